"""The parts of the terminal front ends that need no engine and no process."""

from __future__ import annotations

import io
import json
import signal
from types import SimpleNamespace
from typing import Any

import click
import pytest
from rich.console import Console

from mlx_spec import errors
from mlx_spec.apps import cli
from mlx_spec.apps.cli import options
from mlx_spec.apps.cli.editor import PATHS, CommandCompleter, unfence
from mlx_spec.apps.cli.interrupts import Interrupts
from mlx_spec.apps.cli.markdown import MarkdownWriter, ends
from mlx_spec.apps.cli.output import clean
from mlx_spec.apps.cli.slash_engine import difference
from mlx_spec.apps.cli.thinking import Splitter

TEXT = """# Title

A paragraph with *emphasis*
over two lines.

1. one

   still one
2. two

| a | b |
|---|---|
| 1 | 2 |

```python
def f():

    return 1
```

> a quote

last **words**
"""


# streaming markdown


def test_blocks_are_cut_where_later_text_cannot_change_them() -> None:
    """At every prefix the part called finished parses to the same blocks as in the whole text."""
    from rich.markdown import Markdown

    def blocks(text: str) -> list[tuple[str, str]]:
        return [(token.type, token.content) for token in Markdown(text).parsed]

    cuts = set()
    for size in range(len(TEXT) + 1):
        cut = max(ends(TEXT[:size]), default=0)
        cuts.add(cut)
        assert blocks(TEXT) == blocks(TEXT[:cut]) + blocks(TEXT[cut:]), TEXT[:cut]
    assert len(cuts) == 7, "every block but the last is finished at some point, a list or a fence never in parts"


def render(text: str, step: int) -> str:
    console = Console(file=io.StringIO(), width=60, height=20)  # not a terminal: Live draws nothing in between
    writer = MarkdownWriter(console, clock=iter(range(10**6)).__next__)
    for at in range(0, len(text), step):
        writer.feed(text[at : at + step])
    writer.close()
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_screen_ends_up_the_same_however_the_text_arrives() -> None:
    whole = render(TEXT, len(TEXT))
    for step in (1, 3, 7):
        streamed = render(TEXT, step)
        assert streamed == whole, "blank lines included"
        for word in ("Title", "emphasis", "def", "quote", "last"):
            assert streamed.count(word) == 1, f"{word} is printed once"


