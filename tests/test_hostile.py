"""Drafters that lie and callables that raise, at every call: the text never changes, nothing committed is lost."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import mlx_lm
import pytest
from toys import PlannedDrafter, ScriptModel, save_tiny

from mlx_spec import Engine, Options
from mlx_spec.contracts import Draft
from mlx_spec.errors import DrafterError, EvaluationError, OptionError, SessionError

PROMPT = list(range(5, 25))


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    model, tokenizer = mlx_lm.load(str(save_tiny(tmp_path_factory.mktemp("hostile"))))
    tokenizer.eos_token_ids = set()  # texts here end where they are told to
    return model, tokenizer


@pytest.fixture(scope="module")
def plain(pair):
    """PROMPT and its continuation by lane plain."""
    return PROMPT + [r.token for r in Engine(*pair).stream(PROMPT, Options(max_tokens=80))]


class Lying(PlannedDrafter):
    """``propose(position, count)`` gives whatever it likes."""

    def __init__(self, propose, name="lying"):
        super().__init__(lambda position, count: [], name)
        self.lie = propose

    def open(self, *args, **kwargs):
        session = super().open(*args, **kwargs)
        session.propose = lambda anchor, count: self.lie(session.length + 1, count)
        return session


def broken_array(count):
    """Ids that raise when they are evaluated."""
    singular = mx.linalg.inv(mx.zeros((count, count)), stream=mx.cpu)
    return singular[0].astype(mx.int32)


def tokens(engine, prompt=PROMPT, session=None, **options):
    responses = list(engine.stream(prompt, Options(**({"max_tokens": 40, "width": 4} | options)), session))
    return [r.token for r in responses if r.token >= 0], responses[-1].stats


def check_warm_is_cold(engine, session, **options):
    """A session after whatever happened to it, against a fresh one, on what it says is committed."""
    prompt = [*session.tokens, 33] if session.tokens else [*PROMPT, 33]
    assert tokens(engine, prompt, session, **options)[0] == tokens(engine, prompt, **options)[0]


# ids on the device and on the host that do not agree: what is written into the cache must be what is judged
DISAGREEING = {
    "other ids": lambda ids, count: Draft(mx.array([7] * len(ids)), tuple(ids)),
    "host is shorter": lambda ids, count: Draft(mx.array(ids), tuple(ids[:1])),
    "host is longer": lambda ids, count: Draft(mx.array(ids[:1]), tuple(ids)),
    "host is empty": lambda ids, count: Draft(mx.array(ids), ()),
    "host outside the vocabulary": lambda ids, count: Draft(mx.array(ids), (-1, 999_999, 2**40)[:count]),
    "floats": lambda ids, count: Draft(mx.array([float(i) for i in ids])),
    "negative 64 bit": lambda ids, count: Draft(mx.array([-1] * count, dtype=mx.int64)),
    "bool": lambda ids, count: Draft(mx.array([True] * count)),
    "nan": lambda ids, count: Draft(mx.full((count,), float("nan"))),
    "nothing": lambda ids, count: Draft(mx.array([], dtype=mx.float32)),
}


@pytest.mark.parametrize("which", DISAGREEING)
def test_ids_that_are_wrong_in_any_form_change_nothing(pair, plain, which):
    def lie(position, count):
        return DISAGREEING[which](plain[position : position + count], count)

    engine = Engine(*pair, drafter=Lying(lie))
    session = engine.session()
    got, stats = tokens(engine, session=session, max_tokens=60)
    assert got == plain[20:80] and stats.lane == "lying"
    assert stats.drafted == sum(stats.widths) - stats.rounds, "drafts counted are not the rows verified"
    assert stats.committed == sum(stats.accepted_per_round) + stats.rounds == 60
    check_warm_is_cold(engine, session)


NOT_DRAFTS = {
    "None": lambda count: None,
    "a list": lambda count: [1, 2],
    "a matrix": lambda count: Draft(mx.zeros((1, count), dtype=mx.int32)),
    "a scalar": lambda count: Draft(mx.array(3)),
    "too long": lambda count: Draft(mx.array([1] * (count + 1))),
    "too long on the host": lambda count: Draft(mx.array([1]), (1,) * (count + 1)),
    "missing attribute": lambda count: mx.no_such_thing,
    "missing file": lambda count: Path("/no/such/file").read_text(),
    "fails when evaluated": lambda count: Draft(broken_array(count)),
}


@pytest.mark.parametrize("which", NOT_DRAFTS)
@pytest.mark.parametrize("after", [0, 7])
def test_what_is_no_draft_is_the_drafters_fault_and_loses_nothing(pair, plain, which, after):
    def lie(position, count):
        right = plain[position : position + min(count, 2)]
        return NOT_DRAFTS[which](count) if position > len(PROMPT) + after else Draft(mx.array(right))

    engine = Engine(*pair, drafter=Lying(lie))
    session, got = engine.session(), []
    with pytest.raises(DrafterError, match="lying failed in round"):
        got.extend(r.token for r in engine.stream(PROMPT, Options(max_tokens=40, width=4), session))
    assert session.tokens == PROMPT + got == plain[: len(PROMPT) + len(got)]
    assert session.lost or session.cache.length == len(session.tokens) - 1
    got, stats = tokens(engine, session=session, fallback=True)
    assert got == plain[20:60] and stats.lane == "plain" and len(stats.notes) == 1
    engine.use(None)
    check_warm_is_cold(engine, session)


@pytest.mark.parametrize("where", ["open", "ingest", "arrays", "arrays fail"])
def test_a_drafter_that_breaks_outside_propose(pair, plain, where):
    class Broken(PlannedDrafter):
        def open(self, *args, **kwargs):
            if where == "open":
                raise RuntimeError("broken")
            session = super().open(*args, **kwargs)
            if where == "arrays fail":
                session.arrays = lambda: [broken_array(2)]
            else:
                setattr(session, where, lambda *a: (_ for _ in ()).throw(AttributeError("broken")))
            return session

    engine = Engine(*pair, drafter=Broken(lambda position, count: []))
    session = engine.session()
    with pytest.raises(DrafterError, match="planned failed in"):
        tokens(engine, session=session)
    got, stats = tokens(engine, session=session, fallback=True)
    assert got == plain[20:60] and stats.lane == "plain" and "planned failed in" in stats.reason


def test_a_refused_window_leaves_the_conversation_as_it_was(pair, plain):
    class Strict(PlannedDrafter):
        def open(self, first, start=0, draft_window=None):
            if draft_window:
                raise OptionError("no window")
            return super().open(first, start)

    engine = Engine(*pair, drafter=Strict(lambda position, count: plain[position : position + count]))
    session = engine.session()
    tokens(engine, session=session)
    with pytest.raises(OptionError, match="no window"):
        engine.stream(PROMPT, Options(draft_window=3), session)
    assert (len(session.tokens), session.cache.length, session.draft.length) == (60, 59, 59)
    assert tokens(engine, [*session.tokens, 9], session)[1].cached_tokens == 59


@pytest.mark.parametrize("error", [ValueError, RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["sampler", "processor", "cancel", "progress"])
def test_a_callable_that_raises_at_any_call_leaves_a_session_like_a_cold_one(pair, plain, where, error):
    """Each call in turn raises; in between the session goes on with what it has committed."""
    engine = Engine(*pair, drafter=PlannedDrafter(lambda p, c: plain[p : p + 2] + [1] * (c - 2)))
    reached = 0
    for at in range(40):
        calls = [0]

        def count(value, at=at, calls=calls):
            calls[0] += 1
            if calls[0] > at:
                raise error("stop here")
            return value

        options = {"max_tokens": 9, "width": 4, "prefill_step": 6}
        extra = {"cancel": lambda: count(False)} if where == "cancel" else {}
        if where == "sampler":
            options["sampler"] = lambda logprobs: count(mx.argmax(logprobs, axis=-1))
        elif where == "processor":
            options["processors"] = (lambda seen, logits: count(logits),)
        elif where == "progress":
            extra["progress"] = lambda done, total: count(None)
        session, got = engine.session(), []
        try:
            got.extend(r.token for r in engine.stream(PROMPT, Options(**options), session, **extra))
        except error:
            reached += 1
            assert session.tokens[: len(PROMPT) + len(got)] == (PROMPT + got)[: len(session.tokens)]
            assert session.tokens == plain[: len(session.tokens)]
            assert session.cache.length == session.draft.length == max(len(session.tokens) - 1, 0)
            check_warm_is_cold(engine, session, max_tokens=6)
        else:
            break
    assert reached >= 5


def test_an_interrupt_inside_the_drafter_leaves_a_session_like_a_cold_one(pair, plain):
    for method in ("propose", "ingest"):
        for at in range(6):
            calls = [0]

            class Interrupted(PlannedDrafter):
                def open(self, *args, **kwargs):
                    session = super().open(*args, **kwargs)
                    inner = getattr(session, method)  # noqa: B023

                    def count(*a):
                        calls[0] += 1  # noqa: B023
                        if calls[0] == at + 1:  # noqa: B023
                            raise KeyboardInterrupt
                        return inner(*a)

                    setattr(session, method, count)  # noqa: B023
                    return session

            engine = Engine(*pair, drafter=Interrupted(lambda p, c: plain[p : p + c]))
            session = engine.session()
            with pytest.raises(KeyboardInterrupt):
                tokens(engine, session=session, prefill_step=6)
            assert session.tokens == plain[: len(session.tokens)]
            check_warm_is_cold(engine, session, max_tokens=6)


def test_a_failed_evaluation_of_the_target_does_not_poison_the_session(pair, plain):
    """Caches are written lazily: after a failure they hang on it, older rows included."""
    engine = Engine(*pair)
    session, forward, fail = engine.session(), engine.target.forward, []

    def failing(ids, cache, taps=None):
        if not fail or fail.pop(0):
            return forward(ids, cache, taps)
        return forward(ids + broken_array(max(ids.shape[0], 2))[: ids.shape[0]], cache, taps)

    engine.target.forward = failing
    for plan in ([True, True, True, False], [True, False], [False]):  # in a round, in prefill, at once
        tokens(engine, session=session, max_tokens=6)
        fail[:] = plan
        with pytest.raises(EvaluationError, match="LU factorization"):
            tokens(engine, list(range(60, 90)), session=session, max_tokens=6, prefill_step=20)
        fail.clear()
        assert tokens(engine, session=session)[0] == plain[20:60]
    assert not fail


@pytest.mark.parametrize("token", [256, 99_999, -1])
def test_a_sampler_that_invents_a_token_is_refused(pair, token):
    engine = Engine(*pair)
    with pytest.raises(OptionError, match=f"returned token {token} of 256"):
        tokens(engine, sampler=lambda logprobs: mx.array([token]))


def test_two_streams_on_one_session(pair, plain):
    """The later one goes on, the earlier one says why it cannot; one that is finished may be left unexhausted."""
    engine = Engine(*pair)
    session = engine.session()
    first = engine.stream(PROMPT, Options(max_tokens=30), session)
    assert [next(first).token for _ in range(4)] == plain[20:24]
    other = engine.stream([*PROMPT, 99], Options(max_tokens=20), session)
    got = [next(other).token for _ in range(3)]
    with pytest.raises(SessionError, match="later request took over"):
        next(first)
    assert got + [r.token for r in other] == tokens(engine, [*PROMPT, 99], max_tokens=20)[0]
    waiting, last = engine.stream(PROMPT, session=session), engine.stream(PROMPT, Options(max_tokens=3), session)
    assert [next(last).token for _ in range(3)] == plain[20:23]
    with pytest.raises(SessionError):
        next(waiting)
    assert tokens(engine, session=session)[0] == plain[20:60]
    assert list(last) == []


@pytest.mark.parametrize("where", ["sampler", "cancel", "progress"])
def test_a_request_from_within_a_request_on_the_same_session(pair, plain, where):
    """Refused in the middle of a round; between rounds the inner one takes over. Either way nothing is mixed up."""
    engine, inner = Engine(*pair), []
    session = engine.session()

    def nested(value):
        if len(inner) < 3 and (where != "sampler" or len(session.tokens) > len(PROMPT) + 3):
            inner.append(1)
            inner[-1] = tokens(engine, [*PROMPT[:9], 77], session, max_tokens=5)[0]
        return value

    options = {"sampler": lambda logprobs: nested(mx.argmax(logprobs, axis=-1))} if where == "sampler" else {}
    extra = {} if where == "sampler" else {where: lambda *a: nested(False)}
    stream = engine.stream(PROMPT, Options(max_tokens=9, prefill_step=6, **options), session, **extra)
    with pytest.raises(SessionError, match="in the middle of a round" if where == "sampler" else "took over"):
        list(stream)
    assert inner[0] == 1 or inner[0] == tokens(engine, [*PROMPT[:9], 77], max_tokens=5)[0]
    check_warm_is_cold(engine, session)
    assert tokens(engine, session=session)[0] == plain[20:60]


def test_two_sessions_and_two_engines_interleave(pair, plain):
    """Streams of two sessions, and of two engines with tapped drafters on one model, token by token."""
    right, wrong = (PlannedDrafter(lambda p, c, d=d: [t + d for t in plain[p : p + c]], f"by {d}") for d in (0, 1))
    right.layers, wrong.layers = (0, 1), (1,)
    first, second = Engine(*pair, drafter=right), Engine(*pair, drafter=wrong)
    streams = [e.stream(PROMPT, Options(max_tokens=40, width=4)) for e in (first, second, first, second)]
    rows = list(zip(*streams, strict=True))
    assert [[r.token for r in column] for column in zip(*rows, strict=True)] == [plain[20:60]] * 4
    assert [r.lane for r in rows[-1]] == ["by 0", "by 1"] * 2
    first.close()
    assert tokens(second)[0] == plain[20:60]
    second.close()


def test_another_engines_session_is_refused(pair):
    with pytest.raises(SessionError, match="opened by another engine"):
        Engine(*pair).stream(PROMPT, session=Engine(*pair).session())


def test_changing_the_drafter_under_a_session_and_under_a_stream(pair, plain):
    def tapped(name):
        drafter = PlannedDrafter(lambda p, c: plain[p : p + c], name)
        drafter.layers = (0, 1)
        return drafter

    engine = Engine(*pair, drafter=tapped("one"))
    session, silent = engine.session(), engine.session(drafting=False)
    assert tokens(engine, session=session)[1].lane == "one"
    engine.use(tapped("two"))
    got, stats = tokens(engine, session=session)
    assert got == plain[20:60] and stats.lane == "two" and stats.accepted
    assert tokens(engine, session=silent)[1].lane == "plain", "opened without drafting"
    for fallback in (False, True):
        stream = engine.stream(PROMPT, Options(max_tokens=40, width=4, fallback=fallback), session)
        got = [next(stream).token for _ in range(6)]
        engine.use(tapped("three"))
        if not fallback:
            with pytest.raises(DrafterError, match="given another drafter during the request"):
                list(stream)
            continue
        *rest, last = stream
        assert got + [r.token for r in [*rest, last]] == plain[20:60]
        assert last.lane == "plain" and "given another drafter" in last.stats.notes[0]
    engine.close()


def test_widths_without_a_drafter_are_named_as_ignored(pair):
    assert "no effect" in tokens(Engine(*pair), width=8)[1].notes[0]
    assert tokens(Engine(*pair), width=None)[1].notes == []


@pytest.mark.parametrize("drafting", [False, True])
def test_host_syncs_are_the_device_reads_that_happened(pair, plain, drafting, monkeypatch):
    """Counted at mlx's own door: mx.eval is called once a round, and all that is read later is then there."""
    drafter = PlannedDrafter(lambda p, c: plain[p : p + 2] + [1] * (c - 2)) if drafting else None
    engine, real, calls = Engine(*pair, drafter=drafter), mx.eval, []
    monkeypatch.setattr(mx, "eval", lambda *arrays: (calls.append(1), real(*arrays))[1])
    stream = engine.stream(PROMPT[:1], Options(max_tokens=40, width=4))
    responses = list(stream)
    assert len(calls) == responses[-1].stats.host_syncs == responses[-1].stats.rounds


