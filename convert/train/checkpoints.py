"""A run's checkpoints: all that the next update depends on, whole or not there. Knows arrays by name, no network."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten

from mlx_spec.convert.train.optimiser import Moments
from mlx_spec.convert.train.storage import load_arrays, read_json, replacing, save_arrays, write_json
from mlx_spec.errors import OptionError

FOLDER = "checkpoints"
NAME = re.compile(r"step-(\d+)")


@dataclass(frozen=True)
class Checkpoint:
    """``state``: JSON beside the arrays (settings, hashes, the drafter's config, figures so far)."""

    step: int  # updates done
    weights: dict[str, mx.array]  # all that a drafter's file holds
    moments: Moments
    state: dict[str, Any]


def save(run: Path, checkpoint: Checkpoint, keep: int) -> None:
    """Write it, then drop all but the newest ``keep``."""
    parts = (("first", checkpoint.moments.first), ("second", checkpoint.moments.second))
    arrays = {f"{part}.{name}": value for part, tree in parts for name, value in tree_flatten(tree)}
    arrays |= {f"weights.{name}": value for name, value in checkpoint.weights.items()}
    with replacing(run / FOLDER / f"step-{checkpoint.step:08d}") as folder:
        save_arrays(folder / "state.safetensors", arrays)
        write_json(folder / "state.json", checkpoint.state | {"step": checkpoint.step})
    for step, folder in listed(run)[:-keep]:
        if step != checkpoint.step:
            shutil.rmtree(folder)


def listed(run: Path) -> list[tuple[int, Path]]:
    """(step, folder) of every whole checkpoint, oldest first."""
    places = (run / FOLDER).iterdir() if (run / FOLDER).is_dir() else ()
    found = [(int(match[1]), place) for place in places if (match := NAME.fullmatch(place.name))]
    return sorted(found)


def newest(run: Path) -> Checkpoint:
    """Raises OptionError where ``run`` has none (a wrong folder), CheckpointError where it is damaged."""
    if not run.is_dir():
        raise OptionError(f"there is no training run in {run}; leave --resume out to begin one")
    found = listed(run)
    if not found:
        raise OptionError(f"{run} holds no checkpoint to resume from; name the run's own --out folder")
    return load(found[-1][1])


def load(folder: Path) -> Checkpoint:
    """One checkpoint's folder."""
    state = read_json(folder / "state.json", "a checkpoint")
    parts: dict[str, list[tuple[str, mx.array]]] = {"weights": [], "first": [], "second": []}
    for name, value in load_arrays(folder / "state.safetensors", "a checkpoint").items():
        part, _, rest = name.partition(".")
        parts[part].append((rest, value))
    moments = Moments(tree_unflatten(parts["first"]), tree_unflatten(parts["second"]))
    return Checkpoint(int(state["step"]), dict(parts["weights"]), moments, state)
