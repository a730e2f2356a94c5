"""Counts and times of one request, and their two JSON forms. Knows no model and no clock.

``timings`` holds llama.cpp's field names (server README of ggml-org/llama.cpp), ``mlx_spec`` ours; the keys are
the same in the CLI, the server and the UI. Times are seconds inside, milliseconds in ``timings``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Stats:
    """Totals of one request. ``accepted`` never includes the target's own token of a round."""

    lane: str = "plain"
    reason: str = ""
    exactness: str = "fast"
    blas: str = ""
    seed: int | None = None  # of the keyed noise; None when greedy or when a user's sampler decides
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of those, reused from the session
    prompt_s: float = 0.0
    generated_s: float = 0.0
    drafted: int = 0
    accepted: int = 0
    committed: int = 0
    host_syncs: int = 0  # device reads in rounds; one each with built-in samplers
    accepted_per_round: list[int] = field(default_factory=list)
    widths: list[int] = field(default_factory=list)  # rows verified, round by round; replays the request
    notes: list[str] = field(default_factory=list)  # every fallback or ignored option, one sentence each

    @property
    def rounds(self) -> int:
        return len(self.widths)

    @property
    def acceptance_length(self) -> float:
        """Mean tokens committed per verify (tau of arXiv 2602.06036); 0.0 before the first round."""
        return self.committed / self.rounds if self.rounds else 0.0

    @property
    def prompt_tps(self) -> float:
        return (self.prompt_tokens - self.cached_tokens) / self.prompt_s if self.prompt_s > 0 else 0.0

    @property
    def generation_tps(self) -> float:
        return self.committed / self.generated_s if self.generated_s > 0 else 0.0

    def add_round(self, width: int, drafted: int, accepted: int, committed: int) -> None:
        self.widths.append(width)
        self.accepted_per_round.append(accepted)
        self.drafted += drafted
        self.accepted += accepted
        self.committed += committed

    def timings(self) -> dict[str, Any]:
        return {
            "prompt_n": self.prompt_tokens - self.cached_tokens,
            "prompt_ms": self.prompt_s * 1e3,
            "prompt_per_second": self.prompt_tps,
            "predicted_n": self.committed,
            "predicted_ms": self.generated_s * 1e3,
            "predicted_per_second": self.generation_tps,
            "cache_n": self.cached_tokens,
            "draft_n": self.drafted,
            "draft_n_accepted": self.accepted,
        }

    def mlx_spec(self) -> dict[str, Any]:
        return {
            "lane": self.lane,
            "reason": self.reason,
            "rounds": self.rounds,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "acceptance_length": self.acceptance_length,
            "accepted_per_round": list(self.accepted_per_round),
            "widths": list(self.widths),
            "exactness": self.exactness,
            "blas": self.blas,
            "seed": self.seed,
            "notes": list(self.notes),
        }
