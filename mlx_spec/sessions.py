"""One conversation: committed tokens, the target's caches, the drafter's context. Knows no text and no sampling.

A request brings a whole prompt; what it shares with the committed tokens is kept, the rest is prefilled. So edits,
branches and templates that move need no bookkeeping: warm equals cold.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import mlx.core as mx

from mlx_spec.caches import CacheSet
from mlx_spec.contracts import NO_DRAFT, Cancel, Draft, Drafter, DraftSession, Progress, Taps, Target
from mlx_spec.errors import DrafterError, EvaluationError, OptionError, SessionError

# What a drafter may raise; it is foreign code to the conversation, and never a reason to lose committed tokens.
DRAFTER_FAULTS = (
    *(DrafterError, RuntimeError, ValueError, ArithmeticError, LookupError, TypeError, AssertionError),
    *(AttributeError, OSError, MemoryError),
)
REFILL = 512  # rows per chunk when a conversation is filled again after a failure
T = TypeVar("T")


class Session:
    """``contracts.Conversation`` on one target, with or without a drafter.

    Between requests the caches hold ``tokens[:-1]`` and the drafter the same positions. ``taps`` are the target's,
    opened by whoever bound the drafter. A parked or failed drafter is opened anew, from cold, by the next request.
    ``drafting`` False: never draft, whatever the engine's drafter. ``turn`` counts requests: only the latest may go on.
    """

    def __init__(
        self, target: Target, drafter: Drafter | None = None, taps: Taps | None = None, drafting: bool = True
    ) -> None:
        self.target, self.drafting, self.turn = target, drafting, 0
        self.lost = False  # after a failed evaluation: nothing but the tokens is left, and the next request starts cold
        self.drafter = drafter
        self._taps = taps
        self.tokens: list[int] = []
        self.start = 0
        self.cache: Any = target.new_cache()
        self.draft: DraftSession | None = None
        self.draft_window: int | None = None
        self._last_id = target.vocab_size - 1
        self._last = mx.array(self._last_id, dtype=mx.uint32)

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

    def follow(self, drafter: Drafter | None, taps: Taps | None) -> None:
        """Draft with ``drafter`` from the next request on, unless opened without drafting."""
        if self.drafting and (drafter is not self.drafter or taps is not self._taps):
            self.drafter, self._taps, self.draft = drafter, taps, None

    def match(self, prompt: Sequence[int], draft_window: int | None = None, parked: bool = False) -> int:
        """Begin a request: keep the longest common prefix with ``prompt``; returns the rows reused (at most
        ``len(prompt) - 1``). ``parked``: without drafting. Raises OptionError where the drafter refuses the window, and
        DrafterError where it cannot be opened; the conversation is then as it was.

        Both sides go back to the same point: where the drafter cannot go back that far, or its window changed, the
        target gives up its rows too, so that a warm conversation drafts exactly as a cold one.
        """
        common = 0
        for ours, theirs in zip(self.tokens, prompt, strict=False):
            if ours != theirs:
                break
            common += 1
        if parked:
            self.draft = None
        wanted = self.drafter is not None and not parked
        fresh = wanted and (self.draft is None or draft_window != self.draft_window)
        # One row less than is common: a drafter that holds row j knows the token after it too.
        keep = 0 if fresh else self._restore(common - 1)
        if keep <= 0:
            self._reset(prompt[0], draft_window, wanted)
            keep = 0
        self.tokens, self.lost = list(prompt[: keep + 1]), False
        self.turn += 1
        return keep

    def hold(self, turn: int) -> None:
        """See ``contracts.Conversation.hold``."""
        if self.turn != turn:
            raise SessionError("a later request took over this conversation; finish or close one before the next")
        if self.cache.length != self.start + len(self.tokens) - 1:
            raise SessionError("the cache was changed by somebody else during the request; use one per conversation")

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

    def _reset(self, first: int, draft_window: int | None, wanted: bool) -> None:
        # The drafter comes first: where it refuses, nothing has been touched.
        draft = None
        if wanted and self.drafter is not None:
            try:
                draft = self.drafter.open(first, self.start, draft_window)
            except OptionError:
                raise
            except DRAFTER_FAULTS as error:
                raise self._fault(error) from error
        if self.cache.trim(self.start) != self.start:
            raise SessionError(f"the prompt cache could not be trimmed to its first {self.start} rows; make a new one")
        if self.start == 0 and self.cache.length:
            self.cache = self.target.new_cache()
        self.draft, self.draft_window = draft, draft_window

    def prefill(self, prompt: Sequence[int], step: int, cancel: Cancel, progress: Progress) -> bool:
        """Bring cache and drafter to ``prompt[:-1]`` in chunks of ``step`` rows; False if cancelled between chunks.

        Consistent after every chunk. Features live for one chunk only, so memory does not grow with the prompt.
        Raises DrafterError where the drafter fails; the target's rows stand.
        """
        total, turn = len(prompt) - 1, self.turn
        progress(len(self.tokens) - 1, len(prompt))
        while len(self.tokens) <= total:
            if cancel():
                return False
            self.hold(turn)
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
            self.evaluate(self.cache.arrays(), [] if out.features is None else out.features)
            kept = len(rows)
        finally:
            self.cache.commit(range(kept)) if kept else self.cache.abort()
        self.tokens.extend(following)
        self.ingest(following, out.features, start)
        if self.draft is not None:
            self._guard(mx.eval, self._guard(self.draft.arrays))
        mx.clear_cache()

    def propose(self, count: int) -> Draft:
        """At most ``count`` ids inside the vocabulary. Raises DrafterError (see ``park``)."""
        if self.draft is None or count < 1:
            return NO_DRAFT
        return self._guard(self._proposed, self.draft, count)

    def _proposed(self, drafter: DraftSession, count: int) -> Draft:
        if self._taps is not None and self._taps.closed:
            raise DrafterError("the engine was closed or given another drafter during the request")
        draft = drafter.propose(self.tokens[-1], count)
        shape = draft.tokens.shape if draft.host is None else (len(draft.host),)
        if len(shape) != 1:
            raise DrafterError(f"it proposed ids of shape {shape} where a chain was asked for")
        if shape[0] > count:
            raise DrafterError(f"it proposed {shape[0]} tokens where {count} were asked for")
        # An id outside the embedding would read other memory; clamped, it is merely a draft that is not accepted.
        if draft.host is None:
            return Draft(mx.minimum(draft.tokens.astype(mx.uint32), self._last))
        # Rows and judgement come from one list, so that they cannot disagree.
        ids = tuple([token if 0 <= token <= self._last_id else self._last_id for token in draft.host])
        return Draft(mx.array(ids, dtype=mx.uint32), ids)

    def ingest(self, tokens: Sequence[int], features: mx.array | None, start: int) -> None:
        """Committed rows into the drafter. Raises DrafterError (see ``park``)."""
        if self.draft is not None:
            self._guard(self.draft.ingest, tokens, features, start)

    def evaluate(self, *arrays: Any) -> None:
        """Raises EvaluationError after ``lose``: what was written to the cache hangs on the failure."""
        try:
            mx.eval(*arrays)
        except RuntimeError as error:
            self.lose()
            raise EvaluationError(f"MLX could not compute the prompt: {error}") from error

    def lose(self) -> None:
        """See ``contracts.Conversation.lose``."""
        if self.start:
            raise SessionError("the prompt cache hangs on a computation that failed; make a new one")
        self.cache, self.draft, self.lost = self.target.new_cache(), None, True

    def refill(self) -> None:
        """See ``contracts.Conversation.refill``."""
        tokens, self.tokens, self.lost = self.tokens, self.tokens[:1], False
        self.prefill(tokens, REFILL, lambda: False, lambda done, total: None)

    def park(self) -> None:
        """Drop the drafter's context; the conversation goes on without drafting until the next request."""
        self.draft = None

    def _guard(self, call: Callable[..., T], *args: Any) -> T:
        try:
            return call(*args)
        except DRAFTER_FAULTS as error:
            raise self._fault(error) from error

    def _fault(self, error: Exception) -> DrafterError:
        self.park()
        return error if isinstance(error, DrafterError) else DrafterError(f"{type(error).__name__}: {error}")


