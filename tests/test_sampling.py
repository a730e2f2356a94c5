"""Sampler, processors and chooser: the same as mlx-lm's where mlx-lm has them, the same for any grouping of rows."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm import sample_utils
from mlx_lm.generate import generate_step
from rows import normalised, random_rows
from toys import tiny_qwen3

from mlx_spec.errors import OptionError
from mlx_spec.sampling import KeyedChooser, LazyChooser, Sampler, make_chooser, make_logits_processors, make_sampler

FILTERS: list[dict[str, Any]] = [
    {},
    {"top_p": 0.9},
    {"top_p": 1e-9},
    {"top_p": 0.99999},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"min_p": 0.3, "min_tokens_to_keep": 7},
    {"top_k": 1},
    {"top_k": 40},
    {"top_k": 299},
    {"top_p": 0.8, "min_p": 0.02, "top_k": 20},
    {"top_p": 0.95, "min_p": 0.5, "min_tokens_to_keep": 3, "top_k": 5},
]


@pytest.fixture
def uncompiled() -> Iterator[None]:
    """mlx-lm's filters are compiled functions; uncompiled they give the same and start no C++ compiler."""
    mx.disable_compile()
    yield
    mx.enable_compile()


# --- filters ----------------------------------------------------------------------------------------------------------


def mlx_lm_filtered(logprobs: mx.array, settings: dict[str, Any]) -> mx.array:
    """What mlx-lm's sampler draws from: the argument of its last step."""
    seen: list[mx.array] = []
    original = sample_utils.categorical_sampling
    try:
        sample_utils.categorical_sampling = lambda logits, temp: seen.append(logits) or mx.argmax(logits, axis=-1)
        sample_utils.make_sampler(0.7, **settings)(logprobs)
    finally:
        sample_utils.categorical_sampling = original
    return seen[0]


def ours_filtered(logprobs: mx.array, settings: dict[str, Any]) -> mx.array:
    kept, ids = Sampler(0.7, **settings).filtered(logprobs)
    if ids is None:
        return kept
    return mx.put_along_axis(mx.full(logprobs.shape, -mx.inf, logprobs.dtype), ids, kept, axis=-1)


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
@pytest.mark.parametrize("settings", FILTERS, ids=str)
def test_filters_keep_what_mlx_lm_keeps(settings: dict[str, Any], dtype: mx.Dtype) -> None:
    for seed, scale in itertools.product(range(3), (0.3, 3.0, 20.0)):
        logprobs = normalised(random_rows(40, dtype=dtype, seed=seed, scale=scale))
        wanted = mlx_lm_filtered(logprobs, settings)
        got = ours_filtered(logprobs, settings)
        assert got.dtype == wanted.dtype
        assert mx.array_equal(got, wanted)
        assert mx.all(mx.any(got > -mx.inf, axis=-1))


@pytest.mark.full
@pytest.mark.parametrize("settings", FILTERS, ids=str)
def test_filters_keep_what_mlx_lm_keeps_at_full_size_compiled(settings: dict[str, Any]) -> None:
    for dtype in (mx.float32, mx.bfloat16):
        logprobs = normalised(random_rows(6, 151_936, dtype, seed=4))
        assert mx.array_equal(ours_filtered(logprobs, settings), mlx_lm_filtered(logprobs, settings))


def test_filter_limits_keep_all_or_one() -> None:
    logprobs = normalised(random_rows(8, 50, scale=2.0))
    for settings in ({"top_k": 0}, {"top_k": 50}, {"top_k": 5000}, {"top_p": 0.0}, {"top_p": 1.0}, {"min_p": 0.0}):
        assert mx.array_equal(ours_filtered(logprobs, settings), logprobs), settings
    everything = {"min_p": 0.9, "min_tokens_to_keep": 99}
    assert mx.array_equal(ours_filtered(logprobs, everything), logprobs)
    for settings in ({"top_k": 1}, {"top_p": 1e-6, "top_k": 1}, {"min_p": 1.0, "top_k": 1}):
        chooser = make_chooser(make_sampler(5.0, seed=3, **settings))
        tokens, _ = chooser.rows(logprobs, [1], mx.zeros((7,), dtype=mx.uint32))
        assert mx.array_equal(mx.take_along_axis(logprobs, tokens[:, None], -1)[:, 0], mx.max(logprobs, axis=-1))


