"""The drafter's memory of committed tokens: per layer, keys (normed, rotated) and values of context rows.

Block rows of a pass are written behind the committed rows and never counted, so dropping them costs nothing. Knows
neither features nor projections.
"""

from __future__ import annotations

import mlx.core as mx

STEP = 256  # rows by which a buffer grows
SLACK = 1024  # rows a sliding layer keeps beyond its window, so that a conversation can be taken back


class LayerContext:
    """Keys and values of one layer, [1, heads, rows, head_dim], rows in order of position.

    ``window`` None keeps every row. Otherwise a query sees ``window - 1`` rows before it; those and ``slack`` more are
    kept, and rows are moved once in ``slack`` tokens or more.
    """

    def __init__(self, window: int | None = None, start: int = 0, slack: int = SLACK) -> None:
        self.reach = None if window is None else window - 1
        self.slack = slack
        self.start = start  # position of the first row ever ingested
        self.first = start  # position of row 0 of the buffers
        self.length = start  # position after the last committed row
        self.keys: mx.array | None = None
        self.values: mx.array | None = None

    @property
    def rows(self) -> int:
        """Committed rows held."""
        return self.length - self.first

    def wanted(self, count: int) -> int:
        """Of the next ``count`` rows, how many (the last ones) will ever be read: the others need no projection."""
        return count if self.reach is None else min(count, self.reach + self.slack)

    def skip(self, count: int) -> None:
        """Pass over ``count`` rows that no query will reach, and forget those before them."""
        if count:
            self.length += count
            self.first, self.keys, self.values = self.length, None, None

    def append(self, keys: mx.array, values: mx.array) -> None:
        """Commit rows."""
        self._write(keys, values)
        self.length += keys.shape[2]

    def view(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """The rows in reach of the next position, followed by the given block rows, which are not kept."""
        self._write(keys, values)
        begin, end = self.rows - self.visible(), self.rows + keys.shape[2]
        held_keys, held_values = self.arrays()
        return held_keys[..., begin:end, :], held_values[..., begin:end, :]

    def visible(self) -> int:
        """How many committed rows the query at position ``length`` sees."""
        return self.rows if self.reach is None else min(self.rows, self.reach)

    def can_trim(self, length: int) -> bool:
        """Whether every row that a query at ``length`` would see is still held."""
        if not self.start <= length <= self.length:
            return False
        needed = self.start if self.reach is None else max(self.start, length - self.reach)
        return self.first <= needed

    def trim(self, length: int) -> None:
        """Forget positions >= ``length``; only where ``can_trim``."""
        self.length = length

    def clear(self) -> None:
        """Back to an empty context at ``start``."""
        self.first = self.length = self.start
        self.keys = self.values = None

    def arrays(self) -> list[mx.array]:
        return [] if self.keys is None or self.values is None else [self.keys, self.values]

    def _write(self, keys: mx.array, values: mx.array) -> None:
        held_keys, held_values = self._room(keys, values)
        begin, end = self.rows, self.rows + keys.shape[2]
        held_keys[..., begin:end, :] = keys
        held_values[..., begin:end, :] = values
        self.keys, self.values = held_keys, held_values

    def _room(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Buffers that hold the committed rows and as many more as given; rows out of reach are dropped on the way."""
        rows, new, drop = self.rows, keys.shape[2], 0
        if self.keys is not None and self.values is not None and rows + new <= self.keys.shape[2]:
            return self.keys, self.values
        size = -(-(rows + new) // STEP) * STEP
        if self.reach is not None and rows + new > self.reach + 2 * self.slack:
            drop = max(0, rows - self.reach - self.slack)
            size = max(rows - drop + new, self.reach + 2 * self.slack)
        self.first += drop
        return _grown(self.keys, keys, drop, rows, size), _grown(self.values, values, drop, rows, size)


def _grown(old: mx.array | None, like: mx.array, drop: int, rows: int, size: int) -> mx.array:
    """A buffer of ``size`` rows that starts with rows ``drop .. rows`` of ``old``."""
    _, heads, _, dim = like.shape
    empty = mx.zeros((1, heads, size - (rows - drop), dim), like.dtype)
    return empty if old is None or rows == drop else mx.concatenate([old[..., drop:rows, :], empty], axis=2)
