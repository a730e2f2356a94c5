"""One batch through the drafter: losses, gradients and what was right. Knows no file and no schedule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_spec.convert.train import head, network
from mlx_spec.convert.train.blocks import Blocks
from mlx_spec.convert.train.learner import Learner, Params

PAD = 256  # loss rows come in multiples of this, so that shapes repeat
Arrays = dict[str, Any]


@dataclass(frozen=True)
class Inputs:
    """A batch on the device. ``index`` [R]: the slots that have a label, of all B*m*k; it is padded with slot 0, which
    has no weight."""

    features: mx.array  # [B, S, n*H]
    anchors: mx.array  # [B, m]
    ids: mx.array  # [B, m]
    masks: list[list[mx.array]]  # per kind of layer, per group of blocks: [B, 1, rows, context + rows]
    index: mx.array
    labels: mx.array  # [R]
    weights: mx.array  # [R]

    def arrays(self) -> Arrays:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def prepare(learner: Learner, blocks: Blocks, features: mx.array) -> Inputs:
    """Move a batch to the device and build its masks. ``features`` [B, S, n*H] reach at least to the last anchor."""
    asked = np.flatnonzero(blocks.labels >= 0)
    index = np.pad(asked, (0, -len(asked) % PAD)).astype(np.int32)
    return Inputs(
        features.astype(learner.dtype),
        mx.array(blocks.anchors),
        mx.array(blocks.ids),
        network.make_masks(blocks.anchors, learner.slots, features.shape[1], learner.kinds, learner.dtype),
        mx.array(index),
        mx.array(np.maximum(blocks.labels.reshape(-1)[index], 0)),
        mx.array(blocks.weights.reshape(-1)[index]),
    )


def hidden_rows(learner: Learner, inputs: Inputs) -> mx.array:
    """[R, H] after the final norm, of the rows in ``index``."""
    blocks = learner.embed(inputs.ids)
    masks = dict(zip(learner.kinds, inputs.masks, strict=True))
    out = network.denoise(learner.model, inputs.features, blocks, inputs.anchors, masks)
    normed: mx.array = learner.model.norm(out.reshape(-1, out.shape[-1])[inputs.index])
    return normed


def make_step(learner: Learner, alpha: float | None, compiled: bool) -> Callable[[Params, Arrays], Any]:
    """A function of (weights, ``Inputs.arrays()``) that returns (gradient of the weighted sum of losses, (that sum,
    the weights' sum, right [R])). ``alpha``: D-PACE's, None for the fixed weights."""

    def objective(weights: Params, arrays: Arrays) -> tuple[mx.array, tuple[mx.array, ...]]:
        inputs = Inputs(**arrays)
        learner.wear(weights)
        hidden = hidden_rows(learner, inputs)
        rows = head.score(learner.project, mx.stop_gradient(hidden), inputs.labels, learner.vocab)
        counts = inputs.weights if alpha is None else dpace_weights(learner, inputs, rows.losses, alpha)
        slopes = mx.stop_gradient(rows.slopes.astype(mx.float32) * counts[:, None])
        pull = (hidden.astype(mx.float32) * slopes).sum()  # its gradient is that of the loss
        return pull, ((rows.losses * counts).sum(), counts.sum(), rows.right)

    def step(weights: Params, arrays: Arrays) -> tuple[Params, tuple[mx.array, ...]]:
        (_, found), grads = mx.value_and_grad(objective)(weights, arrays)
        return grads, found

    return mx.compile(step) if compiled else step


def dpace_weights(learner: Learner, inputs: Inputs, losses: mx.array, alpha: float) -> mx.array:
    """[R] weights from the losses of whole blocks; the fixed weights only tell which rows count."""
    total = inputs.ids.size * learner.slots
    counts = (inputs.weights > 0).astype(mx.float32)
    asked = mx.zeros((total,)).at[inputs.index].add(counts) > 0
    spread = mx.zeros((total,)).at[inputs.index].add(losses * counts)
    weights = head.dpace(spread.reshape(-1, learner.slots), asked.reshape(-1, learner.slots), alpha)
    return weights.reshape(-1)[inputs.index] * counts


def by_slot(inputs: Inputs, right: mx.array, slots: int) -> tuple[mx.array, mx.array]:
    """([k] right, [k] asked) counts."""
    counts = (inputs.weights > 0).astype(mx.float32)
    slot = inputs.index % slots
    zeros = mx.zeros((slots,))
    return zeros.at[slot].add(right * counts), zeros.at[slot].add(counts)