# --- rows -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [*FILTERS, {"top_k": 5000}], ids=str)
def test_a_row_is_picked_the_same_alone_and_in_any_block(settings: dict[str, Any]) -> None:
    logits, history = random_rows(16, seed=8), [5, 6, 7]
    draft = [int(token) for token in np.random.default_rng(1).integers(0, 300, 15)]
    processors = make_logits_processors({4: 1.0}, repetition_penalty=1.2, frequency_penalty=0.2)
    for temp in (0.0, 0.8, 3.0):
        chooser = make_chooser(make_sampler(temp, seed=11, **settings), processors)
        tokens, logprobs = chooser.rows(logits, history, mx.array(draft, dtype=mx.uint32))
        assert tokens.shape == (16,)
        assert logprobs.shape == logits.shape
        for first, count in ((0, 1), (0, 5), (5, 1), (6, 10), (15, 1)):
            inside = mx.array(draft[first : first + count - 1], dtype=mx.uint32)
            part, rows = chooser.rows(logits[first : first + count], history + draft[:first], inside)
            assert mx.array_equal(part, tokens[first : first + count])
            assert mx.array_equal(rows, logprobs[first : first + count])
        for row in (0, 1, 9, 15):
            token, logprob = chooser.one(logits[row : row + 1], history + draft[:row])
            assert token == tokens[row].item()
            assert mx.array_equal(logprob, logprobs[row])


def test_a_token_is_the_argmax_of_tempered_logprobs_plus_noise() -> None:
    from mlx_spec.noise import gumbel, hash_ids, make_key

    logits, history = random_rows(4, seed=2), list(range(50, 60))
    tokens, logprobs = make_chooser(make_sampler(0.6, seed=21)).rows(logits, history, mx.array([1, 2, 3]))
    key = make_key(21)
    noise = gumbel(key, mx.array([10, 11, 12, 13]), hash_ids(key, mx.arange(300)))
    assert mx.array_equal(tokens, mx.argmax(logprobs / 0.6 + noise, axis=-1))


def test_rows_are_lazy_and_leave_the_random_state_alone() -> None:
    history = [1, 2, 3]
    before = [state.tolist() for state in mx.random.state]
    for settings in FILTERS:
        processors = make_logits_processors({4: 1.0}, 1.2, 5, 0.3, 5, 0.2, 0)
        chooser = make_chooser(make_sampler(0.9, seed=1, **settings), processors)

        def traced(logits: mx.array, draft: mx.array, chooser: Any = chooser) -> Any:
            return chooser.rows(logits, history, draft)

        mx.compile(traced)(random_rows(4), mx.array([1, 2, 3]))  # reading an array while it is traced raises
        tokens, _ = chooser.rows(random_rows(4), history, mx.array([1, 2, 3]))
        mx.eval(tokens)
    assert [state.tolist() for state in mx.random.state] == before
    with pytest.raises(ValueError, match="eval"):
        mx.compile(lambda x: mx.array(x.tolist()))(mx.array([1]))


def test_greedy_rows_pick_what_mlx_lm_picks_on_bfloat16_ties() -> None:
    """Two logits that differ become one logprob in bfloat16; mlx-lm takes the first of them."""
    flat = mx.zeros((1, 64))
    flat[0, 9], flat[0, 30] = 0.5, 0.50390625
    logits = flat.astype(mx.bfloat16)
    assert mx.argmax(logits, axis=-1).item() == 30
    wanted = sample_utils.greedy_sampler(logits - mx.logsumexp(logits, keepdims=True))
    assert wanted.item() == 9
    block = mx.concatenate([logits] * 5)
    for sampler in (None, make_sampler(), sample_utils.greedy_sampler):
        chooser = make_chooser(sampler)
        assert chooser.seed is None
        assert chooser.rows(block, [1], mx.zeros((4,), dtype=mx.uint32))[0].tolist() == wanted.tolist() * 5
        assert chooser.one(logits, [1])[0] == wanted.item()


def test_very_small_temperatures_are_greedy() -> None:
    logits = mx.random.normal((50, 200), key=mx.random.key(3))
    for temp in (1e-300, 1e-40, 1e-12):
        chooser = make_chooser(make_sampler(temp, seed=1))
        tokens, _ = chooser.rows(logits, [1], mx.zeros((49,), dtype=mx.uint32))
        assert mx.array_equal(tokens, mx.argmax(logits, axis=-1)), temp


# --- seeds ------------------------------------------------------------------------------------------------------------


def sample(seed: int | None, count: int = 64, sampler: Any = None) -> list[int]:
    logits = mx.zeros((count, 1000))
    chooser = make_chooser(sampler or make_sampler(1.0), (), seed)
    return chooser.rows(logits, [1, 2], mx.zeros((count - 1,), dtype=mx.uint32))[0].tolist()


