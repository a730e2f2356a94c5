"""Caches that grow at the end (mlx-lm's KVCache): rolling back is moving the offset. Knows one layer, no model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

HANDLES = ("KVCache",)


class Backend:
    """One layer's append cache. ``entry.keys`` and ``entry.values`` are [1, heads, capacity, head_dim]."""

    def __init__(self, entry: Any) -> None:
        self.entry = entry
        self._start = int(entry.offset)

    @property
    def length(self) -> int:
        return int(self.entry.offset)

    def begin(self, rows: int) -> None:
        self._start = self.length

    def commit(self, kept: Sequence[int]) -> None:
        start, count = self._start, len(kept)
        if kept != range(count):  # a path through a tree: close the gaps first
            rows = mx.array([start + row for row in kept])
            self.entry.keys[..., start : start + count, :] = mx.take(self.entry.keys, rows, axis=2)
            self.entry.values[..., start : start + count, :] = mx.take(self.entry.values, rows, axis=2)
        self.trim(start + count)

    def abort(self) -> None:
        self.trim(self._start)

    def trim(self, length: int) -> int:
        if self.length > length:
            self.entry.trim(self.length - length)
        return self.length

    def arrays(self) -> list[mx.array]:
        return [] if self.entry.keys is None else [self.entry.keys, self.entry.values]

    def marks(self) -> mx.array | None:
        # Times one: a copy, since a view would keep the whole buffer alive and make the next write copy it.
        return None if self.entry.keys is None else self.entry.keys[0, 0, : self.length, :4] * 1
