"""One training run in progress: an update, a measurement, a checkpoint, the drafter's folder. Knows no schedule."""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map

from mlx_spec.convert.train import bundle, checkpoints, optimiser
from mlx_spec.convert.train.batches import Batches
from mlx_spec.convert.train.checkpoints import Checkpoint
from mlx_spec.convert.train.curve import Curve
from mlx_spec.convert.train.forward import by_slot, make_step, prepare
from mlx_spec.convert.train.heldout import Measured, measure
from mlx_spec.convert.train.optimiser import Moments, Params
from mlx_spec.convert.train.provenance import versions
from mlx_spec.convert.train.setup import Cancel, Parts
from mlx_spec.convert.train.trouble import TrainingError

DRAFTER = "drafter"


@dataclass(frozen=True)
class TrainProgress:
    """Where a run is. ``loss`` and ``accuracy`` (slots 1 .. k-1) are means since the last report; ``held_out`` is the
    latest measurement."""

    step: int
    steps: int
    loss: float | None = None
    accuracy: tuple[float, ...] = ()
    blocks_per_second: float = 0.0
    held_out: float | None = None
    left: float | None = None  # seconds
    note: str = ""

    @property
    def line(self) -> str:
        if self.note:
            return self.note
        parts = [f"training: update {self.step} of {self.steps}"]
        if self.loss is not None:
            parts.append(f"loss {self.loss:.3f}")
            parts.append("right " + " ".join(f"{share:.2f}".lstrip("0") or "0" for share in self.accuracy))
        if self.held_out is not None:
            parts.append(f"held-out acceptance length {self.held_out:.2f}")
        if self.blocks_per_second:
            parts.append(f"{self.blocks_per_second:.0f} blocks/s")
        if self.left is not None:
            parts.append(f"{self.left / 60:.0f} min left" if self.left > 90 else f"{self.left:.0f} s left")
        return ", ".join(parts)


@dataclass
class Tally:
    """Sums since the last report."""

    loss: float = 0.0
    weight: float = 0.0
    right: Any = None
    asked: Any = None
    blocks: int = 0
    seconds: float = 0.0

    def add(
        self, loss: mx.array, weight: mx.array, slots: tuple[mx.array, mx.array], blocks: int, seconds: float
    ) -> None:
        self.loss += float(loss)
        self.weight += float(weight)
        self.right = slots[0] if self.right is None else self.right + slots[0]
        self.asked = slots[1] if self.asked is None else self.asked + slots[1]
        self.blocks += blocks
        self.seconds += seconds

    @property
    def accuracy(self) -> tuple[float, ...]:
        if self.right is None:
            return ()
        shares: list[float] = (self.right / mx.maximum(self.asked, 1)).tolist()
        return tuple(shares[1:])


