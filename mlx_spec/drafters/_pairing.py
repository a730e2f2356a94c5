"""Which drafter a request for one means: a method, a folder, a hub id, or the one that travels with the target."""

from __future__ import annotations

from pathlib import Path

from mlx_spec import drafters, hub
from mlx_spec.contracts import Drafter
from mlx_spec.errors import OptionError
from mlx_spec.options import SpeculativeConfig

TRAVELS_IN = "drafter"  # subfolder of a target's folder


def choose(draft: object, config: SpeculativeConfig, target: Path) -> tuple[Drafter | None, str]:
    """(drafter not yet bound, or None; why).

    ``draft``: "auto", None, a method without weights, a folder, a hub id, or a drafter object; see ``Engine.load``.
    ``config`` names a method, a model and settings; a contradiction with ``draft`` raises OptionError. Raises what
    ``hub.resolve`` and the method's ``load`` raise.
    """
    if draft is not None and not isinstance(draft, (str, Path)):
        return draft, "the drafter was given as an object"  # type: ignore[return-value]
    name = _named(draft, config)
    if name is None or config.method == "plain" or name == "plain":
        return None, "drafting was turned off"
    settings = config.drafter_settings()
    if name == "auto":
        return _automatic(config, target)
    if name in drafters.names() and not Path(name).exists():
        if config.method not in (None, name):
            raise OptionError(f"method {config.method} and drafter {name} contradict each other; give one")
        return drafters.load(name, None, settings), f"method {name} was asked for"
    folder = hub.resolve(name, check=lambda found: drafters.refuse_unreadable(found, name))
    method = drafters.detect(folder)
    if config.method not in (None, method):
        raise OptionError(f"{name} is read by method {method}, not {config.method}; leave --method out")
    return drafters.load(method, folder, settings), f"drafter {name}"


def _named(draft: str | Path | None, config: SpeculativeConfig) -> str | None:
    """The one name that ``draft`` and ``config.model`` agree on."""
    name = None if draft is None else str(draft)
    if config.model is None:
        return name
    if name not in (None, "auto", config.model):
        raise OptionError(f"drafter {name} and the configured model {config.model} contradict each other; give one")
    return config.model


def _automatic(config: SpeculativeConfig, target: Path) -> tuple[Drafter | None, str]:
    settings, folder = config.drafter_settings(), target / TRAVELS_IN
    if config.method is None and (folder / "config.json").is_file():
        return drafters.load(drafters.detect(folder), folder, settings), "it travels with the target"
    if config.method is None:
        return drafters.load("ngram", None, settings), "no drafter travels with this target"
    if hasattr(drafters.resolve(config.method), "reads"):
        raise OptionError(f"method {config.method} needs a drafter's weights; name them with --draft")
    return drafters.load(config.method, None, settings), f"method {config.method} was asked for"
