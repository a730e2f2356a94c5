"""The chat as people use it: in a terminal (a pty), through a pipe, over several processes."""

from __future__ import annotations

import json
import sqlite3
import stat
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pexpect
import pytest

COMMAND = str(Path(sys.executable).with_name("mlx-spec"))
TERMINAL = {"TERM": "xterm-256color", "PROMPT_TOOLKIT_NO_CPR": "1"}  # nobody answers where the cursor is
ANSWER = "[^\x00-\x7f\u2800-\u28ff]"  # of the tiny model's text; what is typed is ASCII and a spinner is of dots
Open = Callable[..., "Terminal"]


class Terminal:
    """A chat in a pty. ``say`` waits for the figures after the answer, ``do`` for a command's words."""

    def __init__(self, args: list[str], env: dict[str, str]) -> None:
        self.child = pexpect.spawn(COMMAND, args, env=env, encoding="utf-8", timeout=60, dimensions=(30, 200))
        self.modes = termios.tcgetattr(self.child.child_fd)
        self.child.expect(">>>")

    def say(self, text: str, wait: str = r"tok/s[^\n]*\n") -> str:
        self.child.send(text + "\r")
        self.child.expect(wait)
        shown = self.child.before + self.child.after
        self.child.expect(">>>")
        return str(shown)

    do = say

    def leave(self, keys: str = "\x04") -> int:
        self.child.send(keys)
        self.child.expect(pexpect.EOF)
        self.child.close()
        return int(self.child.exitstatus)


@pytest.fixture
def open_chat(cli_env: dict[str, str], tiny_folder: Path, tmp_path: Path) -> Iterator[Open]:
    opened: list[Terminal] = []

    def start(*args: str, color: bool = True) -> Terminal:
        env = cli_env | TERMINAL
        if color:
            del env["NO_COLOR"]
        words = ["chat", "--blas", "bundled", "--max-tokens", "12", *args]
        opened.append(Terminal(words if "-c" in args else [*words, "-m", str(tiny_folder)], env))
        return opened[-1]

    yield start
    for terminal in opened:
        terminal.child.close(force=True)


def exported(path: Path) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = json.loads(path.read_text())["messages"]
    return messages


def cold_answer(folder: Path, messages: list[dict[str, Any]], tokens: int) -> str:
    """What a fresh engine says to this history."""
    from mlx_spec import Engine, Options
    from mlx_spec.text import encode_chat

    with Engine.load(folder, draft="plain") as engine:
        turns = [{"role": m["role"], "content": m["content"]} for m in messages]
        prompt = encode_chat(engine.tokenizer, turns)
        return "".join(r.text for r in engine.stream(prompt, Options(max_tokens=tokens)))


