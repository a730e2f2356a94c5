"""A target's per-layer caches as one transaction, paired by layer. Knows no model and no token.

Each file of this folder is one cache kind: ``HANDLES`` lists the mlx-lm class names it serves, ``Backend`` wraps one
layer's cache. Kinds are found by file name; a kind nobody serves is refused by name before the first token.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Protocol

import mlx.core as mx

from mlx_spec.errors import SessionError, UnsupportedError


class Backend(Protocol):
    """One layer's cache inside a transaction. Same meaning as ``contracts.Cache``, for one layer."""

    @property
    def length(self) -> int: ...
    def begin(self, rows: int) -> None: ...
    def commit(self, kept: Sequence[int]) -> None: ...
    def abort(self) -> None: ...
    def trim(self, length: int) -> int: ...
    def arrays(self) -> list[mx.array]: ...
    def marks(self) -> mx.array | None: ...


@lru_cache(maxsize=1)
def kinds() -> dict[str, Any]:
    """mlx-lm cache class name -> the Backend class that serves it."""
    found: dict[str, Any] = {}
    for info in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{info.name}")
        found.update(dict.fromkeys(module.HANDLES, module.Backend))
    return found


class CacheSet:
    """All layers' caches of one conversation (``contracts.Cache``).

    ``entries`` are mlx-lm cache objects, one per layer, in layer order; the target reads and writes them.
    Raises UnsupportedError naming the class and layer of a cache that cannot be rolled back.
    """

    def __init__(self, entries: Sequence[Any]) -> None:
        known = kinds()
        for index, entry in enumerate(entries):
            kind = type(entry).__name__
            if kind not in known:
                raise UnsupportedError(
                    f"layer {index} keeps a {kind}, which this version cannot roll back (it can: "
                    f"{', '.join(sorted(known))}); run this model with mlx-lm until that cache kind is added"
                )
        self.entries = list(entries)
        self._open = False  # between begin and commit or abort
        self._backends: list[Backend] = [known[type(entry).__name__](entry) for entry in entries]

    @property
    def length(self) -> int:
        return self._backends[0].length if self._backends else 0

    def begin(self, rows: int) -> None:
        self._open = True
        for backend in self._backends:
            backend.begin(rows)

    def commit(self, kept: Sequence[int]) -> None:
        self._open = False
        for backend in self._backends:
            backend.commit(kept)

    def abort(self) -> None:
        self._open = False
        for backend in self._backends:
            backend.abort()

    def trim(self, length: int) -> int:
        """Repeats until every layer agrees, since one kind may fall further back than it was asked to. Raises
        SessionError inside a transaction: a callable of a request began another on the same conversation."""
        if self._open:
            raise SessionError("this conversation is in the middle of a round; begin another request after it")
        reached = min((backend.trim(length) for backend in self._backends), default=0)
        while any(backend.length != reached for backend in self._backends):
            reached = min(backend.trim(reached) for backend in self._backends)
        return reached

    def arrays(self) -> list[mx.array]:
        return [array for backend in self._backends for array in backend.arrays()]

    def marks(self) -> mx.array | None:
        """[length, m], a few stored numbers of each row of the last layer, whose rows depend on everything before them:
        a row that somebody else rewrote is told by them. None while nothing is stored."""
        return self._backends[-1].marks() if self._backends else None
