"""The seams of the engine: Protocols and the small values that cross them. Imports no room.

Shapes: ``n`` rows of one verify, ``V`` logits per row, ``D`` the target's hidden size, ``k`` tapped layers.
Batch is always 1 and never appears in a shape.

The invariant every room keeps between rounds: the target's cache, the drafter's context and the committed
tokens agree, ``cache.length == draft.length == len(tokens) - 1``; the last committed token is the *anchor*.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx

Cancel = Callable[[], bool]
"""Polled between prefill chunks and between rounds; True ends the request at that point."""

Progress = Callable[[int, int], None]
"""Called with (prompt tokens processed, prompt tokens in total)."""


@dataclass(frozen=True)
class Draft:
    """What a drafter proposes for one round."""

    tokens: mx.array  # [n-1] integer ids, a chain; may still be unevaluated
    host: tuple[int, ...] | None = None  # the ids where the drafter knows them without a device read; these then count

    def __len__(self) -> int:
        return int(self.tokens.shape[0])

    def ids(self) -> Sequence[int]:
        """On the host; a device read only where ``host`` is None."""
        return self.host if self.host is not None else self.tokens.tolist()  # type: ignore[return-value]


NO_DRAFT = Draft(mx.array([], dtype=mx.uint32), ())


@dataclass(frozen=True)
class Forward:
    """One pass of the target. Both arrays are lazy: prefill evaluates features and caches, never logits."""

    logits: mx.array  # [n, V]
    features: mx.array | None  # [n, k*D], tapped layers side by side in the order asked for; None without taps


class Cache(Protocol):
    """All of a target's per-layer caches as one transaction. One file per kind in ``caches/``."""

    entries: list[Any]  # mlx-lm cache objects, one per layer; the target writes them

    @property
    def length(self) -> int:
        """Committed rows."""

    def begin(self, rows: int) -> None:
        """Announce a verify of ``rows`` rows; exactly one ``commit`` or ``abort`` follows."""

    def commit(self, kept: Sequence[int]) -> None:
        """Keep these row indices of the verify (ascending); drop the others."""

    def abort(self) -> None:
        """Back to what ``begin`` found, whether or not the verify ran."""

    def trim(self, length: int) -> int:
        """Shorten to at most ``length`` rows. Returns the length reached, which may be smaller (even 0)."""

    def arrays(self) -> list[mx.array]:
        """What must be evaluated to make the cache's contents real."""


class Taps(Protocol):
    """Opened on a target for one drafter; recording stops when closed."""

    layers: tuple[int, ...]

    @property
    def closed(self) -> bool: ...

    def close(self) -> None: ...


class Target(Protocol):
    """A model whose output is reproduced."""

    vocab_size: int  # V, rows of the head (may exceed the tokenizer's size)
    hidden_size: int  # D
    num_layers: int
    max_context: int | None  # tokens, where the config states it

    def new_cache(self) -> Cache:
        """An empty cache. Raises UnsupportedError naming the cache kind that cannot roll back."""

    def open_taps(self, layers: Sequence[int]) -> Taps:
        """Record the outputs of these decoder layers (0-based; repeats allowed; order kept)."""

    def forward(self, tokens: mx.array, cache: Cache, taps: Taps | None = None) -> Forward:
        """Append ``tokens`` [n] integer ids to ``cache`` and return all rows."""

    def embed(self, ids: mx.array) -> mx.array:
        """[m] -> [m, D], exactly what enters layer 0 (family scale included)."""

    def head(self, hidden: mx.array) -> mx.array:
        """[m, D] (after a final norm) -> [m, V] by the target's own head, without any soft cap or scale."""

    def head_over(self, ids: mx.array) -> Callable[[mx.array], mx.array]:
        """``head`` restricted to the ids [r]: a function [m, D] -> [m, r] over a copy of their rows."""


class DraftSession(Protocol):
    """All of a drafter's state for one conversation. Holds committed data only."""

    @property
    def length(self) -> int:
        """Positions ingested: the position of the anchor that ``propose`` expects."""

    def ingest(self, tokens: Sequence[int], features: mx.array | None, start: int) -> None:
        """Take committed rows. ``features[j]`` belongs to position ``start + j``; ``tokens[j]`` is the token at
        ``start + j + 1`` (feature j precedes token j). ``start`` equals ``length``."""

    def propose(self, anchor: int, count: int) -> Draft:
        """At most ``count`` tokens to follow ``anchor``; leaves no speculative state behind."""

    def trim(self, length: int) -> int:
        """Forget positions >= ``length``; the token at position ``length`` stays what it was. Returns the length
        reached, which may be smaller (even 0)."""

    def arrays(self) -> list[mx.array]:
        """Lazy state that must be evaluated so that graphs do not grow."""


