"""The target's features of training samples: made a batch at a time, kept on disk or not. Knows no drafter.

On disk: ``features.bin``, rows of all samples one after the other, and ``features.json``, which says of what.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx
import numpy as np

from mlx_spec import hub
from mlx_spec.convert.train.shards import Sample
from mlx_spec.convert.train.storage import write_json
from mlx_spec.errors import UnsupportedError
from mlx_spec.targets.decoder import DecoderTarget

ROWS = 4096  # tokens of one forward of the target
Say = Callable[[str], None]


class Features(Protocol):
    """Where a batch's features come from."""

    def rows(self, samples: Sequence[int], length: int) -> mx.array:
        """[B, length, n*H] of these samples, whatever behind their ends."""


class Recorder:
    """The target's tapped layers on batches of ids, without its head."""

    def __init__(self, target: DecoderTarget, layers: Sequence[int]) -> None:
        self.target, self.layers = target, tuple(layers)
        self.taps = target.open_taps(self.layers)

    def __call__(self, ids: mx.array) -> mx.array:
        """[B, S] ids, padded behind their ends -> [B, S, n*H]; rows before the ends do not see the padding."""
        with self.taps.recording() as recorded:
            self.target.model(ids)
        lacking = [layer for layer in self.layers if layer not in recorded]
        if lacking:
            raise UnsupportedError(
                f"layer {lacking[0]} of this target is never called, so it has no feature; see --taps"
            )
        return mx.concatenate([recorded[layer] for layer in self.layers], axis=-1)

    def close(self) -> None:
        self.taps.close()


class OnlineFeatures:
    """Made anew for every batch: no disk, one forward of the target a step."""

    def __init__(self, record: Recorder, samples: Sequence[Sample]) -> None:
        self.record, self.samples = record, samples

    def rows(self, samples: Sequence[int], length: int) -> mx.array:
        return self.record(padded([self.samples[i] for i in samples], length))


class NoFeatures:
    """Zeros: what a drafter does without features is the measure of what they bring."""

    def __init__(self, width: int) -> None:
        self.width = width

    def rows(self, samples: Sequence[int], length: int) -> mx.array:
        return mx.zeros((len(samples), length, self.width))


class CachedFeatures:
    """Read from a file that was made once."""

    def __init__(self, path: Path, samples: Sequence[Sample], width: int, dtype: str) -> None:
        self.starts = np.concatenate([[0], np.cumsum([len(sample) for sample in samples])])
        kind = np.uint16 if dtype == "bfloat16" else np.float32
        self.view = getattr(mx, dtype)
        self.file = np.memmap(path, dtype=kind, mode="r", shape=(int(self.starts[-1]), width))

    def rows(self, samples: Sequence[int], length: int) -> mx.array:
        out = np.zeros((len(samples), length, self.file.shape[1]), dtype=self.file.dtype)
        for row, i in enumerate(samples):
            begin, end = int(self.starts[i]), int(self.starts[i + 1])
            out[row, : end - begin] = self.file[begin : min(end, begin + length)]
        array = mx.array(out)
        return array if array.dtype == mx.float32 else array.view(self.view)


def padded(samples: Sequence[Sample], length: int) -> mx.array:
    """[B, length] ids, zeros behind each sample's end."""
    return mx.array(np.stack([np.pad(sample.tokens[:length], (0, max(0, length - len(sample)))) for sample in samples]))


def cached(
    place: Path, record: Recorder, samples: Sequence[Sample], identity: dict[str, Any], dtype: str,
    cancel: Callable[[], bool], say: Say,
) -> CachedFeatures | None:  # fmt: skip
    """The cache in ``place``, made where it is not there or of something else; None where ``cancel`` ended that.

    ``identity`` says what the features are of. Raises ResourceError where the disk is too small, with both numbers.
    """
    width = len(record.layers) * record.target.hidden_size
    digest = hashlib.sha256()
    for sample in samples:
        digest.update(sample.tokens.tobytes())
    wanted = identity | {"layers": list(record.layers), "dtype": dtype, "width": width, "samples": digest.hexdigest()}
    path, told = place / "features.bin", place / "features.json"
    place.mkdir(parents=True, exist_ok=True)
    if not (path.is_file() and _told(told) == wanted):
        told.unlink(missing_ok=True)
        path.unlink(missing_ok=True)
        total = sum(map(len, samples))
        hub.refuse_full(
            place, total * width * (2 if dtype == "bfloat16" else 4), "the feature cache (or --features online)"
        )
        if not _write(path, record, samples, dtype, cancel, say):
            return None
        write_json(told, wanted)
    return CachedFeatures(path, samples, width, dtype)


def _told(path: Path) -> Any:
    """What a cache says it is; None where it says nothing readable, and is made anew."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _write(
    path: Path, record: Recorder, samples: Sequence[Sample], dtype: str, cancel: Callable[[], bool], say: Say
) -> bool:
    """All samples' rows in order. Neighbours of alike length share a forward."""
    done, complete = 0, False
    try:
        with path.open("wb") as file:
            for batch in _batches(samples):
                if cancel():
                    return False
                rows = record(padded(batch, max(map(len, batch)))).astype(getattr(mx, dtype))
                host = np.array(rows.view(mx.uint16) if dtype == "bfloat16" else rows)
                for sample, out in zip(batch, host, strict=True):
                    file.write(np.ascontiguousarray(out[: len(sample)]).data)
                done += len(batch)
                say(f"reading features: {done} of {len(samples)} sequences")
        complete = True
    finally:
        if not complete:
            path.unlink(missing_ok=True)
    return True


def _batches(samples: Sequence[Sample]) -> Iterator[list[Sample]]:
    batch: list[Sample] = []
    for sample in samples:
        longest = max([len(sample), *map(len, batch)])
        if batch and longest * (len(batch) + 1) > ROWS:
            yield batch
            batch = []
        batch.append(sample)
    if batch:
        yield batch
