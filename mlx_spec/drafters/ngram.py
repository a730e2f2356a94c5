"""Prompt lookup: propose what followed the last occurrence of the text's own ending. Host side only, no weights.

The longest suffix of the committed tokens, of ``prompt_lookup_min`` to ``prompt_lookup_max`` tokens, that occurred
before is looked up; the latest occurrence wins. What follows it is proposed, and where that reaches the end of the
text the copy goes on over itself, so a period is continued. 
Prompt lookup decoding: github.com/apoorvumang/prompt-lookup-decoding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_spec.contracts import NO_DRAFT, Draft, Target
from mlx_spec.drafters._settings import check_settings, refuse_source, refuse_window
from mlx_spec.errors import DrafterError, OptionError

DEFAULT_MAX = 5
DEFAULT_MIN = 2  # one token alone matches almost anywhere, and each false match costs a verify
SETTINGS = ("prompt_lookup_max", "prompt_lookup_min")


class NgramIndex:
    """Where each n-gram of ``tokens`` occurred last, with what it takes to undo.

    ``last[n]`` maps an n-gram to the index just after its latest occurrence that does not end the text; the n-grams
    that end the text are entered when the next token comes, so a suffix never finds itself. A token costs
    ``high - low + 1`` dictionary updates.
    """

    def __init__(self, low: int, high: int) -> None:
        self.low, self.high = low, high
        self.tokens: list[int] = []
        self.last: dict[int, dict[tuple[int, ...], int]] = {n: {} for n in range(low, high + 1)}
        self._older: list[tuple[int | None, ...]] = []  # per entered index, what ``last`` held before, n ascending

    def append(self, token: int) -> None:
        end = len(self.tokens)
        if end:
            self._older.append(tuple(self._enter(n, end) for n in self._lengths(end)))
        self.tokens.append(token)

    def pop(self) -> None:
        """Exact inverse of ``append``."""
        self.tokens.pop()
        end = len(self.tokens)
        if end:
            for n, older in zip(self._lengths(end), self._older.pop(), strict=True):
                gram = tuple(self.tokens[end - n : end])
                if older is None:
                    del self.last[n][gram]
                else:
                    self.last[n][gram] = older

    def continuation(self, count: int) -> tuple[int, ...]:
        """At most ``count`` tokens that may follow the text; () without a match."""
        end = len(self.tokens)
        for n in reversed(self._lengths(end)):
            found = self.last[n].get(tuple(self.tokens[end - n : end]))
            if found is not None:
                period = end - found
                return tuple(self.tokens[found + i % period] for i in range(count))
        return ()

    def _lengths(self, end: int) -> range:
        return range(self.low, min(self.high, end) + 1)

    def _enter(self, n: int, end: int) -> int | None:
        gram = tuple(self.tokens[end - n : end])
        older = self.last[n].get(gram)
        self.last[n][gram] = end
        return older


class NgramDrafter:
    """``contracts.Drafter`` by prompt lookup; 1 <= ``low`` <= ``high``."""

    name = "ngram"
    layers: tuple[int, ...] = ()
    default_width = 8
    max_width: int | None = None
    mask_id: int | None = None

    def __init__(self, low: int = DEFAULT_MIN, high: int = DEFAULT_MAX) -> None:
        self.low, self.high = low, high

    def bind(self, target: Target) -> None:
        """Any target will do: tokens are compared with the conversation's own."""

    def open(self, first: int, start: int = 0, draft_window: int | None = None) -> NgramSession:
        refuse_window(self.name, draft_window)
        return NgramSession(first, start, NgramIndex(self.low, self.high))


class NgramSession:
    """The index of one conversation. The last indexed token is the anchor, so ``length`` is its position."""

    def __init__(self, first: int, start: int, index: NgramIndex) -> None:
        self._start = start
        self.index = index
        index.append(first)

    @property
    def length(self) -> int:
        return self._start + len(self.index.tokens) - 1

    def ingest(self, tokens: Sequence[int], features: mx.array | None, start: int) -> None:
        if start != self.length:
            raise DrafterError(f"ngram was given rows from {start} on, but holds {self.length}")
        for token in tokens:
            self.index.append(token)

    def propose(self, anchor: int, count: int) -> Draft:
        if anchor != self.index.tokens[-1]:
            raise DrafterError(f"the text ends in {self.index.tokens[-1]}, not in the anchor {anchor}")
        ids = self.index.continuation(count)
        return Draft(mx.array(ids, dtype=mx.int32), ids) if ids else NO_DRAFT

    def trim(self, length: int) -> int:
        """The token at position ``length`` stays: it is the anchor again. 0 where that lies before the session."""
        if length < self._start:
            return 0
        while self.length > length:
            self.index.pop()
        return self.length

    def arrays(self) -> list[mx.array]:
        return []


def load(source: Path | None, settings: Mapping[str, Any]) -> NgramDrafter:
    """Settings ``prompt_lookup_min`` (default 2) and ``prompt_lookup_max`` (default 5); where only one is given, the
    other's default gives way to it. Raises OptionError."""
    refuse_source("ngram", source)
    check_settings("ngram", settings, SETTINGS)
    low, high = settings.get("prompt_lookup_min"), settings.get("prompt_lookup_max")
    if high is None:
        high = max(DEFAULT_MAX, low or 0)
    if low is None:
        low = min(DEFAULT_MIN, high)
    if not 1 <= low <= high:
        raise OptionError(f"prompt_lookup_min {low} must be from 1 to prompt_lookup_max {high}")
    return NgramDrafter(low, high)
