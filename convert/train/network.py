"""The drafter's forward over many blocks at once: the same modules and weights as in decoding, other bookkeeping.

Shapes: ``B`` samples, ``S`` context rows, ``m`` blocks of ``k`` slots, ``H`` hidden. Blocks go through attention in
groups of neighbours, so that a group reads no context beyond its last anchor and no block outside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_spec.convert.train import quick
from mlx_spec.convert.train.blocks import Array, visible
from mlx_spec.drafters._dflash_model import DFlashModel

GROUP_ROWS = 64  # slots of a group
STEP = 64  # context rows are read in multiples of this, so that shapes repeat
Kind = tuple[int | None, bool]  # (window, causal) of a layer
Masks = Mapping[Kind, Sequence[mx.array]]


def kinds(model: DFlashModel) -> list[Kind]:
    """The different kinds of its layers."""
    return list(dict.fromkeys((layer.self_attn.window, layer.self_attn.causal) for layer in model.layers))


def make_masks(
    anchors: Array, slots: int, context: int, kinds: Sequence[Kind], dtype: mx.Dtype
) -> list[list[mx.array]]:
    """Per kind, per group of neighbours of ``anchors`` [B, m], which ascend: what its slots see of ``context`` rows up
    to the group's last anchor and of the group, [B, 1, rows, reach + rows] to be added to scores, 0 or -inf."""
    size = max(1, GROUP_ROWS // slots)
    parts = [anchors[:, begin : begin + size] for begin in range(0, anchors.shape[1], size)]
    reaches = [min(context, max(STEP, -(-int(part.max()) // STEP) * STEP)) for part in parts]
    pairs = list(zip(parts, reaches, strict=True))
    return [[_additive(visible(part, reach, slots, *kind), dtype) for part, reach in pairs] for kind in kinds]


def _additive(seen: Array, dtype: mx.Dtype) -> mx.array:
    return mx.array(np.where(seen, np.float32(0), np.float32(-np.inf))[:, None]).astype(dtype)


def denoise(model: DFlashModel, features: mx.array, blocks: mx.array, anchors: mx.array, masks: Masks) -> mx.array:
    """[B, m, k, H] of ``blocks`` [B, m, k, H] (embeddings of ``[anchor, mask, ...]``), before the final norm.

    ``features`` [B, S, n*H] of rows 0 .. S-1; ``anchors`` [B, m] are the positions of slot 0.
    """
    # Rows of all samples and blocks lie in one matrix: with more axes, MLX makes a weight gradient per axis entry.
    shape = blocks.shape
    context = model.hidden_norm(model.fc(features.reshape(-1, features.shape[-1])))
    x, cpu = blocks.reshape(-1, shape[-1]), quick.on_cpu() and blocks.dtype == mx.float32
    for layer in model.layers:
        x = x + _attend(layer.self_attn, layer.input_layernorm(x), context, anchors, masks, model._rope, cpu)
        x = x + _feed(layer.mlp, layer.post_attention_layernorm(x), cpu)
    return x.reshape(shape)


def _feed(mlp: Any, x: mx.array, cpu: bool) -> mx.array:
    out: mx.array = mlp.down_proj(quick.swiglu(mlp.gate_proj(x), mlp.up_proj(x))) if cpu else mlp(x)
    return out


def _attend(
    attn: Any, x: mx.array, context: mx.array, anchors: mx.array, masks: Masks, rope: Any, cpu: bool
) -> mx.array:
    """[B*m*k, H] block rows over [B*S, H] context rows."""
    B, m = anchors.shape
    k, S, at = x.shape[0] // (B * m), context.shape[0] // B, anchors.reshape(-1)

    def joined(rows: mx.array) -> mx.array:  # [B*m, h, k, d] -> [B, h, m*k, d]
        return rows.reshape(B, m, -1, k, rows.shape[-1]).transpose(0, 2, 1, 3, 4).reshape(B, -1, m * k, rows.shape[-1])

    q = joined(rope(_normed(attn.q_norm, attn.q_proj(x), B * m, k, attn.heads), offset=at))
    own_k = joined(rope(_normed(attn.k_norm, attn.k_proj(x), B * m, k, attn.kv_heads), offset=at))
    own_v = attn.v_proj(x).reshape(B, m * k, attn.kv_heads, -1).transpose(0, 2, 1, 3)
    far_k = rope(_normed(attn.k_norm, attn.k_proj(context), B, S, attn.kv_heads), offset=0)
    far_v = attn.v_proj(context).reshape(B, S, attn.kv_heads, -1).transpose(0, 2, 1, 3)
    attention = quick.attention if cpu else mx.fast.scaled_dot_product_attention
    parts, begin = [], 0
    for mask in masks[attn.window, attn.causal]:
        rows = slice(begin, begin + mask.shape[2])
        begin, reach = rows.stop, mask.shape[3] - mask.shape[2]
        keys = mx.concatenate([far_k[:, :, :reach], own_k[:, :, rows]], axis=2)
        values = mx.concatenate([far_v[:, :, :reach], own_v[:, :, rows]], axis=2)
        parts.append(attention(q[:, :, rows], keys, values, scale=attn.scale, mask=mask))
    out = parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=2)
    merged: mx.array = attn.o_proj(out.transpose(0, 2, 1, 3).reshape(B * m * k, -1))
    return merged


def _normed(norm: Any, rows: mx.array, batch: int, length: int, heads: int) -> mx.array:
    """[batch, heads, length, d], normed over d."""
    out: mx.array = norm(rows.reshape(batch, length, heads, -1)).transpose(0, 2, 1, 3)
    return out
