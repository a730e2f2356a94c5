"""Logit bias and penalties: mlx-lm's processors, plus a form for all rows of a verify. Knows no sampling or drafting.

In the row form, row i sees the tokens ``history + draft[:i]``. It stays on the device, the draft may be unevaluated,
and each row comes out bit for bit as the one-row form of mlx-lm (``mlx_lm/sample_utils.py``) leaves it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from numbers import Integral, Real
from typing import Any

import mlx.core as mx
from mlx_lm import sample_utils

from mlx_spec.errors import OptionError


def checked_number(name: str, value: Any, low: float = float("-inf"), high: float = float("inf")) -> float:
    """``value`` as a finite float in [low, high]. Raises OptionError naming it."""
    ok = isinstance(value, Real) and not isinstance(value, bool)
    if not ok or not abs(float(value)) < float("inf") or not low <= float(value) <= high:
        limits = f" of at least {low:g}" if low > float("-inf") else ""
        limits = f" from {low:g} to {high:g}" if high < float("inf") else limits
        raise OptionError(f"{name} must be a finite number{limits}, not {value!r}")
    return float(value)


def checked_count(name: str, value: Any, low: int) -> int:
    """``value`` as an int of at least ``low``. Raises OptionError naming it."""
    if not isinstance(value, Integral) or isinstance(value, bool) or value < low:
        raise OptionError(f"{name} must be a whole number of at least {low}, not {value!r}")
    return int(value)


class Processor(ABC):
    """A processor whose rows can be done at once. Call it as mlx-lm's, or through ``rows``."""

    @abstractmethod
    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        """``tokens`` [L], everything before the row; ``logits`` [1, V]. May change ``logits``, as mlx-lm's do."""

    @abstractmethod
    def rows(self, logits: mx.array, history: Sequence[int], draft: mx.array) -> mx.array:
        """``logits`` [n, V], ``draft`` [n-1] integer ids: new logits [n, V], lazy."""


@dataclass(frozen=True)
class LogitBias(Processor):
    """Adds ``bias[id]`` to each named logit."""

    bias: Mapping[int, float]

    @cached_property
    def _arrays(self) -> tuple[mx.array, mx.array]:
        return mx.array(list(self.bias), dtype=mx.int32), mx.array(list(self.bias.values()), dtype=mx.float32)

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        if max(self.bias) >= logits.shape[-1]:
            raise OptionError(f"logit_bias names token {max(self.bias)}; the model has {logits.shape[-1]} logits")
        ids, values = self._arrays
        return logits.at[:, ids].add(values)

    def rows(self, logits: mx.array, history: Sequence[int], draft: mx.array) -> mx.array:
        return self(draft, logits)


@dataclass(frozen=True)
class Penalty(Processor):
    """A penalty on what the last ``window`` tokens hold (0: all tokens, as in mlx-lm)."""

    penalty: float
    window: int
    stock: Callable[[mx.array, mx.array], mx.array] = field(repr=False, compare=False)

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        return self.stock(tokens, logits)

    def rows(self, logits: mx.array, history: Sequence[int], draft: mx.array) -> mx.array:
        tail = mx.array(list(history[-self.window :]), dtype=mx.int32)
        return self._rows(logits, mx.concatenate([tail, draft.astype(mx.int32)]), len(tail))

    def _rows(self, logits: mx.array, seen: mx.array, known: int) -> mx.array:
        """Row i sees the last ``window`` of ``seen[: known + i]``."""
        count = logits.shape[0]
        if known == 0:  # the first row has seen nothing
            head = logits[:1]
            return head if count == 1 else mx.concatenate([head, self._rows(logits[1:], seen, 1)])
        width = min(self.window or len(seen), len(seen))
        # The window of row i ends before ``known + i``; what lies before the start is a repeat of the first token.
        index = mx.arange(count)[:, None] + (mx.arange(width)[None] + (known - width))
        if not self.window or width > known:
            return self._apply(logits, seen[mx.maximum(index, 0)], index >= 0)
        return self._apply(logits, seen[index], None)

    @abstractmethod
    def _apply(self, logits: mx.array, ids: mx.array, real: mx.array | None) -> mx.array:
        """``ids`` [n, w]: row i's tokens; where ``real`` is False, a repeat that must not count twice."""


class RepetitionPenalty(Penalty):
    """Divides positive logits of seen tokens, multiplies negative ones (arXiv 1909.05858)."""

    def _apply(self, logits: mx.array, ids: mx.array, real: mx.array | None) -> mx.array:
        old = mx.take_along_axis(logits, ids, axis=-1)
        new = mx.where(old < 0, old * self.penalty, old / self.penalty)
        return mx.put_along_axis(logits, ids, new, axis=-1)


class PresencePenalty(Penalty):
    """Subtracts the penalty once from each seen token."""

    def _apply(self, logits: mx.array, ids: mx.array, real: mx.array | None) -> mx.array:
        old = mx.take_along_axis(logits, ids, axis=-1)
        return mx.put_along_axis(logits, ids, old - self.penalty, axis=-1)


class FrequencyPenalty(Penalty):
    """Subtracts the penalty from a token as often as it was seen."""

    def _apply(self, logits: mx.array, ids: mx.array, real: mx.array | None) -> mx.array:
        amount = mx.array(self.penalty, dtype=logits.dtype)
        if real is not None:
            amount = mx.where(real, amount, mx.zeros_like(amount))
        row = mx.arange(ids.shape[0])[:, None]
        return logits.at[row, ids].subtract(amount)


def make_logits_processors(
    logit_bias: Mapping[int, float] | None = None,
    repetition_penalty: float | None = None,
    repetition_context_size: int | None = 20,
    presence_penalty: float | None = None,
    presence_context_size: int | None = 20,
    frequency_penalty: float | None = None,
    frequency_context_size: int | None = 20,
) -> list[Processor]:
    """mlx-lm's processors by mlx-lm's arguments, in its order; None and 0 leave one out.

    A context size is how many of the last tokens count, 0 or None all of them. Raises OptionError for what cannot be
    honoured: a token id below 0, a bias or penalty that is no number, a repetition penalty below 0.
    """
    made: list[Processor] = []
    if logit_bias:
        made.append(LogitBias({_token(token): _bias(token, value) for token, value in logit_bias.items()}))
    for name, value, size, low, kind, stock in (
        ("repetition", repetition_penalty, repetition_context_size, 0.0, RepetitionPenalty, "repetition_penalty"),
        ("presence", presence_penalty, presence_context_size, float("-inf"), PresencePenalty, "presence_penalty"),
        ("frequency", frequency_penalty, frequency_context_size, float("-inf"), FrequencyPenalty, "frequency_penalty"),
    ):
        if value is None or checked_number(f"{name}_penalty", value, low) == 0:
            continue
        window = 0 if size is None else checked_count(f"{name}_context_size", size, 0)
        made.append(kind(float(value), window, getattr(sample_utils, f"make_{stock}")(float(value), window)))
    return made


def _token(token: Any) -> int:
    return checked_count("a token id of logit_bias", token, 0)


def _bias(token: Any, value: Any) -> float:
    """A finite bias, or -inf, which forbids the token."""
    if isinstance(value, float) and value == float("-inf"):
        return value
    return checked_number(f"logit_bias of token {token}", value)
