"""A pair whose drafts are all right when it is wired right: faults of wiring leave the text alone and end acceptance.

``FAULTS`` plants one fault at a time. What each round leaves in the drafter's context is watched in the real loop.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from fitted_pair import BLOCK, MASK, PERIOD, cycle, save_pair

from mlx_spec import Engine, Options
from mlx_spec.contracts import Draft
from mlx_spec.drafters._dflash_context import LayerContext
from mlx_spec.drafters._dflash_model import Attention
from mlx_spec.drafters.dflash import DFlashDrafter, DFlashSession

STEADY = cycle(0, 50)
JUMP = [*cycle(0, 40), *cycle(7, 3)]  # the cycle breaks off: drafts are wrong until it has come round again
TOKENS = 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_pair(tmp_path_factory.mktemp("fitted"))


@pytest.fixture
def engine(folder: Path) -> Any:
    with Engine.load(folder) as made:
        yield made


def run(engine: Engine, prompt: list[int], session: Any = None, **options: Any) -> tuple[list[int], Any]:
    responses = list(engine.stream(prompt, Options(**({"max_tokens": TOKENS} | options)), session))
    return [r.token for r in responses], responses[-1].stats


SETTINGS: list[dict[str, Any]] = [{}, {"width": 5}, {"width": 2}, {"width": (8, 3, 5)}, {"draft_window": 4}]


@pytest.mark.parametrize("options", SETTINGS, ids=str)
def test_right_wiring_accepts_every_draft(engine: Engine, options: dict[str, Any]) -> None:
    text, stats = run(engine, STEADY, prefill_step=16, **options)
    assert text == cycle(50, TOKENS)
    assert MASK in text, "the mask id is a token like any other"
    assert stats.lane == "dflash"
    assert stats.accepted == stats.drafted > 0
    if not options:
        assert stats.widths == [BLOCK] * (TOKENS // BLOCK), "a trained block of 8 is an anchor and 7 drafts"
        assert stats.acceptance_length == BLOCK


def test_rejects_cost_no_context(engine: Engine) -> None:
    """After the break every draft is rejected for a period, then every one is accepted again."""
    text, stats = run(engine, JUMP)
    assert text == cycle(10, TOKENS)
    kept = stats.accepted_per_round
    lost = sum(1 for accepted in kept if accepted == 0)
    assert PERIOD - BLOCK <= lost <= PERIOD
    assert all(accepted == BLOCK - 1 for accepted in kept[lost:-1])


Patch = pytest.MonkeyPatch


def other_taps(*layers: int) -> Callable[[Patch, Engine], None]:
    def plant(patch: Patch, engine: Engine) -> None:
        engine.drafter.layers = layers  # type: ignore[union-attr]
        engine.use(engine.drafter)

    return plant


def from_slot_0(patch: Patch, engine: Engine) -> None:
    def propose(self: DFlashSession, anchor: int, count: int) -> Draft:
        return Draft(mx.argmax(self.logits(self.hidden(anchor)[:count]), axis=-1).astype(mx.int32))

    patch.setattr(DFlashSession, "propose", propose)


def keys_one_off(patch: Patch, engine: Engine) -> None:
    right = Attention.keys_values
    patch.setattr(Attention, "keys_values", lambda self, x, rope, position: right(self, x, rope, position + 1))


def ingesting(change: Callable[[DFlashSession, mx.array], mx.array]) -> Callable[[Patch, Engine], None]:
    """Features changed on their way in; the positions follow whatever was kept."""
    right = DFlashSession.ingest

    def plant(patch: Patch, engine: Engine) -> None:
        patch.setattr(DFlashSession, "ingest", lambda s, t, features, _: right(s, t, change(s, features), s.length))

    return plant


def rewind_too_far(session: DFlashSession, features: mx.array) -> mx.array:
    return features[:-1] if features.shape[0] < BLOCK else features


def keep_the_block(patch: Patch, engine: Engine) -> None:
    right = LayerContext.view

    def view(self: LayerContext, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        seen = right(self, keys, values)
        self.length += keys.shape[2]
        return seen

    patch.setattr(LayerContext, "view", view)
    ingesting(lambda session, features: features)(patch, engine)


def final_norm(patch: Patch, engine: Engine) -> None:
    norm = engine.model.model.norm
    ingesting(lambda s, f: mx.concatenate([f[:, : f.shape[1] // 2], norm(f[:, f.shape[1] // 2 :])], axis=-1))(
        patch, engine
    )


def one_row_late(patch: Patch, engine: Engine) -> None:
    last: list[mx.array] = []

    def change(session: DFlashSession, features: mx.array) -> mx.array:
        rows = mx.concatenate([last.pop() if last else features[:1], features])
        last.append(rows[-1:])
        return rows[:-1]

    ingesting(change)(patch, engine)


FAULTS: dict[str, Callable[[Patch, Engine], None]] = {
    "taps one layer early": other_taps(0, 2),
    "taps in another order": other_taps(3, 1),
    "the last tap after the final norm": final_norm,
    "features one row late": one_row_late,
    "the block read from slot 0": from_slot_0,
    "positions of keys off by one": keys_one_off,
    "a rejected round rewound one row too far": ingesting(rewind_too_far),
    "the block left in the context": keep_the_block,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_wiring_ends_acceptance_and_leaves_the_text(engine: Engine, fault: str, monkeypatch: Patch) -> None:
    right = run(engine, JUMP)[1]
    FAULTS[fault](monkeypatch, engine)
    text, stats = run(engine, JUMP)
    assert text == cycle(10, TOKENS)
    assert stats.lane == "dflash"
    share = 0.75 if fault == "a rejected round rewound one row too far" else 0.1  # a cycle brings old rows round again
    assert stats.accepted < share * right.accepted, f"{fault}: {stats.accepted_per_round}"


@pytest.mark.parametrize("nested_rope", [False, True])
@pytest.mark.parametrize("flat", [False, True])
def test_every_layout_accepts_as_much(folder: Path, tmp_path: Path, flat: bool, nested_rope: bool) -> None:
    """A reader that fell back to a default trained block or rope base would accept nothing here."""
    drafter = Path(shutil.copytree(folder / "drafter", tmp_path / "drafter"))
    config = json.loads((drafter / "config.json").read_text())
    if flat:
        config |= config.pop("dflash_config")
    if nested_rope:
        config["rope_parameters"] = {"rope_theta": config.pop("rope_theta"), "rope_type": "default"}
        del config["rope_scaling"]
    (drafter / "config.json").write_text(json.dumps(config))
    with Engine.load(folder, draft=drafter) as engine:
        assert run(engine, STEADY)[1].acceptance_length == BLOCK
    if flat or nested_rope:
        return
    config["rope_theta"] = 10000.0
    (drafter / "config.json").write_text(json.dumps(config))
    with Engine.load(folder, draft=drafter) as engine:
        assert run(engine, STEADY)[1].acceptance_length < 2, "the rope base does not matter here: a weak test"


def spoiled(patch: Patch) -> None:
    """Every draft wrong, all else as it was."""
    right = DFlashSession.propose
    patch.setattr(
        DFlashSession, "propose", lambda self, anchor, count: Draft((right(self, anchor, count).tokens + 1) % 256)
    )


def committed(context: LayerContext) -> list[mx.array]:
    return [array[..., : context.rows, :] for array in context.arrays()]


@pytest.mark.parametrize("prompt", [STEADY, JUMP], ids=["steady", "jump"])
def test_the_context_is_as_long_as_what_is_committed(engine: Engine, prompt: list[int], monkeypatch: Patch) -> None:
    """After every round, whatever it accepted: no row lost, no block row kept, each feature projected once."""
    projected: list[int] = []
    fc = type(engine.drafter.model.fc)  # type: ignore[union-attr]
    call = fc.__call__

    def counting(self: Any, x: mx.array) -> mx.array:
        if self is engine.drafter.model.fc:  # type: ignore[union-attr]
            projected.append(x.shape[1])
        return call(self, x)

    monkeypatch.setattr(fc, "__call__", counting)
    session = engine.session()
    for response in engine.stream(prompt, Options(max_tokens=TOKENS, width=(8, 3, 5), prefill_step=16), session):
        rows = len(session.tokens) - 1
        assert session.draft.length == session.cache.length == rows, f"round {response.round}"
        assert [context.rows for context in session.draft.contexts] == [rows]
        assert sum(projected) == rows
    emitted = [accepted + 1 for accepted in response.stats.accepted_per_round]
    assert projected[-len(emitted) :] == emitted, "a round projects the rows it committed and no others"


def test_the_context_is_the_same_by_accepts_and_by_rejects(engine: Engine, monkeypatch: Patch) -> None:
    held = []
    for width, spoil in ((8, False), (3, False), (8, True)):
        with monkeypatch.context() as patch:
            if spoil:
                spoiled(patch)
            session = engine.session()
            stats = run(engine, STEADY, session, width=width)[1]
        assert stats.accepted == (0 if spoil else stats.drafted)
        held.append(committed(session.draft.contexts[0]))
    for other in held[1:]:
        assert all(mx.array_equal(a, b) for a, b in zip(held[0], other, strict=True))


def test_a_prompt_said_again_is_reused_as_much_with_a_drafter(folder: Path) -> None:
    found = []
    for draft in ("auto", "ngram", None):
        with Engine.load(folder, draft=draft) as engine:
            session = engine.session()
            text = run(engine, STEADY, session, max_tokens=12)[0]
            on = run(engine, [*STEADY, *text[:9], 40], session, max_tokens=2)[1]
            found.append((engine.lane, on.cached_tokens, run(engine, STEADY, session, max_tokens=2)[1].cached_tokens))
    assert [lane for lane, *_ in found] == ["dflash", "ngram", "plain"]
    assert len({tuple(counts) for _, *counts in found}) == 1, found
    assert found[0][1:] == (len(STEADY) + 8, len(STEADY) - 1)


def test_acceptance_shown_is_acceptance_had(engine: Engine, monkeypatch: Patch) -> None:
    """All, none, and exactly three of seven."""
    right = DFlashSession.propose
    for good in (7, 0, 3):

        def propose(self: DFlashSession, anchor: int, count: int, good: int = good) -> Draft:
            tokens = right(self, anchor, count).tokens
            return Draft((tokens + (mx.arange(len(tokens)) >= good)) % 256)

        with monkeypatch.context() as patch:
            patch.setattr(DFlashSession, "propose", propose)
            text, stats = run(engine, STEADY)
        assert text == cycle(50, TOKENS)
        assert stats.accepted_per_round == [good] * (TOKENS // (good + 1))
        assert stats.acceptance_length == good + 1


def test_the_drafter_is_the_published_class(engine: Engine) -> None:
    """The pair goes through the loader like any checkpoint: nothing of it is made for the test."""
    assert type(engine.drafter) is DFlashDrafter
    assert engine.reason == "it travels with the target"
