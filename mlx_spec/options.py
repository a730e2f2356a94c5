"""What a request may ask for, checked once at construction. Knows option names, not models.

Every contradiction raises OptionError here, so the rooms below may trust what they are given.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from numbers import Integral
from typing import Any

from mlx_spec.errors import OptionError

EXACTNESS = ("fast", "exact", "stock")
MAX_WIDTH = 128  # rows of one verify; vLLM's MAX_SPEC_LEN


@dataclass(frozen=True)
class Options:
    """Settings of one request.

    ``width`` is the rows of a verify (anchor included): an int, a sequence that is cycled round by round, or
    None for the drafter's default. ``max_tokens`` -1 means until the context is full. ``seed`` None draws one
    from ``mx.random`` (so ``mx.random.seed`` makes it repeatable) and records it in the stats.
    """

    max_tokens: int = 256
    sampler: Callable[..., Any] | None = None  # None: greedy
    processors: tuple[Callable[..., Any], ...] = ()
    seed: int | None = None
    stop: tuple[str, ...] = ()
    width: int | tuple[int, ...] | None = None
    draft_window: int | None = None
    exactness: str = "fast"
    prefill_step: int = 2048
    fallback: bool = False  # True: a drafter that fails mid-request parks the request on lane plain, and says so

    def __post_init__(self) -> None:
        check = self._check_int
        if not _is_whole(self.max_tokens) or self.max_tokens == 0 or self.max_tokens < -1:
            raise OptionError(f"max_tokens must be positive, or -1 for no limit, not {self.max_tokens!r}")
        check("prefill_step", self.prefill_step, 1)
        if self.draft_window is not None:
            check("draft_window", self.draft_window, 2, MAX_WIDTH)
        if self.width == ():
            raise OptionError("width is an empty sequence; leave it out for the drafter's default")
        for width in self.widths:
            check("width", width, 1, MAX_WIDTH)
        if self.exactness not in EXACTNESS:
            raise OptionError(f"exactness must be one of {', '.join(EXACTNESS)}, not {self.exactness!r}")
        if isinstance(self.stop, str) or not isinstance(self.stop, Sequence):
            raise OptionError(f"stop must be a tuple of strings, not {self.stop!r}")
        for text in self.stop:
            if not isinstance(text, str):
                raise OptionError(f"a stop string must be text, not {text!r}")
        if any(not text for text in self.stop):
            raise OptionError("a stop string is empty; leave it out or give at least one character")

    @property
    def widths(self) -> tuple[int, ...]:
        """The widths asked for, in cycle order; empty when the drafter's default decides."""
        if self.width is None:
            return ()
        return self.width if isinstance(self.width, tuple) else (self.width,)

    @staticmethod
    def _check_int(name: str, value: Any, low: int, high: int | None = None) -> None:
        ok = _is_whole(value) and value >= low
        if not ok or (high is not None and value > high):
            limit = f"from {low} to {high}" if high is not None else f"of at least {low}"
            raise OptionError(f"{name} must be a whole number {limit}, not {value!r}")


def _is_whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


@dataclass(frozen=True)
class SpeculativeConfig:
    """How to draft: ``method`` plus what it needs. Key names are vLLM's ``speculative_config`` where it has them.

    ``num_speculative_tokens`` is ``width - 1``.
    """

    method: str | None = None
    model: str | None = None
    num_speculative_tokens: int | None = None
    prompt_lookup_max: int | None = None
    prompt_lookup_min: int | None = None
    draft_window: int | None = None
    draft_swa_causal: str | None = None  # "auto" | "on" | "off"

    def __post_init__(self) -> None:
        for name in ("num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min", "draft_window"):
            value = getattr(self, name)
            if value is not None:
                Options._check_int(name, value, 1, MAX_WIDTH)
        if (
            self.prompt_lookup_min is not None
            and self.prompt_lookup_max is not None
            and self.prompt_lookup_min > self.prompt_lookup_max
        ):
            raise OptionError(
                f"prompt_lookup_min {self.prompt_lookup_min} is above prompt_lookup_max {self.prompt_lookup_max}"
            )
        if self.draft_swa_causal not in (None, "auto", "on", "off"):
            raise OptionError(f"draft_swa_causal must be auto, on or off, not {self.draft_swa_causal!r}")
        for name in ("method", "model"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise OptionError(f"{name} must be a string, not {value!r}")

    @classmethod
    def parse(cls, text: str) -> SpeculativeConfig:
        """From a JSON object. Raises OptionError naming an unknown key and listing the known ones."""
        try:
            raw = json.loads(text)
        except json.JSONDecodeError as error:
            raise OptionError(f"--speculative-config is not JSON: {error}") from error
        if not isinstance(raw, dict):
            raise OptionError(f"--speculative-config must be a JSON object, not {type(raw).__name__}")
        known = [item.name for item in fields(cls)]
        for key in raw:
            if key not in known:
                raise OptionError(f"--speculative-config: unknown option {key!r}; known are {', '.join(known)}")
        return cls(**raw)

    def drafter_settings(self) -> dict[str, Any]:
        """The keys that a drafter's constructor takes, set ones only."""
        names = ("prompt_lookup_max", "prompt_lookup_min", "draft_window", "draft_swa_causal")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


def with_stop(options: Options, stop: str | Sequence[str] | None) -> Options:
    """``options`` with the stop strings of an API call: None, one string or a list."""
    if stop is None:
        return options
    if isinstance(stop, str):
        return replace(options, stop=(stop,))
    return replace(options, stop=tuple(stop) if isinstance(stop, Sequence) else stop)


__all__ = ["EXACTNESS", "MAX_WIDTH", "Options", "SpeculativeConfig", "with_stop"]
