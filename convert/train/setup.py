"""A run's parts, opened in an order that leaves nothing half-made: data, target, drafter, then features."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_spec import targets
from mlx_spec.convert.train.batches import Batches, split
from mlx_spec.convert.train.blocks import NO_LABEL
from mlx_spec.convert.train.checkpoints import Checkpoint
from mlx_spec.convert.train.features import Features, NoFeatures, OnlineFeatures, Recorder, cached
from mlx_spec.convert.train.learner import Learner, begin, restored
from mlx_spec.convert.train.settings import TrainSettings, default_gamma
from mlx_spec.convert.train.shards import Data, Sample, read_data
from mlx_spec.convert.train.storage import fingerprint
from mlx_spec.errors import OptionError, PairError
from mlx_spec.targets.decoder import DecoderTarget
from mlx_spec.targets.loading import find_target, load_target

Cancel = Callable[[], bool]
Say = Callable[[str], None]


@dataclass
class Parts:
    """What a run works with. ``facts``: hashes and counts that say what it was, for checkpoints and provenance."""

    settings: TrainSettings
    learner: Learner
    learn: list[Sample]
    held: list[Sample]
    facts: dict[str, Any]
    notes: list[str]
    learn_features: Features | None = None
    held_features: Features | None = None
    recorder: Recorder | None = None

    @property
    def slots(self) -> int:
        return self.learner.slots

    def batches(self) -> Batches:
        settings = self.settings
        gamma = settings.gamma or default_gamma(self.slots)
        return Batches(
            self.learn, settings.batch, settings.anchors, self.slots, gamma, settings.anchor_draw, settings.seed,
            self.learner.to_draft,
        )  # fmt: skip

    def close(self) -> None:
        if self.recorder is not None:
            self.recorder.close()


def open_parts(settings: TrainSettings, checkpoint: Checkpoint | None = None) -> Parts:
    """Everything but the features, which take time and disk. ``checkpoint``: take the drafter from there.

    Raises what reading data and models raises, PairError where data and target do not belong together, OptionError
    where a resumed run's data or target is not what it was.
    """
    data = read_data(settings.data, settings.max_length)
    other = read_data(settings.held_out, settings.max_length) if settings.held_out else None
    folder = find_target(settings.target).path
    model, tokenizer, config = load_target(folder)
    target = targets.wrap(model, config)
    if not isinstance(target, DecoderTarget):
        raise OptionError(f"{settings.target}: targets of type {config.get('model_type')} cannot be trained on yet")
    notes: list[str] = []
    for one in filter(None, (data, other)):
        _fits(one, target, fingerprint(folder), notes)
    facts = _facts(data, other, fingerprint(folder))
    if checkpoint is not None:
        _as_it_was(checkpoint.state["facts"], facts)
    if other is None:
        learn, held = split(data.samples, settings.held_out_share, settings.seed)
    else:
        learn, held = data.samples, other.samples
    held = held[: settings.held_out_sequences]
    if checkpoint is None:
        learner = begin(settings, target, config, tokenizer, data.samples)
    else:
        learner = restored(checkpoint.state["drafter"], checkpoint.weights, settings, target)
    if learner.config.mask_token_id in tokenizer.eos_token_ids:
        raise OptionError(
            f"--mask-id {learner.config.mask_token_id} ends answers, so it cannot be the mask; take another"
        )
    if learner.to_draft is not None:
        facts["draft_vocab_covers"] = covers = _covered(learner, held)
        notes.append(f"the {learner.vocab} ids that can be drafted are {covers:.1%} of the held-out answers")
    return Parts(settings, learner, learn, held, facts, notes)


def add_features(parts: Parts, run: Path, cancel: Cancel, say: Say) -> bool:
    """Make or find the features; False where ``cancel`` ended that."""
    settings, learner = parts.settings, parts.learner
    layers = learner.config.target_layer_ids
    if settings.features == "off":
        parts.learn_features = parts.held_features = NoFeatures(len(layers) * learner.config.hidden_size)
        return True
    record = parts.recorder = Recorder(learner.target, layers)
    if settings.features == "online":
        parts.learn_features, parts.held_features = (OnlineFeatures(record, s) for s in (parts.learn, parts.held))
        return True
    place = Path(settings.cache_dir).expanduser() if settings.cache_dir else run / "features"
    identity, kind = {"target": parts.facts["target_fingerprint"]}, settings.cache_dtype
    parts.held_features = cached(place / "held-out", record, parts.held, identity, kind, cancel, say)
    if parts.held_features is not None:
        parts.learn_features = cached(place, record, parts.learn, identity, kind, cancel, say)
    return parts.learn_features is not None


def _covered(learner: Learner, samples: list[Sample]) -> float:
    """Share of the answers' tokens that can be drafted."""
    assert learner.to_draft is not None
    said = np.concatenate([sample.tokens[sample.prompt :] for sample in samples])
    return float((learner.to_draft[said] != NO_LABEL).mean())


def _facts(data: Data, other: Data | None, target: str) -> dict[str, Any]:
    return {
        "target_fingerprint": target,
        "data": _of(data),
        "held_out": None if other is None else _of(other),
    }


def _of(data: Data) -> dict[str, Any]:
    return {
        "sha256": data.sha256,
        "sequences": len(data.samples),
        "answer_tokens": data.answer_tokens,
        "thinking": data.manifest.get("thinking", ""),
        "template_kwargs": data.manifest.get("template_kwargs", {}),
        "complete": bool(data.manifest.get("complete")),
    }


def _fits(data: Data, target: DecoderTarget, print_: str, notes: list[str]) -> None:
    largest = max(int(sample.tokens.max()) for sample in data.samples)
    if largest >= target.vocab_size:
        raise PairError(f"{data.path} holds token {largest}, this target has {target.vocab_size}: not its data")
    if data.manifest.get("target_fingerprint") not in (None, print_):
        notes.append(f"{data.path} holds the answers of other weights than this target's; make it anew if you can")
    if not data.manifest.get("complete"):
        notes.append(f"{data.path} is not complete; `mlx-spec train data --resume` goes on with it")


def _as_it_was(was: dict[str, Any], now: dict[str, Any]) -> None:
    pairs = [("target", was["target_fingerprint"], now["target_fingerprint"])]
    for name in ("data", "held_out"):
        pairs.append((name, (was[name] or {}).get("sha256"), (now[name] or {}).get("sha256")))
    for name, before, after in pairs:
        if before != after:
            raise OptionError(
                f"this run was begun with another {name}, so it cannot be resumed; begin a new one in another --out"
            )


def timed(parts: Parts, seconds: Callable[[], float], work: Callable[[int], None], count: int) -> float:
    """Seconds of one update, over ``count`` of them after one to warm up."""
    work(0)
    began = seconds()
    for number in range(1, count + 1):
        work(number)
    mx.synchronize()
    return (seconds() - began) / count
