"""Streaming markdown: finished blocks are printed once, only the open block is drawn again.

Rendering a whole answer at every token costs 150 ms at 8 KB, so the cost here depends on the open block alone, and
redrawing never takes more than a tenth of the time. Knows nothing of models.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment, Segments

from mlx_spec.apps.cli.output import clean

SHORTEST = 0.06  # seconds between two drawings of the open block
SHARE = 10  # a drawing that took t seconds is followed by SHARE * t without one


def ends(text: str) -> list[int]:
    """Where those top-level blocks of ``text`` end that later text cannot change, in characters from its start.

    Only complete lines count: a line that has just begun may still join the list or table above it.
    """
    end = text.rfind("\n") + 1
    starts = {token.map[0] for token in Markdown(text[:end]).parsed if token.level == 0 and token.map}
    lines = text[:end].split("\n")  # as the parser counts them: splitlines knows other line ends
    return [sum(len(line) + 1 for line in lines[:start]) for start in sorted(starts)[1:]]


class MarkdownWriter:
    """Takes an answer piece by piece and shows it as markdown on a terminal."""

    def __init__(self, console: Console | None = None, clock: Callable[[], float] = time.perf_counter) -> None:
        self.console = console or Console()
        self._clock = clock
        self._open = ""
        self._printed = 0  # blocks
        self._next = float("-inf")
        self._live: Live | None = None

    def feed(self, text: str, drafted: bool = False) -> None:
        self._open += clean(text)
        if self._clock() >= self._next:
            self._draw()

    def close(self) -> None:
        """Print what is open and give the terminal back."""
        self._flush([*ends(self._open), len(self._open)])
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _draw(self) -> None:
        began = self._clock()
        self._flush(ends(self._open))
        if self._open.strip():
            if self._live is None:
                self._live = Live(console=self.console, auto_refresh=False, transient=True,
                                  redirect_stdout=False, redirect_stderr=False)  # fmt: skip
                self._live.start()
            self._live.update(self._tail(self._open), refresh=True)
        ended = self._clock()
        self._next = ended + max(SHORTEST, SHARE * (ended - began))

    def _flush(self, cuts: list[int]) -> None:
        """Print the blocks that end at ``cuts`` for good, each by itself: how it looks must not depend on when."""
        text, self._open = self._open, self._open[cuts[-1] :] if cuts else self._open
        for start, end in pairwise([0, *cuts]):
            lines = self._lines(text[start:end])
            if not lines:
                continue
            if self._live is not None:
                self._live.update("")
            if self._printed:
                self.console.print()
            self._printed += 1
            self.console.print(Segments([*_joined(lines), Segment.line()]))

    def _tail(self, text: str) -> Any:
        """The open block, cut to the lines that fit: a drawing taller than the screen could not be taken back."""
        height = max(self.console.size.height - 2, 1)
        lines = self._lines(text)
        if self._printed and lines:
            lines.insert(0, [])
        return Segments(_joined(lines[-height:]))

    def _lines(self, text: str) -> list[list[Segment]]:
        """Rendered, without the blank lines that rich puts around some blocks (one between two is ours to print) and
        without the blanks at line ends (a terminal made narrower would wrap them)."""
        markdown = Markdown(text, code_theme="ansi_dark", hyperlinks=False)
        lines = [_stripped(line) for line in self.console.render_lines(markdown, pad=False)]
        full = [at for at, line in enumerate(lines) if line]
        return lines[full[0] : full[-1] + 1] if full else []


def _stripped(line: list[Segment]) -> list[Segment]:
    while line and not line[-1].text.strip():
        line = line[:-1]
    return [*line[:-1], Segment(line[-1].text.rstrip(), line[-1].style)] if line else []


def _joined(lines: list[list[Segment]]) -> list[Segment]:
    return [segment for line in lines for segment in (*line, Segment.line())][:-1]


__all__ = ["MarkdownWriter", "ends"]
