"""Conversations on disk: one SQLite file that the terminal chat and the desktop app share.

Knows messages and titles; knows no model, no terminal and no HTTP. Thread use: one ``Store`` per thread.
"""

from __future__ import annotations

import json
import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlx_spec.errors import MlxSpecError

TITLE_LENGTH = 60


class StoreError(MlxSpecError):
    """The conversation file cannot be read or written; it is left as it is."""


class ChangedError(StoreError):
    """Someone else went on with, or deleted, the conversation that was to be written."""


@dataclass(frozen=True)
class Message:
    """One turn of one speaker. ``stats`` is what the answer's JSON holds under ``timings`` and ``mlx_spec``."""

    role: str  # "system" | "user" | "assistant"
    content: str
    thinking: str = ""
    stopped: bool = False  # the user ended the answer before the model did
    stats: dict[str, Any] | None = None
    created: float = field(default_factory=time.time)


@dataclass(frozen=True)
class Conversation:
    """A line of a list: everything but the messages. Times are seconds since the epoch."""

    id: int
    title: str
    model: str
    created: float
    updated: float
    count: int  # messages


_FIRST = """
CREATE TABLE conversations (
    id INTEGER PRIMARY KEY,
    title TEXT NOT NULL,
    named INTEGER NOT NULL DEFAULT 0,
    model TEXT NOT NULL DEFAULT '',
    created REAL NOT NULL,
    updated REAL NOT NULL
);
CREATE TABLE messages (
    id INTEGER PRIMARY KEY,
    conversation INTEGER NOT NULL REFERENCES conversations(id) ON DELETE CASCADE,
    position INTEGER NOT NULL,
    role TEXT NOT NULL CHECK (role IN ('system', 'user', 'assistant', 'tool')),
    content TEXT NOT NULL,
    thinking TEXT NOT NULL DEFAULT '',
    stopped INTEGER NOT NULL DEFAULT 0,
    stats TEXT,
    created REAL NOT NULL,
    UNIQUE (conversation, position)
);
CREATE INDEX conversations_updated ON conversations(updated);
CREATE VIRTUAL TABLE messages_text USING fts5(content, content='messages', content_rowid='id');
CREATE TRIGGER messages_insert AFTER INSERT ON messages BEGIN
    INSERT INTO messages_text(rowid, content) VALUES (new.id, new.content);
END;
CREATE TRIGGER messages_delete AFTER DELETE ON messages BEGIN
    INSERT INTO messages_text(messages_text, rowid, content) VALUES ('delete', old.id, old.content);
END;
CREATE TRIGGER messages_update AFTER UPDATE OF content ON messages BEGIN
    INSERT INTO messages_text(messages_text, rowid, content) VALUES ('delete', old.id, old.content);
    INSERT INTO messages_text(rowid, content) VALUES (new.id, new.content);
END;
"""

# Entry n takes a file from schema version n to n + 1. Append only.
MIGRATIONS: list[str | Callable[[sqlite3.Connection], None]] = [_FIRST]


def default_path() -> Path:
    from platformdirs import user_data_path

    return user_data_path("mlx-spec", appauthor=False) / "conversations.db"


def title_of(messages: Sequence[Message]) -> str:
    """The first line of the first thing the user said."""
    for message in messages:
        if message.role == "user" and message.content.strip():
            line = message.content.strip().splitlines()[0]
            return line if len(line) <= TITLE_LENGTH else line[: TITLE_LENGTH - 1] + "…"
    return "empty conversation"


