"""Files of a training run: arrays and JSON that are whole or not there. Knows no model and no token."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_spec import hub
from mlx_spec.errors import CheckpointError, OptionError
from mlx_spec.folders import check_header


@contextmanager
def replacing(place: Path) -> Iterator[Path]:
    """A temporary folder that takes the place of ``place``, which may exist, when the block ends well; else it is gone
    and ``place`` is as it was. A crash between the two renames leaves the former under a name with a dot."""
    place.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=place.parent, prefix=f".{place.name}."))
    try:
        yield folder
        folder.chmod(0o755)
        former = place.with_name(f".{place.name}.former")
        shutil.rmtree(former, ignore_errors=True)
        if place.exists():
            place.rename(former)
        folder.rename(place)
        shutil.rmtree(former, ignore_errors=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def write_text(path: Path, text: str) -> None:
    """Whole or not at all."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(name, 0o644)
        os.replace(name, path)
    finally:
        Path(name).unlink(missing_ok=True)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def read_json(path: Path, what: str) -> dict[str, Any]:
    """Raises CheckpointError where it cannot be read, naming ``what`` it should be."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is not {what} ({error}); make it again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} is not {what}; make it again")
    return value


def save_arrays(path: Path, arrays: Mapping[str, mx.array], metadata: Mapping[str, str] | None = None) -> None:
    """A safetensors file, whole or not at all. Raises ResourceError where the disk is too small, OSError where it
    turns out so while writing."""
    hub.refuse_full(path.parent, sum(array.nbytes for array in arrays.values()), path.name)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            mx.save_safetensors(file, dict(arrays), dict(metadata or {"format": "mlx"}))
        check_header(Path(name))
        os.chmod(name, 0o644)
        os.replace(name, path)
    finally:
        Path(name).unlink(missing_ok=True)


def load_arrays(path: Path, what: str) -> dict[str, mx.array]:
    """Raises CheckpointError for a file that is missing or damaged."""
    if not path.is_file():
        raise CheckpointError(f"{path} is missing: the folder is not {what}")
    check_header(path)
    try:
        arrays: Any = mx.load(str(path))
        mx.eval(arrays)
    except (RuntimeError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); make it again") from error
    return dict(arrays)


def hash_file(path: Path) -> str:
    """sha256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fingerprint(folder: Path) -> str:
    """Which model a folder holds: sha256 over config.json, the weights' headers, sizes and 64 KB out of each sixteenth
    of every weights file. Cheap, and different for a model that was tuned further."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for file in sorted(folder.glob("*.safetensors")):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with file.open("rb") as stream:
            for part in range(16):
                stream.seek(size * part // 16)
                digest.update(stream.read(65536))
    return digest.hexdigest()


def new_folder(path: Path, what: str, mark: str) -> None:
    """Make ``path`` ready for a new ``what``. Raises OptionError where it holds one (``mark``) or anything else."""
    if (path / mark).exists():
        raise OptionError(f"{path} holds {what} already; give --resume to go on with it, or name another folder")
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise OptionError(f"{path} exists and is not empty; name another folder for {what}")
    path.mkdir(parents=True, exist_ok=True)
