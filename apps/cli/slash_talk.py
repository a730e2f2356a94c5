"""Slash commands about the conversation: its turns, its files, its place on disk."""

from __future__ import annotations

import base64
import json
import re
import sys
from dataclasses import asdict
from datetime import datetime
from typing import Any

from mlx_spec.apps.cli.commands import command
from mlx_spec.apps.cli.editor import PATHS
from mlx_spec.apps.cli.output import put
from mlx_spec.apps.cli.terminal import cooked
from mlx_spec.apps.config import user_path
from mlx_spec.apps.store import Message, Store
from mlx_spec.errors import OptionError

FILE_LIMIT = 1 << 20  # bytes of an attached text file; more than any context here holds
COPY_LIMIT = 74_994  # bytes; common terminals drop a longer OSC 52 sequence


@command("clear new")
def _clear(chat: Any, rest: str) -> None:
    """Begin a new conversation; settings and system prompt stay."""
    chat.talk.clear()
    chat.screen.say("a new conversation")


@command("regen retry")
def _regen(chat: Any, rest: str) -> None:
    """Answer the last message again."""
    talk = chat.talk
    if talk.reply() is None:
        raise OptionError("there is no answer to make again; say something first")
    if talk.values["temperature"] == 0 or talk.values["seed"] is not None:
        chat.screen.note("temperature 0 or a fixed seed: the answer will be the same unless a setting changed")
    before = list(talk.messages)
    talk.messages = before[:-1]
    chat.answer(before)


@command("undo")
def _undo(chat: Any, rest: str) -> None:
    """Take the last message and its answer back."""
    text = chat.talk.undo()
    if text is None:
        raise OptionError("there is nothing to take back")
    chat.talk.keep()
    chat.screen.say(f"took back: {text.splitlines()[0][:60]}")


@command("edit")
def _edit(chat: Any, rest: str) -> None:
    """Change your last message in $EDITOR and answer it anew (Ctrl-G edits what you are typing)."""
    import click

    talk = chat.talk
    before = list(talk.messages)
    last = talk.undo() or ""
    try:
        with cooked(), chat.interrupts.ignored():
            text = click.edit(last, extension=".md")
    except click.ClickException as error:
        talk.messages = before
        raise OptionError(f"the editor failed: {error.format_message()}") from error
    if text is None or not text.strip() or text.strip() == last.strip():
        talk.messages = before
        chat.screen.say("nothing was changed")
        return
    talk.messages.append(Message("user", text.strip()))
    chat.answer(before)


@command("system", "[text|off]", words=("off",))
def _system(chat: Any, rest: str) -> None:
    """Show or set the system prompt; it holds from the next answer on."""
    if rest:
        chat.talk.system = "" if rest == "off" else rest
        chat.talk.keep()
    chat.screen.say(f"system: {chat.talk.system or '(none)'}")


@command("file", "<path>", words=lambda chat, before: PATHS)
def _file(chat: Any, rest: str) -> None:
    """Attach a text file to your next message."""
    if not rest:
        raise OptionError("give a path: /file notes.txt")
    path = user_path(rest.strip("'\""))
    if not path.exists() and (bare := user_path(re.sub(r"\\(.)", r"\1", rest))).exists():
        path = bare  # as a terminal writes a path that was dropped on it
    try:
        size = path.stat().st_size
        if not (path.is_file() or path.is_dir()):
            raise OptionError(f"{path} is a device or a pipe; attach a text file")
        if size > FILE_LIMIT:
            raise OptionError(f"{path} has {size} bytes; attach at most {FILE_LIMIT}")
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise OptionError(f"{path} is not UTF-8 text (byte {error.start})") from error
    except OSError as error:
        raise OptionError(f"cannot read {path}: {error.strerror}") from error
    chat.talk.attached.append((path.name, text))
    chat.screen.say(f"{path.name}, {len(text)} characters, goes with your next message")


def _titles(chat: Any, before: list[str]) -> list[str]:
    with _store(chat) as store:
        return [found.title for found in store.list()] if not before else []


