"""What users do to the front ends and mean no harm: wrong paths, full disks, two chats at once, keys at odd moments."""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pexpect
import pytest
from test_chat import ANSWER, COMMAND, TERMINAL, Open, exported, open_chat
from test_cli import Run, run

from mlx_spec.apps import config
from mlx_spec.apps.cli import commands, exit_code, generate, opening, sentence
from mlx_spec.apps.cli.editor import LineHistory
from mlx_spec.apps.cli.interrupts import Interrupts
from mlx_spec.apps.cli.options import KeyType
from mlx_spec.apps.cli.output import Screen, Working, put
from mlx_spec.apps.cli.talk import Talk
from mlx_spec.apps.store import ChangedError, Message, Store
from mlx_spec.errors import OptionError

__all__ = ["open_chat", "run"]  # fixtures of these files, used here too


# names and paths


@pytest.mark.parametrize("name", ["~no-such-user-here/x", "x" * 300, "a\0b"])
def test_what_cannot_be_a_path_is_a_sentence(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlx_spec.apps import models
    from mlx_spec.apps.cli.opening import bring_drafter

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    wanted = "cannot be used as a path: .*; check the spelling"
    with pytest.raises(OptionError, match=wanted):
        models.ensure(name)
    with pytest.raises(OptionError, match=wanted):
        bring_drafter(name, lambda question: True, lambda text: None)
    with pytest.raises(OptionError, match=wanted):
        config.config_path({"MLX_SPEC_CONFIG": name})
    for line in (f"/file {name}", f"/export md {name}"):
        with pytest.raises(OptionError, match=wanted):
            commands.run(SimpleNamespace(talk=SimpleNamespace(messages=[Message("user", "x")])), line)


def test_a_name_that_is_empty_is_not_the_default() -> None:
    for name in ("model", "draft", "method"):
        with pytest.raises(OptionError, match=f"{name} must be a name, not ' '"):
            config.KEYS[name].parse(" ")
    assert config.KEYS["system"].parse("") == ""


def test_a_pipe_or_device_is_not_attached(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(OptionError, match="attach a text file"):
            commands.run(SimpleNamespace(), f"/file {path}")


def test_a_wrong_key_can_be_taken_out_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text("tempratur = 1\nseed = 3\n")
    config.write_key(path, "tempratur", None)
    assert path.read_text() == "seed = 3\n"
    with pytest.raises(OptionError, match="unknown setting 'tempratur'"):
        config.write_key(path, "tempratur", None)


def test_help_states_every_default_and_the_drafters(run: Run) -> None:
    text = " ".join(run("generate", "--help").stdout.split())
    assert "--method [dflash|ngram|plain]" in text
    assert "the most likely token. Default: 0.0." in text
    assert "when the drafter fails, and say so. Default: off." in text
    done = run("generate", "-p", "x", "--seed", "-1")
    assert done.stderr == "error: --seed must be a whole number from 0 to 9223372036854775807, not '-1'\n"
    place = run("config", "path").stdout.strip()
    Path(place).parent.mkdir(parents=True)
    Path(place).write_text("tempratur = 1\n")
    assert "unknown setting 'tempratur'" in run("config", "list").stderr
    assert run("config", "unset", "tempratur").stdout == "tempratur is removed\n"
    assert run("config", "list").returncode == 0


def test_names_that_look_like_markup_can_be_shown(capfd: pytest.CaptureFixture[str]) -> None:
    working = Working("loading [/x] [red]", visible=True)
    working._appear()
    working.update("[/y]")
    working.stop()
    assert "Traceback" not in capfd.readouterr().err


# completion


def completed(words: Any) -> list[tuple[str, str]]:
    return [(item.value, item.type) for item in words]


def test_values_and_folders_complete() -> None:
    from mlx_spec.apps.cli.config import _values

    def flag(name: str, text: str) -> Any:
        return KeyType(config.KEYS[name]).shell_complete(None, None, text)  # type: ignore[arg-type]

    assert completed(flag("model", "./mo")) == completed(flag("draft", "./mo")) == [("./mo", "dir")]
    assert ("smollm2", "plain") in completed(flag("model", "sm"))
    assert completed(flag("draft", "a")) == [("auto", "plain")]
    for key, text, wanted in (("exactness", "", ["fast", "exact", "stock"]), ("stats", "o", ["on", "off"])):
        context: Any = SimpleNamespace(params={"key": key})
        assert [value for value, _ in completed(_values(context, None, text))] == wanted  # type: ignore[arg-type]


def test_completion_survives_a_store_that_does_not_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "file"))
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    assert commands.words(SimpleNamespace(talk=SimpleNamespace(store=None)), "load", []) == ()


