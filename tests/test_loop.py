"""The loop under an adversarial drafter: the text never changes, counts shown are counts planned, caches stay right."""

from __future__ import annotations

import mlx.core as mx
import mlx_lm
import pytest
from toys import PlannedDrafter, ScriptModel, save_tiny

from mlx_spec import Engine, Options
from mlx_spec.errors import ContextLengthError, DrafterError, OptionError

PROMPT = [65, 66, 67, 68, 69]
SCRIPT = [((7 * i) % 90) + 33 for i in range(600)]
EOS = 0


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return mlx_lm.load(str(save_tiny(tmp_path_factory.mktemp("tiny"))))[1]


def script_engine(tokenizer, drafter=None, script=SCRIPT):
    return Engine(ScriptModel(script), tokenizer, {"model_type": "script", "vocab_size": 256}, drafter)


def tokens_of(engine, prompt=PROMPT, session=None, **options):
    responses = list(engine.stream(prompt, Options(**options), session))
    return [r.token for r in responses if r.token >= 0], responses[-1]


def right(position, count):
    return [SCRIPT[(position + i) % len(SCRIPT)] for i in range(count)]


def wrong(position, count):
    return [token + 1 for token in right(position, count)]


def right_then_wrong(k):
    return lambda position, count: right(position, count)[:k] + wrong(position + k, max(count - k, 0))


@pytest.mark.parametrize("width", [2, 3, 5, 8, 16])
@pytest.mark.parametrize(
    ("plan", "kept"), [(wrong, 0), (right, 99), (right_then_wrong(1), 1), (right_then_wrong(3), 3)]
)
def test_counts_shown_are_counts_planned(tokenizer, plan, kept, width):
    plain, _ = tokens_of(script_engine(tokenizer), max_tokens=61)
    got, last = tokens_of(script_engine(tokenizer, PlannedDrafter(plan)), max_tokens=61, width=width)
    assert got == plain
    stats, left, widths, accepted = last.stats, 61, [], []
    while left:  # a verify is never wider than what may still be emitted
        widths.append(min(width, left))
        accepted.append(min(kept, widths[-1] - 1))
        left -= accepted[-1] + 1
    assert (stats.widths, stats.accepted_per_round) == (widths, accepted), "counts differ from the plan"
    assert sum(stats.accepted_per_round) == stats.accepted and stats.committed == 61
    assert stats.drafted == sum(w - 1 for w in stats.widths)
    assert last.finish_reason == "length" and last.generation_tokens == 61


def test_always_wrong_commits_exactly_one_token_a_round(tokenizer):
    responses = list(script_engine(tokenizer, PlannedDrafter(wrong)).stream(PROMPT, Options(max_tokens=20, width=4)))
    assert [r.round for r in responses] == list(range(20))
    assert all(r.accepted == 0 and not r.from_draft for r in responses)
    assert responses[-1].stats.acceptance_length == 1.0


def test_round_drafted_and_accepted_are_on_each_token(tokenizer):
    responses = list(script_engine(tokenizer, PlannedDrafter(right)).stream(PROMPT, Options(max_tokens=8, width=4)))
    assert [r.round for r in responses] == [0] * 4 + [1] * 4
    assert [r.from_draft for r in responses] == [True, True, True, False] * 2
    assert {(r.drafted, r.accepted) for r in responses} == {(3, 3)}


@pytest.mark.parametrize("width", [1, 2, 4, 16])
@pytest.mark.parametrize("limit", [1, 2, 3, 5, 16, 17])
def test_max_tokens_is_exact(tokenizer, width, limit):
    engine = script_engine(tokenizer, PlannedDrafter(right))
    got, last = tokens_of(engine, max_tokens=limit, width=width)
    assert got == right(len(PROMPT), limit) and last.finish_reason == "length"


@pytest.mark.parametrize("at", [6, 7, 8, 9, 12])
def test_an_accepted_end_of_sequence_ends_the_round_there(tokenizer, at):
    script = [*SCRIPT[:at], EOS, *SCRIPT[at + 1 :]]
    plan = lambda position, count: [script[position + i] for i in range(count)]  # noqa: E731
    engine = script_engine(tokenizer, PlannedDrafter(plan), script)
    session = engine.session()
    got, last = tokens_of(engine, session=session, max_tokens=50, width=8)
    assert got == script[len(PROMPT) : at + 1] and last.finish_reason == "stop"
    assert last.stats.committed == len(got), "tokens past the end were counted"
    assert session.cache.length == len(session.tokens) - 1


