"""Gumbel noise as a pure function of (seed, absolute position, token id). Knows no logits, filters or requests.

The hash is lowbias32 (Wellons, "Prospecting for Hash Functions") applied twice, to the token id and to its mix with
the position; one round over ``seed ^ position ^ id`` would pass a chi-square and still repeat itself along
(position + 1, id - 1). Every step is elementwise, so a value does not depend on which rows or ids it is computed with.
"""

from __future__ import annotations

from numbers import Integral

import mlx.core as mx

from mlx_spec.errors import OptionError

_MASK64 = (1 << 64) - 1
_ALMOST_ONE = 1.0 - 2.0**-24  # the largest float32 below 1: keeps the logarithm finite


def check_seed(seed: int | None) -> int | None:
    """``seed`` as an int, None as None. Raises OptionError unless it is a whole number of at most 64 bits."""
    if seed is None:
        return None
    if not isinstance(seed, Integral) or isinstance(seed, bool) or not -(1 << 63) <= seed <= _MASK64:
        raise OptionError(f"seed must be a whole number of at most 64 bits, not {seed!r}")
    return int(seed)


def draw_seed() -> int:
    """A fresh seed from ``mx.random``, repeatable through ``mx.random.seed``; 52 bits, so any JSON reader keeps it."""
    high, low = (int(part.item()) for part in mx.random.randint(0, 1 << 26, shape=(2,)))  # type: ignore[arg-type]
    return high << 26 | low


def make_key(seed: int) -> mx.array:
    """[2] uint32 from a seed modulo 2**64: the SplitMix64 step, a bijection, so no two seeds share a key."""
    word = (seed + 0x9E3779B97F4A7C15) & _MASK64
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _MASK64
    word ^= word >> 31
    return mx.array([word >> 32, word & 0xFFFFFFFF], dtype=mx.uint32)


def hash_ids(key: mx.array, ids: mx.array) -> mx.array:
    """The half of the hash that positions share: token ids (any shape, integer) to uint32 words of that shape."""
    return _lowbias32(ids.astype(mx.uint32) + key[1])


def hash_words(key: mx.array, positions: mx.array, hashed: mx.array) -> mx.array:
    """[n, m] uint32 for ``positions`` [n] and ids already through ``hash_ids``, [m] or one row each [n, m]."""
    rows = _lowbias32(positions.astype(mx.uint32) ^ key[0])
    return _lowbias32(hashed ^ rows[:, None])


def gumbel(key: mx.array, positions: mx.array, hashed: mx.array) -> mx.array:
    """[n, m] float32 standard Gumbel noise, arguments as for ``hash_words``; lazy.

    Values lie in [-2.81, 22.87]; their right tail, which decides an argmax, has an error below 1e-6.
    """
    # One kernel on a GPU. On a CPU fusing gains nothing at full rows, and a first use runs a C++ compiler for a second.
    return (_fused if mx.default_device().type == mx.gpu else _gumbel)(key, positions, hashed)


def _gumbel(key: mx.array, positions: mx.array, hashed: mx.array) -> mx.array:
    return from_words(hash_words(key, positions, hashed))


def from_words(words: mx.array) -> mx.array:
    """uint32 words to standard Gumbel values (float32), decreasing in the word; finite for every word."""
    uniform = mx.minimum((words.astype(mx.float32) + 0.5) * 2.0**-32, _ALMOST_ONE)
    rest = 1.0 - uniform
    # -log1p(-uniform) by Kahan's correction of log(rest): as exact, and half the time of MLX's on a CPU.
    exponential = mx.where(rest == 1.0, uniform, -mx.log(rest) * (uniform / (1.0 - rest)))
    return -mx.log(exponential)


_fused = mx.compile(_gumbel)


def _lowbias32(word: mx.array) -> mx.array:
    word = (word ^ (word >> 16)) * 0x7FEB352D
    word = (word ^ (word >> 15)) * 0x846CA68B
    return word ^ (word >> 16)