def test_nothing_grows_with_the_rounds_but_what_is_asked_for(pair):
    """2,000 rounds: Python objects and device memory stay, apart from the tokens and the counts."""
    import gc

    from toys import VOCAB

    script = [33 + i % 90 for i in range(4000)]
    model = ScriptModel(script, VOCAB)

    drafter = PlannedDrafter(lambda p, c: [1] * c)
    drafter.layers = (0, 1)
    engine = Engine(model, pair[1], {"model_type": "script", "vocab_size": VOCAB}, drafter)
    counts = []
    for n, _ in enumerate(engine.stream([33], Options(max_tokens=2000, width=3))):
        if n in (300, 1990):
            gc.collect()
            counts.append((len(gc.get_objects()), mx.get_active_memory()))
    objects, memory = (counts[1][i] - counts[0][i] for i in (0, 1))
    assert objects < 100
    assert memory < 2000 * 4 * 8 * 4 * 2, "more than the rows of the two caches"


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("max_tokens", value) for value in (0, -2, 10.5, float("nan"), "10", True, None)),
        *(("stop", value) for value in ((5,), (None,), ("",))),
        *(("width", value) for value in ((), (4, 0), 2.0, "4")),
    ],
)
def test_options_of_the_wrong_kind_are_refused_at_once(option, value):
    """A limit of 10.5 was never reached, and a NaN neither."""
    with pytest.raises(OptionError, match=option if option != "stop" else "stop string"):
        Options(**{option: value})


@pytest.mark.parametrize("prompt", [[[1, 2]], [1.7, 2], ["a"], None, 5, mx.array([[1, 2]])])
def test_a_prompt_that_is_no_list_of_ids_is_refused(pair, prompt):
    with pytest.raises(OptionError, match="the prompt must be text or a flat list of token ids"):
        Engine(*pair).stream(prompt)


def test_a_name_is_no_drafter_object(pair):
    with pytest.raises(OptionError, match="a drafter object is needed, not 'ngram'"):
        Engine(*pair, drafter="ngram")