def test_drafting_end_of_sequence_first_changes_nothing(tokenizer):
    engine = script_engine(tokenizer, PlannedDrafter(lambda position, count: [EOS] * count))
    assert tokens_of(engine, max_tokens=30, width=5)[0] == right(len(PROMPT), 30)


@pytest.mark.parametrize("ids", [[-5, 3], [256, 10_000_000], [2**31 - 1]])
def test_ids_outside_the_vocabulary_are_never_read_or_emitted(tokenizer, ids):
    engine = script_engine(tokenizer, PlannedDrafter(lambda position, count: (ids * count)[:count]))
    assert tokens_of(engine, max_tokens=30, width=4)[0] == right(len(PROMPT), 30)


def test_a_draft_of_nan_logits_changes_nothing(tokenizer):
    class Nan(PlannedDrafter):
        def open(self, *args, **kwargs):
            session = super().open(*args, **kwargs)
            from mlx_spec.contracts import Draft

            session.propose = lambda anchor, count: Draft(
                mx.argmax(mx.full((count, 256), float("nan")), axis=-1).astype(mx.int32)
            )
            return session

    assert tokens_of(script_engine(tokenizer, Nan(wrong)), max_tokens=30, width=4)[0] == right(len(PROMPT), 30)


def raising(after):
    def plan(position, count):
        if position > len(PROMPT) + after:
            raise RuntimeError("the drafter broke")
        return right(position, count)

    return plan


def test_a_raising_drafter_ends_the_request_and_loses_nothing(tokenizer):
    engine = script_engine(tokenizer, PlannedDrafter(raising(9)))
    session = engine.session()
    got = []
    stream = engine.stream(PROMPT, Options(max_tokens=40, width=4), session)
    with pytest.raises(DrafterError, match=r"planned failed in round 3: RuntimeError: the drafter broke; .*--fallback"):
        got.extend(response.token for response in stream)
    assert got == right(len(PROMPT), len(got)) and len(got) >= 9
    assert session.cache.length == len(session.tokens) - 1
    assert session.tokens == PROMPT + got


def test_with_fallback_a_raising_drafter_parks_and_says_so(tokenizer):
    engine = script_engine(tokenizer, PlannedDrafter(raising(9)))
    got, last = tokens_of(engine, max_tokens=40, width=4, fallback=True)
    assert got == right(len(PROMPT), 40)
    assert last.lane == "plain" and "the drafter broke" in last.stats.reason
    assert last.stats.notes == [last.stats.reason]


def test_a_drafter_that_fails_in_prefill(tokenizer):
    class Broken(PlannedDrafter):
        def open(self, *args, **kwargs):
            session = super().open(*args, **kwargs)
            session.ingest = lambda *a: (_ for _ in ()).throw(ValueError("bad features"))
            return session

    engine = script_engine(tokenizer, Broken(right))
    with pytest.raises(DrafterError, match="failed in prefill: ValueError: bad features"):
        tokens_of(engine, max_tokens=5)
    got, last = tokens_of(engine, max_tokens=5, fallback=True)
    assert got == right(len(PROMPT), 5) and last.lane == "plain"


def test_one_host_sync_a_round(tokenizer):
    _, last = tokens_of(script_engine(tokenizer, PlannedDrafter(right_then_wrong(2))), max_tokens=60, width=6)
    assert last.stats.host_syncs == last.stats.rounds > 10


def test_a_user_sampler_and_processor_see_emitted_rows_only(tokenizer):
    """Stateful callables run once per emitted token, in order, whatever was drafted."""

    def run(drafter):
        seen, calls = [], []

        def processor(tokens, logits):
            seen.append(tokens.tolist())
            return logits

        def sampler(logprobs):
            calls.append(len(calls))
            return mx.argmax(logprobs, axis=-1)

        engine = script_engine(tokenizer, drafter)
        got, _ = tokens_of(engine, max_tokens=25, width=5, sampler=sampler, processors=(processor,))
        return got, seen, len(calls)

    plain = run(None)
    assert plain[2] == 25
    for plan in (right, wrong, right_then_wrong(2)):
        assert run(PlannedDrafter(plan)) == plain


