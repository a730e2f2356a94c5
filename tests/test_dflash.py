"""The DFlash drafter against a float64 oracle, and its context: projected once, bounded, honestly trimmed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from dflash_fixture import FULL, SLIDING, FakeTarget, drafter_config, drafter_weights, random_features, write_drafter
from dflash_numpy import draft_logits, hidden_states

from mlx_spec import drafters
from mlx_spec.drafters._dflash_context import LayerContext
from mlx_spec.errors import DrafterError, OptionError

YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MIXED = (SLIDING, SLIDING, FULL)
SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "more taps than layers": {"taps": (2, 0, 1), "target_layers": 3, "heads": 8, "kv_heads": 1, "head_dim": 8},
    "sliding and full": {"layers": 3, "layer_types": MIXED, "window": 12},
    "causal everywhere": {"layers": 3, "layer_types": MIXED, "window": 12, "is_causal": True},
    "causal nowhere": {"layers": 3, "layer_types": MIXED, "window": 12, "is_causal": False},
    "window below the block": {"layer_types": (SLIDING, SLIDING), "window": 5, "is_causal": False},
    "soft cap and scales": {"softcap": 3.0, "embedding_scale": 2.5, "multiplier": 0.5},
    "linear rope": {"rope": {"rope_type": "linear", "factor": 4.0}},
    "yarn": {"rope": YARN},
    "yarn unrounded": {"rope": YARN | {"truncate": False, "attention_factor": 1.3}, "bias": True},
    "llama3 rope": {"rope": LLAMA3},
    "neighbour pairs": {"is_neox_style": False},
}


def make(folder: Path, seed: int = 0, target: FakeTarget | None = None, settings: Any = None, **shape: Any) -> Any:
    """(bound drafter, config, weights, target)."""
    config = drafter_config(**shape)
    weights = drafter_weights(config, seed)
    drafter: Any = drafters.load("dflash", write_drafter(folder, config, weights), settings or {})
    target = target or FakeTarget(layers=shape.get("target_layers", 2))
    drafter.bind(target)
    return drafter, config, weights, target


def feed(session: Any, features: np.ndarray, begin: int, end: int) -> None:
    session.ingest([1] * (end - begin), mx.array(features[begin:end]), begin)


def block_embedding(target: FakeTarget, anchor: int, config: dict[str, Any]) -> np.ndarray:
    inner = config["dflash_config"]
    return target.embedding[[anchor] + [inner["mask_token_id"]] * (inner["block_size"] - 1)] * target.scale


@pytest.mark.parametrize("name", SHAPES)
def test_forward_equals_float64_oracle(tmp_path: Path, name: str) -> None:
    drafter, config, weights, target = make(tmp_path, **SHAPES[name])
    features = random_features(40, config)
    session = drafter.open(3)
    length = 0
    for rows, anchor in ((17, 3), (1, 9), (8, 200), (5, 0)):
        feed(session, features, length, length + rows)
        length += rows
        assert session.length == length
        wanted = hidden_states(features[:length], block_embedding(target, anchor, config), config, weights)
        got = np.array(session.model.norm(session.hidden(anchor)))
        assert np.abs(got - wanted).max() <= 1e-4 * np.abs(wanted).max()
        logits = draft_logits(wanted, target.unembedding, config)
        assert np.allclose(np.array(session.logits(session.hidden(anchor)[1:])), logits, atol=2e-4)
        assert session.propose(anchor, 7).tokens.tolist() == logits.argmax(-1).tolist()


def test_oracle_shapes_differ_where_the_config_does(tmp_path: Path) -> None:
    """The oracle is only worth something if these switches move its result."""
    config = drafter_config(layers=3, layer_types=MIXED, window=12)
    weights, features, target = drafter_weights(config), random_features(20, config), FakeTarget()
    block = block_embedding(target, 3, config)
    base = hidden_states(features, block, config, weights)
    for change in ({"is_causal": True}, {"is_causal": False}, {"sliding_window": 8}, {"rope_scaling": YARN}):
        assert np.abs(hidden_states(features, block, config | change, weights) - base).max() > 1e-3


@pytest.mark.parametrize(
    ("setting", "configured", "kinds", "oracle_flag"),
    [
        ("auto", None, MIXED, None),
        ("on", False, (SLIDING,) * 3, True),
        ("off", True, (SLIDING,) * 3, False),
        ("off", None, MIXED, False),
        ("on", False, (FULL,) * 3, False),
    ],
)
def test_swa_causal_setting_overrules_the_config_for_sliding_layers_only(
    tmp_path: Path, setting: str, configured: bool | None, kinds: tuple[str, ...], oracle_flag: bool | None
) -> None:
    shape: dict[str, Any] = {"layers": 3, "layer_types": kinds, "window": 12, "is_causal": configured}
    drafter, config, weights, target = make(tmp_path, settings={"draft_swa_causal": setting}, **shape)
    features = random_features(10, config)
    session = drafter.open(1)
    feed(session, features, 0, 10)
    wanted = hidden_states(
        features, block_embedding(target, 5, config), config | {"is_causal": oracle_flag}, weights
    )
    assert np.allclose(np.array(session.model.norm(session.hidden(5))), wanted, atol=1e-3)


def test_last_slot_moves_the_first_only_without_causality(tmp_path: Path) -> None:
    for flag, moves in ((True, False), (False, True)):
        drafter, config, _, _ = make(tmp_path / str(flag), layer_types=(SLIDING, SLIDING), window=64, is_causal=flag)
        session = drafter.open(1)
        feed(session, random_features(6, config), 0, 6)
        x = mx.random.normal((8, 64), key=mx.random.key(1))
        changed = mx.concatenate([x[:7], x[7:] + 1.0])
        first = [np.array(session.model(rows, session.contexts))[:7] for rows in (x, changed)]
        assert (np.abs(first[0] - first[1]).max() > 1e-4) == moves


def test_each_feature_is_projected_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter, config, _, _ = make(tmp_path, layers=3, layer_types=MIXED, window=12)
    session = drafter.open(1)
    features = random_features(200, config)
    seen: list[int] = []
    original = type(session.model.fc).__call__
    monkeypatch.setattr(
        type(session.model.fc),
        "__call__",
        lambda self, x: (seen.append(x.shape[1]) if self is session.model.fc else None, original(self, x))[1],
    )
    length = 0
    for rows in (100, 3, 1, 8, 1, 1, 5):
        feed(session, features, length, length + rows)
        length += rows
        before = len(seen)
        session.propose(7, 7)
        assert len(seen) == before  # proposing projects no feature
    assert seen == [100, 3, 1, 8, 1, 1, 5]


def test_context_holds_no_block_rows_and_does_not_depend_on_rejections(tmp_path: Path) -> None:
    drafter, config, _, _ = make(tmp_path, layers=3, layer_types=MIXED, window=12)
    features = random_features(30, config)
    steady, jumpy = drafter.open(1), drafter.open(1)
    for begin in range(0, 30, 5):  # full accepts: five rows a round
        feed(steady, features, begin, begin + 5)
        steady.propose(9, 7)
    for begin in range(30):  # every draft rejected: a row a round
        feed(jumpy, features, begin, begin + 1)
        jumpy.propose(begin, 7)
        assert jumpy.length == begin + 1
    for one, other in zip(steady.contexts, jumpy.contexts, strict=True):
        rows = min(one.visible(), other.visible())
        for a, b in zip(one.arrays(), other.arrays(), strict=True):
            ends = (one.rows, other.rows)
            assert np.allclose(
                np.array(a[..., ends[0] - rows : ends[0], :]), np.array(b[..., ends[1] - rows : ends[1], :]), atol=1e-5
            )
    assert steady.propose(4, 7).tokens.tolist() == jumpy.propose(4, 7).tokens.tolist()


def test_proposing_twice_gives_the_same(tmp_path: Path) -> None:
    drafter, config, _, _ = make(tmp_path)
    session = drafter.open(1)
    feed(session, random_features(5, config), 0, 5)
    assert session.propose(4, 7).tokens.tolist() == session.propose(4, 7).tokens.tolist()


def test_width_cuts_what_is_used_and_window_what_is_denoised(tmp_path: Path) -> None:
    drafter, config, weights, target = make(tmp_path)
    features = random_features(9, config)
    session = drafter.open(1)
    feed(session, features, 0, 9)
    whole = session.propose(4, 7).tokens.tolist()
    for count in (1, 3, 6, 7, 30):
        assert session.propose(4, count).tokens.tolist() == whole[:count]
    assert len(session.propose(4, 0)) == 0
    narrow = drafter.open(1, 0, 4)
    feed(narrow, features, 0, 9)
    short = config | {"dflash_config": config["dflash_config"] | {"block_size": 4}}
    wanted = hidden_states(features, block_embedding(target, 4, short), config, weights)
    logits = draft_logits(wanted, target.unembedding, config)
    assert narrow.propose(4, 7).tokens.tolist() == logits.argmax(-1).tolist()
    session.draft_window = 4
    assert session.propose(4, 7).tokens.tolist() == narrow.propose(4, 7).tokens.tolist()


def test_windows_and_widths_are_checked(tmp_path: Path) -> None:
    drafter, *_ = make(tmp_path)
    assert (drafter.default_width, drafter.max_width, drafter.layers, drafter.name) == (8, 8, (0, 1), "dflash")
    for window in (1, 9):
        with pytest.raises(OptionError, match=rf"draft_window {window} .*2\.\.8"):
            drafter.open(1, 0, window)
        with pytest.raises(OptionError, match="draft_window"):
            drafters.load("dflash", tmp_path, {"draft_window": window})
    assert drafters.load("dflash", tmp_path, {"draft_window": 3}).open is not None


def test_blind_start_uses_true_positions(tmp_path: Path) -> None:
    """Rows before ``start`` are unknown; those after it stand where they really are."""
    drafter, config, weights, target = make(tmp_path, layers=3, layer_types=MIXED, window=12, rope=YARN)
    features = random_features(20, config)
    session = drafter.open(1, 1000)
    session.ingest([1] * 20, mx.array(features), 1000)
    assert session.length == 1020
    wanted = hidden_states(features, block_embedding(target, 5, config), config, weights, start=1000)
    got = np.array(session.model.norm(session.hidden(5)))
    assert np.abs(got - wanted).max() <= 1e-3 * np.abs(wanted).max()
    assert session.trim(1010) == 1010
    assert session.trim(500) == 0


@pytest.mark.parametrize("slack", [0, 3, 40])
def test_trim_goes_back_exactly_or_says_that_it_cannot(tmp_path: Path, slack: int) -> None:
    drafter, config, _, _ = make(tmp_path, layers=3, layer_types=MIXED, window=12)
    features = random_features(400, config)
    rng = np.random.default_rng(slack)

    def opened() -> Any:
        session = drafter.open(1)
        session.contexts = session.model.new_context(0, slack)
        return session

    session, honest = opened(), 0
    for _ in range(25):
        rows = int(rng.integers(1, 30))
        feed(session, features, session.length, session.length + rows)
        wanted = max(0, session.length - int(rng.integers(0, 20)))
        reached = session.trim(wanted)
        assert reached == session.length
        assert reached in (0, wanted)
        honest += reached == wanted > 0
        cold = opened()
        if wanted:
            feed(cold, features, 0, wanted)
        feed(session, features, reached, wanted)
        assert session.propose(7, 7).tokens.tolist() == cold.propose(7, 7).tokens.tolist()
    assert honest > 0


def test_context_memory_is_bounded_by_the_window(tmp_path: Path) -> None:
    drafter, config, _, _ = make(tmp_path, layer_types=(SLIDING, SLIDING), window=64)
    session = drafter.open(1)
    session.contexts = session.model.new_context(0, 128)
    features = random_features(2000, config)
    most = 0
    for begin in range(0, 2000, 500):
        feed(session, features, begin, begin + 500)
        mx.eval(session.arrays())
        most = max(most, sum(array.nbytes for array in session.arrays()))
    for begin in range(300):
        session.ingest([1], mx.array(features[begin : begin + 1]), session.length)
        session.propose(1, 7)
        mx.eval(session.arrays())
        most = max(most, sum(array.nbytes for array in session.arrays()))
    row = 2 * 2 * 16 * 4 * 2  # keys and values, kv heads, head_dim, bytes, layers
    assert most <= row * (2 * (63 + 128) + 256)


def test_growth_keeps_every_row() -> None:
    context = LayerContext()
    rows = mx.arange(1000, dtype=mx.float32).reshape(1, 1, 1000, 1)
    for begin, end in ((0, 3), (3, 250), (250, 257), (257, 1000)):
        context.append(rows[..., begin:end, :], -rows[..., begin:end, :])
    keys, values = context.view(rows[..., :2, :], rows[..., :2, :])
    assert keys.flatten().tolist() == [*range(1000), 0, 1]
    assert values.flatten().tolist()[:1000] == [-i for i in range(1000)]
    assert context.length == 1000


def test_gaps_and_missing_features_are_refused(tmp_path: Path) -> None:
    drafter, config, _, _ = make(tmp_path)
    session = drafter.open(1)
    with pytest.raises(DrafterError, match="no features"):
        session.ingest([1], None, 0)
    with pytest.raises(DrafterError, match="from 3 on, but it holds 0"):
        session.ingest([1], mx.array(random_features(1, config)), 3)