def test_equal_seeds_repeat_and_others_differ() -> None:
    one, two, three, again = (sample(seed) for seed in (1, 2, 3, 1))
    assert one == again
    assert len({tuple(one), tuple(two), tuple(three)}) == 3
    assert sample(None, sampler=make_sampler(1.0, seed=2)) == two
    assert sample(2, sampler=make_sampler(1.0, seed=2)) == two
    assert sample(2**64 - 1) not in (one, two, three)
    assert sample(1 + 2**32) != one


def test_two_requests_do_not_disturb_each_other() -> None:
    alone = sample(5)
    first, second = (make_chooser(make_sampler(1.0, seed=seed)) for seed in (5, 6))
    mixed: list[int] = []
    for step in range(64):
        mixed.append(first.one(mx.zeros((1, 1000)), range(2 + step))[0])
        second.one(mx.zeros((1, 1000)), range(2 + step))
        mx.random.uniform()
    assert mixed == alone


def test_unseeded_requests_differ_and_repeat_through_mx_random_seed() -> None:
    assert len({tuple(sample(None)) for _ in range(3)}) == 3
    mx.random.seed(4)
    seeds = [make_chooser(make_sampler(1.0)).seed for _ in range(50)]
    mx.random.seed(4)
    assert [make_chooser(make_sampler(1.0)).seed for _ in range(50)] == seeds
    assert len(set(seeds)) == 50
    assert all(seed is not None and 0 <= seed < 2**53 for seed in seeds)


def test_the_seed_used_is_told() -> None:
    assert make_chooser(make_sampler(1.0), (), 9).seed == 9
    assert make_chooser(make_sampler(1.0, seed=9)).seed == 9
    assert make_chooser(make_sampler(0.0), (), 9).seed is None
    assert make_chooser(make_sampler(1.0, seed=9), [lambda tokens, logits: logits]).seed == 9
    assert make_chooser(lambda logprobs: 1).seed is None


# --- callables of the user --------------------------------------------------------------------------------------------


def test_a_user_processor_sees_what_mlx_lm_would_show_it() -> None:
    calls: list[tuple[list[int], tuple[int, ...]]] = []

    def forbid_last(tokens: mx.array, logits: mx.array) -> mx.array:
        calls.append((tokens.tolist(), logits.shape))
        logits[:, tokens[-1]] = -mx.inf
        return logits

    chooser = make_chooser(make_sampler(1.0, seed=3), [*make_logits_processors({2: 3.0}), forbid_last])
    assert isinstance(chooser, LazyChooser)
    assert chooser.lazy
    logits = random_rows(1, 20)
    token, logprob = chooser.one(logits[:1], [4, 9])
    assert calls == [([4, 9], (1, 20))]
    biased = mx.array(logits)
    biased[:, 2] = biased[:, 2] + 3.0
    biased[:, 9] = -mx.inf
    assert mx.array_equal(logprob, normalised(biased)[0])
    assert token == make_chooser(make_sampler(1.0, seed=3)).one(biased, [4, 9])[0]
    tokens, logprobs = chooser.rows(random_rows(3, 20), [4, 9], mx.array([1, 2]))
    assert [seen for seen, _ in calls[1:]] == [[4, 9], [4, 9, 1], [4, 9, 1, 2]]
    assert tokens.shape == (3,)
    assert logprobs.shape == (3, 20)


@pytest.mark.parametrize("result", [lambda best: best, lambda best: best[0], lambda best: best.item()])
def test_a_user_sampler_gets_logprobs_and_may_return_an_array_or_an_int(result: Any) -> None:
    seen: list[mx.array] = []

    def sampler(logprobs: mx.array) -> Any:
        seen.append(logprobs)
        return result(mx.argmax(logprobs, axis=-1))

    logits = random_rows(1)
    chooser = make_chooser(sampler, make_logits_processors({7: 100.0}))
    token, logprob = chooser.one(logits, [1])
    assert chooser.lazy
    assert token == 7
    assert type(token) is int
    assert seen[0].shape == (1, 300)
    assert mx.array_equal(seen[0][0], logprob)


