"""One answer: runs the engine, splits thinking from text, hands both to whoever shows them, keeps the figures."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from mlx_spec.apps.cli.thinking import Splitter, ThinkingView
from mlx_spec.options import Options
from mlx_spec.stats import Stats


class Writer(Protocol):
    """Shows the answer's text as it comes. ``drafted``: the token was a draft that was accepted."""

    def feed(self, text: str, drafted: bool = False) -> None: ...

    def close(self) -> None: ...


@dataclass
class Answer:
    """What came out of one request. ``ttft``: seconds to the first token; ``peak_memory`` in GB."""

    text: str = ""
    thinking: str = ""
    tokens: list[int] = field(default_factory=list)
    finish: str = "cancel"
    stats: Stats = field(default_factory=Stats)
    ttft: float = 0.0
    peak_memory: float = 0.0
    can_think: bool = False

    @property
    def stopped(self) -> bool:
        return self.finish == "cancel"


def run_answer(
    engine: Any,
    prompt: Sequence[int],
    options: Options,
    writer: Writer,
    thinking: ThinkingView,
    *,
    session: Any = None,
    cancel: Callable[[], bool],
    progress: Callable[[int, int], None],
    seen: Callable[[Any], None] | None = None,
) -> Answer:
    """Run one request to its end or until ``cancel``. ``seen`` gets every response as it is.

    Engine errors pass through; what was shown by then is closed properly first.
    """
    splitter = Splitter(engine.tokenizer, prompt)
    answer = Answer(can_think=splitter.active)
    began = time.perf_counter()

    def show(pieces: list[tuple[bool, str]], drafted: bool = False) -> None:
        for is_thinking, text in pieces:
            if is_thinking:
                answer.thinking += text
                thinking.feed(text)
            else:
                thinking.close()
                answer.text += text
                writer.feed(text, drafted)

    try:
        for response in engine.stream(prompt, options, session=session, cancel=cancel, progress=progress):
            answer.ttft = answer.ttft or time.perf_counter() - began
            answer.stats, answer.peak_memory = response.stats, response.peak_memory
            answer.finish = response.finish_reason or answer.finish
            if response.finish_reason != "cancel":
                answer.tokens.append(response.token)
            if seen is not None:
                seen(response)
            show(splitter.feed(response.text), response.from_draft)
        show(splitter.end())
    finally:
        thinking.close()
        writer.close()
    answer.thinking = answer.thinking.strip()
    return answer


class PlainWriter:
    """Text as it is; ends with a line end."""

    def __init__(self, put: Callable[[str], None]) -> None:
        self._put = put
        self._last = "\n"

    def feed(self, text: str, drafted: bool = False) -> None:
        if text:
            self._put(text)
            self._last = text[-1]

    def close(self) -> None:
        if self._last != "\n":
            self._put("\n")
            self._last = "\n"


class TraceWriter(PlainWriter):
    """Raw text with accepted drafts in green; the target's own tokens stay as they are."""

    def __init__(self, put: Callable[[str], None], paint: Callable[[str], None]) -> None:
        super().__init__(put)
        self._paint = paint

    def feed(self, text: str, drafted: bool = False) -> None:
        if text and drafted:
            self._paint(text)
            self._last = text[-1]
        else:
            super().feed(text)


class NoWriter:
    """For a run whose text is not shown."""

    def feed(self, text: str, drafted: bool = False) -> None: ...

    def close(self) -> None: ...


__all__ = ["Answer", "NoWriter", "PlainWriter", "TraceWriter", "Writer", "run_answer"]
