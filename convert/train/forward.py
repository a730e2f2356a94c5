"""One batch through the drafter: losses, gradients and what was right. Knows no file and no schedule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_spec.convert.train import head, network
from mlx_spec.convert.train.blocks import Blocks
from mlx_spec.convert.train.learner import Learner, Params

PAD = 64  # loss rows come in multiples of this, so that shapes repeat


@dataclass(frozen=True)
class Inputs:
    """A batch on the device. ``index`` [R]: the slots that have a label, of all B*m*k; it is padded with slot 0, which
    has no weight."""

    features: mx.array  # [B, S, n*H]
    anchors: mx.array  # [B, m]
    ids: mx.array  # [B, m]
    groups: list[network.Group]
    index: mx.array
    labels: mx.array  # [R]
    weights: mx.array  # [R], or [B*m, k] bool for D-PACE: where a label is


@dataclass(frozen=True)
class Outcome:
    """Sums over a batch: ``loss`` is weighted and not yet divided by ``weight``; ``right`` and ``asked`` are [k]."""

    loss: mx.array
    weight: mx.array
    right: mx.array
    asked: np.ndarray[Any, Any]


def prepare(learner: Learner, blocks: Blocks, features: mx.array) -> Inputs:
    """Move a batch to the device and build its masks."""
    slots = learner.slots
    groups = network.make_groups(blocks.anchors, slots, features.shape[1], network.kinds(learner.model), learner.dtype)
    asked = np.flatnonzero(blocks.labels >= 0)
    index = np.pad(asked, (0, -len(asked) % PAD)).astype(np.int32)
    return Inputs(
        features.astype(learner.dtype),
        mx.array(blocks.anchors),
        mx.array(blocks.ids),
        groups,
        mx.array(index),
        mx.array(np.maximum(blocks.labels.reshape(-1)[index], 0)),
        mx.array(blocks.weights.reshape(-1)[index]),
    )


def hidden_rows(learner: Learner, inputs: Inputs) -> mx.array:
    """[R, H] after the final norm, of the rows in ``index``."""
    blocks = learner.embed(inputs.ids)
    out = network.denoise(learner.model, inputs.features, blocks, inputs.anchors, inputs.groups)
    normed: mx.array = learner.model.norm(out.reshape(-1, out.shape[-1])[inputs.index])
    return normed


def gradients(
    learner: Learner, params: Params, inputs: Inputs, alpha: float | None
) -> tuple[Params, tuple[mx.array, ...]]:
    """(gradient of the weighted sum of losses, (that sum, the weights' sum, right [R])). ``alpha``: D-PACE's, None for
    the fixed weights."""

    def objective(weights: Params) -> tuple[mx.array, tuple[mx.array, ...]]:
        learner.wear(weights)
        hidden = hidden_rows(learner, inputs)
        rows = head.score(learner.project, mx.stop_gradient(hidden), inputs.labels, learner.vocab)
        counts = inputs.weights if alpha is None else _dpace(learner, inputs, rows.losses, alpha)
        slopes = mx.stop_gradient(rows.slopes.astype(mx.float32) * counts[:, None])
        pull = (hidden.astype(mx.float32) * slopes).sum()  # its gradient is that of the loss
        return pull, ((rows.losses * counts).sum(), counts.sum(), rows.right)

    (_, found), grads = mx.value_and_grad(objective)(params)
    return grads, found


def _dpace(learner: Learner, inputs: Inputs, losses: mx.array, alpha: float) -> mx.array:
    """[R] weights from the losses of whole blocks; the fixed weights only tell which rows count."""
    slots = learner.slots
    total = inputs.ids.size * slots
    counts = inputs.weights > 0
    asked = mx.zeros((total,)).at[inputs.index].add(counts.astype(mx.float32)) > 0
    spread = mx.zeros((total,)).at[inputs.index].add(mx.where(counts, losses, 0.0))
    weights = head.dpace(spread.reshape(-1, slots), asked.reshape(-1, slots), alpha)
    return weights.reshape(-1)[inputs.index] * counts


def by_slot(inputs: Inputs, right: mx.array, slots: int) -> tuple[mx.array, mx.array]:
    """([k] right, [k] asked) counts."""
    counts = (inputs.weights > 0).astype(mx.float32)
    slot = inputs.index % slots
    zeros = mx.zeros((slots,))
    return zeros.at[slot].add(right * counts), zeros.at[slot].add(counts)
