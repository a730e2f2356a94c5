"""One conversation: committed tokens, the target's caches, the drafter's context. Knows no text and no sampling.

A request brings a whole prompt; what it shares with the committed tokens is kept, the rest is prefilled. So edits,
branches and templates that move need no bookkeeping: warm equals cold.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import mlx.core as mx

from mlx_spec.caches import CacheSet
from mlx_spec.contracts import NO_DRAFT, Cancel, Draft, Drafter, DraftSession, Progress, Taps, Target
from mlx_spec.errors import DrafterError

# What a drafter may raise; it is foreign code to the conversation, and never a reason to lose committed tokens.
DRAFTER_FAULTS = (DrafterError, RuntimeError, ValueError, ArithmeticError, LookupError, TypeError, AssertionError)
T = TypeVar("T")


class Session:
    """``contracts.Conversation`` on one target, with or without a drafter.

    Between requests the caches hold ``tokens[:-1]`` and the drafter the same positions. ``taps`` are the target's,
    opened by whoever bound the drafter. A parked or failed drafter is opened anew, from cold, by the next request.
    """

    def __init__(self, target: Target, drafter: Drafter | None = None, taps: Taps | None = None) -> None:
        self.target = target
        self.drafter = drafter
        self._taps = taps
        self.tokens: list[int] = []
        self.start = 0
        self.cache: Any = target.new_cache()
        self.draft: DraftSession | None = None
        self.draft_window: int | None = None
        self._last_id = mx.array(target.vocab_size - 1, dtype=mx.uint32)

    @classmethod
    def over(cls, entries: Sequence[Any], target: Target, drafter: Drafter | None, taps: Taps | None) -> Session:
        """Around mlx-lm caches that already hold rows whose tokens are not known; the drafter starts after them."""
        session = cls(target, drafter, taps)
        session.cache = CacheSet(entries)
        session.start = session.cache.length
        return session

    @property
    def taps(self) -> Taps | None:
        """None while nothing drafts, so that a plain conversation records nothing."""
        return self._taps if self.draft is not None else None

    def match(self, prompt: Sequence[int], draft_window: int | None = None) -> int:
        """Keep the longest common prefix with ``prompt``; returns the rows reused (at most ``len(prompt) - 1``).

        Both sides go back to the same point: where the drafter cannot go back that far, or its window changed, the
        target gives up its rows too, so that a warm conversation drafts exactly as a cold one.
        """
        common = 0
        for ours, theirs in zip(self.tokens, prompt, strict=False):
            if ours != theirs:
                break
            common += 1
        fresh = self.drafter is not None and (self.draft is None or draft_window != self.draft_window)
        # One row less than is common: a drafter that holds row j knows the token after it too.
        keep = 0 if fresh else self._restore(common - 1)
        if keep <= 0:
            self._reset(prompt, draft_window)
            keep = 0
        self.tokens = list(prompt[: keep + 1])
        return keep

    def _restore(self, rows: int) -> int:
        """Trim cache and drafter to the same number of rows, at most ``rows`` past ``start``."""
        while rows > 0:
            reached = self.cache.trim(self.start + rows) - self.start
            if self.draft is not None:
                reached = min(reached, self.draft.trim(self.start + reached) - self.start)
            if reached == rows:
                return rows
            rows = reached
        return 0

    def _reset(self, prompt: Sequence[int], draft_window: int | None) -> None:
        if self.cache.trim(self.start) != self.start:
            raise DrafterError(f"the prompt cache could not be trimmed to its first {self.start} rows")
        if self.start == 0:
            self.cache = self.cache if self.cache.length == 0 else self.target.new_cache()
        self.draft_window = draft_window
        self.draft = None if self.drafter is None else self.drafter.open(prompt[0], self.start, draft_window)

    def prefill(self, prompt: Sequence[int], step: int, cancel: Cancel, progress: Progress) -> bool:
        """Bring cache and drafter to ``prompt[:-1]`` in chunks of ``step`` rows; False if cancelled between chunks.

        Consistent after every chunk. Features live for one chunk only, so memory does not grow with the prompt.
        Raises DrafterError where the drafter fails; the target's rows stand.
        """
        total = len(prompt) - 1
        progress(len(self.tokens) - 1, len(prompt))
        while len(self.tokens) <= total:
            if cancel():
                return False
            done = len(self.tokens) - 1
            end = min(done + step, total)
            self._append(prompt[done:end], prompt[done + 1 : end + 1])
            progress(end, len(prompt))
        return True

    def _append(self, rows: Sequence[int], following: Sequence[int]) -> None:
        start, kept = self.cache.length, 0
        self.cache.begin(len(rows))
        try:
            out = self.target.forward(mx.array(list(rows), dtype=mx.uint32), self.cache, self.taps)
            mx.eval(self.cache.arrays(), [] if out.features is None else out.features)
            kept = len(rows)
        finally:
            self.cache.commit(range(kept)) if kept else self.cache.abort()
        self.tokens.extend(following)
        self.ingest(following, out.features, start)
        if self.draft is not None:
            mx.eval(self.draft.arrays())
        mx.clear_cache()

    def propose(self, count: int) -> Draft:
        """At most ``count`` ids inside the vocabulary. Raises DrafterError (see ``park``)."""
        if self.draft is None or count < 1:
            return NO_DRAFT
        draft = self._guard(self.draft.propose, self.tokens[-1], count)
        if len(draft) > count:
            self.park()
            raise DrafterError(f"it proposed {len(draft)} tokens where {count} were asked for")
        # An id outside the embedding would read other memory; clamped, it is merely a draft that is not accepted.
        return Draft(mx.minimum(draft.tokens.astype(mx.uint32), self._last_id), draft.host)

    def ingest(self, tokens: Sequence[int], features: mx.array | None, start: int) -> None:
        """Committed rows into the drafter. Raises DrafterError (see ``park``)."""
        if self.draft is not None:
            self._guard(self.draft.ingest, tokens, features, start)

    def park(self) -> None:
        """Drop the drafter's context; the conversation goes on without drafting until the next request."""
        self.draft = None

    def _guard(self, call: Callable[..., T], *args: Any) -> T:
        try:
            return call(*args)
        except DRAFTER_FAULTS as error:
            self.park()
            raise DrafterError(f"{type(error).__name__}: {error}") from error