@dataclass
class Trainer:
    """One run in progress: weights, moments and where it is."""

    parts: Parts
    run: Path
    steps: int
    step: int = 0
    moments: Moments | None = None
    command: str = ""
    seconds: float = 0.0  # spent in updates, over all sittings
    measured: Measured | None = None
    tally: Tally = field(default_factory=Tally)

    def __post_init__(self) -> None:
        self.params: Params = self.parts.learner.params
        self.moments = self.moments or Moments.zeros(self.params)
        self.batches: Batches = self.parts.batches()
        self.curve = Curve(self.run, self.step)
        settings = self.parts.settings
        alpha = settings.alpha if settings.loss == "dpace" else None
        self.gradients = make_step(self.parts.learner, alpha, settings.compile == "on")

    def pull(self, number: int) -> tuple[Params, tuple[mx.array, mx.array, mx.array, mx.array], int]:
        """Gradients of the batch of this number and (loss, weight, right [k], asked [k]), and its count of blocks."""
        learner, batch = self.parts.learner, self.batches[number]
        assert self.parts.learn_features is not None
        features = self.parts.learn_features.rows(batch.samples, batch.length)
        inputs = prepare(learner, batch.blocks, features)
        grads, (loss, weight, right) = self.gradients(self.params, inputs.arrays())
        blocks = int((batch.blocks.labels[:, :, 1] >= 0).sum())
        return grads, (loss, weight, *by_slot(inputs, right, self.parts.slots)), blocks

    def update(self) -> None:
        """One update over ``accumulate`` batches. Raises TrainingError where the loss is not a number; weights and
        moments are then those before."""
        settings, began = self.parts.settings, time.perf_counter()
        grads, sums, blocks = None, None, 0
        for part in range(settings.accumulate):
            pulled, found, count = self.pull(self.step * settings.accumulate + part)
            grads = pulled if grads is None else tree_map(mx.add, grads, pulled)
            sums = found if sums is None else tuple(a + b for a, b in zip(sums, found, strict=True))
            blocks += count
            mx.eval(grads, sums)
        assert sums is not None and self.moments is not None
        loss, weight, right, asked = sums
        self._check(float(loss))
        grads = tree_map(lambda g: g / mx.maximum(weight, 1e-9), grads)
        lr = optimiser.rate(self.step, self.steps, settings.lr, settings.warmup)
        params, moments = optimiser.update(
            self.params, grads, self.moments, self.step, lr, settings.weight_decay, settings.clip
        )
        mx.eval(params, moments.first, moments.second)
        self.params, self.moments = params, moments
        self.step += 1
        spent = time.perf_counter() - began
        self.seconds += spent
        self.tally.add(loss, weight, (right, asked), blocks, spent)

    def _check(self, loss: float) -> None:
        if math.isfinite(loss):
            return
        saved = checkpoints.listed(self.run)
        last = f"the last checkpoint, of update {saved[-1][0]}, is whole" if saved else "no checkpoint was written"
        raise TrainingError(
            f"the loss is {loss} at update {self.step + 1}: {last}; lower --lr (now {self.parts.settings.lr:g}), "
            "or --clip, in a new run"
        )

    def measure(self, cancel: Cancel) -> bool:
        """Acceptance length on the held-out samples; False where ``cancel`` ended it."""
        learner = self.parts.learner
        learner.wear(self.params)
        assert self.parts.held_features is not None
        found = measure(learner, self.parts.held, self.parts.held_features, cancel)
        self.measured = found or self.measured
        return found is not None

    def point(self, held: bool) -> None:
        """Put where we are on the curve and begin a new tally."""
        tally, mean = self.tally, None
        if tally.weight:
            mean = tally.loss / tally.weight
        self.curve.add(
            {
                "step": self.step,
                "epoch": round(self.step * self.parts.settings.accumulate / self.batches.per_epoch, 4),
                "loss": mean,
                "accuracy": [round(share, 4) for share in tally.accuracy],
                "seconds": round(self.seconds, 2),
                "blocks_per_second": round(tally.blocks / tally.seconds, 1) if tally.seconds else None,
                "held_out": asdict(self.measured) if held and self.measured is not None else None,
            }
        )

    def progress(self) -> TrainProgress:
        tally = self.tally
        pace = self.seconds / self.step if self.step else 0.0
        return TrainProgress(
            self.step,
            self.steps,
            tally.loss / tally.weight if tally.weight else None,
            tally.accuracy,
            tally.blocks / tally.seconds if tally.seconds else 0.0,
            None if self.measured is None else self.measured.acceptance_length,
            (self.steps - self.step) * pace if self.step else None,
        )

    def save(self) -> None:
        """A checkpoint of now."""
        assert self.moments is not None
        state = {
            "settings": self.parts.settings.as_dict(),
            "facts": self.parts.facts,
            "drafter": self.parts.learner.raw,
            "steps": self.steps,
            "seconds": self.seconds,
            "held_out_result": None if self.measured is None else asdict(self.measured),
        }
        weights = self.parts.learner.weights(self.params)
        checkpoints.save(self.run, Checkpoint(self.step, weights, self.moments, state), self.parts.settings.keep)

    def write_drafter(self) -> Path:
        place = self.run / DRAFTER
        learner, bits = self.parts.learner, self.parts.settings.bits
        bundle.write_bundle(place, learner.raw, learner.weights(self.params), self.provenance(), bits, self.run)
        return place

    def provenance(self) -> dict[str, Any]:
        settings = self.parts.settings
        return {
            "target": settings.target,
            **self.parts.facts,
            "settings": settings.as_dict(),
            "command": self.command,
            "versions": versions(),
            "step": self.step,
            "steps": self.steps,
            "seconds": round(self.seconds, 1),
            "held_out_result": None if self.measured is None else asdict(self.measured),
        }
