"""Ctrl-C while an answer is made: once stops the answer, twice within two seconds leaves. Main thread only."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

AGAIN = 2.0  # seconds


class Interrupts:
    """One for a whole chat, so that presses during an answer and at the prompt count together."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last = float("-inf")
        self.stopped = False

    def press(self) -> None:
        """Account for one Ctrl-C. Raises KeyboardInterrupt at the second within ``AGAIN`` seconds."""
        now = self._clock()
        if now - self._last < AGAIN:
            raise KeyboardInterrupt
        self._last = now
        self.stopped = True

    def forget(self) -> None:
        """The user went on: nothing is stopped, and the next press is a first one."""
        self._last = float("-inf")
        self.stopped = False

    def cancelled(self) -> bool:
        """What the engine polls."""
        return self.stopped

    @staticmethod
    @contextmanager
    def raising() -> Iterator[None]:
        """Ctrl-C raises KeyboardInterrupt inside this block: for work that cannot be polled, such as loading."""
        former = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, former)

    @staticmethod
    @contextmanager
    def ignored() -> Iterator[None]:
        """Ctrl-C means nothing to us inside this block: another program has the terminal. A handler that does nothing,
        because a child would inherit an ignored signal."""
        former = signal.signal(signal.SIGINT, lambda *_: None)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, former)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Ctrl-C sets ``stopped`` inside this block; the former handler is restored after it. A press just before an
        answer begins still stops it: only ``forget`` unsets."""
        former = signal.signal(signal.SIGINT, lambda *_: self.press())
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, former)
