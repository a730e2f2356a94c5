"""Logits to tokens: processors, filters, temperature, keyed noise. Knows no model, drafter or loop.

A token is the argmax of ``logprobs / temperature + noise``, the noise a pure function of (seed, absolute position,
token id): the same text whatever is drafted, at any width. Filters are mlx-lm's (``mlx_lm/sample_utils.py``), in its
order: top-p, min-p, top-k on untempered logprobs, then temperature.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm import sample_utils

from mlx_spec.contracts import Chooser
from mlx_spec.errors import OptionError
from mlx_spec.noise import check_seed, draw_seed, gumbel, hash_ids, make_key
from mlx_spec.processors import Processor, checked_count, checked_number, make_logits_processors

_COLDEST = 1e-30  # below this a temperature only overflows; the noise is long absorbed


@dataclass(frozen=True)
class Sampler:
    """Settings of the built-in sampling. Called on logprobs it is mlx-lm's sampler (global random state, unkeyed)."""

    temp: float = 0.0
    top_p: float = 0.0
    min_p: float = 0.0
    min_tokens_to_keep: int = 1
    top_k: int = 0
    seed: int | None = None

    def __post_init__(self) -> None:
        settle = object.__setattr__  # numpy's numbers become Python's
        settle(self, "temp", checked_number("temp", self.temp, 0.0))
        settle(self, "top_p", checked_number("top_p", self.top_p, 0.0, 1.0))
        settle(self, "min_p", checked_number("min_p", self.min_p, 0.0, 1.0))
        settle(self, "min_tokens_to_keep", checked_count("min_tokens_to_keep", self.min_tokens_to_keep, 1))
        settle(self, "top_k", checked_count("top_k", self.top_k, 0))
        settle(self, "seed", check_seed(self.seed))

    def __call__(self, logprobs: mx.array) -> mx.array:
        """[n, V] logprobs to [n] ids. Raises OptionError if seeded: a bare sampler does not know positions."""
        if self.seed is not None and self.temp > 0:
            raise OptionError(
                f"a sampler with seed {self.seed} works in mlx_spec's generate only; elsewhere use mx.random.seed"
            )
        return self.stock(logprobs)

    def stock(self, logprobs: mx.array, *xtc: Any) -> mx.array:
        """mlx-lm's sampler of these settings, bounded by the vocabulary's size, and its XTC arguments if any."""
        size = logprobs.shape[-1]
        temp = max(self.temp, _COLDEST) if self.temp else 0.0
        top_k = self.top_k if self.top_k < size else 0
        keep = min(self.min_tokens_to_keep, size)
        ids: mx.array = sample_utils.make_sampler(temp, self.top_p, self.min_p, keep, top_k, *xtc)(logprobs)
        return ids

    def filtered(self, logprobs: mx.array) -> tuple[mx.array, mx.array | None]:
        """[n, V] logprobs to what may be sampled: ([n, V] with -inf elsewhere, None) or ([n, k], their ids [n, k])."""
        if 0 < self.top_p < 1:
            logprobs = _top_p(logprobs, self.top_p)
        if self.min_p > 0:
            logprobs = _min_p(logprobs, self.min_p, self.min_tokens_to_keep)
        if not 0 < self.top_k < logprobs.shape[-1]:
            return logprobs, None
        ids = mx.argpartition(-logprobs, kth=self.top_k - 1, axis=-1)[:, : self.top_k]
        return mx.take_along_axis(logprobs, ids, axis=-1), ids


def _top_p(logprobs: mx.array, top_p: float) -> mx.array:
    """Keeps each token while those above it hold less than ``top_p`` of the mass, and its ties."""
    ascending = mx.sort(logprobs, axis=-1)
    probs = mx.exp(ascending.astype(mx.float32))
    above = mx.cumsum(probs, axis=-1, reverse=True, inclusive=False)
    total = above[..., :1] + probs[..., :1]
    dropped = (above >= top_p * total).sum(axis=-1, keepdims=True)
    return mx.where(logprobs < mx.take_along_axis(ascending, dropped, axis=-1), -mx.inf, logprobs)


