"""The flags that commands share, and the request they add up to. Contradictions are refused here, once.

Flags are the rows of ``apps.config.KEYS``, so flag, variable, file and ``/set`` check a value by the same rule.
Imports no mlx.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from mlx_spec.apps.config import KEYS, Key, Settings, resolve, shown
from mlx_spec.errors import OptionError
from mlx_spec.options import MAX_WIDTH, Options, SpeculativeConfig

F = TypeVar("F", bound=Callable[..., Any])
OFF = ("off", "none", "plain")


def methods() -> tuple[str, ...]:
    """The drafters' names, from their files, without importing one."""
    from mlx_spec.drafters import names

    return names()


class KeyType(click.ParamType):
    """A value of the settings table."""

    def __init__(self, key: Key) -> None:
        self.key = key
        self.name = {"number": "number", "whole": "int", "text": "text"}.get(key.kind, key.kind)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return self.key.parse(value, self.key.flag)

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str | None:
        words = methods() if self.key.name == "method" else self.key.choices
        return "[" + "|".join(words) + "]" if words else None

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        if self.key.name in ("model", "draft") and incomplete.startswith(("/", ".", "~")):
            return [CompletionItem(incomplete, type="dir")]
        return [CompletionItem(word) for word in words_for(self.key) if word.startswith(incomplete)]


def words_for(key: Key) -> tuple[str, ...]:
    """What a value of this setting may be, as far as that can be listed."""
    if key.name == "method":
        return methods()
    if key.name == "draft":
        return ("auto", "off")
    if key.name == "model":
        return known_models()
    return ("on", "off") if key.kind == "switch" else key.choices


def known_models() -> tuple[str, ...]:
    from mlx_spec.apps import models

    return tuple(models.names())


def setting(name: str, *also: str) -> Callable[[F], F]:
    """A flag for one row of the settings table; None when it is not given."""
    key = KEYS[name]
    text = key.help if key.default is None else f"{key.help} Default: {shown(key.default)}."
    if key.kind == "switch":
        negative = {"--show-thinking": "--hide-thinking"}.get(key.flag, "--no-" + key.flag[2:])
        return click.option(f"{key.flag}/{negative}", name, default=None, help=text)
    return click.option(key.flag, *also, name, type=KeyType(key), default=None, help=text)


def _together(*options: Callable[[F], F]) -> Callable[[F], F]:
    def decorate(command: F) -> F:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


model_flags = _together(
    setting("model", "-m"),
    setting("draft"),
    setting("method"),
    click.option("--speculative-config", metavar="JSON", help="vLLM-style object: method, num_speculative_tokens, ..."),
    setting("fallback"),
    setting("blas"),
    click.option("-y", "--yes", is_flag=True, help="Download without asking."),
)
request_flags = _together(
    setting("system", "-s"),
    setting("max_tokens"),
    setting("temperature", "--temperature"),
    setting("top_p"),
    setting("top_k"),
    setting("min_p"),
    setting("seed"),
    setting("width"),
    setting("draft_window"),
    setting("exactness"),
    setting("think"),
    setting("show_thinking"),
)
common_flags = _together(
    setting("stats"),
    click.option("-v", "--verbose", count=True, help="Say more on stderr."),
    click.option("-q", "--quiet", is_flag=True, help="Say nothing on stderr but errors."),
    click.option("--debug", is_flag=True, help="Show where an error comes from."),
)


def verbosity(verbose: int, quiet: bool) -> int:
    if verbose and quiet:
        raise OptionError("--verbose and --quiet contradict each other; give one")
    return -1 if quiet else verbose


def settle(flags: Mapping[str, Any]) -> tuple[Settings, SpeculativeConfig]:
    """Settings from all sources, and how to draft. Raises OptionError naming both sides of a contradiction."""
    text = flags.get("speculative_config")
    config = SpeculativeConfig.parse(text) if text is not None else SpeculativeConfig()
    settings = resolve(flags)
    method, draft = settings["method"], settings["draft"]
    _method_known(method, KEYS["method"].flag)
    _method_known(config.method, "--speculative-config: method")
    _agree("--method", method, "--speculative-config: method", config.method)
    _agree("--draft", draft, "--speculative-config: model", config.model)
    rows = config.num_speculative_tokens + 1 if config.num_speculative_tokens is not None else None
    if rows is not None and rows > MAX_WIDTH:
        raise OptionError(f"--speculative-config: num_speculative_tokens must be at most {MAX_WIDTH - 1}")
    if flags.get("width") is not None and rows is not None and flags["width"] != rows:
        raise OptionError(
            f"--width {shown(flags['width'])} and --speculative-config: num_speculative_tokens {rows - 1} contradict "
            f"each other (width = num_speculative_tokens + 1 = {rows})"
        )
    _agree("--draft-window", flags.get("draft_window"), "--speculative-config: draft_window", config.draft_window)
    method = method or config.method
    draft = draft or config.model
    if method == "plain" and draft not in (None, "auto", *OFF):
        raise OptionError(f"--method plain and --draft {draft} contradict each other; plain drafts nothing")
    if draft in OFF and method not in (None, "plain"):
        raise OptionError(f"--draft {draft} and --method {method} contradict each other")
    if method in ("plain", None) and draft in OFF:
        method, draft = "plain", None
    return settings, replace(config, method=method, model=None if draft in (None, "auto") else draft)


def _method_known(method: str | None, where: str) -> None:
    if method is not None and method not in methods():
        raise OptionError(f"{where} must be one of {', '.join(methods())}, not {method!r}")


def _agree(one: str, first: Any, other: str, second: Any) -> None:
    if first is not None and second is not None and first != second:
        raise OptionError(f"{one} {first} and {other} {second} contradict each other; give one")


def request_options(values: Mapping[str, Any], config: SpeculativeConfig, max_tokens: int) -> Options:
    """What one answer is asked for. ``max_tokens`` is the command's default. Imports mlx through the sampler."""
    from mlx_spec import make_sampler

    width = values["width"]
    if width is None and config.num_speculative_tokens is not None:
        width = config.num_speculative_tokens + 1
    temperature = values["temperature"]
    filters = {"top_p": values["top_p"], "top_k": values["top_k"], "min_p": values["min_p"]}
    return Options(
        max_tokens=values["max_tokens"] if values["max_tokens"] is not None else max_tokens,
        sampler=make_sampler(temp=temperature, **filters) if temperature > 0 else None,
        seed=values["seed"],
        width=width,
        draft_window=values["draft_window"] if values["draft_window"] is not None else config.draft_window,
        exactness=values["exactness"],
        fallback=values["fallback"],
    )


def unused(settings: Settings) -> list[str]:
    """Sampling settings that were asked for and change nothing at temperature 0, as notes."""
    if settings["temperature"] > 0:
        return []
    names = [name for name in ("top_p", "top_k", "min_p", "seed") if settings.source(name) == "flag"]
    return [f"{KEYS[name].flag} has no effect at temperature 0 (--temp sets it)" for name in names]


__all__ = ["common_flags", "known_models", "methods", "model_flags", "request_flags", "request_options", "setting",
           "settle", "unused", "verbosity", "words_for"]  # fmt: skip
