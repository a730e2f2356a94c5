"""How wide the next verify is. Knows this request's own numbers only; times nothing."""

from __future__ import annotations

from collections.abc import Sequence


class Rotation:
    """The widths asked for, round by round, over and over; one width is the fixed policy.

    Replaying a request is giving it the ``widths`` of its own stats.
    """

    def __init__(self, widths: Sequence[int]) -> None:
        self._widths = tuple(widths)
        self._next = 0

    def width(self) -> int:
        return self._widths[self._next % len(self._widths)]

    def observe(self, drafted: int, accepted: int) -> None:
        self._next += 1
