"""The noise: its law, its independence, and that a value depends on nothing but seed, position and id."""

from __future__ import annotations

import math
from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest

from mlx_spec import noise
from mlx_spec.errors import OptionError
from mlx_spec.sampling import make_chooser, make_sampler

SEEDS = (0, 1, 2**31, 2**32, 12345678901234, 2**64 - 1)
POSITIONS, IDS = 4096, 256


def words(seed: int, positions: mx.array, ids: mx.array) -> mx.array:
    key = noise.make_key(seed)
    return noise.hash_words(key, positions, noise.hash_ids(key, ids))


def draw(seed: int, positions: mx.array, ids: mx.array) -> mx.array:
    key = noise.make_key(seed)
    return noise.gumbel(key, positions, noise.hash_ids(key, ids))


def weak_words(seed: int, positions: mx.array, ids: mx.array) -> mx.array:
    """The negative control: one round of the hash over a plain mix."""
    return noise._lowbias32(positions[:, None] ^ ids[None] ^ noise.make_key(seed)[0])


def test_words_equal_integer_arithmetic() -> None:
    def lowbias32(word: int) -> int:
        word = ((word ^ (word >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
        word = ((word ^ (word >> 15)) * 0x846CA68B) & 0xFFFFFFFF
        return word ^ (word >> 16)

    positions, ids = [0, 1, 77, 2**31, 2**32 - 1], [0, 5, 151935, 2**31 - 1]
    for seed in (*SEEDS, -1):
        got = words(seed, mx.array(positions, dtype=mx.uint32), mx.array(ids, dtype=mx.uint32)).tolist()
        high, low = noise.make_key(seed).tolist()
        for row, position in zip(got, positions, strict=True):
            halves = [lowbias32((token + low) & 0xFFFFFFFF) ^ lowbias32(position ^ high) for token in ids]
            assert row == [lowbias32(half) for half in halves]


def test_the_key_of_seed_zero_is_that_of_the_published_splitmix64() -> None:
    high, low = noise.make_key(0).tolist()
    assert high << 32 | low == 0xE220A8397B1DCDAF


def test_gumbel_values_are_right_and_finite_at_both_ends() -> None:
    ends = mx.array([0, 1, 255, 2**16, 2**24, 2**31, 2**32 - 2**20, 2**32 - 1], dtype=mx.uint32)
    got = np.array(noise.from_words(ends), dtype=np.float64)
    uniform = np.minimum((np.array(ends, dtype=np.float64) + 0.5) / 2**32, 1 - 2.0**-24)
    wanted = -np.log(-np.log1p(-uniform))
    assert np.abs(got - wanted)[:-1].max() < 2e-6
    assert 22.8 < got[0] < 22.9
    assert -2.82 < got[-1] < -2.80
    assert (np.diff(got) < 0).all()


@pytest.mark.parametrize("top_k", [0, 12])
def test_sampled_tokens_follow_p(top_k: int) -> None:
    """Chi-square over 200,000 positions for several seeds, through the chooser, on full rows and on kept ids."""
    size, kept = (12, 12) if not top_k else (64, 12)
    logits = mx.concatenate([mx.linspace(1.0, -3.5, kept), mx.full((size - kept,), -9.0)])
    scaled = np.array(logits[:kept], dtype=np.float64) / 0.8
    p = np.exp(scaled) / np.exp(scaled).sum()
    total, chunk = 200_000, 50_000
    rows = mx.broadcast_to(logits, (chunk, size))
    for seed in SEEDS:
        chooser = make_chooser(make_sampler(0.8, top_k=top_k, seed=seed))
        counts = np.zeros(kept)
        for start in range(0, total, chunk):
            tokens, _ = chooser.rows(rows, range(start), mx.zeros((chunk - 1,), dtype=mx.uint32))
            counts += np.bincount(np.array(tokens), minlength=kept)  # more bins than kept ids would not add up
        statistic = float(((counts - total * p) ** 2 / (total * p)).sum())
        assert 1.5 < statistic < 38.0, (seed, statistic)  # 11 degrees: p from 0.9999 to 0.0001


def test_a_chain_of_tokens_follows_its_joint_law() -> None:
    """Three successive tokens, each drawn given the one before: 64 cells over 60,000 chains."""
    size, chains = 4, 60_000
    table = np.log(np.random.default_rng(3).dirichlet(np.ones(size), size=size + 1))
    chooser = make_chooser(make_sampler(1.0, seed=77))
    given = []
    for row in table:
        rows = mx.broadcast_to(mx.array(row, dtype=mx.float32), (3 * chains, size))
        given.append(np.array(chooser.rows(rows, [], mx.zeros((3 * chains - 1,), dtype=mx.uint32))[0]))
    picks, every = np.stack(given), np.arange(chains)
    first = picks[size, 0::3]
    second = picks[first, 3 * every + 1]
    third = picks[second, 3 * every + 2]
    counts = np.bincount(first * 16 + second * 4 + third, minlength=64)
    p = np.exp(table)
    wanted = chains * (p[size][:, None, None] * p[:size, :, None] * p[None, :size, :]).reshape(-1)
    big = wanted > 5
    statistic = float(((counts - wanted)[big] ** 2 / wanted[big]).sum())
    bound = big.sum() + 4 * math.sqrt(2 * big.sum())
    assert statistic < bound, (statistic, bound)


def test_one_position_follows_p_over_seeds() -> None:
    p = np.array([0.5, 0.25, 0.15, 0.1])
    logits, none = mx.array(np.log(p), dtype=mx.float32)[None], mx.array([], dtype=mx.uint32)
    sampler, tries = make_sampler(1.0), 1000
    picks = [make_chooser(sampler, (), seed).rows(logits, range(9), none)[0] for seed in range(tries)]
    counts = np.bincount(np.array(mx.concatenate(picks)), minlength=4)
    assert float(((counts - tries * p) ** 2 / (tries * p)).sum()) < 21.1  # 3 degrees: p = 0.0001


def centred(hashed: mx.array) -> np.ndarray:
    """Uniform in [-sqrt 3, sqrt 3): mean 0, variance 1."""
    return (np.array(hashed, dtype=np.float64) / 2**32 - 0.5) * math.sqrt(12)


def z_score(left: np.ndarray, right: np.ndarray) -> float:
    return float((left * right).sum() / math.sqrt(left.size))


def z_scores(hashed: mx.array) -> dict[str, float]:
    """Correlations over a grid [positions, ids] with itself, shifted and with flipped bits."""
    grid = centred(hashed)
    rows, columns = grid.shape
    found = {f"position+{lag}": z_score(grid[lag:], grid[:-lag]) for lag in (1, 2, 3, 8)}
    found |= {f"id+{lag}": z_score(grid[:, lag:], grid[:, :-lag]) for lag in (1, 2, 3, 8)}
    found["position+1, id-1"] = z_score(grid[1:, :-1], grid[:-1, 1:])
    found["position+1, id+1"] = z_score(grid[1:, 1:], grid[:-1, :-1])
    flip = np.arange(rows)[:, None] ^ 1, np.arange(columns)[None] ^ 1
    half = np.arange(rows) % 2 == 0  # each pair once
    found["position^1, id^1"] = z_score(grid[half], grid[flip][half])
    found["swap"] = z_score(*(side[np.triu_indices(columns, 1)] for side in (grid[:columns], grid[:columns].T)))
    return found


def grids(kind: Callable[..., mx.array], seed: int) -> mx.array:
    return kind(seed, mx.arange(POSITIONS, dtype=mx.uint32), mx.arange(IDS, dtype=mx.uint32))


@pytest.mark.parametrize("seed", SEEDS)
def test_positions_and_ids_are_uncorrelated(seed: int) -> None:
    found = z_scores(grids(words, seed))
    assert all(abs(z) < 4.5 for z in found.values()), found


def test_the_correlation_check_catches_a_weak_hash() -> None:
    """A single round passes along positions, along ids and a chi-square; it fails only where both change."""
    line = mx.arange(200_000, dtype=mx.uint32)
    along = centred(weak_words(1, line, line[:1])[:, 0]), centred(weak_words(1, line[:1], line)[0])
    for values in along:
        assert all(abs(z_score(values[lag:], values[:-lag])) < 4.5 for lag in (1, 2, 3, 8))
        counts = np.histogram(values, bins=50)[0]
        assert 15 < ((counts - 4000) ** 2 / 4000).sum() < 100  # 49 degrees
    found = z_scores(grids(weak_words, 1))
    assert abs(found["position+1, id-1"]) > 100, found
    assert abs(found["position^1, id^1"]) > 100, found


def test_seeds_are_uncorrelated() -> None:
    base = centred(grids(words, 5))
    for other in (4, 6, 7, 5 + 2**32, 5 ^ (1 << 63), 13):
        assert abs(z_score(base, centred(grids(words, other)))) < 4.5, other
    neighbour = centred(grids(words, 6))
    for lag in (1, 2, 3, 8):
        assert abs(z_score(base[lag:], neighbour[:-lag])) < 4.5, lag
        assert abs(z_score(base[:, lag:], neighbour[:, :-lag])) < 4.5, lag


def test_noise_is_the_same_for_any_rows_and_any_ids() -> None:
    size = 151_937
    positions, ids = mx.arange(3000, 3016, dtype=mx.uint32), mx.arange(size, dtype=mx.uint32)
    whole = draw(9, positions, ids)
    for row in (0, 7, 15):
        assert mx.array_equal(draw(9, positions[row : row + 1], ids)[0], whole[row])
    assert mx.array_equal(draw(9, positions[3:8], ids), whole[3:8])
    subset = mx.array([151_936, 3, 40, 41, 77_777, 0], dtype=mx.uint32)
    assert mx.array_equal(draw(9, positions, subset), whole[:, subset])
    own = mx.stack([mx.roll(subset, row) for row in range(16)])  # other ids in every row
    assert mx.array_equal(draw(9, positions, own), mx.take_along_axis(whole, own, axis=-1))
    assert draw(9, positions[2:3], ids[40:41]).item() == whole[2, 40].item()


def test_noise_is_the_same_compiled() -> None:
    ids = mx.arange(5000, dtype=mx.uint32)
    key = noise.make_key(2**40 + 1)
    hashed = noise.hash_ids(key, ids)
    for count in (1, 16):
        positions = mx.arange(100, 100 + count, dtype=mx.uint32)
        assert mx.array_equal(noise._fused(key, positions, hashed), noise._gumbel(key, positions, hashed))
    other = noise.make_key(3)  # key and positions are inputs: nothing of the first call is baked in
    positions, hashed = mx.arange(7, 23, dtype=mx.uint32), noise.hash_ids(other, ids)
    assert mx.array_equal(noise._fused(other, positions, hashed), noise._gumbel(other, positions, hashed))


def test_keys_of_different_seeds_differ() -> None:
    seeds = [*range(2000), *(2**32 + s for s in range(50)), *(2**63 + s for s in range(50)), -1, -2]
    keys = {tuple(noise.make_key(seed).tolist()) for seed in seeds}
    assert len(keys) == len(seeds)


@pytest.mark.parametrize("seed", [1.0, True, "1", 2**64, -(2**63) - 1, float("nan")])
def test_what_is_no_seed_is_refused(seed: object) -> None:
    with pytest.raises(OptionError, match="64 bits"):
        noise.check_seed(seed)  # type: ignore[arg-type]


@pytest.mark.full
@pytest.mark.parametrize("seed", range(10))
def test_wide_grids_are_uncorrelated(seed: int) -> None:
    """Strided and random ids, late positions, 25 million values a seed."""
    rng = np.random.default_rng(seed)
    for ids in (np.arange(1024) * 149, rng.choice(151_936, 1024, replace=False), 2**17 + np.arange(1024)):
        start = int(rng.integers(0, 2**20))
        positions = mx.arange(start * 2, start * 2 + 8192, dtype=mx.uint32)
        found = z_scores(words(seed * 7919 + 2**33, positions, mx.array(ids.astype(np.uint32))))
        assert all(abs(z) < 5 for z in found.values()), found
