"""The terminal's line discipline around a chat: what is typed ahead is kept for the next prompt, neither echoed into
the answer nor rewritten. Knows POSIX terminals; does nothing where standard input is none."""

from __future__ import annotations

import os
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
        yield from _mode(
            clear_input=termios.ICRNL, clear=termios.ECHO | termios.ICANON, set_=termios.NOFLSH, again=True
        )
    finally:
        signal.signal(signal.SIGTERM, former)


@contextmanager
def cooked() -> Iterator[None]:
    """Inside: an ordinary terminal, for a question or another program."""
    yield from _mode(set_input=termios.ICRNL, set_=termios.ECHO | termios.ICANON | termios.ISIG)


def _mode(
    clear_input: int = 0, clear: int = 0, set_input: int = 0, set_: int = 0, again: bool = False
) -> Iterator[None]:
    """``again``: also after Ctrl-Z and ``fg``, because a shell that takes the terminal back leaves its own modes."""
    if not sys.stdin.isatty():
        yield
        return
    former = termios.tcgetattr(sys.stdin)
    wanted = termios.tcgetattr(sys.stdin)
    wanted[_INPUT] = wanted[_INPUT] & ~clear_input | set_input
    wanted[_LOCAL] = wanted[_LOCAL] & ~clear | set_

    def apply(*_: object) -> None:
        if os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp():  # in the background the terminal is not ours to change
            termios.tcsetattr(sys.stdin, termios.TCSANOW, wanted)

    termios.tcsetattr(sys.stdin, termios.TCSANOW, wanted)
    handler = signal.signal(signal.SIGCONT, apply if again else signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGCONT, handler)
        termios.tcsetattr(sys.stdin, termios.TCSANOW, former)


__all__ = ["cooked", "quiet"]
