"""A conversation with a model: messages, settings, one engine session. Knows no terminal and no keys.

Every request encodes the whole conversation anew and the engine keeps the rows of the common prefix, so edits of any
kind need no bookkeeping here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from mlx_spec.apps.cli.opening import Opened
from mlx_spec.apps.cli.options import request_options
from mlx_spec.apps.config import KEYS, Settings
from mlx_spec.apps.store import ChangedError, Message, Store
from mlx_spec.errors import OptionError
from mlx_spec.options import Options

MAX_TOKENS = 1024  # of an answer, where nothing else is set


class Talk:
    """``values`` holds the settings by name and may be changed; ``store`` None keeps nothing on disk; ``note`` gets a
    sentence where a conversation has to be kept as a new one."""

    def __init__(
        self, opened: Opened, settings: Settings, store: Store | None = None, note: Callable[[str], None] = print
    ) -> None:
        self.values: dict[str, Any] = dict(settings)
        self.system: str = settings["system"] or ""
        self.messages: list[Message] = []  # user and assistant in turn
        self.attached: list[tuple[str, str]] = []  # (name, text) that go with the next message
        self.store = store
        self.conversation: int | None = None
        self._seen: list[Message] = []  # what the store holds of it, as far as this chat knows
        self._note = note
        self.switch(opened)

    def release(self) -> None:
        """Let go of the model's memory; ``switch`` follows."""
        self.engine.close()
        self.opened = self.session = None

    def switch(self, opened: Opened) -> None:
        """Go on with another model; the messages stay."""
        self.opened: Any = opened
        self.session: Any = self.engine.session()
        self.plain_tps: float | None = None  # speed of lane plain, once it was measured
        self.last_prompt: list[int] | None = None

    @property
    def engine(self) -> Any:
        return self.opened.engine

    def redraft(self, name: str) -> None:
        """Draft with "auto", "off", a method, a folder or a hub id from now on. Raises what choosing a drafter can."""
        draft = {"off": "plain", "none": "plain", "auto": self.opened.draft}.get(name, name)
        self.engine.redraft(draft)
        self.opened.config = replace(self.opened.config, num_speculative_tokens=None, draft_window=None)
        self.session = self.engine.session()

    def clear(self) -> None:
        """A new conversation; settings and system prompt stay."""
        self.messages, self.attached, self.conversation, self.last_prompt = [], [], None, None
        self.session = self.engine.session()

    # prompts

    def compose(self, text: str) -> str:
        """The user's text with the attached files before it."""
        files = "".join(f"File {name}:\n```\n{body.rstrip()}\n```\n\n" for name, body in self.attached)
        return files + text

    def prompt(self, messages: Sequence[Message] | None = None) -> list[int]:
        """Token ids of the conversation, ready for an answer."""
        chosen = self.messages if messages is None else messages
        head = [{"role": "system", "content": self.system}] if self.system else []
        turns = [{"role": message.role, "content": message.content} for message in chosen]
        return list(self.opened.encode([*head, *turns], self.values["think"]))

    def options(self) -> Options:
        return request_options(self.values, self.opened.config, MAX_TOKENS)

    def set(self, name: str, text: str) -> Any:
        """Change a setting of this chat; "default" takes it back. Raises OptionError; then nothing has changed."""
        key = KEYS[name]
        former = self.values[name]
        self.values[name] = key.default if text == "default" else key.parse(text, name)
        try:
            self.options()
        except OptionError:
            self.values[name] = former
            raise
        return self.values[name]

    # turns

    def undo(self) -> str | None:
        """Take the last exchange back. Returns what the user said in it."""
        while self.messages:
            message = self.messages.pop()
            if message.role == "user":
                return message.content
        return None

    def reply(self) -> Message | None:
        """The last answer."""
        return next((message for message in reversed(self.messages) if message.role == "assistant"), None)

    # keeping

    def keep(self) -> None:
        """Write the conversation, where conversations are kept."""
        if self.store is not None and (self.messages or self.conversation is not None):
            self.save(self.store)

    def save(self, store: Store, name: str | None = None) -> None:
        messages = self.stored()
        if self.conversation is not None:
            try:
                store.write(self.conversation, messages, self.opened.name, self._seen)
            except ChangedError:
                self.conversation = None
                self._note("this conversation was changed or deleted elsewhere; it goes on as a new one")
        if self.conversation is None:
            self.conversation = store.create(self.opened.name)
            store.write(self.conversation, messages, self.opened.name)
        self._seen = messages
        if name:
            store.rename(self.conversation, name)

    def stored(self) -> list[Message]:
        """The messages as they are kept: the system prompt, if any, is the first."""
        if not self.system:
            return list(self.messages)
        created = self.messages[0].created if self.messages else 0.0
        return [Message("system", self.system, created=created), *self.messages]

    def restore(self, store: Store, conversation: int) -> None:
        """Continue a kept conversation; its system prompt comes with it."""
        found = self._seen = store.messages(conversation)
        self.system = "\n".join(message.content for message in found if message.role == "system")
        self.messages = [message for message in found if message.role != "system"]
        self.attached, self.conversation, self.last_prompt = [], conversation, None


__all__ = ["MAX_TOKENS", "Talk"]
