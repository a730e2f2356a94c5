"""Batch construction, loss weights and optimiser against references written with loops, on random cases."""

from __future__ import annotations

import itertools
import math

import mlx.core as mx
import numpy as np
import pytest
import train_slow
from mlx.optimizers import AdamW

from mlx_spec.convert.train import blocks, head, network, optimiser
from mlx_spec.convert.train.batches import Batches, split
from mlx_spec.convert.train.heldout import accepted, walk
from mlx_spec.convert.train.settings import default_gamma, default_taps
from mlx_spec.convert.train.shards import Sample
from mlx_spec.errors import OptionError

VOCAB = 50


def sample(rng: np.random.Generator, shortest: int = 3, longest: int = 40) -> Sample:
    length = int(rng.integers(shortest, longest))
    return Sample(rng.integers(0, VOCAB, length).astype(np.int32), int(rng.integers(1, length - 1)))


@pytest.mark.parametrize("seed", range(12))
def test_labels_and_weights(seed: int) -> None:
    rng = np.random.default_rng(seed)
    slots, gamma = int(rng.integers(2, 17)), float(rng.uniform(1, 8))
    samples = [sample(rng) for _ in range(int(rng.integers(1, 5)))]
    anchors = [blocks.random_anchors(s, int(rng.integers(1, 9)), rng) for s in samples]
    ids = sorted(rng.choice(VOCAB, 20, replace=False).tolist()) if seed % 2 else None
    to_draft = None
    if ids is not None:
        to_draft = np.full(VOCAB, blocks.NO_LABEL)
        to_draft[ids] = np.arange(len(ids))
    made = blocks.make_blocks(samples, anchors, slots, gamma, to_draft)
    assert made.labels.shape == made.weights.shape == (len(samples), max(map(len, anchors)), slots)
    for row, (s, places) in enumerate(zip(samples, anchors, strict=True)):
        labels, weights = train_slow.labels_and_weights(s.tokens.tolist(), s.prompt, places, slots, gamma, ids)
        count = len(places)
        assert np.array_equal(made.labels[row, :count], labels)
        np.testing.assert_allclose(made.weights[row, :count], weights, rtol=1e-6)
        assert not made.weights[row, count:].any(), "padding counts"
        assert (made.labels[row, count:] == -1).all()
        assert made.anchors[row, :count].tolist() == places
        assert made.ids[row].tolist() == s.tokens[made.anchors[row]].tolist()


@pytest.mark.parametrize("seed", range(12))
def test_masks(seed: int) -> None:
    rng = np.random.default_rng(100 + seed)
    slots, context = int(rng.integers(2, 9)), int(rng.integers(1, 30))
    window, causal = (int(rng.integers(2, 12)), bool(seed % 2)) if seed % 3 else (None, bool(seed % 2))
    anchors = np.sort(rng.integers(0, context + 1, (2, int(rng.integers(1, 5)))), axis=1)
    seen = blocks.visible(anchors, context, slots, window, causal)
    for b, places in enumerate(anchors.tolist()):
        for j in range(len(places)):
            for i in range(slots):
                row = [
                    train_slow.sees(j, i, key, places, context, slots, window, causal)
                    for key in range(context + len(places) * slots)
                ]
                assert seen[b, j * slots + i].tolist() == row, (b, j, i)


@pytest.mark.parametrize("seed", range(4))
def test_groups_are_the_mask_in_pieces(seed: int) -> None:
    """What a group leaves out of its keys is invisible to its slots."""
    rng = np.random.default_rng(200 + seed)
    slots, context = int(rng.integers(2, 17)), int(rng.integers(40, 90))
    anchors = np.sort(rng.integers(0, context + 1, (2, 40)), axis=1)
    kinds = [(None, False), (16, True)]
    masks = network.make_masks(anchors, slots, context, kinds, mx.float32)
    for kind, parts in zip(kinds, masks, strict=True):
        whole, begin = blocks.visible(anchors, context, slots, *kind), 0
        for mask in parts:
            rows = slice(begin, begin + mask.shape[2])
            keys = [*range(mask.shape[3] - mask.shape[2]), *range(context + rows.start, context + rows.stop)]
            assert np.array_equal(np.array(mask)[:, 0] == 0, whole[:, rows][:, :, keys])
            assert not np.delete(whole[:, rows], keys, axis=2).any()
            begin = rows.stop
        assert begin == 40 * slots


def test_anchors_are_drawn_anew_and_told_by_the_seed() -> None:
    rng = np.random.default_rng(0)
    samples = [sample(rng, 30, 60) for _ in range(7)]
    one, two = (Batches(samples, 2, 4, 8, 4.0, "random", 5) for _ in range(2))
    assert one.per_epoch == 4
    for number in (9, 3, 3, 0):  # in any order
        assert np.array_equal(one[number].blocks.anchors, two[number].blocks.anchors)
    drawn = []
    for epoch in (0, 1):
        batches = [one[epoch * 4 + i] for i in range(4)]
        assert sorted(i for batch in batches for i in batch.samples) == list(range(7)), "an epoch is every sample once"
        drawn.append({i: tuple(row) for b in batches for i, row in zip(b.samples, b.blocks.anchors, strict=True)})
    assert drawn[0] != drawn[1]
    fixed = Batches(samples, 2, 4, 8, 4.0, "fixed", 5)
    rows = [{i: tuple(r) for b in range(4) for i, r in _rows(fixed[e * 4 + b])} for e in (0, 1)]
    assert rows[0] == rows[1]
    for batch in (one[0], fixed[0]):
        for i, row in _rows(batch):
            assert all(samples[i].prompt - 1 <= a <= len(samples[i]) - 2 for a in row)


