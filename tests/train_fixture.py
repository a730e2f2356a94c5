"""A small target with its own answers, for tests of training: made once per session."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from toys import save_tiny

from mlx_spec.convert.train import shards
from mlx_spec.convert.train.settings import DataSettings, TrainSettings
from mlx_spec.convert.train.shards import Sample
from mlx_spec.convert.train.storage import fingerprint

WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa", "lambda", "mu"]


def small_target(folder: Path) -> Path:
    return save_tiny(folder, layers=3, hidden=32)


def write_prompts(path: Path, count: int = 8) -> Path:
    path.write_text("".join(f"{i}: {WORDS[i % len(WORDS)]} {WORDS[(3 * i + 1) % len(WORDS)]}\n" for i in range(count)))
    return path


def data_settings(target: Path, prompts: Path, out: Path, **changes: Any) -> DataSettings:
    values = {"max_tokens": 20, "max_prompt": 80, "shard": 4, "batch": 4}
    return DataSettings(target=str(target), prompts=(str(prompts),), out=str(out), **values | changes)


def write_data(folder: Path, target: Path, samples: Sequence[tuple[Sequence[int], int]]) -> Path:
    """A data folder of these (tokens, prompt length), as if ``make_data`` had made it."""
    folder.mkdir(parents=True)
    made = [Sample(np.array(tokens, dtype=np.int32), prompt) for tokens, prompt in samples]
    manifest = {
        "format": shards.FORMAT, "target_fingerprint": fingerprint(target), "shards": [], "complete": True,
        "thinking": "", "template_kwargs": {},
    }  # fmt: skip
    manifest["shards"].append(shards.write_shard(folder, 0, made, 256))
    shards.write_manifest(folder, manifest)
    return folder


def random_data(folder: Path, target: Path, count: int = 6, seed: int = 0) -> Path:
    rng = np.random.default_rng(seed)
    rows = [(rng.integers(1, 200, int(rng.integers(14, 40))).tolist(), int(rng.integers(1, 8))) for _ in range(count)]
    return write_data(folder, target, rows)


def train_settings(target: Path, data: Path, out: Path, **changes: Any) -> TrainSettings:
    """A run of seconds. Not compiled: on a machine that never did, a CPU's kernels take a minute to build."""
    values = {
        "layers": 1, "block": 4, "batch": 2, "anchors": 6, "steps": 6, "evaluate_every": 4, "save_every": 2,
        "lr": 3e-3, "held_out_sequences": 1, "compile": "off",
    }  # fmt: skip
    return TrainSettings(target=str(target), data=str(data), out=str(out), **values | changes)
