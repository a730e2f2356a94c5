"""The drop-in functions: signatures, fields and texts of mlx-lm, prompt caches that both sides can continue."""

from __future__ import annotations

import dataclasses
import inspect
import json

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm.generate import GenerationResponse as MlxLmResponse
from mlx_lm.models.cache import load_prompt_cache, save_prompt_cache, trim_prompt_cache
from mlx_lm.models.cache import make_prompt_cache as mlx_lm_cache
from toys import PlannedDrafter, save_tiny

import mlx_spec
from mlx_spec import Engine, generate, load, make_prompt_cache, make_sampler, stream_generate
from mlx_spec.errors import (
    CheckpointError,
    MlxSpecError,
    ModelNotFoundError,
    OptionError,
    UnsupportedError,
)

PROMPT = "the cat sat on the mat, the cat sat on"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("api") / "tiny")


@pytest.fixture(scope="module")
def pair(folder):
    return load(folder)


@pytest.fixture(scope="module")
def theirs(folder):
    return mlx_lm.load(str(folder))


def test_names_and_signatures_are_those_of_mlx_lm():
    for name in ("load", "generate", "stream_generate"):
        ours, mine = getattr(mlx_lm, name), getattr(mlx_spec, name)
        wanted = [p for p in inspect.signature(ours).parameters if p not in ("kwargs", "stream")]
        assert list(inspect.signature(mine).parameters)[: len(wanted)] == wanted, name
    fields = [f.name for f in dataclasses.fields(MlxLmResponse)]
    assert [f.name for f in dataclasses.fields(mlx_spec.GenerationResponse)][:10] == fields
    assert issubclass(mlx_spec.GenerationResponse, MlxLmResponse)
    assert sorted(mlx_spec.__all__) == mlx_spec.__all__
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = mlx_spec.nothing


def test_text_and_responses_equal_mlx_lm(pair, theirs):
    ours = list(stream_generate(*pair, PROMPT, max_tokens=90))
    reference = list(mlx_lm.stream_generate(*theirs, PROMPT, max_tokens=90))
    assert [r.token for r in ours] == [r.token for r in reference]
    assert "".join(r.text for r in ours) == "".join(r.text for r in reference)
    assert [r.finish_reason for r in ours] == [r.finish_reason for r in reference]
    assert [r.generation_tokens for r in ours] == [r.generation_tokens for r in reference]
    assert ours[-1].prompt_tokens == reference[-1].prompt_tokens
    for a, b in zip(ours, reference, strict=True):
        assert mx.array_equal(a.logprobs, b.logprobs)
    assert ours[-1].lane == "ngram" and ours[-1].stats.reason
    assert generate(*pair, PROMPT, max_tokens=90) == mlx_lm.generate(*theirs, PROMPT, max_tokens=90)


def test_a_model_loaded_by_mlx_lm_runs_plain_and_says_so(theirs):
    last = list(stream_generate(*theirs, PROMPT, max_tokens=5))[-1]
    assert last.lane == "plain" and "without a drafter" in last.stats.reason


@pytest.mark.parametrize("prompt", [PROMPT, mx.array([5, 6, 7]), [5, 6, 7]])
def test_prompt_forms(pair, theirs, prompt):
    assert generate(*pair, prompt, max_tokens=8) == mlx_lm.generate(*theirs, prompt, max_tokens=8)


def test_mlx_lm_options_that_cannot_be_honoured_are_named(pair):
    for name, value in (("max_kv_size", 64), ("kv_bits", 4), ("input_embeddings", mx.zeros((1, 64)))):
        with pytest.raises(UnsupportedError, match=name):
            stream_generate(*pair, PROMPT, **{name: value})
    with pytest.raises(UnsupportedError, match="max_kv_size=64"):
        make_prompt_cache(pair[0], 64)
    with pytest.raises(OptionError, match="no option 'temperature'"):
        stream_generate(*pair, PROMPT, temperature=1.0)
    with pytest.raises(OptionError, match="not both"):
        stream_generate(*pair, PROMPT, width=4, num_draft_tokens=2)
    with pytest.raises(ValueError, match="max_tokens"):
        stream_generate(*pair, PROMPT, max_tokens=0)
    list(stream_generate(*pair, PROMPT, max_tokens=2, max_kv_size=None, kv_bits=None, kv_group_size=64))
    with pytest.raises(UnsupportedError, match="draft_model"):
        stream_generate(*pair, PROMPT, draft_model=pair[0])


def test_stop_and_progress(pair):
    full = generate(*pair, PROMPT, max_tokens=40)
    calls = []
    text = generate(*pair, PROMPT, max_tokens=40, stop=full[10:13], prompt_progress_callback=lambda *a: calls.append(a))
    assert text == full[: full.index(full[10:13])]
    assert calls[0] == (0, calls[-1][1])