# keeping


def talk(store: Store, notes: list[str]) -> Talk:
    opened: Any = SimpleNamespace(engine=SimpleNamespace(session=lambda: None), name="tiny")
    return Talk(opened, config.resolve({}, {}, Path("/nowhere/config.toml")), store, notes.append)


def contents(store: Store, conversation: int | None) -> list[str]:
    return [message.content for message in store.messages(conversation or 0)]


def test_two_chats_on_one_conversation_lose_nothing(tmp_path: Path) -> None:
    notes: list[str] = []
    with Store(tmp_path / "one.db") as store, Store(tmp_path / "one.db") as other:
        first, second = talk(store, notes), talk(other, notes)
        first.messages = [Message("user", "hello"), Message("assistant", "hi")]
        first.keep()
        assert first.conversation is not None
        second.restore(other, first.conversation)
        for who, text in ((second, "from two"), (first, "from one"), (second, "two again")):
            who.messages.append(Message("user", text))
            who.keep()
        assert first.conversation != second.conversation
        assert contents(store, second.conversation) == ["hello", "hi", "from two", "two again"]
        assert contents(store, first.conversation) == ["hello", "hi", "from one"]
        assert notes == ["this conversation was changed or deleted elsewhere; it goes on as a new one"]
        other.delete(first.conversation)
        first.save(store, "a name")
        found = store.find("a name")
        assert found is not None
        assert contents(store, found.id) == ["hello", "hi", "from one"]


def test_a_store_refuses_to_write_over_what_was_not_seen(tmp_path: Path) -> None:
    with Store(tmp_path / "one.db") as store:
        made = store.create()
        one = [Message("user", "one")]
        store.write(made, one, seen=[])
        with pytest.raises(ChangedError):
            store.write(made, [Message("user", "two")], seen=[])
        assert contents(store, made) == ["one"]
        store.write(made, [*one, Message("user", "two")], seen=one)
        store.rename(made, "Grüße an alle")
        assert [found.id for found in store.search("grüße AN")] == [made], "titles are searched, too"
        assert store.find("9" * 30) is None


def test_a_history_that_cannot_be_kept_is_said_once(tmp_path: Path) -> None:
    notes: list[str] = []
    (tmp_path / "history").mkdir()
    history = LineHistory(tmp_path / "history", notes.append)
    assert list(history.load_history_strings()) == []
    history.append_string("typed")
    assert history.get_strings() == ["typed"]
    assert notes == [f"typed lines are not kept: {tmp_path}/history: Is a directory"]


# streams


def test_json_keeps_its_letters_where_the_stream_is_not_unicode(monkeypatch: pytest.MonkeyPatch) -> None:
    for encoding, wanted in (("ascii", rb'{"text": "\u00e9\u6f22"}'), ("UTF-8", '{"text": "é漢"}'.encode())):
        raw = io.BytesIO()
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding=encoding, errors="replace"))
        generate._print_json({"text": "é漢"})
        assert raw.getvalue() == wanted + b"\n"


