"""The line of figures after an answer, and the JSON of one. Knows ``Stats``; words as everywhere."""

from __future__ import annotations

from typing import Any

from mlx_spec.apps.cli.answers import Answer


def stats_line(answer: Answer, thinking: str = "", plain_tps: float | None = None) -> str:
    """One line. ``thinking``: "on" or "off" where the model has the switch, because acceptance depends on it.
    ``plain_tps``: lane plain's speed measured in this session; without it no "x vs plain"."""
    stats = answer.stats
    parts = [f"{stats.committed} tok", f"{stats.generation_tps:.1f} tok/s"]
    if plain_tps:
        parts.append(f"{stats.generation_tps / plain_tps:.2f}x vs plain")
    parts += [
        f"acceptance length {stats.acceptance_length:.2f}",
        f"{stats.accepted}/{stats.drafted} drafts accepted",
        f"{stats.rounds} rounds",
        f"lane {stats.lane}" + (f" ({stats.reason})" if stats.reason else ""),
        f"TTFT {answer.ttft:.2f} s",
        f"peak {answer.peak_memory:.2f} GB",
    ]
    if thinking:
        parts.append(f"thinking {thinking}")
    if stats.exactness != "fast":
        parts.append(f"exactness {stats.exactness}")
    if stats.cached_tokens:
        parts.append(f"{stats.cached_tokens}/{stats.prompt_tokens} prompt tokens reused")
    if stats.blas:
        parts.append(f"blas {stats.blas}")
    return " · ".join(parts)


def final_object(answer: Answer) -> dict[str, Any]:
    """What ``--json`` prints. ``text`` is the answer; ``reasoning`` is there where the model can think."""
    stats = answer.stats
    found: dict[str, Any] = {"text": answer.text}
    if answer.can_think:
        found["reasoning"] = answer.thinking
    return found | {
        "tokens": answer.tokens,
        "finish_reason": answer.finish,
        "usage": {
            "prompt_tokens": stats.prompt_tokens,
            "completion_tokens": stats.committed,
            "total_tokens": stats.prompt_tokens + stats.committed,
        },
        "timings": stats.timings(),
        "mlx_spec": stats.mlx_spec(),
    }


__all__ = ["final_object", "stats_line"]
