"""Prompt caches in every hand they pass through: whatever is done to one, it holds what mlx-lm's own would hold."""

from __future__ import annotations

import copy
import gc
import pickle
import random

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm.models.cache import load_prompt_cache, save_prompt_cache, trim_prompt_cache
from mlx_lm.models.cache import make_prompt_cache as mlx_lm_cache
from toys import PlannedDrafter, save_tiny

from mlx_spec import load, make_prompt_cache, stream_generate
from mlx_spec.api import engine_of
from mlx_spec.contracts import Draft
from mlx_spec.errors import ContextLengthError, SessionError
from mlx_spec.sessions import PromptCache

PROMPT = "the cat sat on the mat, the cat sat on"


class Oracle(PlannedDrafter):
    """Drafts what the target will say, by asking another copy of it; every third draft ends wrong."""

    def __init__(self, model) -> None:
        super().__init__(lambda position, count: [], "oracle")
        self.model, self.layers = model, (0, 1)

    def open(self, first, start=0, draft_window=None):
        return OracleSession(self.model, first, start)


class OracleSession:
    def __init__(self, model, first, start) -> None:
        self.model, self.start, self.tokens = model, start, [first]

    @property
    def length(self):
        return self.start + len(self.tokens) - 1

    def ingest(self, tokens, features, start):
        assert start == self.length and features.shape[0] == len(tokens)
        self.tokens += tokens

    def propose(self, anchor, count):
        assert anchor == self.tokens[-1], "the drafter's text is not the conversation's"
        ids = list(self.tokens)
        for _ in range(count):
            ids.append(mx.argmax(self.model(mx.array([ids]))[0, -1]).item())
        if len(self.tokens) % 3 == 0:
            ids[-1] = (ids[-1] + 1) % 256
        return Draft(mx.array(ids[len(self.tokens) :]))

    def trim(self, length):
        if length < self.start:
            return 0
        del self.tokens[length - self.start + 1 :]
        return self.length

    def arrays(self):
        return []


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("cache") / "tiny")


@pytest.fixture(scope="module")
def theirs(folder):
    model, tokenizer = mlx_lm.load(str(folder))
    tokenizer.eos_token_ids = set()
    return model, tokenizer


@pytest.fixture(scope="module")
def pair(folder, theirs):
    model, tokenizer = load(folder, draft=Oracle(theirs[0]))
    tokenizer.eos_token_ids = set()
    return model, tokenizer


def ids(responses):
    return [r.token for r in responses]


def is_open(cache):
    return isinstance(cache, PromptCache) and cache.shown is not None


def walk(pair, theirs, rng, path):
    """Random things done to one of our caches and to one of mlx-lm's; yields both results of each."""
    ours, reference = rng.choice([make_prompt_cache, mlx_lm_cache])(pair[0]), mlx_lm_cache(theirs[0])
    left_open = []
    for _ in range(6):
        text, count, few, width = rng.choice(["a", " b cd", PROMPT]), rng.randrange(1, 14), rng.randrange(1, 6), 4
        does = rng.choice(["generate", "generate", "break", "raise", "open", "idle", "trim", "them", "copy", "save"])
        if does in ("trim", "them", "save") and (is_open(ours) or not reference[0].offset):
            continue  # a cache is complete once its stream is closed, or the next one has begun
        mine = stream_generate(*pair, text, max_tokens=count + few, prompt_cache=ours, width=width)
        if does == "generate":
            yield ids(mine), ids(mlx_lm.stream_generate(*theirs, text, max_tokens=count + few, prompt_cache=reference))
        elif does in ("break", "raise", "open"):
            other = mlx_lm.stream_generate(*theirs, text, max_tokens=count + few, prompt_cache=reference)
            yield tuple([next(stream).token for _ in range(few)] for stream in (mine, other))
            for stream in (mine, other):
                if does == "raise":
                    with pytest.raises(ZeroDivisionError):
                        stream.throw(ZeroDivisionError)
                elif does == "break" or not isinstance(ours, PromptCache):
                    stream.close()
            left_open += [mine, other]
        elif does == "trim":
            yield tuple(trim_prompt_cache(cache, min(few, reference[0].offset)) for cache in (ours, reference))
        elif does == "them":
            yield tuple(ids(mlx_lm.stream_generate(*theirs, text, prompt_cache=c)) for c in (ours, reference))
        elif does == "copy":
            ours = copy.deepcopy(ours)
        elif does == "save":
            save_prompt_cache(str(path), ours)
            ours = load_prompt_cache(str(path))
        if not is_open(ours):
            assert {entry.offset for entry in ours} == {reference[0].offset}, f"rows after {does}"
        left_open.append(mine)  # "idle": never iterated at all


