"""Prefix reuse: whatever the conversation does, warm equals cold, and caches, drafter and tokens agree."""

from __future__ import annotations

import random

import mlx_lm
import pytest
from toys import PlannedDrafter, save_tiny

from mlx_spec import Engine, Options


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return mlx_lm.load(str(save_tiny(tmp_path_factory.mktemp("tiny"))))


class ShortMemory(PlannedDrafter):
    """A drafter that cannot always go back as far as it is asked to."""

    def __init__(self, reach: int) -> None:
        super().__init__(lambda position, count: [position % 250] * count)
        self.reach = reach

    def open(self, *args, **kwargs):
        session = super().open(*args, **kwargs)
        trim = session.trim
        session.trim = lambda length: trim(length if session.length - length <= self.reach else 0)
        return session


def tokens(engine, prompt, session=None, **changes):
    responses = list(engine.stream(prompt, Options(**({"max_tokens": 12, "width": 4} | changes)), session))
    return [r.token for r in responses if r.token >= 0], responses[-1].stats


def agree(session):
    rows = session.start + len(session.tokens) - 1
    assert session.cache.length == rows
    assert session.draft is None or session.draft.length == rows


@pytest.mark.parametrize("reach", [0, 3, 10_000])
@pytest.mark.parametrize("seed", range(4))
def test_random_edits_are_equal_to_cold_runs(pair, reach, seed):
    """Append, cut, edit in the middle, repeat, start over: the text and the rounds of a cold session."""
    rng = random.Random(seed)
    engine = Engine(*pair, drafter=ShortMemory(reach))
    session, prompt = engine.session(), [rng.randrange(1, 256) for _ in range(20)]
    for _ in range(8):
        warm, stats = tokens(engine, prompt, session)
        cold, fresh = tokens(engine, prompt)
        assert warm == cold and stats.accepted_per_round == fresh.accepted_per_round
        agree(session)
        whole = prompt + warm
        at = rng.randrange(1, len(whole))
        prompt = rng.choice(
            [
                whole,
                [*whole, 7, 8],
                whole[:at],
                [*whole[:at], rng.randrange(1, 256), *whole[at + 1 :]],
                prompt,
                [9, 9, 9],
            ]
        )


def test_reuse_is_counted_and_leaves_at_least_the_anchor(pair):
    engine = Engine(*pair)
    session = engine.session()
    first, stats = tokens(engine, list(range(1, 30)), session)
    assert stats.cached_tokens == 0
    _, stats = tokens(engine, list(range(1, 30)), session)
    assert stats.cached_tokens == 28
    _, stats = tokens(engine, [*range(1, 30), *first[:3], 99], session)
    assert stats.cached_tokens == 31


def test_on_and_off_give_the_same_prefix_hits(pair):
    prompt = list(range(1, 40))
    hits = []
    for drafter in (None, ShortMemory(10_000)):
        engine = Engine(*pair, drafter=drafter)
        session = engine.session()
        tokens(engine, prompt, session)
        hits.append(tokens(engine, [*prompt, 50, 51], session)[1].cached_tokens)
    assert hits[0] == hits[1] > 0


def test_chat_a_then_reset_then_chat_b_is_a_fresh_chat_b(pair):
    engine = Engine(*pair)
    session = engine.session()
    tokens(engine, [5, 6, 7, 8], session)
    assert tokens(engine, [60, 61, 62], session)[0] == tokens(engine, [60, 61, 62])[0]
    agree(session)


def test_a_session_whose_drafter_failed_starts_it_anew(pair):
    faults = [True]

    def plan(position, count):
        if faults and position > 8:
            faults.clear()
            raise RuntimeError("once")
        return [1] * count

    engine = Engine(*pair, drafter=PlannedDrafter(plan))
    session = engine.session()
    _, stats = tokens(engine, [5, 6, 7, 8], session, fallback=True)
    assert stats.lane == "plain" and session.draft is None
    again, stats = tokens(engine, [5, 6, 7, 8], session, fallback=True)
    assert stats.lane == "planned" and stats.drafted > 0
    assert again == tokens(engine, [5, 6, 7, 8])[0]
    agree(session)


def test_plain_sessions_record_no_features(pair):
    drafter = PlannedDrafter(lambda position, count: [])
    drafter.layers = (0,)
    engine = Engine(*pair, drafter=drafter)
    assert engine.session(drafting=False).taps is None
    session = engine.session()
    tokens(engine, [5, 6, 7], session)
    assert session.taps is not None
    session.park()
    assert session.taps is None
    engine.close()
