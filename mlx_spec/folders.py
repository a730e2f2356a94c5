"""What a checkpoint folder is and what is missing from it, told before anything is loaded. Knows names, config.json
and the headers of safetensors files; imports no mlx and opens no network.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_spec.errors import CheckpointError, ModelNotFoundError, PairError, UnsupportedError

Config = Mapping[str, Any]

INDEX = "model.safetensors.index.json"
WEIGHTS = "model*.safetensors"  # what mlx-lm reads, so what has to be there
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tiktoken.model", "*.tiktoken", "vocab.json")
OTHER_WEIGHTS = {"*.gguf": "GGUF", "pytorch_model*.bin": "PyTorch", "*.pt": "PyTorch", "*.npz": "npz"}
SHARD = re.compile(r"(.*)-(\d+)-of-(\d+)\.safetensors")
MAX_HEADER = 100_000_000  # bytes; the limit of the safetensors format


def _arch(config: Config, *words: str) -> bool:
    return any(word in str(name) for name in config.get("architectures") or () for word in words)


def _nested(config: Config, key: str = "dflash_config") -> Config:
    inner = config.get(key)
    return inner if isinstance(inner, Mapping) else {}


def _projector(config: Config) -> bool:
    kind = _nested(config).get("projector_type", config.get("projector_type"))
    return kind not in (None, "", "dflash")


# First match wins: (format, is it this?). Successors come before plain DFlash, whose keys they keep.
DRAFTERS: tuple[tuple[str, Callable[[Config], bool]], ...] = (
    ("speculators", lambda c: "speculators_model_type" in c or "speculators_config" in c),
    ("DeepSpec", lambda c: _arch(c, "DSpark") or "markov_rank" in c or "markov_head_type" in c),
    ("DFly", lambda c: _arch(c, "DFly") or "hidden_correction_intermediate_size" in c),
    ("DFlash2", lambda c: _arch(c, "DFlash2") or "selector_rank" in _nested(c)),
    ("DFlash successor", _projector),
    ("DFlash", lambda c: _arch(c, "DFlash") or "dflash_config" in c or {"target_layer_ids", "mask_token_id"} <= set(c)),
    ("EAGLE", lambda c: _arch(c, "Eagle", "EAGLE") or "eagle_config" in c),
    ("Medusa", lambda c: _arch(c, "Medusa") or "medusa_num_heads" in c),
)


@dataclass(frozen=True)
class FolderInfo:
    """A checkpoint folder that has passed its checks."""

    path: Path
    kind: str  # "target" | "drafter"
    format: str  # a drafter's format (DRAFTERS), a target's model_type
    config: dict[str, Any]
    weights: tuple[Path, ...]  # safetensors files, complete by their headers

    @property
    def size(self) -> int:
        """Bytes of weights."""
        return sum(file.stat().st_size for file in self.weights)


def drafter_format(config: Config) -> str | None:
    """The drafter format that this config.json belongs to; None for a language model."""
    return next((name for name, test in DRAFTERS if test(config)), None)


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a folder. Raises ModelNotFoundError (no folder) and CheckpointError (no or broken config.json)."""
    if not folder.is_dir():
        what = "is a file, not a folder" if folder.exists() else "does not exist"
        raise ModelNotFoundError(f"{folder} {what}; give the folder of a checkpoint")
    path = folder / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{folder} has no config.json ({_contents(folder)}); give the folder of a checkpoint")
    return parse_config(path)