def _min_p(logprobs: mx.array, min_p: float, keep: int) -> mx.array:
    """Keeps what has at least ``min_p`` of the best token's probability, and the ``keep`` best."""
    removed = logprobs < mx.max(logprobs, axis=-1, keepdims=True) + math.log(min_p)
    if keep >= logprobs.shape[-1]:
        return logprobs
    if keep > 1:
        best = mx.argpartition(logprobs, kth=-keep, axis=-1)[..., -keep:]
        removed = mx.put_along_axis(removed, best, mx.array(False), axis=-1)
    return mx.where(removed, -mx.inf, logprobs)


def make_sampler(
    temp: float = 0.0,
    top_p: float = 0.0,
    min_p: float = 0.0,
    min_tokens_to_keep: int = 1,
    top_k: int = 0,
    xtc_probability: float = 0.0,
    xtc_threshold: float = 0.1,
    xtc_special_tokens: list[int] | None = None,
    *,
    seed: int | None = None,
) -> Callable[[mx.array], mx.array]:
    """mlx-lm's ``make_sampler`` plus ``seed``; a ``top_k`` beyond the vocabulary keeps all.

    With XTC it returns mlx-lm's own sampler, which draws from ``mx.random`` and is run row by row; as in mlx-lm, XTC
    does nothing at ``temp`` 0. Raises OptionError for a value out of range and for XTC with ``seed``.
    """
    made = Sampler(temp, top_p, min_p, min_tokens_to_keep, top_k, seed)
    checked_number("xtc_probability", xtc_probability, 0.0, 1.0)
    checked_number("xtc_threshold", xtc_threshold, 0.0, 0.5)
    if xtc_probability == 0 or temp == 0:
        return made
    if seed is not None:
        raise OptionError(f"seed {seed} cannot be kept with XTC, which draws from mx.random; use mx.random.seed")
    special = [checked_count("a token id of xtc_special_tokens", token, 0) for token in xtc_special_tokens or ()]
    return lambda logprobs: made.stock(logprobs, xtc_probability, xtc_threshold, special)


class KeyedChooser:
    """Built-in sampler and processors: all rows at once, as one lazy graph (``contracts.Chooser``)."""

    lazy = False

    def __init__(self, sampler: Sampler, processors: Sequence[Processor], seed: int | None) -> None:
        self.sampler, self.processors = sampler, tuple(processors)
        self.seed = seed  # None: greedy
        self._scale = 1.0 / max(sampler.temp, _COLDEST)
        self._key = None if seed is None else make_key(seed)
        self._vocabulary = mx.array([], dtype=mx.uint32)  # hashed ids 0..V-1, the same for every row

    def rows(self, logits: mx.array, history: Sequence[int], draft: mx.array) -> tuple[mx.array, mx.array]:
        """See ``contracts.Chooser.rows``. Evaluates nothing and leaves ``mx.random`` alone."""
        for processor in self.processors:
            logits = processor.rows(logits, history, draft)
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        return self.pick(logprobs, len(history)), logprobs

    def pick(self, logprobs: mx.array, position: int) -> mx.array:
        """[n, V] logprobs to [n] ids; row i's token sits at ``position + i``."""
        if self._key is None:
            return mx.argmax(logprobs, axis=-1)
        kept, ids = self.sampler.filtered(logprobs)
        positions = mx.arange(position, position + kept.shape[0], dtype=mx.uint32)
        hashed = self._hashed(kept.shape[-1]) if ids is None else hash_ids(self._key, ids)
        scores = kept.astype(mx.float32) * self._scale + gumbel(self._key, positions, hashed)
        best = mx.argmax(scores, axis=-1)
        return best if ids is None else mx.take_along_axis(ids, best[:, None], axis=-1)[:, 0]

    def _hashed(self, size: int) -> mx.array:
        if self._vocabulary.shape[0] != size and self._key is not None:
            self._vocabulary = hash_ids(self._key, mx.arange(size, dtype=mx.uint32))
        return self._vocabulary

    def one(self, logits: mx.array, history: Sequence[int]) -> tuple[int, mx.array]:
        """See ``contracts.Chooser.one``; bit for bit what ``rows`` picks."""
        ids, logprobs = self.rows(logits, history, mx.array([], dtype=mx.uint32))
        return _item(ids), logprobs[0]