@pytest.mark.parametrize("seed", range(6))
def test_any_treatment_gives_mlx_lms_texts(pair, theirs, seed, tmp_path):
    for ours, reference in walk(pair, theirs, random.Random(seed), tmp_path / "cache.safetensors"):
        assert ours == reference


@pytest.mark.full
@pytest.mark.parametrize("seed", range(100, 200))
def test_many_treatments_give_mlx_lms_texts(pair, theirs, seed, tmp_path):
    test_any_treatment_gives_mlx_lms_texts(pair, theirs, seed, tmp_path)


def test_rows_written_by_others_after_a_trim_are_noticed(pair, theirs):
    """Trimmed and grown again to a length that ours had: the tokens we remember are not those rows."""
    texts = []
    for cache, step, model in (
        (make_prompt_cache(pair[0]), stream_generate, pair),
        (mlx_lm_cache(theirs[0]), mlx_lm.stream_generate, theirs),
    ):
        ids(step(*model, PROMPT, max_tokens=20, prompt_cache=cache))
        trim_prompt_cache(cache, 10)
        ids(mlx_lm.stream_generate(*theirs, "xyz", max_tokens=4, prompt_cache=cache))
        texts.append(ids(step(*model, " more", max_tokens=12, prompt_cache=cache)))
    assert texts[0] == texts[1]


def test_an_earlier_call_on_the_same_cache_says_why_it_cannot_go_on(pair):
    for cache in (make_prompt_cache(pair[0]), mlx_lm_cache(pair[0])):
        first = stream_generate(*pair, PROMPT, max_tokens=30, prompt_cache=cache)
        next(first)
        ids(stream_generate(*pair, " more", max_tokens=3, prompt_cache=cache))
        rows = cache[0].offset
        with pytest.raises(SessionError, match=r"took over|changed by somebody else"):
            ids(first)
        assert cache[0].offset == rows


def test_a_refused_call_leaves_the_cache_as_it_was(pair, monkeypatch):
    cache = make_prompt_cache(pair[0])
    ids(stream_generate(*pair, PROMPT, max_tokens=5, prompt_cache=cache))
    rows, tokens = cache[0].offset, list(cache.session.tokens)
    monkeypatch.setattr(engine_of(*pair).target, "max_context", rows + 2)
    with pytest.raises(ContextLengthError):
        ids(stream_generate(*pair, PROMPT, prompt_cache=cache))
    assert (cache[0].offset, cache.session.tokens) == (rows, tokens)


