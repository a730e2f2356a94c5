"""Feature taps: chosen layer objects of one model instance tell what goes in and comes out. Knows no family.

A tapped layer object gets a cached subclass of its own class; no class or module of mlx-lm is modified, other layers
and instances are untouched, several taps share one layer through its list of sinks, and the last to close restores it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import mlx.core as mx

Sink = Callable[[Any, Any], None]  # (first argument, output) of a layer call


@cache
def _tapped(kind: Any) -> Any:
    class Tapped(kind):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            out = super().__call__(*args, **kwargs)
            first = args[0] if args else next(iter(kwargs.values()), None)
            for sink in self._tap_sinks:
                sink(first, out)
            return out

        def __reduce_ex__(self, protocol: Any) -> Any:
            # A copy or a pickle is a layer of the untapped kind: sinks belong to this object's drafters.
            _, _, state, *items = super().__reduce_ex__(protocol)
            return _untapped, (kind,), {k: v for k, v in state.items() if k != "_tap_sinks"}, *items

    Tapped.__name__, Tapped.__qualname__, Tapped.__module__ = kind.__name__, kind.__qualname__, kind.__module__
    return Tapped


def _untapped(kind: Any) -> Any:
    return kind.__new__(kind)


def attach(layer: Any, sink: Sink) -> None:
    """Let ``layer`` (one object) report its calls to ``sink``."""
    if "_tap_sinks" not in layer.__dict__:
        # Not through Module.__setattr__: a list there would become a child of the module.
        object.__setattr__(layer, "_tap_sinks", [])
        kind: Any = type(layer)
        layer.__class__ = _tapped(kind)
    layer.__dict__["_tap_sinks"].append(sink)


def detach(layer: Any, sink: Sink) -> None:
    """Undo one ``attach``; the last one gives the layer its own class back."""
    sinks = layer.__dict__["_tap_sinks"]
    sinks.remove(sink)
    if not sinks:
        layer.__class__ = type(layer).__mro__[1]
        object.__delattr__(layer, "_tap_sinks")


class LayerTaps:
    """Outputs of ``layers`` (0-based, in this order, repeats allowed) of one model, while recording.

    ``join`` gives [n, k*D] of what one forward recorded. Nothing is held between forwards.
    """

    def __init__(self, modules: Sequence[Any], layers: Sequence[int]) -> None:
        self.layers = tuple(layers)
        self.closed = False
        self._modules = modules
        self._recorded: dict[int, mx.array] | None = None
        self._sinks = {index: self._sink(index) for index in sorted(set(self.layers))}
        for index, sink in self._sinks.items():
            attach(modules[index], sink)

    def _sink(self, index: int) -> Sink:
        def record(_: Any, out: Any) -> None:
            if self._recorded is not None:
                self._recorded[index] = out[0] if isinstance(out, tuple) else out

        return record

    @contextmanager
    def recording(self) -> Iterator[dict[int, mx.array]]:
        """Yields the dict that fills with layer index -> [1, n, D]; a forward of another drafter is not seen."""
        self._recorded = {}
        try:
            yield self._recorded
        finally:
            self._recorded = None

    def join(self, recorded: dict[int, mx.array]) -> mx.array:
        """[n, k*D], in the order asked for."""
        rows = [recorded[index][0] for index in self.layers]
        return rows[0] if len(rows) == 1 else mx.concatenate(rows, axis=-1)

    def close(self) -> None:
        """Restore the layers. Closing twice does nothing."""
        for index, sink in self._sinks.items():
            detach(self._modules[index], sink)
        self._sinks, self.closed = {}, True
