"""Blocks of a batch: where they begin, what each slot must say, how much it counts, what it may see. Host arrays only.

Shapes: ``B`` samples, ``m`` blocks a sample, ``k`` slots a block (the anchor is slot 0), ``S`` context rows. A block
holds its anchor ``a`` and masks at positions ``a .. a+k-1``; slot i must say the token at position ``a+i``
(arXiv 2602.06036, section 4; not shifted).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mlx_spec.convert.train.shards import Sample

Array = np.ndarray[Any, Any]
NO_LABEL = -1


@dataclass(frozen=True)
class Blocks:
    """``anchors`` [B, m] ascending; ``ids`` [B, m] the anchors' tokens; ``labels`` [B, m, k], NO_LABEL where nothing is
    asked; ``weights`` [B, m, k], 0 there."""

    anchors: Array
    ids: Array
    labels: Array
    weights: Array


def candidates(sample: Sample) -> range:
    """Positions that can be anchors: the next token is of the answer. The prompt's last token is one: the engine's
    first anchor."""
    return range(max(sample.prompt - 1, 0), len(sample) - 1)


def random_anchors(sample: Sample, count: int, rng: np.random.Generator) -> list[int]:
    """At most ``count`` different ones, ascending."""
    places = candidates(sample)
    drawn = rng.choice(len(places), size=min(count, len(places)), replace=False)
    return [places.start + int(i) for i in np.sort(drawn)]


def fixed_anchors(sample: Sample, count: int, slots: int) -> list[int]:
    """Blocks one after the other from the answer's beginning: what random anchors are compared with."""
    return list(candidates(sample)[::slots])[:count]


def decay(slots: int, gamma: float) -> Array:
    """[k]: 0 for the anchor, then exp(-(i-1)/gamma)."""
    weights = np.exp(-(np.arange(slots) - 1) / gamma)
    weights[0] = 0.0
    return weights.astype(np.float32)


def make_blocks(
    samples: Sequence[Sample], anchors: Sequence[Sequence[int]], slots: int, gamma: float, to_draft: Array | None = None
) -> Blocks:
    """Blocks of one batch. ``to_draft`` [V]: a token's number in a reduced draft vocabulary, NO_LABEL for none.

    Samples with fewer anchors than others repeat their last one without weight.
    """
    most = max(map(len, anchors))
    padded = np.stack([np.pad(np.asarray(row), (0, most - len(row)), mode="edge") for row in anchors]).astype(np.int32)
    real = np.stack([np.arange(most) < len(row) for row in anchors])
    at = padded[:, :, None] + np.arange(slots)
    lengths = np.array([len(sample) for sample in samples])[:, None, None]
    longest = int(lengths.max())
    tokens = np.stack([np.pad(sample.tokens, (0, longest - len(sample))) for sample in samples])
    rows = np.arange(len(samples))[:, None, None]
    asked = (at < lengths) & real[:, :, None] & (np.arange(slots) > 0)
    said = tokens[rows, np.minimum(at, longest - 1)]
    if to_draft is not None:
        said = to_draft[said]
        asked &= said != NO_LABEL
    labels = np.where(asked, said, NO_LABEL).astype(np.int32)
    weights = np.where(asked, decay(slots, gamma), 0.0).astype(np.float32)
    return Blocks(padded, tokens[rows[:, :, 0], padded].astype(np.int32), labels, weights)


def visible(anchors: Array, context: int, slots: int, window: int | None, causal: bool) -> Array:
    """[B, m*k, context + m*k] bool: what each slot sees of ``context`` feature rows and of the blocks' own rows.

    Features strictly before the anchor, within ``window`` tokens of the slot; of the blocks, its own only: all of it,
    or, ``causal``, up to itself.
    """
    B, m = anchors.shape
    slot = np.tile(np.arange(slots), m)
    begin = np.repeat(anchors, slots, axis=1)
    keys = np.arange(context)
    seen = keys < begin[:, :, None]
    own = np.repeat(np.arange(m), slots)
    inside = own[:, None] == own
    apart = slot[:, None] - slot
    if window is not None:
        seen &= (begin + slot)[:, :, None] - keys < window
        inside &= np.abs(apart) < window
    if causal:
        inside &= apart >= 0
    return np.concatenate([seen, np.broadcast_to(inside, (B, m * slots, m * slots))], axis=2)
