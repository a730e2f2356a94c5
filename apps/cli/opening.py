"""From settings to an engine that is ready: choose a model, prepare BLAS, make the files be here, load. In that order,
because BLAS must be prepared before mlx is imported."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from mlx_spec.apps.cli.output import Screen
from mlx_spec.apps.cli.terminal import cooked
from mlx_spec.apps.config import Settings, user_path
from mlx_spec.errors import ModelNotFoundError, OptionError
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

    def encode(self, messages: Sequence[dict[str, Any]], think: str) -> list[int]:
        """Token ids of a conversation; ``think`` is the template's switch: "auto" (the pair's own), "on" or "off".

        Raises OptionError where the template refuses the conversation (some know no system prompt).
        """
        from jinja2 import TemplateError

        from mlx_spec.text import encode_chat

        try:
            return encode_chat(self.engine.tokenizer, messages, **self._switches(think))
        except TemplateError as error:
            raise OptionError(f"this model's chat template refuses the conversation: {error}") from error

    def _switches(self, think: str) -> dict[str, Any]:
        return self.template if think == "auto" else self.template | {"enable_thinking": think == "on"}

    def thinking(self, think: str) -> str:
        """The state of the template's thinking switch: "on", "off", or "" where it has none."""
        tokenizer = self.engine.tokenizer
        if not tokenizer.has_thinking and "thinking" not in str(tokenizer.chat_template):
            return ""
        # Without a word from us mlx-lm switches it on for every model that can think.
        return "on" if self._switches(think).get("enable_thinking", tokenizer.has_thinking) else "off"

    def switch_note(self, think: str) -> list[str]:
        """Says that ``think`` changes nothing, where the template has no such switch."""
        if think == "auto" or self.thinking(think):
            return []
        return [f"think {think} has no effect: this model's chat template has no thinking switch"]


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

        paths = models.ensure(name, ask=asking.within(working), progress=working.report)
        bring_drafter(config.model, asking.within(working), working.report, settings["fallback"])
        ready()
        partner = paths.draft or "auto"
        draft = partner if config.model is None and _takes_weights(config.method) else "auto"
        engine = Engine.load(
            paths.target,
            draft=None if config.method == "plain" else draft,
            speculative=config,
            fallback=settings["fallback"],
        )
    if paths.target == Path(name).expanduser():  # a folder, not a name: `chat -c` finds it from anywhere
        name = str(paths.target.resolve())
    return Opened(engine, name, config, paths.target, partner, dict(paths.template_kwargs))


def bring_drafter(
    name: str | None, ask: Callable[[str], bool], say: Callable[[str], None], fallback: bool = False
) -> None:
    """Have a drafter's checkpoint here, by the rules of a model: looked at first, asked about where it is large.

    ``fallback`` leaves a drafter that cannot be had to the engine, which goes on without and says why.
    """
    from mlx_spec import drafters, hub
    from mlx_spec.apps import pull

    if name is None or name in drafters.names() or user_path(name).is_dir():
        return
    try:
        if hub.local(name) is None:
            found = hub.look(name, check=lambda config: hub.refuse_target(config, name))
            pull.agree(name, found.size, ask)
            hub.fetch(found, pull.bar(say, f"fetching {name}"))
    except ModelNotFoundError:
        if not fallback:
            raise


def _takes_weights(method: str | None) -> bool:
    """May this method (None: any) be given a drafter's checkpoint?"""
    from mlx_spec import drafters

    return method is None or hasattr(drafters.resolve(method), "reads")


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
    try:
        with cooked():
            return click.confirm(question, default=True, err=True)
    except click.Abort:  # Ctrl-C or Ctrl-D; inside a chat that must not end the chat
        raise KeyboardInterrupt from None


__all__ = ["SMALL", "Opened", "choose", "open_engine"]
