"""From denoised slots to the loss and its gradient, through the target's frozen head, a few rows at a time.

The head is frozen, so the gradient of each row's cross-entropy is made where its logits are, which are then dropped:
no [rows, V] array outlives its chunk, and each softmax is computed once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx

from mlx_spec.convert.train import quick

CHUNK = 1 << 24  # logits alive at once
Project = Callable[[mx.array], mx.array]  # [R, H] after the final norm -> [R, V] logits


@dataclass(frozen=True)
class Rows:
    """Per row: cross-entropy, its gradient by the hidden state, and whether the best token is the label."""

    losses: mx.array  # [R] float32
    slopes: mx.array  # [R, H]
    right: mx.array  # [R] bool


def score(project: Project, hidden: mx.array, labels: mx.array, vocab: int) -> Rows:
    """``hidden`` [R, H] against ``labels`` [R] (a row without a label carries any id; its numbers mean nothing)."""
    size = max(1, CHUNK // vocab)
    parts = [
        _score(project, hidden[begin : begin + size], labels[begin : begin + size])
        for begin in range(0, hidden.shape[0], size)
    ]
    if len(parts) == 1:
        return parts[0]
    return Rows(*(mx.concatenate([getattr(part, name) for part in parts]) for name in ("losses", "slopes", "right")))


def _score(project: Project, hidden: mx.array, labels: mx.array) -> Rows:
    logits = project(hidden)
    wide = logits.astype(mx.float32)
    top = wide.max(axis=-1, keepdims=True)
    raised = quick.exp(wide - top) if quick.on_cpu() else mx.exp(wide - top)
    total = raised.sum(axis=-1, keepdims=True)
    own = mx.take_along_axis(wide, labels[:, None], axis=-1)
    losses = (mx.log(total) + top - own)[:, 0]
    slope = raised / total
    slope = slope.at[mx.arange(labels.shape[0]), labels].add(-1.0)
    _, (slopes,) = mx.vjp(project, [hidden], [slope.astype(logits.dtype)])
    return Rows(losses, slopes, mx.argmax(wide, axis=-1) == labels)


def dpace(losses: mx.array, asked: mx.array, alpha: float) -> mx.array:
    """D-PACE's weights (arXiv 2605.18810) of [blocks, k] losses: how much the expected accepted length grows with each
    slot's log-probability. ``asked``: slots that have a label; slot 0 is the anchor.

    s_i = (1 - alpha) p_i + alpha (1 where nothing is asked); the weight of slot i is the sum over j >= i of the product
    s_1 .. s_j of slots that are asked.
    """
    smoothed = mx.where(asked, (1 - alpha) * mx.exp(-losses) + alpha, 1.0)
    reached = mx.cumprod(smoothed, axis=-1) * asked
    return mx.cumsum(reached, axis=-1, reverse=True) * asked