class Drafter(Protocol):
    """Weights and settings, shared by all conversations. ``drafters/<method>.py`` defines one each."""

    name: str  # the lane's name
    layers: tuple[int, ...]  # target layers it needs the outputs of; empty: none
    default_width: int  # rows of a verify when the user names none
    max_width: int | None  # the most rows it can fill (trained block); None: no limit
    mask_id: int | None  # the id that its masked slots carry; None where it has none

    def bind(self, target: Target) -> None:
        """Check the pair and borrow what is shared. Raises PairError with both numbers."""

    def open(self, first: int, start: int = 0, draft_window: int | None = None) -> DraftSession:
        """``first`` is the token at position ``start`` (no feature precedes it). ``start > 0``: the rows before
        are in the target's cache but unknown to the drafter. ``draft_window`` cuts what it denoises (block
        drafters; OptionError from others), None: the drafter's own default."""


@dataclass(frozen=True)
class Round:
    """What one round committed."""

    index: int  # 0-based count of verifies in this request
    tokens: tuple[int, ...]  # 1..n of them
    drafted: int  # proposed tokens of this round, 0..n-1
    accepted: int  # of those, kept in the output; never counts the target's own token
    logprobs: mx.array | Sequence[mx.array]  # [V] by index, lazy: of the row that emitted each token
    finish: str | None  # "stop" | "length" on the last round


class Stops(Protocol):
    """Decides, token by token and before anything is committed, where the output ends."""

    @property
    def remaining(self) -> int:
        """Tokens that may still be emitted; a verify is never wider."""

    def take(self, token: int) -> str | None:
        """Account for one more output token; a finish reason if the output ends with it."""


class Conversation(Protocol):
    """What the loop needs of a session. Between rounds ``cache.length == draft.length == start + len(tokens) - 1``."""

    tokens: list[int]  # committed; the last one is the anchor
    start: int  # rows in the cache before tokens[0] (0 unless a foreign prompt cache was handed in)
    cache: Cache

    @property
    def taps(self) -> Taps | None:
        """What a verify records for the drafter; None while nothing drafts."""

    def hold(self, turn: int) -> None:
        """Raises SessionError unless request number ``turn`` is the latest and the cache is as it left it."""

    def propose(self, count: int) -> Draft:
        """The drafter's proposal to follow the anchor, ids inside the vocabulary; empty when parked.
        Raises DrafterError after parking the drafter, whatever it raised."""

    def ingest(self, tokens: Sequence[int], features: mx.array | None, start: int) -> None:
        """Committed rows into the drafter. Raises DrafterError as ``propose`` does."""

    def lose(self) -> None:
        """After a failed evaluation, whose results MLX may show as zeros: drop everything but the tokens. Raises
        SessionError where the first ``start`` rows cannot be had again."""

    def refill(self) -> None:
        """The cache again for the committed tokens, after ``lose``; the drafter stays parked."""


class Chooser(Protocol):
    """Logits to tokens for one request: processors, filters, temperature, noise."""

    lazy: bool  # True: user callables are involved, rows are chosen one by one and only while they are emitted

    def rows(self, logits: mx.array, history: Sequence[int], draft: mx.array) -> tuple[mx.array, mx.array]:
        """All rows at once, on device: (token ids [n], logprobs [n, V]). ``history`` is everything committed,
        anchor included; row i sees ``history + draft[:i]`` and its token's absolute position is
        ``len(history) + i``."""

    def one(self, logits: mx.array, history: Sequence[int]) -> tuple[int, mx.array]:
        """One row [1, V] with the tokens before it: (token, logprobs [V])."""


class Policy(Protocol):
    """How wide the next verify is. Uses only this request's own statistics and stored tables."""

    def width(self) -> int:
        """Rows of the next verify, >= 1 (1: no drafting)."""

    def observe(self, drafted: int, accepted: int) -> None: ...
