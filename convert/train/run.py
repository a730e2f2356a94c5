"""``train``: the loop over updates, with measuring, checkpoints and the drafter's folder. ``export``: a checkpoint as a
drafter. A run that was killed goes on from its newest checkpoint and ends as if it had not been.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_spec.convert.train import bundle, checkpoints
from mlx_spec.convert.train.checkpoints import Checkpoint
from mlx_spec.convert.train.heldout import Measured
from mlx_spec.convert.train.provenance import versions
from mlx_spec.convert.train.records import RECORD, read_record
from mlx_spec.convert.train.settings import TrainSettings, flag
from mlx_spec.convert.train.setup import Cancel, Parts, add_features, open_parts, timed
from mlx_spec.convert.train.storage import new_folder, write_json
from mlx_spec.convert.train.trainer import Tally, Trainer, TrainProgress
from mlx_spec.errors import OptionError

DEFAULT_EPOCHS = 6.0  # the paper's
REPORTS = 10  # between two measurements
TIMED = 5  # updates timed to turn minutes into updates
# A resumed run may be told other values of these: they decide when and where, not what is computed.
FREE = ("out", "target", "data", "held_out", "evaluate_every", "save_every", "keep", "cache_dir", "bits")
LONGER = ("steps", "epochs", "minutes")  # these too, but the learning rate's course changes with them


Report = Callable[[TrainProgress], None]


@dataclass
class Result:
    """How a run ended. ``finished`` False: it was cancelled, and can be resumed."""

    finished: bool
    step: int
    steps: int
    drafter: Path | None
    measured: Measured | None


def train(
    settings: TrainSettings,
    cancel: Cancel = lambda: False,
    report: Report = lambda progress: None,
    command: str = "",
) -> Result:
    """A new run in ``settings.out``. ``cancel`` is polled between updates: the run is then saved and can be resumed.

    Raises OptionError (settings, data, a folder in use), TrainingError (a loss that is not a number), ResourceError or
    OSError (disk), and what loading data, target and drafter raises.
    """
    parts = open_parts(settings)
    run = Path(settings.out).expanduser()
    new_folder(run, "a training run", RECORD)
    write_json(run / RECORD, {"settings": settings.as_dict(), "command": command})
    return _run(parts, run, None, cancel, report, command)


def resume(
    out: str | Path,
    changes: Mapping[str, Any] | None = None,
    cancel: Cancel = lambda: False,
    report: Report = lambda progress: None,
    command: str = "",
) -> Result:
    """Go on with the run in ``out``, with its own settings. ``changes``: of when and where (FREE), or of the length.

    Raises OptionError for another change, a folder without a run, or data that changed; see ``train``.
    """
    run = Path(out).expanduser()
    record = read_record(run)
    checkpoint = checkpoints.newest(run) if checkpoints.listed(run) else None
    old = record["settings"] if checkpoint is None else checkpoint.state["settings"]
    settings = _changed(TrainSettings(**old), dict(changes or {}), run)
    parts = open_parts(settings.changed(out=str(run)), checkpoint)
    return _run(parts, run, checkpoint, cancel, report, command or record["command"])


def _changed(settings: TrainSettings, changes: dict[str, Any], run: Path) -> TrainSettings:
    for name, value in changes.items():
        value = tuple(value) if isinstance(value, list) else value
        if name not in (*FREE, *LONGER) and value != getattr(settings, name):
            raise OptionError(
                f"{run} was begun with {flag(name)} {getattr(settings, name)}, now {value}: leave it out, or begin a "
                "new run in another --out"
            )
    if any(changes.get(name) is not None for name in LONGER):
        changes = dict.fromkeys(LONGER) | changes
    return settings.changed(**changes)


def _run(
    parts: Parts, run: Path, checkpoint: Checkpoint | None, cancel: Cancel, report: Report, command: str
) -> Result:
    for note in parts.notes:
        report(TrainProgress(0, 0, note=f"note: {note}"))
    try:
        if not add_features(parts, run, cancel, lambda text: report(TrainProgress(0, 0, note=text))):
            return Result(False, 0, 0, None, None)
        trainer = _trainer(parts, run, checkpoint, command)
        return _loop(trainer, cancel, report)
    finally:
        parts.close()


def _trainer(parts: Parts, run: Path, checkpoint: Checkpoint | None, command: str) -> Trainer:
    if checkpoint is None:
        trainer = Trainer(parts, run, 0, command=command)
        trainer.steps = _steps(trainer)
        return trainer
    state = checkpoint.state
    trainer = Trainer(parts, run, state["steps"], checkpoint.step, checkpoint.moments, command, state["seconds"])
    trainer.measured = Measured(**state["held_out_result"]) if state["held_out_result"] else None
    was, now = state["settings"], parts.settings.as_dict()
    if any(was[name] != now[name] for name in LONGER):
        trainer.steps = _steps(trainer)
    return trainer


def _steps(trainer: Trainer) -> int:
    """How many updates the settings mean; minutes are turned into updates by timing some that change nothing."""
    settings = trainer.parts.settings
    if settings.steps is not None:
        return settings.steps
    if settings.minutes is None:
        epochs = settings.epochs or DEFAULT_EPOCHS
        return max(1, math.ceil(epochs * trainer.batches.per_epoch / settings.accumulate))

    def work(number: int) -> None:
        mx.eval(trainer.pull(number)[:2])

    one = timed(trainer.parts, time.perf_counter, work, TIMED * settings.accumulate) * settings.accumulate
    return trainer.step + max(1, int(settings.minutes * 60 / one))


def _loop(trainer: Trainer, cancel: Cancel, report: Report) -> Result:
    settings, place = trainer.parts.settings, None
    every = max(1, settings.evaluate_every // REPORTS)
    if trainer.step == 0 and trainer.measured is None:
        if not trainer.measure(cancel):
            return Result(False, 0, trainer.steps, None, None)
        trainer.point(held=True)
        trainer.save()
        report(trainer.progress())
    if settings.compile == "on" and trainer.step < trainer.steps:
        report(TrainProgress(trainer.step, trainer.steps, note="compiling the update (a minute, once, on a CPU)"))
    saved = trainer.step
    while trainer.step < trainer.steps:
        trainer.update()
        last = trainer.step == trainer.steps
        stopped = cancel() and not last
        measuring = (last or trainer.step % settings.evaluate_every == 0) and not stopped
        if measuring:
            stopped = not trainer.measure(cancel)
        if measuring or trainer.step % every == 0:
            trainer.point(held=measuring and not stopped)
            report(trainer.progress())
            trainer.tally = Tally()
        if measuring or stopped or trainer.step % settings.save_every == 0:
            trainer.save()
            saved = trainer.step
        if measuring and not stopped:
            trainer.curve.plot()
            place = trainer.write_drafter()
        if stopped:
            return Result(False, trainer.step, trainer.steps, place, trainer.measured)
    if saved != trainer.step or place is None:
        place = trainer.write_drafter()
    return Result(True, trainer.step, trainer.steps, place, trainer.measured)


def export(run: str | Path, out: str | Path, step: int | None = None, bits: int | None = None) -> Path:
    """Write the drafter of a checkpoint (the newest, or that of ``step``) as a new folder.

    Raises OptionError where there is no such checkpoint or ``out`` exists.
    """
    run, out = Path(run).expanduser(), Path(out).expanduser()
    if out.exists():
        raise OptionError(f"{out} exists already; remove it, or name another folder")
    found = dict(checkpoints.listed(run))
    if step is not None and step not in found:
        raise OptionError(f"{run} has no checkpoint of update {step}; it has {', '.join(map(str, found)) or 'none'}")
    checkpoint = checkpoints.newest(run) if step is None else checkpoints.load(found[step])
    state = checkpoint.state
    record = read_record(run)
    provenance = {
        "target": state["settings"]["target"],
        **state["facts"],
        "settings": state["settings"],
        "command": record["command"],
        "versions": versions(),
        "step": checkpoint.step,
        "steps": state["steps"],
        "seconds": round(state["seconds"], 1),
        "held_out_result": state["held_out_result"],
    }
    bundle.write_bundle(out, state["drafter"], checkpoint.weights, provenance, bits, run)
    return out
