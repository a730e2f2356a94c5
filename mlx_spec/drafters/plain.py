"""The drafter that proposes none: every round is one row of the target. Knows nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_spec.contracts import NO_DRAFT, Draft, Target
from mlx_spec.drafters._settings import check_settings, refuse_source, refuse_window


class PlainDrafter:
    """``contracts.Drafter`` of lane ``plain``; its width is 1."""

    name = "plain"
    layers: tuple[int, ...] = ()
    default_width = 1
    mask_id: int | None = None
    max_width: int | None = 1

    def bind(self, target: Target) -> None:
        """Any target will do."""

    def open(self, first: int, start: int = 0, draft_window: int | None = None) -> PlainSession:
        refuse_window(self.name, draft_window)
        return PlainSession(start)


class PlainSession:
    """Counts positions, so that it keeps the same promises as a drafter with state."""

    def __init__(self, start: int) -> None:
        self.length = start

    def ingest(self, tokens: Sequence[int], features: mx.array | None, start: int) -> None:
        self.length += len(tokens)

    def propose(self, anchor: int, count: int) -> Draft:
        return NO_DRAFT

    def trim(self, length: int) -> int:
        self.length = min(self.length, length)
        return self.length

    def arrays(self) -> list[mx.array]:
        return []


def load(source: Path | None, settings: Mapping[str, Any]) -> PlainDrafter:
    """Takes no source and no settings. Raises OptionError."""
    refuse_source("plain", source)
    check_settings("plain", settings, ())
    return PlainDrafter()