def _rows(batch):
    return list(zip(batch.samples, batch.blocks.anchors.tolist(), strict=True))


def test_split_needs_two() -> None:
    rng = np.random.default_rng(0)
    samples = [sample(rng) for _ in range(10)]
    learn, held = split(samples, 0.2, 1)
    assert (len(learn), len(held)) == (8, 2)
    assert {id(s) for s in learn} | {id(s) for s in held} == {id(s) for s in samples}
    with pytest.raises(OptionError, match="too little"):
        split(samples[:1], 0.2, 1)


def test_paper_numbers() -> None:
    assert [default_gamma(block) for block in (16, 10, 8)] == [7.0, 5.0, 4.0]
    assert default_taps(5, 36) == (1, 9, 17, 25, 33)
    assert default_taps(5, 32) == (1, 8, 15, 22, 29)
    assert default_taps(5, 64) == (1, 16, 31, 46, 61)
    assert default_taps(1, 30) == (15,)
    for layers in range(1, 12):
        taps = default_taps(min(5, layers), layers)
        assert taps and all(0 <= tap < layers for tap in taps)


@pytest.mark.parametrize("seed", range(5))
def test_dpace(seed: int) -> None:
    rng = np.random.default_rng(seed)
    asked = rng.random((6, 8)) < 0.8
    asked[:, 0] = False
    probabilities = rng.uniform(0.01, 1, (6, 8))
    alpha = float(rng.uniform(0, 1))
    weights = head.dpace(mx.array(-np.log(probabilities)), mx.array(asked), alpha)
    slow = [train_slow.dpace(p, a, alpha) for p, a in zip(probabilities.tolist(), asked.tolist(), strict=True)]
    np.testing.assert_allclose(np.array(weights), slow, rtol=1e-4, atol=1e-6)


def test_head_gradient_is_autodiffs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cross-entropy and its slope, in chunks, against mx.grad of the plain formula, soft cap included."""
    keys = mx.random.split(mx.random.key(1), 3)
    matrix = mx.random.normal((VOCAB, 12), key=keys[0])
    hidden, labels = mx.random.normal((37, 12), key=keys[1]), mx.random.randint(0, VOCAB, (37,), key=keys[2])

    def project(h: mx.array) -> mx.array:
        return mx.tanh(h @ matrix.T / 5) * 5

    def plain(h: mx.array) -> mx.array:
        logits = project(h)
        return (mx.logsumexp(logits, axis=-1) - mx.take_along_axis(logits, labels[:, None], axis=-1)[:, 0]).sum()

    whole = head.score(project, hidden, labels, VOCAB)
    monkeypatch.setattr(head, "CHUNK", 10 * VOCAB)
    parts = head.score(project, hidden, labels, VOCAB)
    for rows in (whole, parts):
        assert math.isclose(rows.losses.sum().item(), plain(hidden).item(), rel_tol=1e-5)
        np.testing.assert_allclose(np.array(rows.slopes), np.array(mx.grad(plain)(hidden)), atol=1e-5)
        assert mx.array_equal(rows.right, mx.argmax(project(hidden), axis=-1) == labels).item()


def test_adamw_is_mlx_adamw() -> None:
    """Without clipping, ten updates equal mlx.optimizers' with bias correction."""
    keys = mx.random.split(mx.random.key(0), 12)
    params = {"a": {"weight": mx.random.normal((3, 4), key=keys[10])}}
    ours, moments = params, optimiser.Moments.zeros(params)
    theirs = {"a": {"weight": params["a"]["weight"]}}
    other = AdamW(1e-2, betas=list(optimiser.BETAS), eps=optimiser.EPSILON, weight_decay=0.1, bias_correction=True)
    for step in range(10):
        gradient = {"a": {"weight": mx.random.normal((3, 4), key=keys[step])}}
        ours, moments = optimiser.update(ours, gradient, moments, step, 1e-2, 0.1, clip=1e9)
        theirs = other.apply_gradients(gradient, theirs)
    np.testing.assert_allclose(np.array(ours["a"]["weight"]), np.array(theirs["a"]["weight"]), rtol=1e-5, atol=1e-6)
    clipped, _ = optimiser.update(params, gradient, optimiser.Moments.zeros(params), 0, 1.0, 0.0, clip=0.5)
    assert math.isclose(optimiser.norm(gradient).item(), float(mx.linalg.norm(gradient["a"]["weight"])), rel_tol=1e-5)
    assert mx.isfinite(clipped["a"]["weight"]).all().item()


def test_rate() -> None:
    rates = [optimiser.rate(step, 100, 1.0, 0.04) for step in range(100)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4] == 1.0
    assert all(a >= b for a, b in itertools.pairwise(rates[4:]))
    assert rates[-1] < 1e-3
    assert optimiser.rate(0, 1, 1.0, 0.04) == 1.0


@pytest.mark.parametrize("seed", range(5))
def test_played_back_rounds(seed: int) -> None:
    """Rounds from hits at every anchor equal decoding written as a loop."""
    rng = np.random.default_rng(seed)
    slots, prompt, length = int(rng.integers(2, 9)), 5, 60
    tokens = rng.integers(0, 3, length)
    drafts = {anchor: rng.integers(0, 3, slots - 1) for anchor in range(prompt - 1, length - 1)}
    hits = np.zeros((length - prompt, slots - 1), dtype=bool)
    for row, anchor in enumerate(drafts):
        for i in range(min(slots - 1, length - 1 - anchor)):
            hits[row, i] = drafts[anchor][i] == tokens[anchor + 1 + i]
    rounds = walk(accepted(hits))
    assert rounds == train_slow.acceptance(tokens.tolist(), prompt, lambda anchor: drafts[anchor].tolist())
    assert sum(rounds) + len(rounds) >= length - prompt