def test_a_talk_with_interruptions_and_its_continuation(
    open_chat: Open, cli_env: dict[str, str], tiny_folder: Path, tmp_path: Path
) -> None:
    chat = open_chat()
    figures = chat.say("hello")
    for word in ("12 tok", "acceptance length", "drafts accepted", "rounds", "lane ngram (", "TTFT", "peak", "blas"):
        assert word in figures
    assert "vs plain" not in figures, "a ratio is shown only after it was measured"
    chat.say("two\x1b\rlines")  # Alt-Enter
    chat.say('"""three\rmore\nlines"""')  # Enter inside a block, Ctrl-J
    chat.say("\x1b[200~pasted\r\nlines\x1b[201~")  # as a terminal brackets a paste

    chat.do("/set max_tokens -1", "max_tokens = -1")
    chat.child.send("a long one\r")
    chat.child.expect(ANSWER)
    chat.child.send("\x03")
    chat.child.expect("stopped")
    chat.child.expect(">>>")

    chat.do("/set max_tokens 12", "max_tokens = 12")
    assert "prompt tokens reused" in chat.say("after the stop")
    chat.do("/set seed 5", "seed = 5")
    chat.do("/set temperature 0.9", "temperature = 0.9")
    chat.say("sampled")
    chat.say("/regen")
    assert "same tokens: yes" in chat.do("/compare", "vs plain[^\n]*\n")
    chat.do(f"/export json {tmp_path}/one.json", "wrote")
    chat.do("/undo", "took back")
    chat.do("/save my talk", "saved as 'my talk'")
    chat.do("/nonsense", "there is no command /nonsense")

    messages = exported(tmp_path / "one.json")
    assert [m["role"] for m in messages] == ["user", "assistant"] * 7
    users = [m["content"] for m in messages[::2]]
    assert users[:4] == ["hello", "two\nlines", "three\nmore\nlines", "pasted\nlines"]
    assert users[4:] == ["a long one", "after the stop", "sampled"]
    assert [m["stopped"] for m in messages[1::2]] == [False] * 4 + [True] + [False] * 2
    assert messages[11]["content"] == cold_answer(tiny_folder, messages[:11], 12), "warm after a stop equals cold"

    chat.child.send("\x03")
    chat.child.expect("Ctrl-D")
    chat.child.expect(">>>")
    assert chat.leave("\x03") == 130

    again = open_chat("-c", color=False)  # the conversation knows its model
    assert "my talk" in again.do("/list", r"this one[^\n]*\n")
    again.say("and on")
    again.do(f"/export json {tmp_path}/two.json", "wrote")
    again.do("/clear", "new conversation")
    again.say("fresh")
    again.do(f"/export json {tmp_path}/fresh.json", "wrote")
    again.do("/load my", "continuing 'my talk', 14 messages")
    again.do("/file /nowhere", "No such file")
    again.do("/set temperature hot", "temperature must be a number")
    assert again.leave() == 0
    two, fresh = exported(tmp_path / "two.json"), exported(tmp_path / "fresh.json")
    assert two[:12] == messages[:12], "the undone exchange is gone, the rest is as it was"
    assert [m["content"] for m in two[12::2]] == ["and on"]
    assert fresh[1]["content"] == cold_answer(tiny_folder, fresh[:1], 12), "nothing of the old talk is left"

    data = tmp_path / "home/.local/share/mlx-spec"
    assert {f.name: stat.S_IMODE(f.stat().st_mode) for f in data.iterdir() if f.suffix != ".db-wal"} == {
        "conversations.db": 0o600,
        "history": 0o600,
    }
    assert "+and on" in (data / "history").read_text()