class Store:
    """Opened conversations. Raises StoreError where the file is not ours, is damaged, or is from a newer version."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or default_path()
        with self._sentences():
            _private_file(self.path)
            self._db = sqlite3.connect(self.path, timeout=5.0, isolation_level=None)
            self._db.row_factory = sqlite3.Row
        try:
            with self._sentences():
                self._open()
        except StoreError:
            self._db.close()
            raise

    def _open(self) -> None:
        version = self._version()
        if version > len(MIGRATIONS):
            raise StoreError(
                f"{self.path} was written by a newer mlx-spec (schema {version}, this one knows {len(MIGRATIONS)}); "
                "update mlx-spec, or move the file away to start afresh"
            )
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA foreign_keys = ON")
        if version < len(MIGRATIONS):
            self._migrate()

    def _version(self) -> int:
        return int(self._db.execute("PRAGMA user_version").fetchone()[0])

    def _migrate(self) -> None:
        with self._transaction():
            # Read again under the write lock: another process may have migrated in between.
            for number in range(self._version(), len(MIGRATIONS)):
                step = MIGRATIONS[number]
                if callable(step):
                    step(self._db)
                else:
                    for statement in _statements(step):
                        self._db.execute(statement)
                self._db.execute(f"PRAGMA user_version = {number + 1}")

    def close(self) -> None:
        self._db.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # writing

    def create(self, model: str = "", title: str | None = None) -> int:
        """A new, empty conversation. Returns its id."""
        now = time.time()
        with self._transaction():
            row = self._db.execute(
                "INSERT INTO conversations(title, named, model, created, updated) VALUES (?, ?, ?, ?, ?)",
                (title or title_of(()), title is not None, model, now, now),
            )
        return int(row.lastrowid or 0)

    def write(
        self,
        conversation: int,
        messages: Sequence[Message],
        model: str | None = None,
        seen: Sequence[Message] | None = None,
    ) -> None:
        """Make the stored messages equal these: what is common stays, what follows it is replaced.

        ``seen``: the messages that the caller last read or wrote there. Raises ChangedError, and writes nothing, where
        others are stored by now or the conversation is gone.
        """
        with self._transaction():
            if self._db.execute("SELECT 1 FROM conversations WHERE id = ?", (conversation,)).fetchone() is None:
                raise ChangedError(f"conversation {conversation} is no longer in {self.path}; keep it as a new one")
            stored = self._messages(conversation)
            if seen is not None and list(map(_mark, stored)) != list(map(_mark, seen)):
                raise ChangedError(f"conversation {conversation} was changed by someone else; keep yours as a new one")
            same = 0
            while same < min(len(stored), len(messages)) and stored[same] == messages[same]:
                same += 1
            self._db.execute("DELETE FROM messages WHERE conversation = ? AND position >= ?", (conversation, same))
            for position in range(same, len(messages)):
                self._insert(conversation, position, messages[position])
            self._db.execute(
                "UPDATE conversations SET updated = ?, model = coalesce(?, model), "
                "title = CASE WHEN named THEN title ELSE ? END WHERE id = ?",
                (time.time(), model, title_of(messages), conversation),
            )

    def _insert(self, conversation: int, position: int, message: Message) -> None:
        stats = json.dumps(message.stats) if message.stats is not None else None
        self._db.execute(
            "INSERT INTO messages(conversation, position, role, content, thinking, stopped, stats, created) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (conversation, position, message.role, message.content, message.thinking, message.stopped, stats,
             message.created),
        )  # fmt: skip

    def rename(self, conversation: int, title: str) -> None:
        with self._transaction():
            self._db.execute("UPDATE conversations SET title = ?, named = 1 WHERE id = ?", (title, conversation))

    def delete(self, conversation: int) -> None:
        with self._transaction():
            self._db.execute("DELETE FROM conversations WHERE id = ?", (conversation,))

    # reading

    def messages(self, conversation: int) -> list[Message]:
        with self._sentences():
            return self._messages(conversation)

    def _messages(self, conversation: int) -> list[Message]:
        rows = self._db.execute("SELECT * FROM messages WHERE conversation = ? ORDER BY position", (conversation,))
        return [
            Message(
                role=row["role"],
                content=row["content"],
                thinking=row["thinking"],
                stopped=bool(row["stopped"]),
                stats=json.loads(row["stats"]) if row["stats"] is not None else None,
                created=row["created"],
            )
            for row in rows
        ]

    def list(self, limit: int = 50) -> list[Conversation]:
        """The most recently used first; conversations without messages are left out."""
        return self._list("HAVING count > 0 ORDER BY updated DESC, c.id DESC LIMIT ?", (limit,))

    def latest(self) -> Conversation | None:
        found = self.list(1)
        return found[0] if found else None

    def find(self, name: str) -> Conversation | None:
        """By id, by whole title, else by the start of a title; the most recent where several fit."""
        if name.isdecimal() and len(name) < 19 and (found := self._list("HAVING c.id = ?", (int(name),))):
            return found[0]
        newest = "ORDER BY updated DESC, c.id DESC LIMIT 1"
        exact = self._list(f"HAVING title = ? COLLATE NOCASE {newest}", (name,))
        begins = exact or self._list(f"HAVING substr(title, 1, ?) = ? COLLATE NOCASE {newest}", (len(name), name))
        return begins[0] if begins else None

    def search(self, words: str, limit: int = 50) -> list[Conversation]:
        """Conversations with a message that holds all these words, or with a title that holds the text."""
        query = " ".join('"' + word.replace('"', '""') + '"' for word in words.split())
        if not query:
            return []
        inside = (
            "SELECT m.conversation FROM messages_text t JOIN messages m ON m.id = t.rowid WHERE messages_text MATCH ?"
        )
        return self._list(
            f"HAVING count > 0 AND (c.id IN ({inside}) OR instr(lower(title), lower(?))) ORDER BY updated DESC LIMIT ?",
            (query, words.strip(), limit),
        )

    def _list(self, tail: str, values: tuple[Any, ...]) -> list[Conversation]:
        with self._sentences():
            rows = self._db.execute(
                "SELECT c.id, title, model, c.created, updated, count(m.id) AS count "
                f"FROM conversations c LEFT JOIN messages m ON m.conversation = c.id GROUP BY c.id {tail}",
                values,
            ).fetchall()
        return [Conversation(**dict(row)) for row in rows]

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._sentences():
            self._db.execute("BEGIN IMMEDIATE")
            end = "ROLLBACK"
            try:
                yield
                end = "COMMIT"
            finally:
                self._db.execute(end)

    @contextmanager
    def _sentences(self) -> Iterator[None]:
        """SQLite's errors as one sentence with the path and the next step."""
        try:
            yield
        except sqlite3.OperationalError as error:
            raise StoreError(f"cannot use the conversations in {self.path}: {error}") from error
        except sqlite3.DatabaseError as error:
            raise StoreError(
                f"{self.path} is damaged or is not a conversation file ({error}); move it away to start afresh"
            ) from error
        except OSError as error:
            raise StoreError(f"cannot use {self.path}: {error.strerror or error}") from error


def _mark(message: Message) -> tuple[str, str, float]:
    """What tells one message from another."""
    return message.role, message.content, message.created


def _private_file(path: Path) -> None:
    """Create the file readable by its owner only; SQLite gives its side files the same mode."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))


def _statements(script: str) -> Iterator[str]:
    """One statement at a time: ``executescript`` would end the transaction that makes a migration atomic."""
    statement = ""
    for part in script.split(";")[:-1]:
        statement += part + ";"
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""


__all__ = ["ChangedError", "Conversation", "Message", "Store", "StoreError", "default_path", "title_of"]
