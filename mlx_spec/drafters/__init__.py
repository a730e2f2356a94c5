"""Drafters, one module a method, resolved by FILE NAME: ``drafters/<method>.py``. Knows no method by name.

A method module defines

    def load(source: Path | None, settings: Mapping[str, Any]) -> contracts.Drafter

``source`` is a local folder (None for methods without weights); ``settings`` are the keys of
``SpeculativeConfig.drafter_settings()`` that the user set, and a key the method does not take is an OptionError.
A method that reads checkpoints also defines

    def reads(config: Mapping[str, Any]) -> bool      # is this config.json one of mine?
    def check(config: Mapping[str, Any]) -> None      # raises UnsupportedError for a key that is not implemented

Modules whose name starts with an underscore are helpers, never methods. Listing the names imports no
method and no MLX.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from mlx_spec.errors import OptionError, UnsupportedError
from mlx_spec.folders import drafter_format, read_config, refuse_target

if TYPE_CHECKING:
    from mlx_spec.contracts import Drafter


def names() -> tuple[str, ...]:
    """Every method, in alphabetical order, from the files of this package."""
    return tuple(sorted(item.name for item in pkgutil.iter_modules(__path__) if not item.name.startswith("_")))


def resolve(method: str) -> ModuleType:
    """The module of ``method``. Raises OptionError listing the known names."""
    if method not in names():
        raise OptionError(f"unknown method {method!r}; known are {', '.join(names())}")
    return importlib.import_module(f"{__name__}.{method}")


def load(method: str, source: Path | None = None, settings: Mapping[str, Any] | None = None) -> Drafter:
    """A drafter, not yet bound. Raises OptionError and, for checkpoints, what reading one can raise (errors.py)."""
    drafter: Drafter = resolve(method).load(source, settings or {})
    return drafter


def detect(folder: Path) -> str:
    """The method that reads the checkpoint in ``folder``.

    Raises ModelNotFoundError, CheckpointError (no readable config.json), PairError (a language model) and
    UnsupportedError (a drafter that no method here reads); the message says what the checkpoint is.
    """
    return _reader(read_config(folder), folder)


def refuse_unreadable(config: Mapping[str, Any], origin: object) -> None:
    """What ``detect`` and ``load`` would say to this config.json, said before any weights are fetched."""
    resolve(_reader(config, origin)).check(config)


def _reader(config: Mapping[str, Any], origin: object) -> str:
    refuse_target(config, origin)
    for name in names():
        reads = getattr(resolve(name), "reads", None)
        if reads is not None and reads(config):
            return name
    known = ", ".join(names())
    raise UnsupportedError(f"{origin} is a {drafter_format(config)} drafter, which no method here reads ({known})")


__all__ = ["detect", "load", "names", "refuse_unreadable", "resolve"]