@pytest.mark.parametrize("plan", [right, wrong, right_then_wrong(2)])
@pytest.mark.parametrize("stop_after", [1, 2, 5, 9])
def test_cancel_leaves_the_session_equal_to_a_cold_run(tokenizer, plan, stop_after):
    engine = script_engine(tokenizer, PlannedDrafter(plan))
    session, seen = engine.session(), []
    responses = engine.stream(PROMPT, Options(max_tokens=60, width=4), session, cancel=lambda: len(seen) >= stop_after)
    for response in responses:
        seen.append(response)
    assert seen[-1].finish_reason == "cancel" and seen[-1].token == -1
    got = [r.token for r in seen[:-1]]
    assert session.tokens == PROMPT + got and session.cache.length == len(session.tokens) - 1
    follow = [*session.tokens, 77, 78]
    warm, last = tokens_of(engine, follow, session, max_tokens=20, width=4)
    assert last.stats.cached_tokens >= len(PROMPT) + len(got) - 1
    assert warm == tokens_of(engine, follow, max_tokens=20, width=4)[0]


def test_closing_the_generator_mid_round_keeps_the_session_right(tokenizer):
    engine = script_engine(tokenizer, PlannedDrafter(right))
    session = engine.session()
    stream = engine.stream(PROMPT, Options(max_tokens=60, width=8), session)
    for _ in range(3):
        next(stream)
    stream.close()
    assert session.cache.length == len(session.tokens) - 1
    assert (
        tokens_of(engine, [*PROMPT, 90], session, max_tokens=9)[0] == tokens_of(engine, [*PROMPT, 90], max_tokens=9)[0]
    )


def test_cancel_during_prefill(tokenizer):
    engine = script_engine(tokenizer)
    session, calls = engine.session(), []
    prompt = list(range(1, 60))
    stream = engine.stream(
        prompt, Options(prefill_step=16), session, cancel=lambda: len(calls) > 2, progress=lambda *a: calls.append(a)
    )
    assert [r.finish_reason for r in stream] == ["cancel"]
    assert session.tokens == prompt[:33] and session.cache.length == 32
    assert calls == [(0, 59), (16, 59), (32, 59)]


@pytest.mark.parametrize("size", [1, 2, 15, 16, 17, 33])
def test_prompt_sizes_around_the_prefill_step(tokenizer, size):
    prompt = [33 + i for i in range(size)]
    engine = script_engine(tokenizer, PlannedDrafter(right))
    assert tokens_of(engine, prompt, max_tokens=9, prefill_step=16)[0] == right(size, 9)


def test_requests_that_cannot_run_are_refused_before_any_token(tokenizer):
    engine = script_engine(tokenizer, PlannedDrafter(right))
    with pytest.raises(OptionError, match="prompt is empty"):
        engine.stream([])
    with pytest.raises(OptionError, match="token id 300"):
        engine.stream([1, 300])
    engine.target.max_context = 16
    with pytest.raises(ContextLengthError, match=r"16 tokens, this model's context is 16"):
        engine.stream(list(range(1, 17)))
    got, last = tokens_of(engine, list(range(1, 11)), max_tokens=99)
    assert len(got) == 6 and last.finish_reason == "length" and "cut to 6" in last.stats.notes[0]
    assert len(tokens_of(engine, list(range(1, 11)), max_tokens=-1)[0]) == 6
    engine.drafter.max_width = 8
    with pytest.raises(OptionError, match="width 9 is above the 8 rows"):
        engine.stream(PROMPT, Options(width=9))


def test_a_mask_id_in_the_output_is_an_ordinary_token(tokenizer):
    """A token equal to some drafter's mask id is kept: output is never filtered by id."""
    script = [*SCRIPT[:8], 255, *SCRIPT[9:]]
    got, _ = tokens_of(script_engine(tokenizer, PlannedDrafter(right), script), max_tokens=10, width=4)
    assert got == script[5:15]


def test_widths_in_the_stats_replay_the_request(tokenizer):
    engine = script_engine(tokenizer, PlannedDrafter(right_then_wrong(2)))
    _, first = tokens_of(engine, max_tokens=50, width=(2, 4, 8))
    _, again = tokens_of(engine, max_tokens=50, width=tuple(first.stats.widths))
    assert again.stats.accepted_per_round == first.stats.accepted_per_round
