"""Acceptance length on held-out samples: greedy decoding is played back on the target's own answers.

Drafts are made at every anchor of an answer at once; then the rounds are walked as the engine would: from anchor to
anchor, each accepted draft token and the target's own token further. Knows no engine; the answers are the verifier.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_spec.convert.train.blocks import NO_LABEL, candidates, make_blocks
from mlx_spec.convert.train.features import Features
from mlx_spec.convert.train.forward import hidden_rows, prepare
from mlx_spec.convert.train.learner import Learner
from mlx_spec.convert.train.network import STEP
from mlx_spec.convert.train.shards import Sample

ANCHORS = 256  # of one forward


@dataclass(frozen=True)
class Measured:
    """``acceptance_length``: tokens committed per round, all rounds of all samples together. ``accuracy`` [k-1]: share
    of the slots 1 .. k-1 that say the right token, over all anchors. ``survival`` [k-1]: share of the rounds that kept
    at least that many draft tokens."""

    acceptance_length: float
    accuracy: list[float]
    survival: list[float]
    rounds: int
    samples: int


def measure(
    learner: Learner, samples: Sequence[Sample], features: Features, cancel: Callable[[], bool] = lambda: False
) -> Measured | None:
    """None where ``cancel`` ended it. The learner computes with what it wears."""
    slots = learner.slots
    right, asked = np.zeros(slots), np.zeros(slots)
    kept: list[int] = []
    committed = 0
    for i, sample in enumerate(samples):
        if cancel():
            return None
        hits, labelled = _hits(learner, sample, i, features)
        right += (hits & labelled).sum(axis=0)
        asked += labelled.sum(axis=0)
        lengths = accepted(hits[:, 1:])
        rounds = walk(lengths)
        kept += rounds
        committed += len(lengths)
    survival = [float(np.mean([n >= k for n in kept])) for k in range(1, slots)]
    accuracy = [float(r / max(a, 1)) for r, a in zip(right[1:], asked[1:], strict=True)]
    return Measured(committed / len(kept), accuracy, survival, len(kept), len(samples))


def _hits(learner: Learner, sample: Sample, i: int, features: Features) -> tuple[np.ndarray[Any, Any], ...]:
    """([anchors, k] is the draft token right?, [anchors, k] is there a token to be right about?)."""
    places = list(candidates(sample))
    slots = learner.slots
    rows = features.rows([i], -(-len(sample) // STEP) * STEP)
    hits, labelled = [], []
    for begin in range(0, len(places), ANCHORS):
        part = places[begin : begin + ANCHORS]
        blocks = make_blocks([sample], [part], slots, 1.0, learner.to_draft)
        inputs = prepare(learner, blocks, rows[:, : -(-max(part[-1], 1) // STEP) * STEP])
        best = mx.argmax(learner.project(hidden_rows(learner, inputs)), axis=-1)
        flat = np.zeros(len(part) * slots, dtype=bool)
        flat[np.array(inputs.index)] = np.array(best) == np.array(inputs.labels)
        flat[0] = False  # the padding's slot
        hits.append(flat.reshape(-1, slots))
        labelled.append(make_blocks([sample], [part], slots, 1.0).labels[0] != NO_LABEL)
    return np.concatenate(hits) & np.concatenate(labelled), np.concatenate(labelled)


def accepted(hits: np.ndarray[Any, Any]) -> list[int]:
    """[anchors, k-1] hits -> how many draft tokens in a row are right, per anchor."""
    counts: list[int] = np.cumprod(hits, axis=1).sum(axis=1).tolist()
    return counts


def walk(lengths: Sequence[int]) -> list[int]:
    """Draft tokens kept per round, where ``lengths[j]`` would be kept at the j-th place that an anchor can have."""
    kept, at = [], 0
    while at < len(lengths):
        kept.append(lengths[at])
        at += lengths[at] + 1
    return kept