def turns(step, cache, **kwargs):
    """Three turns on one prompt cache; each turn's prompt is only what is new."""
    return [[r.token for r in step(text, cache, **kwargs)] for text in (PROMPT, " and the dog", " ran after the cat")]


@pytest.mark.parametrize("width", [1, 4])
def test_a_prompt_cache_continues_as_in_mlx_lm(pair, theirs, width):
    reference = turns(
        lambda text, cache: mlx_lm.stream_generate(*theirs, text, max_tokens=12, prompt_cache=cache),
        mlx_lm_cache(theirs[0]),
    )
    ours = lambda text, cache: stream_generate(*pair, text, max_tokens=12, prompt_cache=cache, width=width)  # noqa: E731
    assert turns(ours, make_prompt_cache(pair[0])) == reference
    assert turns(ours, mlx_lm_cache(pair[0])) == reference, "a cache made by mlx-lm"


def test_a_prompt_cache_moves_between_the_two_libraries(pair, theirs, tmp_path):
    cache = make_prompt_cache(pair[0])
    first = [r.token for r in stream_generate(*pair, PROMPT, max_tokens=12, prompt_cache=cache)]
    save_prompt_cache(str(tmp_path / "cache.safetensors"), cache)
    loaded = load_prompt_cache(str(tmp_path / "cache.safetensors"))
    by_them = [r.token for r in mlx_lm.stream_generate(*theirs, " more", max_tokens=12, prompt_cache=loaded)]
    reference_cache = mlx_lm_cache(theirs[0])
    assert first == [
        r.token for r in mlx_lm.stream_generate(*theirs, PROMPT, max_tokens=12, prompt_cache=reference_cache)
    ]
    wanted = [r.token for r in mlx_lm.stream_generate(*theirs, " more", max_tokens=12, prompt_cache=reference_cache)]
    assert by_them == wanted
    assert [r.token for r in stream_generate(*pair, " more", max_tokens=12, prompt_cache=cache)] == wanted


def test_a_prompt_cache_trimmed_by_the_user(pair, theirs):
    cache, reference = make_prompt_cache(pair[0]), mlx_lm_cache(theirs[0])
    list(stream_generate(*pair, PROMPT, max_tokens=12, prompt_cache=cache))
    list(mlx_lm.stream_generate(*theirs, PROMPT, max_tokens=12, prompt_cache=reference))
    for each in (cache, reference):
        trim_prompt_cache(each, 7)
    ours = [r.token for r in stream_generate(*pair, " more", max_tokens=12, prompt_cache=cache)]
    assert ours == [r.token for r in mlx_lm.stream_generate(*theirs, " more", max_tokens=12, prompt_cache=reference)]


def test_the_same_request_three_times_on_one_session(pair):
    engine = Engine(*pair)
    session = engine.session()
    texts = [[r.token for r in engine.stream(PROMPT, session=session)] for _ in range(3)]
    assert texts[0] == texts[1] == texts[2] and texts[0]


def test_seeds(pair):
    def text(seed):
        return generate(*pair, PROMPT, max_tokens=20, sampler=make_sampler(temp=1.0, seed=seed))

    assert text(1) == text(1) != text(2)
    assert len({text(None) for _ in range(3)}) == 3
    mx.random.seed(7)
    first = text(None)
    mx.random.seed(7)
    assert text(None) == first