def test_a_long_answer_costs_its_open_block_only(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    real = MarkdownWriter._lines
    monkeypatch.setattr(MarkdownWriter, "_lines", lambda self, text: sizes.append(len(text)) or real(self, text))
    render("Some words of a paragraph.\n\n" * 300, 16)
    assert max(sizes) < 400


def test_an_open_block_taller_than_the_terminal_shows_its_end() -> None:
    console = Console(file=io.StringIO(), width=40, height=10, force_terminal=True)
    writer = MarkdownWriter(console, clock=iter(range(10**6)).__next__)
    writer.feed("```\n" + "\n".join(f"line {n}" for n in range(50)))
    assert isinstance(console.file, io.StringIO)
    drawn = console.file.getvalue()
    assert "line 49" in drawn
    assert "line 30" not in drawn
    writer.close()
    assert "line 30" in console.file.getvalue()


def test_a_models_output_does_not_drive_the_terminal() -> None:
    assert clean("a\x1b]52;c;xx\x07b\tc\r\nd\x9b31m") == "a�]52;c;xx�b\tc\nd�31m"


# thinking


def tokenizer(**changes: Any) -> Any:
    base = {
        "has_thinking": True,
        "think_start": "<think>",
        "think_end": "</think>",
        "structural_markers": (),
        "response_transitions": {},
        "response_initial_state": None,
        "rfind_think_start": lambda prompt: prompt.index(1) if 1 in prompt else -1,
        "rfind_think_end": lambda prompt: prompt.index(2) if 2 in prompt else -1,
    }
    return SimpleNamespace(**(base | changes))


def split(text: str, step: int, prompt: list[int], **changes: Any) -> tuple[str, str]:
    splitter = Splitter(tokenizer(**changes), prompt)
    pieces = [piece for at in range(0, len(text), step) for piece in splitter.feed(text[at : at + step])]
    pieces += splitter.end()
    return "".join(t for thinking, t in pieces if thinking), "".join(t for thinking, t in pieces if not thinking)


@pytest.mark.parametrize("step", [1, 2, 5, 100])
def test_thinking_is_cut_from_the_answer(step: int) -> None:
    assert split("<think>\nhm < 3\n</think>\n\nyes <b>", step, []) == ("\nhm < 3\n", "yes <b>")
    assert split("hm</think>\n\nyes", step, [0, 1, 5]) == ("hm", "yes"), "the template opened it"
    assert split("yes", step, [0, 1, 2, 5]) == ("", "yes"), "the template opened and closed it"
    assert split("  plain <thi", step, []) == ("", "  plain <thi"), "an unfinished marker is text"
    assert split("<think>cut sho", step, []) == ("cut sho", ""), "ended inside thinking"
    assert split("<think>x</think>", step, [], has_thinking=False) == ("", "<think>x</think>")


# Ctrl-C


def test_one_press_stops_and_two_leave() -> None:
    now = [10.0]
    interrupts = Interrupts(lambda: now[0])
    former = signal.getsignal(signal.SIGINT)
    with interrupts.watching():
        assert not interrupts.cancelled()
        signal.raise_signal(signal.SIGINT)
        assert interrupts.cancelled()
        now[0] += 3
        signal.raise_signal(signal.SIGINT)
        now[0] += 1
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is former
    with interrupts.watching():
        assert interrupts.cancelled(), "a press just before the answer is not lost"
    interrupts.forget()
    assert not interrupts.cancelled()


# choosing a model


class Lines:
    """A screen that keeps what it is told."""

    verbosity = 0

    def __init__(self) -> None:
        self.lines: list[str] = []

    def line(self, text: str, faint: bool = False) -> None:
        self.lines.append(text)


@pytest.mark.parametrize(
    ("suggestion", "asked", "answer", "yes", "wanted"),
    [
        (None, True, True, False, "smollm2"),
        (SimpleNamespace(name="big", line="Big suits."), True, True, False, "big"),
        (SimpleNamespace(name="big", line="Big suits."), True, False, False, "smollm2"),
        (SimpleNamespace(name="big", line="Big suits."), False, True, False, "smollm2"),
        (SimpleNamespace(name="big", line="Big suits."), False, False, True, "big"),
    ],
)
def test_who_names_no_model_is_told_the_choice(
    suggestion: Any, asked: bool, answer: bool, yes: bool, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlx_spec.apps import models
    from mlx_spec.apps.cli import opening

    monkeypatch.setattr(models, "recommend", lambda: suggestion)
    monkeypatch.setattr(opening, "_can_ask", lambda: asked)
    monkeypatch.setattr(opening, "_confirm", lambda question: answer)
    screen = Lines()
    assert opening.choose(screen, yes) == wanted  # type: ignore[arg-type]
    assert wanted in screen.lines[-1]
    assert "--model" in screen.lines[-1]


def test_a_drafter_is_asked_about_before_it_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    from mlx_spec import hub
    from mlx_spec.apps.cli.opening import Asking, bring_drafter

    fetched: list[str] = []
    monkeypatch.setattr(hub, "local", lambda name: None)
    monkeypatch.setattr(hub, "look", lambda name, check: SimpleNamespace(name=name, size=3e9))
    monkeypatch.setattr(hub, "fetch", lambda found, progress: fetched.append(found.name))
    bring_drafter("ngram", lambda question: False, print)
    bring_drafter(None, lambda question: False, print)
    with pytest.raises(errors.OptionError, match="not fetched"):
        bring_drafter("a/b", lambda question: False, print)
    monkeypatch.setattr("mlx_spec.apps.cli.opening._can_ask", lambda: False)
    with pytest.raises(errors.OptionError, match=r"3\.0 GB.*--yes"):
        bring_drafter("a/b", Asking(Lines(), False).within(None), print)  # type: ignore[arg-type]
    assert fetched == []
    bring_drafter("a/b", Asking(Lines(), True).within(None), print)  # type: ignore[arg-type]
    assert fetched == ["a/b"]

    def nowhere(name: str, check: Any) -> Any:
        raise errors.OfflineError(name)

    monkeypatch.setattr(hub, "look", nowhere)
    bring_drafter("a/b", lambda question: True, print, fallback=True)
    with pytest.raises(errors.OfflineError):
        bring_drafter("a/b", lambda question: True, print)


def test_long_work_without_a_terminal_is_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    from mlx_spec.apps.cli import output

    now = [100.0]
    monkeypatch.setattr(output.time, "monotonic", lambda: now[0])
    lines: list[str] = []
    working = output.Working("x", visible=False, line=lines.append)
    for second in range(25):
        now[0] = 100.0 + second
        working.report(f"fetching: {second}")
        working.update("never a line")
    working.report("converting")
    working.stop()
    assert lines == ["fetching: 0", "fetching: 10", "fetching: 20", "converting"], "a new step does not wait"


# flags


def settle(tmp_path: Any, monkeypatch: pytest.MonkeyPatch, **flags: Any) -> Any:
    monkeypatch.setenv("MLX_SPEC_CONFIG", str(tmp_path / "none.toml"))
    return options.settle(flags)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"method": "plain", "draft": "x/y"}, ["--method plain", "x/y"]),
        ({"method": "ngram", "draft": "off"}, ["--method ngram", "off"]),
        ({"method": "nothing"}, ["nothing", "ngram", "plain"]),
        ({"speculative_config": "{"}, ["not JSON"]),
        ({"speculative_config": "[1]"}, ["object"]),
        ({"speculative_config": '{"widht": 4}'}, ["widht", "num_speculative_tokens"]),
        ({"speculative_config": '{"method": "nothing"}'}, ["nothing", "ngram"]),
        ({"speculative_config": '{"method": "ngram"}', "method": "plain"}, ["plain", "ngram"]),
        ({"speculative_config": '{"model": "a/b"}', "draft": "c/d"}, ["a/b", "c/d"]),
        ({"speculative_config": '{"num_speculative_tokens": 3}', "width": 8}, ["width 8", "4"]),
        ({"speculative_config": '{"draft_window": 3}', "draft_window": 8}, ["8", "3"]),
    ],
)
def test_contradictions_name_both_sides(
    flags: dict[str, Any], words: list[str], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(errors.OptionError) as caught:
        settle(tmp_path, monkeypatch, **flags)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_what_agrees_is_accepted(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    same = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 5}
    _, config = settle(tmp_path, monkeypatch, method="ngram", width=4, speculative_config=json.dumps(same))
    assert (config.method, config.model, config.prompt_lookup_max) == ("ngram", None, 5)
    assert settle(tmp_path, monkeypatch, draft="off")[1].method == "plain"
    assert settle(tmp_path, monkeypatch, draft="auto")[1].model is None


def test_exit_codes_and_one_line() -> None:
    codes = {
        errors.OptionError("x"): 2,
        click.UsageError("x"): 2,
        errors.ModelNotFoundError("x"): 3,
        errors.OfflineError("x"): 3,
        errors.ResourceError("x"): 4,
        MemoryError(): 4,
        OSError(28, "No space left on device"): 4,
        RuntimeError("[malloc] Unable to allocate 1 bytes."): 4,
        errors.CheckpointError("x"): 1,
        errors.PairError("x"): 1,
        errors.ContextLengthError("x"): 1,
        RuntimeError("x"): 1,
        KeyboardInterrupt(): 130,
    }
    for error, code in codes.items():
        assert cli.exit_code(error) == code, error
        assert "\n" not in cli.sentence(error)
    assert cli.sentence(errors.PairError("one\n  two")) == "one two"


# the editor


def complete(completer: CommandCompleter, text: str) -> list[str]:
    from prompt_toolkit.completion import CompleteEvent
    from prompt_toolkit.document import Document

    return [found.text for found in completer.get_completions(Document(text), CompleteEvent())]


def test_completion_of_commands_words_and_paths(tmp_path: Any) -> None:
    (tmp_path / "notes.txt").write_text("x")
    given = {("set", ()): ["seed", "stats", "width"], ("set", ("stats",)): ["on", "off"], ("file", ()): PATHS}
    completer = CommandCompleter(["help", "set", "save"], lambda name, before: given.get((name, tuple(before)), ()))
    assert complete(completer, "/s") == ["/save", "/set"]
    assert complete(completer, "/set s") == ["seed", "stats"]
    assert complete(completer, "/set stats o") == ["on", "off"]
    assert complete(completer, "/set stats on ") == []
    assert complete(completer, f"/file {tmp_path}/no") == ["tes.txt"]
    assert complete(completer, "s") == []


def test_every_command_is_described_and_completes() -> None:
    from mlx_spec.apps.cli.commands import ALL, words

    wanted = (
        "help exit quit bye clear new regen retry undo edit system set show model draft file save load list export "
        "copy stats compare trace tokens"
    )
    assert set(wanted.split()) <= set(ALL)
    assert all(found.help.endswith(".") for found in ALL.values())
    assert words(None, "set", ["exactness"]) == ("fast", "exact", "stock", "default")
    assert words(None, "show", []) == ("info", "params", "system", "template", "draft")


def test_a_block_loses_its_marks() -> None:
    assert unfence('"""one\ntwo"""') == "one\ntwo"
    assert unfence('say """x""" twice') == 'say """x""" twice'


def test_where_two_token_lists_part() -> None:
    assert difference([1, 2], [1, 2]) == "yes"
    assert difference([1, 2, 3], [1, 9, 3]) == "no (first difference at 1)"
    assert difference([1, 2], [1, 2, 3]) == "no (first difference at 2)"
