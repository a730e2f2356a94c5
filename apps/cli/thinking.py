"""Thinking apart from the answer, in the stream and on the screen. The markers are the tokenizer's own."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from mlx_spec.apps.cli.output import Screen

THINKING, ANSWER = "reasoning", "normal"


class Splitter:
    """Cuts generated text into (is it thinking?, text) pieces; markers are dropped.

    Matching is mlx-lm's own state machine, on text, so a marker may come in parts. A prompt that ends inside an open
    thinking block (some templates open it) starts in thinking.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int]) -> None:
        from mlx_lm.generate import TextStateMachine

        edges = {name: list(found) for name, found in tokenizer.response_transitions.items()}
        if tokenizer.has_thinking:
            edges.setdefault(ANSWER, []).append((tokenizer.think_start, THINKING))
            edges.setdefault(THINKING, []).append((tokenizer.think_end, ANSWER))
        for marker in tokenizer.structural_markers if edges else ():
            edges.setdefault(ANSWER, []).append((marker, ANSWER))
        self.active = bool(edges)
        self._machine = TextStateMachine
        initial = tokenizer.response_initial_state or ANSWER
        if tokenizer.has_thinking and tokenizer.rfind_think_start(prompt) > tokenizer.rfind_think_end(prompt):
            initial = THINKING
        self._state = TextStateMachine(edges or None).make_state(initial)
        self._strip = initial == THINKING

    def feed(self, text: str) -> list[tuple[bool, str]]:
        if not self.active:
            return [(False, text)] if text else []
        self._state, segments = self._machine.split(self._state, text)
        return self._pieces(segments)

    def end(self) -> list[tuple[bool, str]]:
        """What was held back because it might have become a marker."""
        if not self.active:
            return []
        self._state, text, name = self._machine.flush(self._state)
        return self._pieces([(name, text)])

    def _pieces(self, segments: Sequence[tuple[str, str]]) -> list[tuple[bool, str]]:
        pieces = []
        for name, text in segments:
            thinking = name == THINKING
            if thinking:
                self._strip = True
            elif self._strip:  # models put blank lines between thinking and answer
                text = text.lstrip()
                self._strip = not text
            if text:
                pieces.append((thinking, text))
        return pieces


class ThinkingView:
    """Thinking on stderr: as it comes (dim), or only how long it took."""

    def __init__(self, screen: Screen, show: bool | None) -> None:
        self._screen = screen
        self._show = screen.err_tty if show is None else show
        self._began: float | None = None
        self._ends_line = True
        self.seconds = 0.0

    def feed(self, text: str) -> None:
        if self._began is None:
            self._began = time.perf_counter()
            text = text.lstrip()
        if self._show and text:
            self._screen.dim(text)
            self._ends_line = text.endswith("\n")

    def close(self) -> None:
        """At the first piece of the answer, or at the end of the output."""
        if self._began is None:
            return
        self.seconds += time.perf_counter() - self._began
        self._began = None
        if self._show and not self._ends_line:
            self._screen.dim("\n")
        if self._screen.err_tty:
            self._screen.line(f"Thought for {self.seconds:.1f} s", faint=True)


__all__ = ["Splitter", "ThinkingView"]
