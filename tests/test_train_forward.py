"""Training's forward is decoding's: the same drafter on the same context, and gradients that are those of the loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from dflash_fixture import FULL, SLIDING, FakeTarget, random_features, save_drafter
from mlx.utils import tree_flatten, tree_map

from mlx_spec.convert.train import forward, initial
from mlx_spec.convert.train.blocks import make_blocks, random_anchors
from mlx_spec.convert.train.learner import Learner, dense_weights
from mlx_spec.convert.train.shards import Sample
from mlx_spec.drafters import dflash
from mlx_spec.folders import read_config

SHAPES: dict[str, dict[str, Any]] = {
    "full": {"block": 8},
    "sliding": {"layer_types": (SLIDING, FULL), "window": 9, "block": 8},
    "window within the block": {"layer_types": (SLIDING, SLIDING), "window": 3, "block": 8},
    "sliding, not causal": {"layer_types": (SLIDING, FULL), "window": 9, "is_causal": False, "block": 8},
    "all causal": {"is_causal": True, "block": 5},
    "soft cap and scales": {"softcap": 3.0, "embedding_scale": 2.5, "multiplier": 0.5, "block": 4},
    "yarn": {"rope": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, "block": 16},
    "bias and one kv head": {"bias": True, "kv_heads": 1, "block": 3},
}


def learner_of(folder: Path, target: Any) -> tuple[Learner, dflash.DFlashDrafter]:
    drafter = dflash.load(folder, {})
    drafter.bind(target)
    model = dflash.DFlashModel(drafter.config)
    model.load_weights(list(dense_weights(drafter.model).items()))
    raw = read_config(folder)
    return Learner(raw, drafter.config, model, target, mx.float32), drafter


def some_samples(count: int = 3, vocab: int = 256, seed: int = 0) -> list[Sample]:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(12, 70, count).tolist()
    return [Sample(rng.integers(0, vocab, n).astype(np.int32), int(rng.integers(1, n // 2))) for n in lengths]


@pytest.mark.parametrize("name", SHAPES)
def test_equals_the_drafter_in_decoding(tmp_path: Path, name: str) -> None:
    """Logits of every slot of every block, against a session that was fed the same context, within 1e-4."""
    folder, target = save_drafter(tmp_path / "d", **SHAPES[name]), FakeTarget()
    learner, drafter = learner_of(folder, target)
    samples, rng = some_samples(), np.random.default_rng(1)
    anchors = [[*{max(s.prompt - 1, 0), *random_anchors(s, 12, rng)}] for s in samples]
    anchors = [sorted(row) for row in anchors]
    blocks = make_blocks(samples, anchors, learner.slots, 4.0)
    longest = max(map(len, samples))
    features = [random_features(longest, learner.raw, seed=i) for i in range(len(samples))]
    inputs = forward.prepare(learner, blocks, mx.array(np.stack(features)))
    learner.wear(learner.params)
    hidden = forward.hidden_rows(learner, inputs)
    logits = np.array(learner.project(hidden))
    rows = {int(slot): row for row, slot in enumerate(np.array(inputs.index).tolist()) if slot}
    most, compared = blocks.anchors.shape[1], 0
    for b, places in enumerate(anchors):
        for j, anchor in enumerate(places):
            session = drafter.open(0)
            session.ingest([0] * anchor, mx.array(features[b][:anchor]), 0)
            wanted = np.array(session.logits(session.hidden(int(samples[b].tokens[anchor]))))
            for slot in range(1, learner.slots):
                at = (b * most + j) * learner.slots + slot
                if at in rows:
                    np.testing.assert_allclose(logits[rows[at]], wanted[slot], atol=1e-4)
                    compared += 1
    assert compared > 20


def test_blocks_and_later_features_do_not_touch_a_block(tmp_path: Path) -> None:
    """Isolation, end to end: other blocks and features from the anchor on change nothing."""
    learner, _ = learner_of(save_drafter(tmp_path / "d", block=8), FakeTarget())
    (one,) = some_samples(1, seed=4)
    features = random_features(len(one), learner.raw)
    anchors = list(range(one.prompt - 1, len(one) - 1))
    middle = anchors[len(anchors) // 2]

    def logits(places: list[int], rows: np.ndarray) -> np.ndarray:
        blocks = make_blocks([one], [places], 8, 4.0)
        inputs = forward.prepare(learner, blocks, mx.array(rows[None]))
        index = np.array(inputs.index).tolist()
        mine = [row for row, slot in enumerate(index) if slot and slot // 8 == places.index(middle)]
        return np.array(learner.project(forward.hidden_rows(learner, inputs)))[mine]

    changed = features.copy()
    changed[middle:] = 7.0
    alone = logits([middle], changed)
    np.testing.assert_allclose(logits(anchors, features), alone, atol=1e-5)
    touched = features.copy()
    touched[middle - 1] += 1.0
    assert np.abs(logits([middle], touched) - alone).max() > 1e-3


@pytest.mark.parametrize(
    ("alpha", "compiled"), [(None, False), (0.5, False), pytest.param(0.5, True, marks=pytest.mark.full)]
)
def test_gradient_is_that_of_the_weighted_loss(tmp_path: Path, alpha: float | None, compiled: bool) -> None:
    """Against central differences along random directions; D-PACE's weights are held fixed (they are detached)."""
    learner, _ = learner_of(save_drafter(tmp_path / "d", block=6, layer_types=(SLIDING, FULL), window=7), FakeTarget())
    samples = some_samples(2, seed=2)
    rng = np.random.default_rng(0)
    blocks = make_blocks(samples, [random_anchors(s, 5, rng) for s in samples], 6, 4.0)
    features = np.stack([random_features(max(map(len, samples)), learner.raw, seed=i) for i in range(2)])
    inputs = forward.prepare(learner, blocks, mx.array(features))
    step = forward.make_step(learner, alpha, compiled)
    grads, (loss, weight, right) = step(learner.params, inputs.arrays())
    mx.eval(grads, loss, weight, right)
    assert right.shape == inputs.index.shape
    learner.wear(learner.params)

    def rows_of() -> mx.array:
        logits = learner.project(forward.hidden_rows(learner, inputs))
        own = mx.take_along_axis(logits, inputs.labels[:, None], axis=-1)[:, 0]
        return mx.logsumexp(logits, axis=-1) - own

    counts = inputs.weights
    if alpha is not None:
        counts = forward.dpace_weights(learner, inputs, rows_of(), alpha)
    np.testing.assert_allclose(loss.item(), (rows_of() * counts).sum().item(), rtol=1e-4)
    np.testing.assert_allclose(weight.item(), counts.sum().item(), rtol=1e-5)
    flat = dict(tree_flatten(grads))
    for name in ("fc.weight", "layers.0.self_attn.k_proj.weight", "layers.1.mlp.up_proj.weight", "norm.weight"):
        direction = mx.random.normal(flat[name].shape, key=mx.random.key(3))
        direction = direction / mx.linalg.norm(direction)
        step, values = 2e-2, []
        for sign in (1, -1):
            moved = dict(tree_flatten(learner.params))
            moved[name] = moved[name] + sign * step * direction
            learner.model.load_weights(list(moved.items()))
            values.append((rows_of() * counts).sum().item())
        slope = (values[0] - values[1]) / (2 * step)
        np.testing.assert_allclose((flat[name] * direction).sum().item(), slope, rtol=3e-2, atol=2e-2)


