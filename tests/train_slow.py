"""Training's batch construction written with loops, from the paper's words (arXiv 2602.06036, section 4; D-PACE: arXiv
2605.18810). Shares no code with the product; every number is made one at a time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np


def labels_and_weights(
    tokens: Sequence[int],
    prompt: int,
    anchors: Sequence[int],
    slots: int,
    gamma: float,
    draft_ids: Sequence[int] | None,
) -> tuple[np.ndarray, np.ndarray]:
    """[m, k] each: the token that slot i of the block at ``a`` must say (-1: none), and its weight."""
    labels = np.full((len(anchors), slots), -1)
    weights = np.zeros((len(anchors), slots))
    for j, anchor in enumerate(anchors):
        for i in range(1, slots):
            position = anchor + i
            if position >= len(tokens) or position < prompt:
                continue
            token = tokens[position]
            if draft_ids is not None:
                if token not in draft_ids:
                    continue
                token = draft_ids.index(token)
            labels[j, i] = token
            weights[j, i] = math.exp(-(i - 1) / gamma)
    return labels, weights


def sees(
    query_block: int, query_slot: int, key: int, anchors: Sequence[int], context: int, slots: int,
    window: int | None, causal: bool,
) -> bool:  # fmt: skip
    """Whether one slot sees one key; keys are the context rows, then all blocks' slots."""
    here = anchors[query_block] + query_slot
    if key < context:
        if key >= anchors[query_block]:
            return False  # the anchor's own feature is not known when it is the anchor
        return window is None or here - key < window
    block, slot = divmod(key - context, slots)
    if block != query_block:
        return False
    if causal and slot > query_slot:
        return False
    return window is None or abs(query_slot - slot) < window


def dpace(probabilities: Sequence[float], asked: Sequence[bool], alpha: float) -> list[float]:
    """Weights of one block's slots."""
    reached, product = [], 1.0
    for probability, there in zip(probabilities, asked, strict=True):
        product *= (1 - alpha) * probability + alpha if there else 1.0
        reached.append(product if there else 0.0)
    return [sum(reached[i:]) if asked[i] else 0.0 for i in range(len(asked))]


def acceptance(tokens: Sequence[int], prompt: int, draft) -> list[int]:  # type: ignore[no-untyped-def]
    """Accepted draft tokens per round of greedy decoding whose output is ``tokens``; ``draft(anchor)`` proposes."""
    kept, anchor = [], prompt - 1
    while anchor < len(tokens) - 1:
        right = 0
        for i, token in enumerate(draft(anchor)):
            if anchor + 1 + i < len(tokens) and tokens[anchor + 1 + i] == token:
                right += 1
            else:
                break
        kept.append(right)
        anchor += right + 1
    return kept