def test_piped_text_is_one_answer(cli_env: dict[str, str], tiny_folder: Path, tmp_path: Path) -> None:
    words = [COMMAND, "chat", "-m", str(tiny_folder), "--max-tokens", "12", "--blas", "bundled", "--no-history"]
    done = subprocess.run(words, input="hello", capture_output=True, text=True, env=cli_env, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip("\n") == cold_answer(tiny_folder, [{"role": "user", "content": "hello"}], 12).rstrip("\n")
    assert "lane ngram" in done.stderr
    assert "\x1b" not in done.stderr
    assert not (tmp_path / "home/.local/share/mlx-spec").exists(), "--no-history keeps nothing"


@pytest.mark.full
def test_a_second_ctrl_c_leaves_at_once_and_the_terminal_is_as_before(open_chat: Open, tmp_path: Path) -> None:
    chat = open_chat("--no-history")
    chat.do("/set max_tokens -1", "= -1")
    chat.child.send("a long one\r")
    chat.child.expect(ANSWER)
    assert termios.tcgetattr(chat.child.child_fd) != chat.modes
    chat.child.send("\x03")
    chat.child.expect("stopped")
    chat.child.send("\x03")
    chat.child.expect(pexpect.EOF)
    assert termios.tcgetattr(chat.child.child_fd) == chat.modes
    chat.child.close()
    assert chat.child.exitstatus == 130


@pytest.mark.full
def test_ctrl_c_while_the_model_loads_or_the_prompt_is_read(
    open_chat: Open, cli_env: dict[str, str], tiny_folder: Path
) -> None:
    env = cli_env | TERMINAL
    del env["NO_COLOR"]
    child = pexpect.spawn(COMMAND, ["chat", "-m", str(tiny_folder)], env=env, timeout=60)
    child.expect("loading")
    child.send("\x03")
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 130

    chat = open_chat("--no-history")
    chat.child.send("words " * 600 + "\r")
    chat.child.send("\x03")
    chat.child.expect("stopped|Ctrl-D")
    chat.child.expect(">>>")
    chat.say("hello")
    assert chat.leave() == 0


@pytest.mark.full
def test_commands_of_the_engine(open_chat: Open, tiny_folder: Path, tmp_path: Path) -> None:
    chat = open_chat("--no-history")
    chat.do("/draft off", r"lane plain")
    assert "lane plain" in chat.say("hello")
    chat.do("/compare", "lane plain is in use")
    chat.do("/draft ngram", r"lane ngram")
    chat.do("/draft nonsense/nothing", "error: ")
    assert "lane ngram" in chat.say("hello")
    chat.do("/model /nowhere", "error: ")
    chat.say("still here")
    chat.do(f"/model {tiny_folder}", "2 layers")
    chat.say("here again")
    chat.do("/trace on", "trace on")
    chat.say("traced")
    chat.do("/stats", "accepted per round")
    chat.do("/tokens", r"tokens of 4096")
    chat.do("/show template", "assistant")
    chat.do("/system Be brief.", "system: Be brief.")
    (tmp_path / "notes.txt").write_text("Some notes.")
    chat.do(f"/file {tmp_path}/notes.txt", "goes with your next message")
    chat.say("about the file")
    chat.do("/copy", r"\x1b\]52;c;[A-Za-z0-9+/=]+\x07")
    chat.do(f"/export json {tmp_path}/talk.json", "wrote")
    messages = exported(tmp_path / "talk.json")
    assert messages[0]["role"] == "system"
    assert messages[-2]["content"] == "File notes.txt:\n```\nSome notes.\n```\n\nabout the file"
    chat.do(f"/export md {tmp_path}/talk.json", "cannot write")
    chat.child.send("/se\t")  # completed as far as it is clear
    chat.child.expect("/set")
    assert chat.leave("\x03\x04") == 0


@pytest.mark.full
def test_terminals_that_can_little(cli_env: dict[str, str], tiny_folder: Path, tmp_path: Path) -> None:
    """TERM=dumb gets no escape codes; an answer that goes to a file leaves the talk on the terminal."""
    line = f"{COMMAND} chat --no-history -m {tiny_folder} --max-tokens 8 --blas bundled"
    for env, rest in ((cli_env | {"TERM": "dumb"}, ""), (cli_env | TERMINAL, f" >{tmp_path}/answers")):
        child = pexpect.spawn("bash", ["-c", line + rest], env=env, encoding="utf-8", timeout=60)
        child.expect(">>>")
        child.send("hello\r")
        child.expect("tok/s")
        assert ("\x1b" in child.before) == bool(rest)
        child.expect(">>>")
        child.send("\x04")
        child.expect(pexpect.EOF)
        child.close()
        assert child.exitstatus == 0
    answer = (tmp_path / "answers").read_text(errors="replace")
    assert answer.endswith("\n")
    assert "\x1b[" not in answer


@pytest.mark.full
def test_the_editor_changes_the_last_message(open_chat: Open, cli_env: dict[str, str], tmp_path: Path) -> None:
    script = tmp_path / "editor"
    script.write_text('#!/bin/sh\necho "edited" > "$1"\n')
    script.chmod(0o755)
    cli_env["EDITOR"] = cli_env["VISUAL"] = str(script)
    chat = open_chat()
    chat.say("first")
    chat.say("second")
    chat.say("/edit")
    chat.child.send("typed\x07")  # Ctrl-G
    chat.child.expect("edited")
    chat.say("")
    chat.do(f"/export json {tmp_path}/talk.json", "wrote")
    assert [m["content"] for m in exported(tmp_path / "talk.json")][::2] == ["first", "edited", "edited"]
    assert chat.leave() == 0


@pytest.mark.full
def test_a_damaged_conversation_file_is_a_sentence_and_stays(
    cli_env: dict[str, str], tiny_folder: Path, tmp_path: Path
) -> None:
    path = tmp_path / "home/.local/share/mlx-spec/conversations.db"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"something else" * 99)
    words = [COMMAND, "chat", "-c", "-m", str(tiny_folder)]
    done = subprocess.run(words, input="hello", capture_output=True, text=True, env=cli_env, timeout=120)
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {path} is damaged")
    assert path.read_bytes() == b"something else" * 99
    with pytest.raises(sqlite3.DatabaseError):
        sqlite3.connect(path).execute("SELECT 1 FROM messages")