@pytest.mark.parametrize("ours", [make_prompt_cache, mlx_lm_cache])
@pytest.mark.parametrize("during", [0, 4])
def test_a_failed_evaluation_keeps_the_conversation(pair, theirs, monkeypatch, ours, during):
    """In the prompt, and in the third round: the cache is filled again with what was handed out."""
    cache, reference = ours(pair[0]), mlx_lm_cache(theirs[0])
    target = engine_of(*pair).target
    forward, calls = target.forward, []
    broken = mx.linalg.inv(mx.zeros((2, 2)), stream=mx.cpu)[0, :1].astype(mx.uint32)

    def failing(tokens, *rest):
        calls.append(1)
        return forward(tokens + broken if len(calls) == during + 1 else tokens, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(target, "forward", failing)
        got, stream = [], stream_generate(*pair, PROMPT, prompt_cache=cache, width=1)
        with pytest.raises(RuntimeError, match="MLX could not compute"):
            got.extend(response.token for response in stream)
    assert len(got) == max(during - 1, 0)
    fed = pair[1].encode(PROMPT)[: None if during else 1] + got
    theirs[0](mx.array([fed]), cache=reference)
    texts = []
    for step, model, held in ((stream_generate, pair, cache), (mlx_lm.stream_generate, theirs, reference)):
        assert held[0].offset == held[-1].offset == len(fed)
        texts.append(ids(step(*model, " again", max_tokens=9, prompt_cache=held)))
    assert texts[0] == texts[1]


def test_another_models_cache_is_refused(pair, theirs, tmp_path):
    """mlx-lm would run the layers that have a cache, and leave out the others."""
    other = load(save_tiny(tmp_path / "deep", layers=4))
    for cache in (make_prompt_cache(other[0]), mlx_lm_cache(other[0]), mlx_lm_cache(pair[0])[:1], []):
        with pytest.raises(SessionError, match="was made for another model than this one \\(2 layers of KVCache\\)"):
            stream_generate(*pair, PROMPT, prompt_cache=cache)
    twin = load(save_tiny(tmp_path / "twin", seed=1))
    with pytest.raises(SessionError, match="another model"):
        stream_generate(*pair, PROMPT, prompt_cache=make_prompt_cache(twin[0]))


def test_a_model_of_mlx_lm_gets_mlx_lms_cache(folder):
    model, tokenizer = mlx_lm.load(str(folder))
    cache = make_prompt_cache(model)
    assert type(cache) is list
    assert ids(stream_generate(model, tokenizer, PROMPT, max_tokens=3, prompt_cache=cache)) and cache[0].offset


def test_a_new_drafter_drafts_on_an_old_cache(folder):
    pair = load(folder)
    cache = make_prompt_cache(pair[0])
    lanes = []
    for name in (None, "first", "second"):
        drafter = PlannedDrafter(lambda position, count: [1] * count, name) if name else None
        stream = stream_generate(*pair, " so", max_tokens=3, prompt_cache=cache, draft_model=drafter)
        lanes.append(list(stream)[-1].lane)
    assert lanes == ["ngram", "first", "second"]


def test_copies_and_pickles_of_a_model_carry_no_engine(pair, theirs):
    """They are mlx-lm models like any other, taps and all left behind; a cache's copy shares the model."""
    before = mx.get_active_memory()
    cache = make_prompt_cache(pair[0])
    assert copy.deepcopy(cache).session.target is cache.session.target
    assert type(pickle.loads(pickle.dumps(cache))) is list
    assert mx.get_active_memory() - before < 100_000, "the model was copied with its cache"
    wanted = ids(mlx_lm.stream_generate(*theirs, PROMPT, max_tokens=12))
    for model in (copy.deepcopy(pair[0]), pickle.loads(pickle.dumps(pair[0]))):
        assert {type(layer).__mro__[1].__name__ for layer in model.layers} == {"Module"}
        last = list(stream_generate(model, pair[1], PROMPT, max_tokens=12))
        assert ids(last) == wanted and last[-1].lane == "plain"
    assert list(stream_generate(*pair, PROMPT, max_tokens=12))[-1].lane == "oracle"


def test_a_dropped_model_is_freed_before_the_next_is_loaded(folder):
    pair = load(folder)
    gc.collect()
    held = mx.get_active_memory()
    gc.disable()  # by chance it would run in between
    try:
        for _ in range(3):
            del pair
            pair = load(folder)
    finally:
        gc.enable()
    assert mx.get_active_memory() <= held + 100_000 and pair


def test_the_tokenizer_of_the_call_decides(folder):
    model, first = load(folder)
    second = mlx_lm.load(str(folder))[1]
    tokens = ids(stream_generate(model, first, PROMPT, max_tokens=20))
    second.eos_token_ids = {tokens[4]}
    cut = tokens[: tokens.index(tokens[4]) + 1]
    assert ids(stream_generate(model, second, PROMPT, max_tokens=20)) == cut
    assert ids(stream_generate(model, first, PROMPT, max_tokens=20)) == tokens


@pytest.mark.parametrize("size", [1, 2, 40])
def test_progress_is_reported_as_mlx_lm_reports_it(pair, theirs, size):
    calls = []
    for step, model in ((stream_generate, pair), (mlx_lm.stream_generate, theirs)):
        calls.append([])
        report = lambda *done: calls[-1].append(done)  # noqa: E731
        ids(step(*model, [5] * size, max_tokens=2, prefill_step_size=16, prompt_progress_callback=report))
    assert calls[0] == calls[1]
