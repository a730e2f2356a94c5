"""The brand: every lane gives the text of lane plain, and greedy lane plain gives mlx-lm's. Plain is the reference.

Bundled BLAS, so equality is bit for bit. The full product runs under ``make test-full``; every run here takes a
share of it that covers each drafter, width, temperature and seed at least once.
"""

from __future__ import annotations

import functools
import os

import mlx.core as mx
import mlx_lm
import pytest
from dflash_fixture import save_drafter
from toys import PlannedDrafter, save_tiny

from mlx_spec import Engine, Options, make_logits_processors, make_sampler
from mlx_spec.drafters import load as load_drafter

WIDTHS = (2, 3, 5, 8, 16)
SEEDS = (None, 1, 2, 3)  # None: greedy
DRAFTERS = ("ngram", "dflash", "wrong", "right")
TOKENS = 400


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lossless")
    save_tiny(folder / "target")
    save_drafter(folder / "drafter", block=16)
    return folder


@pytest.fixture(scope="module")
def model(home):
    return mlx_lm.load(str(home / "target"))


def prompt(number: int) -> list[int]:
    """Mixed material: some with repeats (so that lookup accepts), some without; lengths 1 to 60."""
    key = mx.random.key(1000 + number)
    ids = (mx.random.randint(1, 256, (1 + (number * 7) % 60,), key=key)).tolist()
    return ids * 2 if number % 3 == 0 else ids


def options(seed: int | None, **changes) -> Options:
    sampler = None if seed is None else make_sampler(temp=0.8, top_p=0.95, seed=seed)
    return Options(**({"max_tokens": TOKENS, "sampler": sampler} | changes))


def run(engine: Engine, ids: list[int], wanted: Options) -> list[int]:
    return [r.token for r in engine.stream(ids, wanted) if r.token >= 0]


@functools.cache
def plain(model_key, number: int, seed: int | None) -> tuple[int, ...]:
    engine = Engine(*MODELS[model_key])
    return tuple(run(engine, prompt(number), options(seed)))


MODELS: dict[int, tuple] = {}


def engine_for(model, home, name: str, number: int, seed: int | None) -> Engine:
    MODELS[id(model)] = model
    reference = plain(id(model), number, seed)
    script = prompt(number) + list(reference)
    if name == "right":
        drafter = PlannedDrafter(lambda position, count: script[position : position + count])
    elif name == "wrong":
        drafter = PlannedDrafter(lambda p, count: [(t + 1) % 256 for t in (script + [0] * 99)[p : p + count]])
    else:
        drafter = load_drafter(name, home / "drafter" if name == "dflash" else None)
    return Engine(*model, drafter=drafter)


def check(model, home, number: int, seed: int | None, name: str, width) -> None:
    engine = engine_for(model, home, name, number, seed)
    got = run(engine, prompt(number), options(seed, width=width))
    engine.close()
    wanted = list(plain(id(model), number, seed))
    first = next((i for i, (a, b) in enumerate(zip(got, wanted, strict=False)) if a != b), None)
    assert got == wanted, f"{name}, width {width}, seed {seed}, prompt {number}: first difference at token {first}"
    assert len(wanted) == TOKENS or wanted[-1] == 0


