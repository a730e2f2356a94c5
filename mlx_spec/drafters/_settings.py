"""Checks of what a method is given, shared by the methods. Knows no method."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlx_spec.errors import OptionError


def check_settings(method: str, settings: Mapping[str, Any], known: tuple[str, ...]) -> None:
    """Raises OptionError naming a key that ``method`` does not take, and those it takes."""
    for key in settings:
        if key not in known:
            takes = f"it takes {', '.join(known)}" if known else "it takes no settings"
            raise OptionError(f"method {method} has no option {key!r}; {takes}")


def refuse_source(method: str, source: Path | None) -> None:
    """Raises OptionError where a method without weights is given a checkpoint."""
    if source is not None:
        raise OptionError(f"method {method} needs no drafter model, but {source} was given; leave it out")


def refuse_window(method: str, draft_window: int | None) -> None:
    """Raises OptionError where a method that denoises no block is given a window."""
    if draft_window is not None:
        raise OptionError(f"method {method} denoises no block, so draft_window {draft_window} has no meaning")