def parse_config(path: Path) -> dict[str, Any]:
    """A config.json file as a dict. Raises CheckpointError."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON ({error}); download the model again") from error
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path} holds a {type(raw).__name__} instead of an object; download the model again")
    return raw


def check_config(config: Config, name: object) -> None:
    """Refuse a model whose type mlx-lm does not implement. Needs no weights, so it runs before they are fetched.

    Drafters pass: their own loader decides. Raises CheckpointError (no ``model_type``) and UnsupportedError.
    """
    if drafter_format(config) is not None or config.get("model_file"):
        return
    kind = config.get("model_type")
    if not isinstance(kind, str):
        raise CheckpointError(f"{name}: config.json names no model_type; it is not the config of a language model")
    from mlx_lm.utils import MODEL_REMAPPING  # late: reading a config must not import mlx

    module = MODEL_REMAPPING.get(kind, kind)
    if not module.isidentifier() or importlib.util.find_spec(f"mlx_lm.models.{module}") is None:
        raise UnsupportedError(f"{name} is of model type {kind!r}, which the installed mlx-lm does not implement")


def check_folder(path: str | Path) -> FolderInfo:
    """What the folder holds, complete as far as names and headers tell.

    Raises ModelNotFoundError, CheckpointError (config or weights missing, half-downloaded, cut short, an index that
    points outside the folder) and UnsupportedError (a model type that mlx-lm does not implement; told before weights).
    """
    folder = Path(path)
    config = read_config(folder)
    check_config(config, folder)
    files = _weights(folder)
    for file in files:
        check_header(file)
    drafter = drafter_format(config)
    kind = "target" if drafter is None else "drafter"
    return FolderInfo(folder, kind, drafter or str(config.get("model_type")), config, files)


def check_target(path: str | Path) -> FolderInfo:
    """``check_folder`` for a folder that is to be a target. A drafter in its place is a PairError."""
    folder = Path(path)
    refuse_drafter(read_config(folder), folder)
    info = check_folder(folder)
    if not any(next(folder.glob(pattern), None) for pattern in TOKENIZERS):
        raise CheckpointError(f"{folder} has no tokenizer ({', '.join(TOKENIZERS[:2])}); download the model again")
    return info


def check_drafter(path: str | Path) -> FolderInfo:
    """``check_folder`` for a folder that is to be a drafter. A language model in its place is a PairError."""
    folder = Path(path)
    refuse_target(read_config(folder), folder)
    return check_folder(folder)


def refuse_drafter(config: Config, name: object) -> None:
    """PairError where the config of a drafter came in a target's place."""
    drafter = drafter_format(config)
    if drafter is not None:
        raise PairError(f"{name} is a {drafter} drafter, not a model; give it with --draft, beside its --model")


def refuse_target(config: Config, name: object) -> None:
    """PairError where the config of a language model came in a drafter's place."""
    if drafter_format(config) is None:
        kind = config.get("model_type", "unknown")
        raise PairError(f"{name} is a language model ({kind}), not a drafter; give it with --model")


def check_header(file: Path) -> None:
    """The file is as long as its header says. Raises CheckpointError; reads the header only."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(64)
        if start.startswith(b"version https://git-lfs"):
            raise CheckpointError(f"{file} is a git-lfs pointer, not weights; run `git lfs pull` in its folder")
        length = int.from_bytes(start[:8], "little")
        if len(start) < 8 or size < 8 + length <= 8 + MAX_HEADER:
            raise CheckpointError(f"{file} is cut short ({size} bytes); download it again")
        if length > MAX_HEADER:
            raise CheckpointError(f"{file} is not a safetensors file (a header of {length} bytes); download it again")
        stream.seek(8)
        raw = stream.read(length)
    try:
        header = json.loads(raw)
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        needed = 8 + length + max(ends, default=0)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise CheckpointError(f"{file} has a damaged header; download it again") from error
    if size != needed:
        raise CheckpointError(f"{file} has {size} bytes where its header needs {needed}; download it again")


def _weights(folder: Path) -> tuple[Path, ...]:
    """The safetensors files, checked against the index and against the numbers in their own names."""
    expected = _indexed(folder)
    files = tuple(sorted(folder.glob(WEIGHTS)))
    for file in files:
        if match := SHARD.fullmatch(file.name):
            stem, digits, count = match[1], len(match[2]), int(match[3])
            expected |= {f"{stem}-{i:0{digits}}-of-{match[3]}.safetensors" for i in range(1, min(count, 9999) + 1)}
    missing = sorted(name for name in expected if not (folder / name).is_file())
    if missing:
        shown = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        raise CheckpointError(
            f"{folder} is half-downloaded: {len(missing)} of {len(expected)} weight files are missing ({shown}); "
            "download the model again, finished files are kept"
        )
    if not files:
        raise CheckpointError(f"{folder} has a config.json but no weights ({WEIGHTS}; {_contents(folder)})")
    return files


def _indexed(folder: Path) -> set[str]:
    """File names that the index lists. A name that leaves the folder is refused."""
    path = folder / INDEX
    if not path.is_file():
        return set()
    mapping = parse_config(path).get("weight_map")
    if not isinstance(mapping, dict) or not all(isinstance(name, str) for name in mapping.values()):
        raise CheckpointError(f"{path} has no weight_map of file names; download the model again")
    names = set(mapping.values())
    for name in names:
        if Path(name).name != name or "\\" in name or name in ("", ".", ".."):
            raise CheckpointError(f"{path} points outside its folder ({name!r}); do not use this download")
    return names


def _contents(folder: Path) -> str:
    """What else is there, in words, for a message."""
    for pattern, kind in OTHER_WEIGHTS.items():
        if next(folder.glob(pattern), None):
            return f"it holds {kind} weights, which must be converted first"
    if (folder / "adapter_config.json").is_file():
        return "it holds an adapter, which goes with a model"
    names = sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith("."))
    return "it is empty" if not names else "it holds " + ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