SHARE = [(n, SEEDS[n % 4], DRAFTERS[(n // 2) % 4], WIDTHS[n % 5]) for n in range(20)]


@pytest.mark.parametrize(("number", "seed", "name", "width"), SHARE)
def test_share_of_the_product(model, home, number, seed, name, width):
    check(model, home, number, seed, name, width)


# Every fourth prompt in `make test-full`; all twenty with MLX_SPEC_TEST_ALL=1 (docs/lab.md has the figures).
PROMPTS = range(0, 20, 1 if os.environ.get("MLX_SPEC_TEST_ALL") else 4)


@pytest.mark.full
@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("number", PROMPTS)
def test_full_product(model, home, number, seed, name):
    for width in WIDTHS:
        check(model, home, number, seed, name, width)


@pytest.mark.parametrize("name", DRAFTERS)
def test_rotating_width(model, home, name):
    check(model, home, 3, 2, name, (2, 4, 8, 16))


@pytest.mark.parametrize("number", [0, 1, 4])
def test_greedy_lane_plain_is_mlx_lm(model, number):
    reference = [r.token for r in mlx_lm.stream_generate(*model, prompt(number), max_tokens=TOKENS)]
    MODELS[id(model)] = model
    assert list(plain(id(model), number, None)) == reference


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "4-bit", "8-bit"])
def test_precisions(home, kind):
    """fp32, bf16, 4-bit and 8-bit targets, drafted and not; greedy plain equals mlx-lm in each."""
    import mlx.nn as nn

    loaded, tokenizer = mlx_lm.load(str(home / "target"))
    if kind == "bfloat16":
        loaded.set_dtype(mx.bfloat16)
    elif kind != "float32":
        nn.quantize(loaded, group_size=32, bits=int(kind[0]))
    pair = (loaded, tokenizer)
    reference = [r.token for r in mlx_lm.stream_generate(*pair, prompt(3), max_tokens=330)]
    assert run(Engine(*pair), prompt(3), Options(max_tokens=330)) == reference
    for name, width in (("ngram", 8), ("dflash", 5)):
        engine = engine_for_kind(pair, home, name)
        assert run(engine, prompt(3), Options(max_tokens=330, width=width)) == reference, f"{kind} {name}"
        engine.close()


def engine_for_kind(pair, home, name):
    return Engine(*pair, drafter=load_drafter(name, home / "drafter" if name == "dflash" else None))


PROCESSORS = {
    "repetition": {"repetition_penalty": 1.3},
    "presence and frequency": {"presence_penalty": 0.7, "frequency_penalty": 0.4},
    "bias": {"logit_bias": {65: 4.0, 66: -100.0}},
    "all": {"repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.2, "logit_bias": {70: 2.0}},
}


@pytest.mark.parametrize("which", PROCESSORS)
@pytest.mark.parametrize("temp", [0.0, 0.9])
def test_processors(model, home, which, temp):
    """Penalties count every accepted token once, whatever was drafted; greedy equals mlx-lm's own processors."""
    settings = Options(
        max_tokens=120,
        sampler=make_sampler(temp=temp, seed=5) if temp else None,
        processors=tuple(make_logits_processors(**PROCESSORS[which])),
    )
    wanted = run(Engine(*model), prompt(0), settings)
    if not temp:
        theirs = mlx_lm.sample_utils.make_logits_processors(**PROCESSORS[which])
        reference = mlx_lm.stream_generate(*model, prompt(0), max_tokens=120, logits_processors=theirs)
        assert wanted == [r.token for r in reference]
    for name in ("ngram", "dflash"):
        engine = engine_for_kind(model, home, name)
        assert run(engine, prompt(0), Options(**(vars(settings) | {"width": 6}))) == wanted, name
        engine.close()


@pytest.mark.parametrize("name", ["ngram", "dflash"])
def test_opaque_samplers_and_processors_of_mlx_lm(model, home, name):
    """mlx-lm's own sampler draws from the global state, one draw a token: the same stream in every lane."""
    theirs = mlx_lm.sample_utils.make_sampler(temp=0.9, top_p=0.9)
    processors = mlx_lm.sample_utils.make_logits_processors(repetition_penalty=1.2)

    def seeded(engine):
        mx.random.seed(11)
        return run(engine, prompt(3), Options(max_tokens=80, sampler=theirs, processors=tuple(processors), width=4))

    engine = engine_for_kind(model, home, name)
    assert seeded(engine) == seeded(Engine(*model))
    engine.close()


@pytest.mark.parametrize("name", ["ngram", "dflash"])
def test_a_warm_turn_equals_a_cold_one_in_text_and_in_drafts(model, home, name):
    engine = engine_for_kind(model, home, name)
    session, history = engine.session(), prompt(3)
    for turn in range(4):
        cut = [*history[:-5], 40 + turn] if turn == 2 else [*history, 50 + turn, 51]
        warm = list(engine.stream(cut, Options(max_tokens=40, width=6), session))
        cold = list(engine.stream(cut, Options(max_tokens=40, width=6)))
        assert [r.token for r in warm] == [r.token for r in cold]
        assert warm[-1].stats.accepted_per_round == cold[-1].stats.accepted_per_round
        if turn:
            assert warm[-1].stats.cached_tokens > 0
        history = cut + [r.token for r in warm]
    engine.close()
