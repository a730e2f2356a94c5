"""Prompt lookup against a brute-force search, its exact undo, and the drafter that proposes none."""

from __future__ import annotations

import random
from typing import Any

import pytest

from mlx_spec import drafters
from mlx_spec.drafters.ngram import NgramIndex
from mlx_spec.errors import DrafterError, OptionError


def brute(tokens: list[int], low: int, high: int, count: int) -> tuple[int, ...]:
    """The longest suffix that occurred before, its latest occurrence, copied over itself past the end."""
    for n in range(min(high, len(tokens) - 1), low - 1, -1):
        for end in range(len(tokens) - 1, n - 1, -1):
            if tokens[end - n : end] == tokens[-n:]:
                text = list(tokens)
                for _ in range(count):
                    text.append(text[len(text) - (len(tokens) - end)])
                return tuple(text[len(tokens) :])
    return ()


def built(tokens: list[int], low: int, high: int) -> NgramIndex:
    index = NgramIndex(low, high)
    for token in tokens:
        index.append(token)
    return index


@pytest.mark.parametrize(("low", "high"), [(1, 1), (2, 5), (1, 4), (3, 3)])
def test_proposals_equal_brute_force_and_trim_equals_a_fresh_build(low: int, high: int) -> None:
    rng = random.Random(low * 10 + high)
    found = 0
    for alphabet in (2, 3, 8):
        index, tokens = NgramIndex(low, high), []
        for _ in range(300):
            if tokens and rng.random() < 0.15:
                for _ in range(rng.randrange(len(tokens)) // 2):
                    index.pop()
                    tokens.pop()
                fresh = built(tokens, low, high)
                assert (index.tokens, index.last, index._older) == (tokens, fresh.last, fresh._older)
            token = rng.randrange(alphabet)
            index.append(token)
            tokens.append(token)
            proposed = index.continuation(5)
            assert proposed == brute(tokens, low, high, 5)
            found += bool(proposed)
    assert found > 100


def test_longest_match_wins_then_the_latest() -> None:
    drafter: Any = drafters.load("ngram", None, {"prompt_lookup_min": 1, "prompt_lookup_max": 3})
    session = drafter.open(1)
    session.ingest([2, 3, 7, 9, 3, 8, 5, 1, 2, 3], None, 0)
    assert session.length == 10
    draft = session.propose(3, 2)  # 1 2 3 occurred at the start; a 3 alone was followed by 8 more recently
    assert draft.host == (7, 9)
    assert draft.tokens.tolist() == [7, 9]
    session = drafter.open(3)
    session.ingest([4, 6, 3, 5, 6, 3], None, 0)
    assert session.propose(3, 1).host == (5,)


def test_no_match_proposes_nothing() -> None:
    session = drafters.load("ngram").open(1)
    session.ingest([2, 3, 4, 5, 1], None, 0)  # 1 occurred, but 5 1 did not, and the default minimum is 2
    assert len(session.propose(1, 8)) == 0
    assert session.propose(1, 8).host == ()


def test_session_trims_to_the_token_at_length() -> None:
    session = drafters.load("ngram").open(5, 100)
    session.ingest([6, 7, 5, 6], None, 100)
    assert session.length == 104
    assert session.propose(6, 3).host == (7, 5, 6)
    assert session.trim(500) == 104
    assert session.trim(102) == 102
    session.ingest([9, 5, 6], None, 102)
    assert session.propose(6, 4).host == (7, 9, 5, 6)
    assert session.trim(99) == 0
    with pytest.raises(DrafterError, match="from 7 on"):
        session.ingest([1], None, 7)
    with pytest.raises(DrafterError, match="not in the anchor 8"):
        session.propose(8, 1)


def test_settings() -> None:
    def bounds(**settings: int) -> tuple[int, int]:
        drafter: Any = drafters.load("ngram", None, settings)
        return drafter.low, drafter.high

    assert bounds() == (2, 5)
    assert bounds(prompt_lookup_max=1) == (1, 1)
    assert bounds(prompt_lookup_min=7) == (7, 7)
    assert bounds(prompt_lookup_min=3, prompt_lookup_max=4) == (3, 4)
    with pytest.raises(OptionError, match=r"prompt_lookup_min 4 .* prompt_lookup_max 3"):
        bounds(prompt_lookup_min=4, prompt_lookup_max=3)
    with pytest.raises(OptionError, match="has no option 'draft_window'; it takes prompt_lookup_max"):
        bounds(draft_window=4)
    assert drafters.load("ngram").default_width == 8


def test_plain_proposes_none() -> None:
    drafter: Any = drafters.load("plain")
    session = drafter.open(1, 4)
    session.ingest([1, 2], None, 4)
    assert (session.length, len(session.propose(2, 5)), session.trim(5), session.trim(9)) == (6, 0, 5, 5)
    assert (drafter.default_width, drafter.max_width, drafter.layers) == (1, 1, ())


@pytest.mark.parametrize("method", ["plain", "ngram"])
def test_methods_without_weights_refuse_what_they_cannot_use(method: str, tmp_path: Any) -> None:
    with pytest.raises(OptionError, match="needs no drafter model"):
        drafters.load(method, tmp_path)
    with pytest.raises(OptionError, match="draft_window 4"):
        drafters.load(method).open(1, 0, 4)
    with pytest.raises(OptionError, match="has no option 'draft_swa_causal'"):
        drafters.load(method, None, {"draft_swa_causal": "on"})
