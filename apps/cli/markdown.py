"""Streaming markdown: finished blocks are printed once, only the open block is drawn again.

Rendering a whole answer at every token costs 150 ms at 8 KB, so the cost here depends on the open block alone, and
redrawing never takes more than a tenth of the time. Knows nothing of models.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment, Segments

from mlx_spec.apps.cli.output import clean

SHORTEST = 0.06  # seconds between two drawings of the open block
SHARE = 10  # a drawing that took t seconds is followed by SHARE * t without one


def finished(text: str) -> int:
    """How many characters at the start of ``text`` are whole top-level blocks that later text cannot change.

    Only complete lines count: a line that has just begun may still join the list or table above it.
    """
    end = text.rfind("\n") + 1
    starts = [token.map[0] for token in Markdown(text[:end]).parsed if token.level == 0 and token.map]
    if len(set(starts)) < 2:
        return 0
    lines = text[:end].splitlines(keepends=True)
    return sum(len(line) for line in lines[: max(starts)])


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
        self._flush(len(self._open))
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _draw(self) -> None:
        began = self._clock()
        self._flush(finished(self._open))
        if self._open.strip():
            if self._live is None:
                self._live = Live(console=self.console, auto_refresh=False, transient=True,
                                  redirect_stdout=False, redirect_stderr=False)  # fmt: skip
                self._live.start()
            self._live.update(self._tail(self._open), refresh=True)
        ended = self._clock()
        self._next = ended + max(SHORTEST, SHARE * (ended - began))

    def _flush(self, size: int) -> None:
        """Print the first ``size`` characters for good."""
        block, self._open = self._open[:size], self._open[size:]
        if not block.strip():
            return
        if self._live is not None:
            self._live.update("")
        if self._printed:
            self.console.print()
        self._printed += 1
        self.console.print(self._markdown(block))

    def _tail(self, text: str) -> Any:
        """The open block, cut to the lines that fit: a drawing taller than the screen could not be taken back."""
        height = max(self.console.size.height - 2, 1)
        lines = self.console.render_lines(self._markdown(text), pad=False)
        if self._printed:
            lines.insert(0, [])
        shown = lines[-height:]
        return Segments([segment for line in shown for segment in (*line, Segment.line())][:-1])

    @staticmethod
    def _markdown(text: str) -> Markdown:
        return Markdown(text, code_theme="ansi_dark", hyperlinks=False)


__all__ = ["MarkdownWriter", "finished"]
