"""Rows of logits for the tests of sampling and processors."""

from __future__ import annotations

import mlx.core as mx


def random_rows(
    count: int, size: int = 300, dtype: mx.Dtype = mx.float32, seed: int = 0, scale: float = 3.0
) -> mx.array:
    """Logits with many exact ties in them: a third of the values are rounded to halves."""
    values = scale * mx.random.normal((count, size), key=mx.random.key(seed))
    rounded = mx.round(values * 2) / 2
    tied = mx.random.uniform(shape=(count, size), key=mx.random.key(seed + 1)) < 0.33
    return mx.where(tied, rounded, values).astype(dtype)


def normalised(logits: mx.array) -> mx.array:
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)
