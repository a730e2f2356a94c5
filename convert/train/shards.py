"""Token shards: sequences of a target's own answers, with a manifest of how they were made. Knows no model.

``data.json`` names the target, the template and the shards with their hashes. A shard is a safetensors file:
``tokens`` [T] uint16 (uint32 for a vocabulary above 65536), ``ends`` [n] (where each sequence ends in ``tokens``),
``prompts`` [n] (how many of its tokens are prompt).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_spec.convert.train.storage import hash_file, load_arrays, read_json, save_arrays, write_json
from mlx_spec.errors import CheckpointError, ModelNotFoundError, OptionError

MANIFEST = "data.json"
FORMAT = 1
Tokens = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Sample:
    """One prompt with its answer: ``tokens`` [L], of which the first ``prompt`` are the prompt."""

    tokens: Tokens
    prompt: int

    def __len__(self) -> int:
        return len(self.tokens)

    def cut(self, length: int) -> Sample:
        return self if len(self) <= length else Sample(self.tokens[:length], self.prompt)

    @property
    def learnable(self) -> bool:
        """An answer of one token leaves no slot to learn."""
        return len(self) - self.prompt >= 2


@dataclass(frozen=True)
class Data:
    """A data folder that was read whole."""

    path: Path
    manifest: dict[str, Any]
    samples: list[Sample]
    sha256: str  # over the shards' hashes

    @property
    def answer_tokens(self) -> int:
        return sum(len(sample) - sample.prompt for sample in self.samples)


def shard_name(number: int) -> str:
    return f"tokens-{number:05d}.safetensors"


def write_shard(folder: Path, number: int, sequences: Sequence[Sample], vocab: int) -> dict[str, Any]:
    """Write one shard; its entry for the manifest."""
    kind = np.uint16 if vocab <= 1 << 16 else np.uint32
    flat = np.concatenate([s.tokens for s in sequences]) if sequences else np.zeros(0)
    ends = np.cumsum([len(s) for s in sequences], dtype=np.int64) if sequences else np.zeros(0, np.int64)
    prompts = np.array([s.prompt for s in sequences], dtype=np.int32)
    path = folder / shard_name(number)
    # safetensors has no empty arrays to speak of: a shard in which nothing was kept holds a zero-length one.
    arrays = {"tokens": mx.array(flat.astype(kind)), "ends": mx.array(ends), "prompts": mx.array(prompts)}
    save_arrays(path, arrays, {"format": "mlx", "kind": "mlx-spec tokens"})
    return {"file": path.name, "sequences": len(sequences), "tokens": len(flat), "sha256": hash_file(path)}


def read_manifest(folder: Path) -> dict[str, Any]:
    """Raises ModelNotFoundError (no folder), OptionError (not data), CheckpointError (damaged, another format)."""
    if not folder.is_dir():
        raise ModelNotFoundError(f"there is no data folder {folder}; make one with `mlx-spec train data`")
    if not (folder / MANIFEST).is_file():
        raise OptionError(f"{folder} holds no training data ({MANIFEST}); make it with `mlx-spec train data`")
    manifest = read_json(folder / MANIFEST, "a manifest of training data")
    if manifest.get("format") != FORMAT:
        raise CheckpointError(f"{folder} is data of format {manifest.get('format')}, this version reads {FORMAT}")
    return manifest


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    write_json(folder / MANIFEST, manifest)


def read_data(folder: str | Path, max_length: int) -> Data:
    """All sequences that can be learned from, cut to ``max_length`` tokens.

    Raises what ``read_manifest`` raises, CheckpointError where a shard is missing or not what the manifest says, and
    OptionError where nothing is left to learn from.
    """
    folder = Path(folder).expanduser()
    manifest = read_manifest(folder)
    sequences: list[Sample] = []
    for entry in manifest["shards"]:
        sequences += read_shard(folder, entry)
    if not sequences:
        raise OptionError(f"{folder} holds no sequence; add prompts and run `mlx-spec train data` again")
    cut = [sequence.cut(max_length) for sequence in sequences]
    kept = [sequence for sequence in cut if sequence.learnable]
    if not kept:
        raise OptionError(
            f"none of the {len(sequences)} sequences in {folder} has an answer of two tokens within {max_length}: "
            "nothing can be learned; raise --max-tokens or --max-length"
        )
    return Data(folder, manifest, kept, combined_hash(manifest))


def combined_hash(manifest: dict[str, Any]) -> str:
    """One hash for all shards."""
    import hashlib

    return hashlib.sha256("".join(entry["sha256"] for entry in manifest["shards"]).encode()).hexdigest()


def read_shard(folder: Path, entry: dict[str, Any]) -> list[Sample]:
    """Raises CheckpointError where it is not the file that the manifest speaks of."""
    path = folder / entry["file"]
    if not path.is_file() or hash_file(path) != entry["sha256"]:
        raise CheckpointError(f"{path} is missing or not the file that {MANIFEST} lists; make the data again")
    arrays = load_arrays(path, "training data")
    tokens, ends, prompts = (np.array(arrays[name]) for name in ("tokens", "ends", "prompts"))
    starts = np.concatenate([[0], ends[:-1]]) if len(ends) else ends
    triples = zip(starts.tolist(), ends.tolist(), prompts.tolist(), strict=True)
    return [Sample(tokens[start:end].astype(np.int32), prompt) for start, end, prompt in triples]


__all__ = ["FORMAT", "MANIFEST", "Data", "Sample", "read_data", "read_manifest", "write_manifest", "write_shard"]