@pytest.mark.parametrize(
    ("sampler", "processors", "words"),
    [
        (lambda logprobs: logprobs, (), "one token id"),
        (lambda logprobs: 1.5, (), "one token id"),
        (lambda logprobs: mx.array([0.5]), (), "one token id"),
        (lambda logprobs: None, (), "one token id"),
        (None, (lambda tokens, logits: None,), "must return logits"),
        (None, (lambda tokens, logits: logits[0],), "must return logits"),
    ],
)
def test_a_callable_that_returns_something_else_is_named(sampler: Any, processors: Any, words: str) -> None:
    with pytest.raises(OptionError, match=words):
        make_chooser(sampler, processors).one(random_rows(1), [1])


@pytest.mark.usefixtures("uncompiled")
def test_built_in_pieces_in_mlx_lm_give_its_own_text() -> None:
    """``make_sampler`` and ``make_logits_processors`` dropped into mlx-lm's own loop."""
    model, prompt = tiny_qwen3(1), mx.array([5, 6, 7])
    settings: list[dict[str, Any]] = [{}, {"temp": 0.9}, {"temp": 1.1, "top_p": 0.9, "top_k": 50, "min_p": 0.01}]
    penalties = {"repetition_penalty": 1.2, "frequency_penalty": 0.3}
    for setting in settings:
        texts = []
        for room in (sample_utils.make_sampler, make_sampler):
            maker = sample_utils.make_logits_processors if room is not make_sampler else make_logits_processors
            mx.random.seed(6)
            steps = generate_step(
                prompt, model, max_tokens=12, sampler=room(**setting), logits_processors=maker(**penalties)
            )
            texts.append([token for token, _ in steps])
        assert texts[0] == texts[1]


@pytest.mark.usefixtures("uncompiled")
def test_xtc_is_mlx_lms_own_and_runs_row_by_row() -> None:
    sampler = make_sampler(1.0, xtc_probability=1.0, xtc_threshold=0.1, xtc_special_tokens=[1], top_k=5000)
    assert not isinstance(sampler, Sampler)
    logits = mx.log(mx.array([[0.5, 0.3, 0.15, 0.05]]))
    chooser = make_chooser(sampler)
    assert chooser.lazy
    picks = {chooser.one(logits, [1])[0] for _ in range(60)}
    assert 0 not in picks  # the most likely token over the threshold is excluded
    assert {1, 2} <= picks
    greedy = make_sampler(0.0, xtc_probability=0.5, seed=3)
    assert isinstance(greedy, Sampler)
    assert make_chooser(greedy).one(logits, [1])[0] == 0


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {"temp": -0.1},
        {"temp": math.nan},
        {"temp": math.inf},
        {"temp": True},
        {"temp": "1"},
        {"temp": None},
        {"top_p": 1.01},
        {"top_p": -0.1},
        {"top_p": math.nan},
        {"min_p": 1.5},
        {"min_p": -1},
        {"min_tokens_to_keep": 0},
        {"min_tokens_to_keep": 1.0},
        {"top_k": -1},
        {"top_k": 4.0},
        {"top_k": True},
        {"temp": 1.0, "xtc_probability": 1.5},
        {"xtc_threshold": 0.6},
        {"temp": 1.0, "xtc_probability": 0.5, "xtc_special_tokens": [-1]},
        {"temp": 1.0, "xtc_probability": 0.5, "seed": 1},
        {"seed": 1.5},
        {"seed": 2**64},
    ],
    ids=str,
)
def test_sampler_settings_out_of_range_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(OptionError) as caught:
        make_sampler(**settings)
    assert any(name in str(caught.value) for name in settings)


def test_contradicting_seeds_are_refused() -> None:
    with pytest.raises(OptionError, match="seed 1 and the request 2"):
        make_chooser(make_sampler(1.0, seed=1), (), 2)
    with pytest.raises(OptionError, match="sampler of your own"):
        make_chooser(lambda logprobs: 1, (), 2)
    with pytest.raises(OptionError, match=r"mx\.random\.seed"):
        make_sampler(1.0, seed=1)(normalised(random_rows(1)))
    with pytest.raises(OptionError, match="callable"):
        make_chooser(0.8)  # type: ignore[arg-type]


def test_built_ins_are_recognised() -> None:
    for sampler in (None, make_sampler(), make_sampler(0.7, top_k=5), sample_utils.greedy_sampler):
        assert isinstance(make_chooser(sampler, make_logits_processors({1: 1.0}, 1.1)), KeyedChooser)
    for processors in ([lambda tokens, logits: logits], sample_utils.make_logits_processors({1: 1.0})):
        assert make_chooser(make_sampler(0.7), processors).lazy
    assert make_chooser(sample_utils.make_sampler(0.7)).lazy
    assert make_sampler(np.float32(0.5), top_k=np.int64(3)) == Sampler(0.5, top_k=3)