def test_accumulating_is_a_larger_batch(tmp_path: Path) -> None:
    learner, _ = learner_of(save_drafter(tmp_path / "d", block=4), FakeTarget())
    samples = some_samples(2, seed=5)
    anchors = [random_anchors(s, 6, np.random.default_rng(9)) for s in samples]
    features = [random_features(80, learner.raw, seed=i) for i in range(2)]

    def pull(which: list[int]) -> tuple[Any, Any]:
        blocks = make_blocks([samples[i] for i in which], [anchors[i] for i in which], 4, 4.0)
        inputs = forward.prepare(learner, blocks, mx.array(np.stack([features[i] for i in which])))
        return forward.make_step(learner, None, False)(learner.params, inputs.arrays())

    both, (loss, weight, _) = pull([0, 1])
    (first, found), (second, other) = pull([0]), pull([1])
    np.testing.assert_allclose(loss.item(), (found[0] + other[0]).item(), rtol=1e-5)
    np.testing.assert_allclose(weight.item(), (found[1] + other[1]).item(), rtol=1e-6)
    summed = dict(tree_flatten(tree_map(mx.add, first, second)))
    for name, value in tree_flatten(both):
        np.testing.assert_allclose(np.array(value), np.array(summed[name]), atol=2e-4)


def test_packed_drafter_is_unpacked(tmp_path: Path) -> None:
    """A quantised drafter can be taken up: dense weights are what its packed ones stand for, every name once."""
    learner, drafter = learner_of(save_drafter(tmp_path / "d", bias=True), FakeTarget())
    names = set(dense_weights(drafter.model))
    mx_quantised = dflash.DFlashModel(drafter.config)
    mx_quantised.load_weights(list(dense_weights(drafter.model).items()))
    import mlx.nn as nn

    nn.quantize(mx_quantised, group_size=32, bits=8)
    unpacked = dense_weights(mx_quantised)
    assert set(unpacked) == names
    for name, value in dict(tree_flatten(learner.params)).items():
        np.testing.assert_allclose(np.array(unpacked[name]), np.array(value), atol=0.03)


def test_random_start_is_told_by_the_seed(tmp_path: Path) -> None:
    learner, _ = learner_of(save_drafter(tmp_path / "d"), FakeTarget())
    one, two, other = (initial.random_weights(learner.model, seed) for seed in (1, 1, 2))
    assert set(one) == set(dict(tree_flatten(learner.params)))
    assert all(mx.array_equal(one[name], two[name]).item() for name in one)
    assert not mx.array_equal(one["fc.weight"], other["fc.weight"]).item()