class LazyChooser:
    """A user's sampler or processors among the pieces: one row at a time, called as mlx-lm calls them."""

    lazy = True

    def __init__(self, sampler: Callable[..., Any] | KeyedChooser, processors: Sequence[Callable[..., Any]]) -> None:
        self.sampler, self.processors = sampler, tuple(processors)
        self.seed = sampler.seed if isinstance(sampler, KeyedChooser) else None  # None: greedy, or the user's affair

    def one(self, logits: mx.array, history: Sequence[int]) -> tuple[int, mx.array]:
        """See ``contracts.Chooser.one``. Raises OptionError for a callable that returns no logits, or no token."""
        tokens = mx.array(list(history), dtype=mx.int32)
        for processor in self.processors:
            shape, logits = logits.shape, processor(tokens, logits)
            if getattr(logits, "shape", None) != shape:
                raise OptionError(f"logits processor {processor!r} must return logits of shape {shape}, not {logits!r}")
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        if isinstance(self.sampler, KeyedChooser):
            return _item(self.sampler.pick(logprobs, len(history))), logprobs[0]
        picked = self.sampler(logprobs)
        if isinstance(picked, mx.array) and picked.size == 1:
            picked = picked.item()
        if not isinstance(picked, int) or isinstance(picked, bool):
            raise OptionError(f"sampler {self.sampler!r} must return one token id for logprobs [1, V], not {picked!r}")
        if not 0 <= picked < logprobs.shape[-1]:  # it would be read from outside the embedding
            raise OptionError(f"sampler {self.sampler!r} returned token {picked} of {logprobs.shape[-1]}")
        return picked, logprobs[0]

    def rows(self, logits: mx.array, history: Sequence[int], draft: mx.array) -> tuple[mx.array, mx.array]:
        """All rows by ``one``, so the draft is read and the callables see every row; the loop never asks for it."""
        ids: list[int] = draft.tolist()  # type: ignore[assignment]
        picks = [self.one(logits[i : i + 1], [*history, *ids[:i]]) for i in range(logits.shape[0])]
        return mx.array([token for token, _ in picks], dtype=mx.uint32), mx.stack([row for _, row in picks])


def make_chooser(
    sampler: Callable[..., Any] | None = None,
    processors: Sequence[Callable[..., Any]] = (),
    seed: int | None = None,
) -> KeyedChooser | LazyChooser:
    """The chooser of one request. ``sampler`` None is greedy; ``seed`` may come with the request or the sampler.

    Without a seed one is drawn from ``mx.random`` when it is needed; ``chooser.seed`` tells which. Raises OptionError
    for two different seeds, and for a seed with a sampler that is not ours.
    """
    check_seed(seed)
    for given in (sampler, *processors):
        if given is not None and not callable(given):
            raise OptionError(f"a sampler or logits processor must be callable, not {given!r}")
    if sampler is None or sampler is sample_utils.greedy_sampler:
        sampler = Sampler()
    if not isinstance(sampler, Sampler):
        if seed is not None:
            raise OptionError(f"seed {seed} cannot steer a sampler of your own; use mx.random.seed, or make_sampler")
        return LazyChooser(sampler, processors)
    if seed is not None and sampler.seed not in (None, seed):
        raise OptionError(f"the sampler has seed {sampler.seed} and the request {seed}; give one")
    seed = sampler.seed if seed is None else seed
    ours = [processor for processor in processors if isinstance(processor, Processor)]
    keyed = KeyedChooser(sampler, ours, None if sampler.temp == 0 else draw_seed() if seed is None else seed)
    return keyed if len(ours) == len(processors) else LazyChooser(keyed, processors)


def _item(ids: mx.array) -> int:
    return int(ids.item())  # type: ignore[arg-type]


__all__ = ["Chooser", "Sampler", "make_chooser", "make_logits_processors", "make_sampler"]