def test_a_full_disk_under_the_output_is_named() -> None:
    def full(text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    stream: Any = SimpleNamespace(write=full, name="<stdout>")
    with pytest.raises(OSError, match="No space") as caught:
        put(stream, "x")
    assert sentence(caught.value) == "No space left on device: writing to <stdout>"
    assert exit_code(caught.value) == 4


def test_long_lines_break_between_words(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen()
    screen.err_tty = False
    assert screen.fold("word " * 40) == "word " * 40, "whole in a pipe"
    screen.err_tty = True
    for columns, longest in ((30, 29), (5, 20), (0, 79)):
        monkeypatch.setattr(os, "get_terminal_size", lambda fd, n=columns: os.terminal_size((n, 24)))
        lines = screen.fold("word " * 40, 6).splitlines()
        assert max(map(len, lines)) <= longest
        assert set(" ".join(lines).split()) == {"word"}


# keys


def test_ctrl_c_at_a_question_inside_a_chat_is_a_stop(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The question before a download, asked by /model and /draft."""

    def asks(*args: Any) -> None:
        opening._confirm("Download 9 GB?")

    def pressed(*args: Any, **flags: Any) -> bool:
        raise click.Abort

    monkeypatch.setattr(click, "confirm", pressed)
    monkeypatch.setattr(opening, "open_engine", asks)
    monkeypatch.setattr(opening, "bring_drafter", asks)
    target = SimpleNamespace(num_layers=2, hidden_size=4, vocab_size=8, max_context=None)
    engine = SimpleNamespace(target=target, config={}, drafter=None, lane="plain", reason="")
    opened = SimpleNamespace(name="tiny", engine=engine)
    chat = SimpleNamespace(
        talk=SimpleNamespace(opened=opened, engine=engine, release=None), interrupts=Interrupts(), screen=Screen(),
        settings={}, yes=False,
    )  # fmt: skip
    for line in ("/model other", "/draft a/b"):
        assert commands.run(chat, line) is None
        assert "stopped" in capsys.readouterr().err


def test_ctrl_c_belongs_to_the_editor_while_one_runs() -> None:
    interrupts = Interrupts()
    with interrupts.watching():
        with interrupts.ignored():
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
            assert signal.getsignal(signal.SIGINT) is not signal.SIG_IGN, "an editor would inherit that"
        assert not interrupts.stopped


@pytest.mark.full
def test_ctrl_c_in_an_editor_and_errors_leave_the_chat_alive(
    open_chat: Open, cli_env: dict[str, str], tmp_path: Path
) -> None:
    script = tmp_path / "editor"
    script.write_text("#!/bin/sh\ntrap '' INT\necho EDITING\nsleep 2\necho edited > \"$1\"\n")
    script.chmod(0o755)
    cli_env["EDITOR"] = cli_env["VISUAL"] = str(script)
    chat = open_chat("--no-history")
    chat.say("first")
    for keys in ("/edit\r", "\x07"):
        chat.child.send(keys)
        chat.child.expect("EDITING")
        chat.child.send("\x03")
        chat.child.send("\x03")
        chat.child.expect("tok/s" if keys == "/edit\r" else "edited")
    chat.say("")
    chat.do("/file ~no-such-user-here/x", "cannot be used as a path")
    chat.do("/load 99999999999999999999", "there is no conversation")
    chat.do(f"/export json {tmp_path}/talk.json", "wrote")
    assert [m["content"] for m in exported(tmp_path / "talk.json")][::2] == ["edited", "edited"]
    assert chat.leave() == 0


@pytest.mark.full
def test_suspend_and_go_on(cli_env: dict[str, str], tiny_folder: Path) -> None:
    """Ctrl-Z at the prompt and in an answer; afterwards what is typed ahead is still kept."""
    child = pexpect.spawn("bash", ["--norc"], env=cli_env | TERMINAL | {"PS1": "SHELL "}, encoding="utf-8", timeout=60)
    child.expect("SHELL")
    child.sendline(f"{COMMAND} chat --no-history -m {tiny_folder} --max-tokens -1")
    child.expect(">>>")
    for line in ("", "a long one\r"):
        child.send(line)
        if line:
            child.expect(ANSWER)
        child.send("\x1a")
        child.expect("Stopped.*SHELL")
        child.sendline("fg")
        child.expect("mlx-spec chat")
    child.send("/stats")
    child.send("\x03")
    child.expect("stopped")
    child.expect(">>>")
    child.send("\r")
    child.expect("this chat: 1 answers")
    child.send("\x04")
    child.expect("SHELL")
    child.close(force=True)


@pytest.mark.full
def test_nothing_piped_into_a_chat_and_a_last_model_that_is_gone(run: Run, tmp_path: Path, tiny_folder: Path) -> None:
    done = run("chat", "-m", str(tiny_folder))
    assert (done.returncode, done.stderr) == (
        2,
        "error: nothing was piped in; pipe a message, or run this in a terminal\n",
    )
    with Store(tmp_path / "home/.local/share/mlx-spec/conversations.db") as store:
        store.write(store.create("/gone/away"), [Message("user", "x")])
    done = run("chat", "-c", stdin="hello")
    assert done.returncode == 3
    assert "/gone/away" in done.stderr
    assert "give another with -m NAME" in done.stderr