class _store:
    """The chat's store, or one opened for a moment where the chat keeps none."""

    def __init__(self, chat: Any) -> None:
        self._kept = chat.talk.store

    def __enter__(self) -> Store:
        self._opened = self._kept or Store()
        return self._opened

    def __exit__(self, *_: object) -> None:
        if self._kept is None:
            self._opened.close()


@command("save", "[name]")
def _save(chat: Any, rest: str) -> None:
    """Keep the conversation, under a name if you give one."""
    if not chat.talk.messages:
        raise OptionError("there is nothing to save yet")
    with _store(chat) as store:
        chat.talk.save(store, rest or None)
        found = store.find(str(chat.talk.conversation))
    chat.screen.say(f"saved as {found.title!r}" if found else "saved")


@command("load", "[name]", words=_titles)
def _load(chat: Any, rest: str) -> None:
    """Continue a kept conversation: by title, its beginning, or number; without a name the last one."""
    with _store(chat) as store:
        kept = store.find(rest) if rest else next((c for c in store.list(2) if c.id != chat.talk.conversation), None)
        if kept is None:
            raise OptionError(f"there is no conversation {rest!r}; /list shows them" if rest else "nothing is kept yet")
        chat.talk.restore(store, kept.id)
    chat.screen.say(f"continuing {kept.title!r}, {kept.count} messages")
    if kept.model and kept.model != chat.talk.opened.name:
        chat.screen.note(f"it was held with {kept.model}; /model {kept.model} goes back to that")


@command("list", "[words]")
def _list(chat: Any, rest: str) -> None:
    """List kept conversations, or those that hold some words."""
    with _store(chat) as store:
        found = store.search(rest) if rest else store.list()
    if not found:
        chat.screen.say("no conversation holds that" if rest else "nothing is kept yet")
    for item in found:
        when = datetime.fromtimestamp(item.updated).strftime("%Y-%m-%d %H:%M")
        here = " (this one)" if item.id == chat.talk.conversation else ""
        chat.screen.say(f"{item.id:>4}  {when}  {item.count:>3} messages  {item.title}{here}")


@command("export", "md|json [path]", words=lambda chat, before: PATHS if before else ("md", "json"))
def _export(chat: Any, rest: str) -> None:
    """Write the conversation to a file."""
    kind, _, name = rest.partition(" ")
    if kind not in ("md", "json"):
        raise OptionError(
            f"export as md or json, not {kind!r}" if kind else "give a format: /export md or /export json"
        )
    if not chat.talk.messages:
        raise OptionError("there is nothing to export yet")
    path = user_path(name.strip() or f"chat-{datetime.now():%Y-%m-%d-%H%M%S}.{kind}")
    messages = chat.talk.stored()
    text = _as_json(messages, chat.talk.opened.name) if kind == "json" else _as_markdown(messages)
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise OptionError(f"cannot write {path}: {error.strerror}") from error
    chat.screen.say(f"wrote {path}")


def _as_json(messages: list[Message], model: str) -> str:
    return json.dumps({"model": model, "messages": [asdict(m) for m in messages]}, ensure_ascii=False, indent=2) + "\n"


def _as_markdown(messages: list[Message]) -> str:
    return "\n".join(f"## {m.role}{' (stopped)' if m.stopped else ''}\n\n{m.content.strip()}\n" for m in messages)


@command("copy")
def _copy(chat: Any, rest: str) -> None:
    """Copy the last answer to the clipboard (through the terminal, OSC 52)."""
    reply = chat.talk.reply()
    if reply is None:
        raise OptionError("there is no answer to copy")
    stream = sys.stdout if chat.screen.tty else sys.stderr
    if not stream.isatty():
        raise OptionError("copying needs a terminal")
    data = base64.b64encode(reply.content.encode()).decode()
    if len(data) > COPY_LIMIT:
        raise OptionError(
            f"the answer is too long for a terminal's clipboard ({len(data)} bytes); /export md writes it"
        )
    put(stream, f"\x1b]52;c;{data}\x07")
    chat.screen.say(f"sent {len(reply.content)} characters to the terminal's clipboard")
