"""From settings to an engine that is ready: choose a model, prepare BLAS, make the files be here, load. In that order,
because BLAS must be prepared before mlx is imported."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from mlx_spec.apps.cli.output import Screen
from mlx_spec.apps.cli.terminal import cooked
from mlx_spec.apps.config import Settings
from mlx_spec.errors import OptionError
from mlx_spec.options import SpeculativeConfig

SMALL = "smollm2"  # runs anywhere, needs no hub


@dataclass
class Opened:
    """An engine and what the front end must know of its model."""

    engine: Any
    name: str  # as asked for; what a saved conversation remembers
    config: SpeculativeConfig
    target: Any = None  # folder or hub id
    draft: Any = "auto"  # what "auto" means for this model: its known partner, or the engine's own choice
    template: dict[str, Any] = field(default_factory=dict)  # keyword arguments of the chat template


def open_engine(
    settings: Settings,
    config: SpeculativeConfig,
    screen: Screen,
    yes: bool = False,
    model: str | None = None,
    ready: Callable[[], None] = lambda: None,
) -> Opened:
    """Load the model that was named (``model``, else the setting, else a choice that one line explains).

    ``ready`` is called when the files are here and memory is about to be needed.
    """
    from mlx_spec import blas
    from mlx_spec.apps import models

    report = blas.prepare(settings["blas"])
    if report.advice:
        screen.note(report.advice)
    screen.detail(f"blas {report.name}: {report.detail}")
    name = model or settings["model"] or choose(screen, yes)
    asking = Asking(screen, yes)
    with screen.working(f"loading {name}") as working:
        from mlx_spec.api import Engine

        paths = models.ensure(name, ask=asking.within(working), progress=working.update)
        ready()
        partner = paths.draft or "auto"
        draft = "auto" if config.method is not None or config.model is not None else partner
        engine = Engine.load(
            paths.target,
            draft=None if config.method == "plain" else draft,
            speculative=config,
            fallback=settings["fallback"],
        )
    if Path(name).is_dir():
        name = str(Path(name).resolve())  # so that `chat -c` finds it from any folder
    return Opened(engine, name, config, paths.target, partner, dict(paths.template_kwargs))


def choose(screen: Screen, yes: bool) -> str:
    """A model for someone who named none; one line says which, and how to change it."""
    from mlx_spec.apps import models

    name = SMALL
    found = models.recommend()
    if found is not None and (yes or _can_ask()) and (yes or _confirm(f"No model is named. {found.line} Use it?")):
        name = found.name
    screen.line(f"using {name}; --model NAME or `mlx-spec config set model NAME` changes that")
    return name


class Asking:
    """A yes-or-no question before something large happens."""

    def __init__(self, screen: Screen, yes: bool) -> None:
        self._screen = screen
        self._yes = yes

    def within(self, working: Any) -> Any:
        """The question for a moment when ``working`` moves on the same line."""

        def ask(question: str) -> bool:
            if self._yes:
                return True
            if not _can_ask():
                raise OptionError(f"{question} Nobody can be asked here; give --yes to agree")
            working.stop()
            return _confirm(question)

        return ask


def _can_ask() -> bool:
    return sys.stdin.isatty() and sys.stderr.isatty()


def _confirm(question: str) -> bool:
    with cooked():
        return click.confirm(question, default=True, err=True)


__all__ = ["SMALL", "Opened", "choose", "open_engine"]
