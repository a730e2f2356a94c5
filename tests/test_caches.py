"""The cache transaction: commit, abort, trim, gaps, mixed kinds, and the kinds that are refused."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache
from toys import tiny_qwen3

from mlx_spec.caches import CacheSet, kinds
from mlx_spec.errors import UnsupportedError
from mlx_spec.targets import wrap


def rows(start: int, count: int) -> mx.array:
    return mx.broadcast_to(mx.arange(start, start + count, dtype=mx.float32)[None, None, :, None], (1, 2, count, 4))


def filled(count: int, layers: int = 3) -> CacheSet:
    cache = CacheSet([KVCache() for _ in range(layers)])
    write(cache, 0, count)
    return cache


def write(cache: CacheSet, start: int, count: int) -> None:
    for entry in cache.entries:
        entry.update_and_fetch(rows(start, count), -rows(start, count))


def content(cache: CacheSet) -> list[list[float]]:
    return [entry.keys[0, 0, : entry.offset, 0].tolist() for entry in cache.entries]


@pytest.mark.parametrize("before", [1, 20, 250, 256, 300])
@pytest.mark.parametrize("kept", range(9))
def test_commit_keeps_the_first_rows(before, kept):
    cache = filled(before)
    cache.begin(8)
    write(cache, before, 8)
    cache.commit(range(kept)) if kept else cache.abort()
    assert cache.length == before + kept
    assert content(cache) == [[float(i) for i in range(before + kept)]] * 3
    write(cache, before + kept, 3)
    assert content(cache)[2][-3:] == [before + kept, before + kept + 1, before + kept + 2]


def test_commit_of_a_path_through_a_tree_closes_the_gaps():
    cache = filled(10)
    cache.begin(6)
    write(cache, 10, 6)
    cache.commit([0, 2, 5])
    assert content(cache)[0][-3:] == [10.0, 12.0, 15.0]
    assert cache.length == 13


def test_abort_after_some_layers_were_written():
    cache = filled(10)
    cache.begin(4)
    cache.entries[0].update_and_fetch(rows(10, 4), rows(10, 4))
    cache.abort()
    assert [entry.offset for entry in cache.entries] == [10, 10, 10]


def test_abort_before_anything_was_written_and_on_an_empty_cache():
    cache = CacheSet([KVCache(), KVCache()])
    cache.begin(4)
    cache.abort()
    assert cache.length == 0 and cache.arrays() == []


def test_trim_is_equal_on_all_layers_and_never_grows():
    cache = filled(12)
    assert cache.trim(5) == 5
    assert cache.trim(9) == 5
    assert [entry.offset for entry in cache.entries] == [5, 5, 5]
    assert cache.trim(0) == 0


def test_layers_of_different_reach_agree_on_the_shortest(monkeypatch):
    cache = filled(12)
    monkeypatch.setattr(cache._backends[1], "trim", lambda length: cache.entries[1].trim(12) and 0)
    assert cache.trim(7) == 0
    assert [entry.offset for entry in cache.entries] == [0, 0, 0]


@pytest.mark.parametrize("odd", [RotatingKVCache(max_size=8), ArraysCache(2)])
def test_a_kind_that_cannot_roll_back_is_named_with_its_layer(odd):
    with pytest.raises(UnsupportedError, match=f"layer 1 keeps a {type(odd).__name__}"):
        CacheSet([KVCache(), odd, KVCache()])


def test_kinds_are_found_by_file_name():
    assert "KVCache" in kinds()


@pytest.mark.parametrize("kept", range(8))
def test_a_verify_that_was_rolled_back_leaves_no_trace(kept):
    """Keep k of 8 rows, then six single steps and one more block: bit-equal to one by one (any leftover shows)."""
    target = wrap(tiny_qwen3(), {"model_type": "qwen3"})
    prompt, block, tail = list(range(1, 30)), list(range(60, 68)), [7, 8, 9, 10, 11, 12]
    cache, alone = target.new_cache(), target.new_cache()
    for each in (cache, alone):
        mx.eval(target.forward(mx.array(prompt, dtype=mx.int32), each).logits)
    cache.begin(8)
    mx.eval(target.forward(mx.array(block, dtype=mx.int32), cache).logits)
    cache.commit(range(kept))
    for token in block[:kept]:
        mx.eval(target.forward(mx.array([token], dtype=mx.int32), alone).logits)
    for token in tail:
        one = mx.array([token], dtype=mx.int32)
        assert mx.array_equal(target.forward(one, cache).logits, target.forward(one, alone).logits)
    again = target.forward(mx.array(block, dtype=mx.int32), cache).logits
    singles = [target.forward(mx.array([token], dtype=mx.int32), alone).logits for token in block]
    assert mx.array_equal(again, mx.concatenate(singles))
