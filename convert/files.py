"""How a converted model reaches its place: written whole under another name, checked, then renamed.

Knows folders, JSON and shards; no source format.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.utils import load_model, make_shards

from mlx_spec.errors import CheckpointError, OptionError
from mlx_spec.folders import INDEX


@contextmanager
def staged(place: Path) -> Iterator[Path]:
    """A temporary folder beside ``place`` that becomes ``place`` when the block ends well, and is gone otherwise
    (errors and Ctrl-C alike). Raises OptionError where ``place`` exists."""
    if place.exists() or place.is_symlink():
        raise OptionError(f"{place} exists already; remove it, or name another folder")
    place.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=place.parent, prefix=f".{place.name}."))
    try:
        yield folder
        folder.chmod(0o755)  # mkdtemp's own is for the owner alone
        folder.rename(place)
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # nothing is left of it after a rename


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Sorted and indented, as mlx-lm writes config.json."""
    path.write_text(json.dumps(value, indent=4, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")


def write_weights(folder: Path, weights: dict[str, mx.array]) -> None:
    """``model*.safetensors`` in shards of 5 GB with an index, laid out as mlx-lm does."""
    shards = make_shards(weights)
    many = len(shards) > 1
    mapping: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors" if many else "model.safetensors"
        mx.save_safetensors(str(folder / name), shard, metadata={"format": "mlx"})
        mapping |= dict.fromkeys(shard, name)
    total = {"total_size": sum(array.nbytes for array in weights.values())}
    write_json(folder / INDEX, {"metadata": total, "weight_map": mapping})


def check_loads(folder: Path, source: Path) -> None:
    """mlx-lm accepts the folder: every weight has its place and every place its weight. Reads no weight data."""
    try:
        load_model(folder, lazy=True, strict=True)
    except (ValueError, KeyError) as error:
        text = " ".join(str(error).split())[:300]
        raise CheckpointError(f"{source} does not make a complete model: {text}") from error