class PromptCache(list[Any]):
    """mlx-lm's prompt cache (a list of per-layer caches) that also remembers what mlx-lm's forgets: tokens and context.

    Between calls it holds every token of the conversation, the last included, as mlx-lm's does, so it can be saved,
    trimmed or continued by mlx-lm. ``enter`` reconciles it with whatever happened to the list in between.
    """

    def __init__(self, session: Session) -> None:
        super().__init__(session.cache.entries)
        self.session = session

    def enter(self) -> Session:
        """The session, with cache, tokens and drafter agreeing again; foreign rows make the drafter start blind."""
        session = self.session
        held = CacheSet(self).length - session.start
        if held > len(session.tokens) or any(a is not b for a, b in zip(self, session.cache.entries, strict=False)):
            self.session = Session.over(self, session.target, session.drafter, session._taps)
            return self.session
        del session.tokens[held:]
        session.cache.trim(session.start + max(held - 1, 0))
        if session.draft is not None and session.draft.trim(session.cache.length) != session.cache.length:
            session.park()
        return session

    def leave(self) -> None:
        """Let the cache hold the last committed token too; the next ``enter`` takes it out again."""
        session = self.session
        if session.tokens and session.cache.length == session.start + len(session.tokens) - 1:
            session.target.forward(mx.array(session.tokens[-1:], dtype=mx.uint32), session.cache)
            mx.eval(session.cache.arrays())
        self[:] = session.cache.entries
