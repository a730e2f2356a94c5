"""The drafter's forward over many blocks at once: the same modules and weights as in decoding, other bookkeeping.

Shapes: ``B`` samples, ``S`` context rows, ``m`` blocks of ``k`` slots, ``H`` hidden. Blocks go through attention in
groups of neighbours, so that a group reads no context beyond its last anchor and no block outside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_spec.convert.train.blocks import Array, visible
from mlx_spec.drafters._dflash_model import DFlashModel

GROUP_ROWS = 64  # slots of a group
STEP = 32  # context rows are read in multiples of this, so that shapes repeat
Kind = tuple[int | None, bool]  # (window, causal) of a layer


@dataclass(frozen=True)
class Group:
    """Blocks ``begin .. end`` and, per kind of layer, what their slots see: [B, 1, rows, context + rows] to be added
    to scores, 0 or -inf."""

    begin: int
    end: int
    context: int
    masks: dict[Kind, mx.array]


def kinds(model: DFlashModel) -> list[Kind]:
    """Per layer."""
    return [(layer.self_attn.window, layer.self_attn.causal) for layer in model.layers]


def make_groups(anchors: Array, slots: int, context: int, kinds: Sequence[Kind], dtype: mx.Dtype) -> list[Group]:
    """Groups of ``anchors`` [B, m], which ascend, over ``context`` feature rows."""
    size = max(1, GROUP_ROWS // slots)
    groups = []
    for begin in range(0, anchors.shape[1], size):
        part = anchors[:, begin : begin + size]
        reach = min(context, max(STEP, -(-int(part.max()) // STEP) * STEP))
        masks = {kind: _additive(visible(part, reach, slots, *kind), dtype) for kind in dict.fromkeys(kinds)}
        groups.append(Group(begin, begin + part.shape[1], reach, masks))
    return groups


def _additive(seen: Array, dtype: mx.Dtype) -> mx.array:
    return mx.array(np.where(seen, np.float32(0), np.float32(-np.inf))[:, None]).astype(dtype)


def denoise(
    model: DFlashModel, features: mx.array, blocks: mx.array, anchors: mx.array, groups: Sequence[Group]
) -> mx.array:
    """[B, m, k, H] of ``blocks`` [B, m, k, H] (embeddings of ``[anchor, mask, ...]``), before the final norm.

    ``features`` [B, S, n*H] of rows 0 .. S-1; ``anchors`` [B, m] are the positions of slot 0.
    """
    context, x = model.hidden_norm(model.fc(features)), blocks
    for layer in model.layers:
        x = x + _attend(layer.self_attn, layer.input_layernorm(x), context, anchors, groups, model._rope)
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    return x


def _attend(
    attn: Any, x: mx.array, context: mx.array, anchors: mx.array, groups: Sequence[Group], rope: Any
) -> mx.array:
    B, m, k, _ = x.shape
    S = context.shape[1]
    at = anchors.reshape(-1)

    def joined(rows: mx.array) -> mx.array:  # [B*m, h, k, d] -> [B, h, m*k, d]
        return rows.reshape(B, m, -1, k, rows.shape[-1]).transpose(0, 2, 1, 3, 4).reshape(B, -1, m * k, rows.shape[-1])

    q = joined(rope(_normed(attn.q_norm, attn.q_proj(x), B * m, k, attn.heads), offset=at))
    own_k = joined(rope(_normed(attn.k_norm, attn.k_proj(x), B * m, k, attn.kv_heads), offset=at))
    own_v = joined(attn.v_proj(x).reshape(B * m, k, attn.kv_heads, -1).transpose(0, 2, 1, 3))
    far_k = rope(_normed(attn.k_norm, attn.k_proj(context), B, S, attn.kv_heads), offset=0)
    far_v = attn.v_proj(context).reshape(B, S, attn.kv_heads, -1).transpose(0, 2, 1, 3)
    parts = []
    for group in groups:
        rows = slice(group.begin * k, group.end * k)
        keys = mx.concatenate([far_k[:, :, : group.context], own_k[:, :, rows]], axis=2)
        values = mx.concatenate([far_v[:, :, : group.context], own_v[:, :, rows]], axis=2)
        mask = group.masks[attn.window, attn.causal]
        parts.append(mx.fast.scaled_dot_product_attention(q[:, :, rows], keys, values, scale=attn.scale, mask=mask))
    out = parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=2)
    merged: mx.array = attn.o_proj(out.transpose(0, 2, 1, 3).reshape(B, m, k, -1))
    return merged


def _normed(norm: Any, rows: mx.array, batch: int, length: int, heads: int) -> mx.array:
    """[batch, heads, length, d], normed over d."""
    out: mx.array = norm(rows.reshape(batch, length, heads, -1)).transpose(0, 2, 1, 3)
    return out
