"""AdamW with warm-up, a cosine to zero and clipping by the global norm. State is two trees like the weights'."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map

Params = dict[str, Any]
BETAS = (0.9, 0.95)
EPSILON = 1e-8


@dataclass
class Moments:
    first: Params
    second: Params

    @classmethod
    def zeros(cls, params: Params) -> Moments:
        return cls(tree_map(mx.zeros_like, params), tree_map(mx.zeros_like, params))


def rate(step: int, steps: int, peak: float, warmup: float) -> float:
    """The learning rate of update ``step`` (from 0) of ``steps``: rises over the first ``warmup`` share, then falls
    along half a cosine."""
    rising = max(1, round(steps * warmup))
    if step < rising:
        return peak * (step + 1) / rising
    return peak * 0.5 * (1 + math.cos(math.pi * (step - rising) / max(1, steps - rising)))


def norm(gradients: Params) -> mx.array:
    """Of all gradients together."""
    return mx.sqrt(mx.stack([mx.square(value).sum() for _, value in tree_flatten(gradients)]).sum())


def update(
    params: Params, gradients: Params, moments: Moments, step: int, lr: float, weight_decay: float, clip: float
) -> tuple[Params, Moments]:
    """One AdamW update (``step`` from 0), matrices alone decaying."""
    b1, b2 = BETAS
    scale = mx.minimum(1.0, clip / (norm(gradients) + 1e-6))
    gradients = tree_map(lambda g: g * scale, gradients)
    first = tree_map(lambda m, g: b1 * m + (1 - b1) * g, moments.first, gradients)
    second = tree_map(lambda v, g: b2 * v + (1 - b2) * mx.square(g), moments.second, gradients)
    c1, c2 = 1 - b1 ** (step + 1), 1 - b2 ** (step + 1)

    def moved(p: mx.array, m: mx.array, v: mx.array) -> mx.array:
        decay = weight_decay if p.ndim > 1 else 0.0
        return p - lr * ((m / c1) / (mx.sqrt(v / c2) + EPSILON) + decay * p)

    return tree_map(moved, params, first, second), Moments(first, second)
