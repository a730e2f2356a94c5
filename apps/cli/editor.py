"""The line editor of the chat: prompt, history, keys, completion. Knows prompt_toolkit; knows no model."""

from __future__ import annotations

import os
import re
from asyncio import Future
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output.defaults import create_output
from prompt_toolkit.utils import is_dumb_terminal

PATHS = object()  # what a completion source returns for "a file"
FENCE = '"""'


def keys() -> KeyBindings:
    """Enter sends (inside an open \"\"\" it goes on), Alt-Enter and Ctrl-J break the line, Ctrl-G opens $EDITOR,
    Ctrl-C drops what is typed or, on an empty line, is handed on."""
    found = KeyBindings()

    @found.add("enter")
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.text.lstrip().startswith(FENCE) and buffer.text.count(FENCE) % 2:
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @found.add("c-j")
    @found.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    editing: list[Future[None]] = []

    @found.add("c-g")
    def _(event: KeyPressEvent) -> None:
        editing[:] = [event.current_buffer.open_in_editor()]

    @found.add("c-c")
    @found.add("<sigint>")
    def _(event: KeyPressEvent) -> None:
        if editing and not editing[0].done():
            return  # it was meant for the editor
        if event.current_buffer.text:
            event.current_buffer.reset()
        else:
            event.app.exit(exception=KeyboardInterrupt)

    return found


class CommandCompleter(Completer):
    """Commands, then what the command says may follow it."""

    def __init__(self, names: Iterable[str], words: Callable[[str, list[str]], Any]) -> None:
        self._names = sorted(names)
        self._words = words  # (command, the words typed before this one) -> words, or PATHS
        self._paths = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, complete_event: Any) -> Iterator[Completion]:
        text = document.text_before_cursor
        if not text.startswith("/") or "\n" in text:
            return
        if " " not in text:
            for name in self._names:
                if name.startswith(text[1:]):
                    yield Completion(f"/{name}", start_position=-len(text))
            return
        command, _, rest = text[1:].partition(" ")
        before, last = re.findall(r"\S+(?=\s)", rest), re.split(r"\s+", rest)[-1]
        words = self._words(command, before)
        if words is PATHS:
            document = Document(rest.lstrip(), len(rest.lstrip()))
            yield from self._paths.get_completions(document, complete_event)
            return
        for word in words:
            if word.startswith(last):
                yield Completion(word, start_position=-len(last))


def unfence(text: str) -> str:
    """The text of a \"\"\" block without its marks."""
    stripped = text.strip()
    if stripped.startswith(FENCE):
        return stripped.removeprefix(FENCE).removesuffix(FENCE).strip("\n")
    return text


class LineHistory(FileHistory):
    """Typed lines in a file that only its owner reads. Where that cannot be written, ``note`` gets one sentence and the
    lines are kept in memory."""

    def __init__(self, path: Path, note: Callable[[str], None]) -> None:
        self._note: Callable[[str], None] | None = note
        super().__init__(str(path))
        with self._noting():
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))

    def load_history_strings(self) -> Iterable[str]:
        with self._noting():
            return list(super().load_history_strings())
        return []

    def store_string(self, string: str) -> None:
        with self._noting():
            super().store_string(string)

    @contextmanager
    def _noting(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if self._note is not None:
                self._note(f"typed lines are not kept: {self.filename!s}: {error.strerror}")
                self._note = None


class Editor:
    """Reads one message at a time. Raises EOFError at Ctrl-D, KeyboardInterrupt at Ctrl-C on an empty line."""

    def __init__(self, history: Path | None, completer: Completer, note: Callable[[str], None]) -> None:
        kept: History = InMemoryHistory() if history is None else LineHistory(history, note)
        # The prompt goes to stderr where stdout is a file. A terminal without escape codes: prompt_toolkit's own case.
        output = None if is_dumb_terminal() else create_output(always_prefer_tty=True)
        self._session: PromptSession[str] = PromptSession(
            ">>> ",
            history=kept,
            completer=completer,
            complete_while_typing=False,
            multiline=True,
            key_bindings=keys(),
            prompt_continuation=lambda width, line, wrapped: "... ",
            output=output,
            tempfile_suffix=".md",
            enable_suspend=True,
        )

    def read(self) -> str:
        """What the user typed, marks of a block removed."""
        return unfence(self._session.prompt())


__all__ = ["PATHS", "CommandCompleter", "Editor", "unfence"]
