"""The conversation file: what is written is read back, by another process too, and damage is a sentence."""

from __future__ import annotations

import sqlite3
import stat
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from mlx_spec.apps import store as store_module
from mlx_spec.apps.store import MIGRATIONS, Message, Store, StoreError


def talk(*texts: str) -> list[Message]:
    return [Message("user" if i % 2 == 0 else "assistant", text, created=float(i)) for i, text in enumerate(texts)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "data" / "conversations.db"


def test_messages_survive_with_all_their_fields(path: Path) -> None:
    written = [
        *talk("hello\nthere"),
        Message("assistant", "é 漢 \x00", thinking="hm", stopped=True, stats={"mlx_spec": {"rounds": 3}}, created=2.5),
    ]
    with Store(path) as store:
        made = store.create("tiny")
        store.write(made, written)
    with Store(path) as store:
        assert store.messages(made) == written
        found = store.latest()
        assert found is not None
        assert (found.id, found.title, found.model, found.count) == (made, "hello", "tiny", 2)


def test_write_replaces_only_what_changed(path: Path) -> None:
    with Store(path) as store:
        made = store.create()
        store.write(made, talk("a", "b", "c", "d"))
        ids = [row[0] for row in store._db.execute("SELECT id FROM messages ORDER BY position")]
        changed = talk("a", "b", "C")
        store.write(made, changed)
        assert store.messages(made) == changed
        assert [row[0] for row in store._db.execute("SELECT id FROM messages ORDER BY position")][:2] == ids[:2]
        store.write(made, [])
        assert store.messages(made) == []


def test_titles_find_and_search(path: Path) -> None:
    with Store(path) as store:
        first, second = store.create(), store.create()
        store.write(first, talk("How do whales sleep?", "One half at a time."))
        store.write(second, talk("x" * 100, "whales again: 100% \"quoted\" 'text'"))
        assert store.list()[1].title == "How do whales sleep?"
        assert len(store.list()[0].title) == store_module.TITLE_LENGTH
        assert store.find("how do").id == first  # type: ignore[union-attr]
        assert store.find(str(second)).id == second  # type: ignore[union-attr]
        assert store.find("100%") is None
        assert [c.id for c in store.search("whales sleep")] == [first]
        assert {c.id for c in store.search("whales")} == {first, second}
        assert store.search('"quoted" AND (') == []
        assert store.search("  ") == []
        store.rename(first, "Whales")
        store.write(first, talk("something else"))
        assert store.find("Whales").id == first  # type: ignore[union-attr]
        assert store.search("half") == [], "the search index forgets what was replaced"
        store.delete(first)
        assert store.find("Whales") is None
        assert store._db.execute("SELECT count(*) FROM messages WHERE conversation = ?", (first,)).fetchone()[0] == 0


def test_empty_conversations_are_not_listed(path: Path) -> None:
    with Store(path) as store:
        store.create()
        assert store.latest() is None


def test_only_the_owner_can_read_it(path: Path) -> None:
    with Store(path) as store:
        store.write(store.create(), talk("private"))
        modes = {found.name: stat.S_IMODE(found.stat().st_mode) for found in path.parent.iterdir()}
    assert modes.keys() >= {"conversations.db", "conversations.db-wal"}
    assert set(modes.values()) == {0o600}


def test_damage_and_newer_files_are_one_sentence_and_stay(path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(b"not a database" * 100)
    with pytest.raises(StoreError, match="damaged"):
        Store(path)
    assert path.read_bytes() == b"not a database" * 100
    path.unlink()
    Store(path).close()
    with sqlite3.connect(path) as db:
        db.execute(f"PRAGMA user_version = {len(MIGRATIONS) + 1}")
    with pytest.raises(StoreError, match="newer"):
        Store(path)
    with sqlite3.connect(path) as db:
        assert db.execute("PRAGMA user_version").fetchone()[0] == len(MIGRATIONS) + 1


def test_a_path_that_cannot_be_opened_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="file"):
        Store(tmp_path / "file" / "conversations.db")


def test_a_migration_runs_once_and_a_failing_one_leaves_the_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Store(path) as store:
        store.write(store.create(), talk("kept"))
    broken = [*MIGRATIONS, "ALTER TABLE messages ADD COLUMN flavour TEXT; ALTER TABLE nowhere ADD COLUMN x;"]
    monkeypatch.setattr(store_module, "MIGRATIONS", broken)
    with pytest.raises(StoreError, match="nowhere"):
        Store(path)
    good = [*MIGRATIONS[:1], "ALTER TABLE messages ADD COLUMN flavour TEXT NOT NULL DEFAULT 'plain';"]
    monkeypatch.setattr(store_module, "MIGRATIONS", good)
    for _ in range(2):
        with Store(path) as store:
            assert store._db.execute("SELECT flavour FROM messages").fetchone()[0] == "plain"
            assert store.messages(1)[0].content == "kept"


def test_two_writers_do_not_lose_each_other(path: Path) -> None:
    Store(path).close()

    def write(name: str) -> None:
        with Store(path) as store:
            for turn in range(15):
                made = store.create(name)
                store.write(made, talk(f"{name} {turn}"))

    threads = [threading.Thread(target=write, args=(name,)) for name in ("one", "two")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with Store(path) as store:
        assert len(store.list(100)) == 30


def test_a_conversation_that_was_deleted_elsewhere_is_named(path: Path) -> None:
    with Store(path) as one, Store(path) as other:
        made = one.create()
        other.delete(made)
        with pytest.raises(StoreError, match="no longer"):
            one.write(made, talk("a"))


def test_messages_compare_by_content() -> None:
    message = Message("user", "a", created=1.0)
    assert message == replace(message)
    assert message != replace(message, stopped=True)
