"""The terminal's line discipline around a chat: what is typed ahead is kept for the next prompt, neither echoed into
the answer nor rewritten. Knows POSIX terminals; does nothing where standard input is none."""

from __future__ import annotations

import signal
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager

_INPUT, _LOCAL = 0, 3  # places in tcgetattr's list


@contextmanager
def quiet() -> Iterator[None]:
    """Inside: no echo, no line buffer, Enter stays a carriage return; Ctrl-C still interrupts, and does not throw
    away what was typed ahead or half a character that is on its way to the screen."""
    former = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # through the finally below
    try:
        yield from _mode(clear_input=termios.ICRNL, clear=termios.ECHO | termios.ICANON, set_=termios.NOFLSH)
    finally:
        signal.signal(signal.SIGTERM, former)


@contextmanager
def cooked() -> Iterator[None]:
    """Inside: an ordinary terminal, for a question or another program."""
    yield from _mode(set_input=termios.ICRNL, set_=termios.ECHO | termios.ICANON | termios.ISIG)


def _mode(clear_input: int = 0, clear: int = 0, set_input: int = 0, set_: int = 0) -> Iterator[None]:
    if not sys.stdin.isatty():
        yield
        return
    former = termios.tcgetattr(sys.stdin)
    wanted = termios.tcgetattr(sys.stdin)
    wanted[_INPUT] = wanted[_INPUT] & ~clear_input | set_input
    wanted[_LOCAL] = wanted[_LOCAL] & ~clear | set_
    termios.tcsetattr(sys.stdin, termios.TCSANOW, wanted)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSANOW, former)


__all__ = ["cooked", "quiet"]
