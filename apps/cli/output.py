"""Where text goes: the answer to standard output, everything else to standard error. Knows no model.

On a terminal stderr carries a banner, progress and dim figures; in a pipe only notes, figures and errors.
"""

from __future__ import annotations

import os
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

import click

# C0 and C1 controls but tab and line end: a model's output must not drive the terminal.
_CONTROLS = dict.fromkeys((*range(32), *range(127, 160)), "\N{REPLACEMENT CHARACTER}") | {9: "\t", 10: "\n", 13: ""}


def clean(text: str) -> str:
    """``text`` as a terminal may see it."""
    return text.translate(_CONTROLS)


class Screen:
    """The two streams and what they can do. ``verbosity``: -1 errors only, 0 normal, 1 more."""

    def __init__(self, verbosity: int = 0) -> None:
        self.verbosity = verbosity
        self.tty = sys.stdout.isatty()
        self.err_tty = sys.stderr.isatty()
        fancy = not os.environ.get("NO_COLOR") and os.environ.get("TERM", "dumb") != "dumb"
        self.color = self.err_tty and fancy
        self.out_color = self.tty and fancy

    def write(self, text: str) -> None:
        """A piece of the answer, at once. Raises BrokenPipeError as ``Closed`` for the boundary."""
        put(sys.stdout, clean(text) if self.tty else text)

    def paint(self, text: str) -> None:
        """A piece of the answer in green."""
        self.write(text) if not self.out_color else put(sys.stdout, f"\x1b[32m{clean(text)}\x1b[39m")

    def dim(self, text: str) -> None:
        """A piece of running side text (thinking) on stderr, without a line end of its own."""
        text = clean(text) if self.err_tty else text
        put(sys.stderr, f"\x1b[2m{text}\x1b[0m" if self.color and text else text)

    def line(self, text: str, faint: bool = False) -> None:
        """One line on stderr; nothing when quiet."""
        if self.verbosity >= 0:
            sys.stdout.flush()
            self.dim(text + "\n") if faint else put(sys.stderr, text + "\n")

    def say(self, text: str) -> None:
        """A line that was asked for, quiet or not; on stderr."""
        sys.stdout.flush()
        put(sys.stderr, (clean(text) if self.err_tty else text) + "\n")

    def fold(self, text: str, indent: int = 0) -> str:
        """``text`` broken between words where this terminal ends, with ``indent`` before each further line; whole where
        nobody is looking."""
        if not self.err_tty:
            return text
        width = os.get_terminal_size(sys.stderr.fileno()).columns or 80  # 0: a terminal that does not know
        indent = indent if indent < width // 2 else 4
        return textwrap.fill(text, max(width - 1, 20), subsequent_indent=" " * indent, break_on_hyphens=False)

    def note(self, text: str) -> None:
        """Something the user should know that is not an error."""
        self.line(f"note: {text}")

    def banner(self, text: str) -> None:
        """Only where someone is looking."""
        if self.err_tty:
            self.line(text, faint=True)

    def detail(self, text: str) -> None:
        """With -v."""
        if self.verbosity > 0:
            self.line(text, faint=True)

    @contextmanager
    def working(self, text: str) -> Iterator[Working]:
        """A line that moves while something takes time; on a terminal only, gone afterwards."""
        working = Working(text, self.color and self.verbosity >= 0, self.line)
        try:
            yield working
        finally:
            working.stop()


class Working:
    """The moving line. It appears after ``DELAY``, so that quick work does not flicker."""

    DELAY = 0.4  # seconds

    EVERY = 10.0  # seconds between two lines where nothing can move

    def __init__(self, text: str, visible: bool, line: Callable[[str], None] = lambda text: None) -> None:
        self._text = text
        self._line = line
        self._said = float("-inf")
        self._step = ""
        self._status: Any = None
        self._lock = threading.Lock()
        self._timer = threading.Timer(self.DELAY, self._appear)
        self._timer.daemon = True
        self._visible = visible
        self._over = not visible
        if visible:
            self._timer.start()

    def _appear(self) -> None:
        from rich.console import Console
        from rich.text import Text

        with self._lock:
            if not self._over:
                self._status = Console(stderr=True).status(Text(self._text))  # a name may look like rich's markup
                self._status.start()

    def update(self, text: str) -> None:
        with self._lock:
            self._text = text
            if self._status is not None:
                from rich.text import Text

                self._status.update(Text(text))

    def report(self, text: str) -> None:
        """Like ``update``, for what may take minutes: without a terminal it is a line for each new step (the words
        before a colon), and its figures now and then."""
        self.update(text)
        step, now = text.partition(":")[0], time.monotonic()
        if not self._visible and (step != self._step or now - self._said >= self.EVERY):
            self._step, self._said = step, now
            self._line(text)

    def stop(self) -> None:
        self._timer.cancel()
        with self._lock:
            self._over = True
            if self._status is not None:
                self._status.stop()
                self._status = None


class Closed(click.exceptions.Exit):
    """The reader of our output has gone. An Exit, because click turns a BrokenPipeError into exit code 1."""

    def __init__(self) -> None:
        super().__init__(141)


def put(stream: TextIO, text: str) -> None:
    try:
        stream.write(text)
        stream.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        raise Closed from None
    except OSError as error:  # a full disk, most often
        raise OSError(error.errno, error.strerror, f"writing to {stream.name}") from error


__all__ = ["Closed", "Screen", "Working", "clean", "put"]
