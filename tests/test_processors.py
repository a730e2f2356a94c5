"""Logit bias and penalties: bit for bit mlx-lm's, for every row count."""

from __future__ import annotations

import itertools
import math
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm import sample_utils
from rows import normalised, random_rows

from mlx_spec.errors import OptionError
from mlx_spec.sampling import make_chooser, make_logits_processors

NONE = mx.array([], dtype=mx.uint32)
PROCESSORS: list[dict[str, Any]] = [
    {"logit_bias": {3: 5.0, 17: -2.25, 299: 1}},
    {"logit_bias": {2: -math.inf, 5: 4}},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.7, "repetition_context_size": 1},
    {"repetition_penalty": 1.5, "repetition_context_size": 5},
    {"repetition_penalty": 2, "repetition_context_size": 0},
    {"presence_penalty": 0.6, "presence_context_size": 3},
    {"presence_penalty": -1.1, "presence_context_size": 0},
    {"frequency_penalty": 0.37},
    {"frequency_penalty": -0.5, "frequency_context_size": 2},
    {"frequency_penalty": 1.1, "frequency_context_size": 0},
    {
        "logit_bias": {1: 0.3},
        "repetition_penalty": 1.2,
        "repetition_context_size": 6,
        "presence_penalty": 0.4,
        "presence_context_size": 4,
        "frequency_penalty": 0.21,
        "frequency_context_size": 9,
    },
]


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
@pytest.mark.parametrize("settings", PROCESSORS, ids=str)
def test_processors_equal_mlx_lm_for_every_row_count(settings: dict[str, Any], dtype: mx.Dtype) -> None:
    """Windows, repeats, histories shorter and longer than the window; rows, one row and the plain call."""
    stock, ours = sample_utils.make_logits_processors(**settings), make_logits_processors(**settings)
    assert len(stock) == len(ours)
    chooser = make_chooser(None, ours)
    rng = np.random.default_rng(5)
    for length, count in itertools.product((1, 2, 5, 40), (1, 2, 7)):
        history = [int(token) for token in rng.integers(0, 6, length)]  # repeats in every window
        draft = [int(token) for token in rng.integers(0, 6, count - 1)]
        logits = random_rows(count, dtype=dtype, seed=length * 10 + count)
        unevaluated = mx.array(draft, dtype=mx.uint32) + mx.zeros((count - 1,), dtype=mx.uint32)
        _, logprobs = chooser.rows(logits, history, unevaluated)
        for row in range(count):
            before = history + draft[:row]
            wanted = by_call = logits[row : row + 1]
            wanted, by_call = mx.array(wanted), mx.array(by_call)
            for stock_one, our_one in zip(stock, ours, strict=True):
                wanted = stock_one(mx.array(before), wanted)
                by_call = our_one(mx.array(before), by_call)
            assert mx.array_equal(by_call, wanted)
            assert logprobs.dtype == dtype
            assert mx.array_equal(logprobs[row], normalised(wanted)[0]), (length, count, row)
            assert mx.array_equal(chooser.one(logits[row : row + 1], before)[1], logprobs[row])


@pytest.mark.parametrize("settings", PROCESSORS, ids=str)
def test_processors_without_any_history(settings: dict[str, Any]) -> None:
    """mlx-lm leaves a row alone that has no token before it; later rows see the draft."""
    ours, logits, draft = make_logits_processors(**settings), random_rows(4), [3, 3, 5]
    for processor, stock in zip(ours, sample_utils.make_logits_processors(**settings), strict=True):
        rows = processor.rows(logits, [], mx.array(draft))
        for row in range(4):
            wanted = stock(mx.array(draft[:row], dtype=mx.int32), mx.array(logits[row : row + 1]))
            assert mx.array_equal(rows[row], wanted[0])
        assert mx.array_equal(processor.rows(logits[:1], [], NONE), rows[:1])


def test_rows_do_not_change_the_logits_they_are_given() -> None:
    logits = random_rows(3)
    kept = np.array(logits)
    for settings in PROCESSORS:
        chooser = make_chooser(None, make_logits_processors(**settings))
        mx.eval(chooser.rows(logits, [1, 2, 3], mx.array([3, 3])))
        assert np.array_equal(np.array(logits), kept)


def test_one_more_repeat_in_the_draft_flips_the_pick() -> None:
    """Case D6: every token counts once for the rows after it, the last accepted one too."""
    logits = mx.zeros((4, 8))
    logits[:, 3] = 1.0
    chooser = make_chooser(None, make_logits_processors(frequency_penalty=0.4))
    tokens, _ = chooser.rows(logits, [7], mx.array([3, 3, 3]))
    assert tokens.tolist() == [3, 3, 3, 0]  # 1.0, 0.6, 0.2, -0.2
    tokens, _ = chooser.rows(logits, [3], mx.array([3, 3, 3]))
    assert tokens.tolist() == [3, 3, 0, 0]


def test_no_processors_for_nothing() -> None:
    assert make_logits_processors() == []
    assert make_logits_processors({}, 0.0, 20, 0, 20, 0.0, 20) == []


@pytest.mark.parametrize(
    "settings",
    [
        {"logit_bias": {-1: 1.0}},
        {"logit_bias": {"5": 1.0}},
        {"logit_bias": {5: math.nan}},
        {"logit_bias": {5: math.inf}},
        {"logit_bias": {5: "1"}},
        {"repetition_penalty": -1.0},
        {"repetition_penalty": math.nan},
        {"repetition_penalty": True},
        {"repetition_penalty": 1.1, "repetition_context_size": -1},
        {"presence_penalty": math.inf},
        {"presence_penalty": 0.5, "presence_context_size": 2.5},
        {"frequency_penalty": "0.5"},
    ],
    ids=str,
)
def test_processor_settings_out_of_range_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        make_logits_processors(**settings)


def test_a_bias_beyond_the_vocabulary_is_refused() -> None:
    with pytest.raises(OptionError, match="token 300; the model has 300"):
        make_chooser(None, make_logits_processors({300: 1.0})).rows(random_rows(2), [1], mx.array([1]))
