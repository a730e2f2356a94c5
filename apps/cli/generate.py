"""``mlx-spec generate``: one prompt in, one answer out."""

from __future__ import annotations

import json
import os
import select
import stat
import sys
from collections.abc import Callable
from typing import Any

import click

from mlx_spec.apps.cli import options as flags_
from mlx_spec.apps.cli.output import Screen, put
from mlx_spec.errors import OptionError

MAX_TOKENS = 256
PATIENCE = 2.0  # seconds before we say that we are waiting for piped text


@click.command()
@click.option("-p", "--prompt", metavar="TEXT", help="The prompt; - reads it from standard input.")
@flags_.model_flags
@flags_.request_flags
@click.option("--raw", is_flag=True, help="Give the prompt to the model as it is, without a chat template.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
@click.option("--jsonl", "as_jsonl", is_flag=True, help="Print one JSON object per token, then the final one.")
@flags_.common_flags
def generate(prompt: str | None, raw: bool, as_json: bool, as_jsonl: bool, **flags: Any) -> None:
    """Answer one prompt.

    The answer goes to standard output, everything else to standard error. Piped text is the prompt, or the context
    of --prompt.

    \b
      mlx-spec generate -p "Why is the sky blue?" --temp 0.7 --seed 1
      cat notes.md | mlx-spec generate -p "Summarise this." --json
    """
    screen = Screen(flags_.verbosity(flags["verbose"], flags["quiet"]))
    if as_json and as_jsonl:
        raise OptionError("--json and --jsonl contradict each other; give one")
    if raw and flags["system"] is not None:
        raise OptionError("--raw and --system contradict each other; a raw prompt has no system message")
    settings, config = flags_.settle(flags)
    text = read_prompt(prompt, screen)
    for note in (*settings.notes, *flags_.unused(settings)):
        screen.note(note)

    from mlx_spec.apps.cli.opening import open_engine

    opened = open_engine(settings, config, screen, flags["yes"])
    for note in opened.switch_note(settings["think"]):
        screen.note(note)
    answer = _answer(opened, settings, text, raw, as_json, as_jsonl, screen)
    for note in answer.stats.notes:
        screen.note(note)
    machine = as_json or as_jsonl
    if settings["stats"] and not (machine and settings.source("stats") == "default"):
        from mlx_spec.apps.cli.figures import stats_line

        thinking = "" if raw else opened.thinking(settings["think"])
        line = screen.fold(stats_line(answer, thinking))
        screen.say(line) if settings.source("stats") == "flag" else screen.line(line, faint=True)
    if answer.stopped:
        raise KeyboardInterrupt


def _answer(opened: Any, settings: Any, text: str, raw: bool, as_json: bool, as_jsonl: bool, screen: Screen) -> Any:
    from mlx_spec.apps.cli.answers import NoWriter, PlainWriter, Writer, run_answer
    from mlx_spec.apps.cli.figures import final_object
    from mlx_spec.apps.cli.interrupts import Interrupts
    from mlx_spec.apps.cli.thinking import ThinkingView
    from mlx_spec.text import encode_prompt

    engine = opened.engine
    if raw:
        ids = encode_prompt(engine.tokenizer, text)
    else:
        system = [{"role": "system", "content": settings["system"]}] if settings["system"] else []
        messages = [*system, {"role": "user", "content": text}]
        ids = opened.encode(messages, settings["think"])
    writer: Writer = NoWriter() if as_json or as_jsonl else PlainWriter(screen.write)
    interrupts = Interrupts()
    with screen.working("reading the prompt") as working, interrupts.watching():
        answer = run_answer(
            engine, ids, flags_.request_options(settings, opened.config, MAX_TOKENS), writer,
            ThinkingView(screen, settings["show_thinking"]),
            cancel=interrupts.cancelled, progress=reading(working),
            seen=seen_by(working, _print_event if as_jsonl else None),
        )  # fmt: skip
    if as_json or as_jsonl:
        found = final_object(answer)
        _print_json({"type": "done"} | found if as_jsonl else found)
    return answer


def reading(working: Any) -> Callable[[int, int], None]:
    return lambda done, total: working.update(f"reading the prompt, {done} of {total} tokens")


def seen_by(working: Any, then: Callable[[Any], None] | None = None) -> Callable[[Any], None]:
    """The first response ends the moving line; every one goes on to ``then``."""

    def seen(response: Any) -> None:
        working.stop()
        if then is not None:
            then(response)

    return seen


def _print_event(response: Any) -> None:
    if response.finish_reason == "cancel":
        return
    names = ("text", "token", "from_draft", "round", "drafted", "accepted", "lane", "finish_reason")
    _print_json({"type": "token"} | {name: getattr(response, name) for name in names})


def _print_json(found: dict[str, Any]) -> None:
    unicode = sys.stdout.encoding.lower().replace("-", "") == "utf8"  # elsewhere letters would become "?"
    put(sys.stdout, json.dumps(found, ensure_ascii=not unicode) + "\n")


def read_prompt(prompt: str | None, screen: Screen) -> str:
    """The prompt from flag and pipe. Raises OptionError where there is none or it is not text."""
    piped = None
    if prompt == "-" or (prompt is None and not sys.stdin.isatty()):
        return _some(read_pipe(screen))
    if prompt is None:
        raise OptionError("there is no prompt; give --prompt TEXT or pipe one in")
    if _has_pipe():
        piped = read_pipe(screen)
    _encodable(prompt)
    return _some(f"{piped.strip()}\n\n{prompt}" if piped and piped.strip() else prompt)


def _some(text: str) -> str:
    if not text.strip():
        raise OptionError("the prompt is empty; give --prompt TEXT or pipe some text in")
    return text


def _encodable(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise OptionError(f"the prompt is not UTF-8 text (character {error.start})") from error


def _has_pipe() -> bool:
    """A pipe, socket or file on standard input; a terminal or /dev/null brings no context."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (OSError, ValueError):  # closed
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode) or stat.S_ISSOCK(mode)


def read_pipe(screen: Screen) -> str:
    """All of standard input as text. Says so where it has to wait."""
    if sys.stdin.isatty():
        screen.line("type the prompt; Ctrl-D ends it", faint=True)
    elif not select.select([sys.stdin], [], [], PATIENCE)[0]:
        screen.note("waiting for piped text on standard input (`</dev/null` if there is none)")
    try:
        return sys.stdin.buffer.read().decode("utf-8-sig").rstrip("\n")
    except UnicodeDecodeError as error:
        raise OptionError(f"standard input is not UTF-8 text (byte {error.start})") from error


__all__ = ["generate", "read_pipe", "read_prompt", "reading", "seen_by"]