class PromptCache(list[Any]):
    """mlx-lm's prompt cache (a list of per-layer caches) that also remembers what mlx-lm's forgets: tokens and context.

    Between calls it holds every token that was handed out, the last included, as mlx-lm's does, so it can be saved,
    trimmed or continued by mlx-lm. ``enter`` reconciles it with whatever happened to the list in between. A copy keeps
    rows and tokens, shares the model, and opens its drafter anew.
    """

    def __init__(self, session: Session) -> None:
        super().__init__(session.cache.entries)
        self.session = session
        self.uses = 0  # calls so far; only the latest may leave
        self.shown: int | None = None  # tokens of the conversation, as far as the open call has handed them out
        self._marks: mx.array | None = None

    def enter(self) -> int:
        """Make cache, tokens and drafter of ``session`` agree; rows that others wrote make the drafter start blind.
        An earlier call that is still open ends here. Returns the number of this use, for ``leave``."""
        self.leave(self.uses)
        self.uses += 1
        session, held = self.session, CacheSet(self)
        if session.lost:
            return self.uses
        rows = held.trim(held.length) - session.start  # layers of unequal length: something was interrupted
        if not self._is_ours(rows, held):
            drafter, taps = session.drafter, session._taps
            self.session = Session.over(self, session.target, drafter, taps)
            return self.uses
        del session.tokens[rows:]
        session.cache.trim(session.start + max(rows - 1, 0))
        if session.draft is not None and session.draft.trim(session.cache.length) != session.cache.length:
            session.park()
        return self.uses

    def _is_ours(self, rows: int, held: CacheSet) -> bool:
        """Whether the list holds the first ``rows`` of the session's tokens, and no row of anybody else."""
        session = self.session
        if not 0 <= rows <= len(session.tokens) or len(self) != len(session.cache.entries):
            return False
        if any(mine is not theirs for mine, theirs in zip(self, session.cache.entries, strict=True)):
            return False
        marks, last = held.marks(), session.start + rows - 1
        if last < 0 or marks is None or self._marks is None:
            return True
        return bool(mx.array_equal(marks[last], self._marks[last], equal_nan=True).item())

    def leave(self, use: int) -> None:
        """Hold the tokens that were handed out, the last included; the next ``enter`` takes that one out again. Does
        nothing after a later ``enter``, or where somebody else has written into the caches."""
        session, shown = self.session, self.shown
        if use != self.uses or shown is None:
            return
        if session.lost:
            session.refill()
        if session.tokens and session.cache.length == session.start + len(session.tokens) - 1:
            del session.tokens[max(shown, 1) :]
            session.cache.trim(session.start + len(session.tokens) - 1)
            session.target.forward(mx.array(session.tokens[-1:]), session.cache)
            self._marks = session.cache.marks()
            session.evaluate(session.cache.arrays(), [] if self._marks is None else self._marks)
        if session.start == 0:
            self[:] = session.cache.entries
        self.shown = None  # last: an interrupted call is finished by the next

    def __deepcopy__(self, memo: dict[int, Any]) -> PromptCache:
        ours = self.session
        twin = Session(ours.target, ours.drafter, ours._taps, ours.drafting)
        twin.start, twin.tokens = ours.start, list(ours.tokens)
        twin.cache = CacheSet(copy.deepcopy(ours.cache.entries, memo))
        copied = PromptCache(twin)
        copied.shown, copied._marks = self.shown, self._marks
        return copied

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (list(self),)  # pickled as mlx-lm's own; a model does not belong into a cache's file