def test_load_errors_are_one_sentence_each(folder, tmp_path):
    with pytest.raises(ModelNotFoundError):
        load(tmp_path / "nothing")
    (tmp_path / "only").mkdir()
    (tmp_path / "only" / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(CheckpointError):
        load(tmp_path / "only")
    broken = save_tiny(tmp_path / "nan")
    weights = mx.load(str(broken / "model.safetensors"))
    weights["model.norm.weight"] = mx.full((64,), float("nan"))
    mx.save_safetensors(str(broken / "model.safetensors"), weights)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight holds values that are not finite"):
        load(broken)
    with pytest.raises(MlxSpecError, match="nope"):
        load(folder, draft=str(tmp_path / "nope"))


def test_a_drafter_that_cannot_be_loaded_falls_back_only_when_asked(folder, tmp_path):
    engine = Engine.load(folder, draft=str(tmp_path / "nope"), fallback=True)
    last = list(engine.stream(PROMPT))[-1]
    assert last.lane == "plain" and "could not be used" in last.stats.reason


def test_draft_argument(folder):
    assert Engine.load(folder, draft=None).lane == "plain"
    assert Engine.load(folder, draft="plain").lane == "plain"
    assert Engine.load(folder, draft="ngram").lane == "ngram"
    with pytest.raises(OptionError, match="needs a drafter's weights"):
        Engine.load(folder, speculative=mlx_spec.SpeculativeConfig(method="dflash"))
    with pytest.raises(OptionError, match="unknown method 'medusa'"):
        Engine.load(folder, speculative=mlx_spec.SpeculativeConfig(method="medusa"))


def test_exactness_contracts_hold_on_the_bundled_blas_and_are_probed(pair):
    engine = Engine(*pair, drafter=PlannedDrafter(lambda position, count: [1] * count))
    tokens = {}
    for exactness in ("fast", "exact", "stock"):
        responses = list(engine.stream(PROMPT, mlx_spec.Options(max_tokens=30, exactness=exactness, width=5)))
        tokens[exactness] = [r.token for r in responses]
        assert responses[-1].stats.exactness == exactness
    assert tokens["fast"] == tokens["exact"] == tokens["stock"]
    assert engine._exact == {(5,): None}


def test_exactness_is_refused_by_name_where_it_does_not_hold(pair, monkeypatch):
    engine = Engine(*pair, drafter=PlannedDrafter(lambda position, count: []))
    options = mlx_spec.Options(exactness="exact")
    with monkeypatch.context() as patch:
        patch.setattr("mlx_spec.blas.active", lambda: "mkl")
        with pytest.raises(UnsupportedError, match=r"'exact' cannot be had with mkl kernels"):
            engine.stream(PROMPT, options)
    forward = engine.target.forward
    monkeypatch.setattr(
        engine.target, "forward", lambda t, *a: dataclasses.replace(f := forward(t, *a), logits=f.logits + t.shape[0])
    )
    with pytest.raises(UnsupportedError, match="does not hold for this model at width 4"):
        engine.stream(PROMPT, options)


def test_closing_an_engine_leaves_the_model_as_it_was(folder):
    model, tokenizer = mlx_lm.load(str(folder))
    before, classes = set(model.__dict__), [type(layer) for layer in model.layers]
    drafter = PlannedDrafter(lambda position, count: [])
    drafter.layers = (0, 1)
    with Engine(model, tokenizer, drafter=drafter) as engine:
        assert [type(layer) for layer in model.layers] != classes
        list(engine.stream(PROMPT))
    assert set(model.__dict__) == before and [type(layer) for layer in model.layers] == classes


def test_a_mask_id_that_ends_answers_is_said(pair):
    drafter = PlannedDrafter(lambda position, count: [])
    drafter.mask_id = 0
    with Engine(*pair, drafter=drafter, reason="asked for") as engine:
        assert engine.reason == "asked for; its mask id 0 is an end-of-sequence id here: a wrong pair?"


def test_an_unreadable_drafter_is_refused_before_its_weights_are_fetched(folder, monkeypatch):
    """The hub is asked for config.json first; only then would weights come."""
    from mlx_spec import hub

    configs = {
        "some/eagle": {"architectures": ["LlamaForCausalLMEagle3"]},
        "some/dflash2": {"dflash_config": {"target_layer_ids": [0], "mask_token_id": 1, "selector_rank": 256}},
        "some/llama": {"model_type": "llama"},
    }
    monkeypatch.setattr(hub, "look", lambda name, revision, check: check(configs[name]))
    monkeypatch.setattr(hub, "fetch", lambda *a: pytest.fail("weights were fetched"))
    for name, words in (
        ("some/eagle", "EAGLE drafter"),
        ("some/dflash2", "selector_rank"),
        ("some/llama", "language model"),
    ):
        with pytest.raises(MlxSpecError, match=words):
            Engine.load(folder, draft=name)


def test_a_local_family_that_cannot_be_a_target_is_refused_before_its_weights_are_read(folder, tmp_path, monkeypatch):
    changed = save_tiny(tmp_path / "sliding")
    config = json.loads((changed / "config.json").read_text())
    sliding = {"model_type": "llama", "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16}
    (changed / "config.json").write_text(json.dumps(config | sliding))
    monkeypatch.setattr("mlx_spec.targets.loading.mlx_lm_load", lambda *a, **k: pytest.fail("weights were read"))
    with pytest.raises(UnsupportedError, match="layer 0 keeps a RotatingKVCache"):
        load(changed)


def test_paths_that_mlx_lm_cannot_read_are_named(tmp_path):
    with pytest.raises(CheckpointError, match="rename the folder"):
        load(save_tiny(tmp_path / "a[1]"))
    with pytest.raises(ModelNotFoundError, match="no home folder for ~nosuch-user/x"):
        load("~nosuch-user/x")
