"""DFlash's forward in float64 NumPy, recomputed from scratch every time: slow, cache-free, readable. Test oracle.

Written from the published description of the method (arXiv 2602.06036 and the formulas of z-lab's release), one
query at a time; shares no code with the engine.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

Array = np.ndarray


def norm(x: Array, weight: Array, eps: float) -> Array:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def inverse_frequencies(config: dict[str, Any]) -> tuple[Array, float]:
    """(angle per position for each pair, factor on the rotated vectors)."""
    dim, rope = config["head_dim"], config.get("rope_scaling") or config.get("rope_parameters") or {}
    base = config.get("rope_theta") or rope["rope_theta"]
    plain = 1.0 / base ** (np.arange(0, dim, 2) / dim)
    kind = rope.get("rope_type", "default")
    if kind == "default":
        return plain, 1.0
    factor = rope["factor"]
    if kind == "linear":
        return plain / factor, 1.0
    original = rope["original_max_position_embeddings"]
    if kind == "llama3":
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        waves = 2 * np.pi / plain
        smooth = np.clip((original / waves - low) / (high - low), 0, 1)
        return (1 - smooth) * plain / factor + smooth * plain, 1.0
    assert kind == "yarn"

    def turn(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(base))

    first, last = turn(rope.get("beta_fast", 32)), turn(rope.get("beta_slow", 1))
    if rope.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    ramp = np.clip((np.arange(dim // 2) - first) / max(last - first, 1e-3), 0, 1)
    return plain / factor * ramp + plain * (1 - ramp), rope.get("attention_factor") or 0.1 * math.log(factor) + 1


def rotate(x: Array, positions: Array, config: dict[str, Any]) -> Array:
    """[rows, heads, dim], halves paired (or neighbours, where the config says so)."""
    freqs, scale = inverse_frequencies(config)
    angle = positions[:, None, None] * freqs
    cos, sin = np.cos(angle), np.sin(angle)
    half = x.shape[-1] // 2
    if config.get("is_neox_style", True):
        a, b = x[..., :half], x[..., half:]
        return scale * np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)
    a, b = x[..., ::2], x[..., 1::2]
    return scale * np.stack([a * cos - b * sin, b * cos + a * sin], -1).reshape(x.shape)


def attention(
    x: Array, ctx: Array, start: int, layer: str, kind: str, config: dict[str, Any], weights: dict[str, Array]
) -> Array:
    """``x`` [m, H] normed block rows, ``ctx`` [c, H] fused features at positions start .. start + c - 1."""
    dim, heads, kv = config["head_dim"], config["num_attention_heads"], config["num_key_value_heads"]
    eps, m, c = config["rms_norm_eps"], len(x), len(ctx)

    def project(rows: Array, name: str, count: int) -> Array:
        bias = weights.get(f"{layer}.self_attn.{name}_proj.bias", 0.0)
        return (rows @ weights[f"{layer}.self_attn.{name}_proj.weight"].T + bias).reshape(len(rows), count, dim)

    both = np.concatenate([ctx, x])
    positions = np.arange(start, start + c + m).astype(np.float64)
    q = rotate(norm(project(x, "q", heads), weights[f"{layer}.self_attn.q_norm.weight"], eps), positions[c:], config)
    k = rotate(norm(project(both, "k", kv), weights[f"{layer}.self_attn.k_norm.weight"], eps), positions, config)
    v = project(both, "v", kv)
    flag = config.get("is_causal")
    causal = kind == "sliding_attention" if flag is None else flag
    out = np.zeros((m, heads, dim))
    for i in range(m):
        seen = np.ones(c + m, dtype=bool)
        for j in range(c + m):
            behind = positions[c + i] - positions[j]
            if causal and behind < 0:
                seen[j] = False
            if kind == "sliding_attention" and abs(behind) >= config["sliding_window"]:
                seen[j] = False
        for h in range(heads):
            scores = k[seen, h // (heads // kv)] @ q[i, h] / math.sqrt(dim)
            scores = np.exp(scores - scores.max())
            out[i, h] = scores / scores.sum() @ v[seen, h // (heads // kv)]
    bias = weights.get(f"{layer}.self_attn.o_proj.bias", 0.0)
    return out.reshape(m, -1) @ weights[f"{layer}.self_attn.o_proj.weight"].T + bias


def hidden_states(
    features: Array, embedded: Array, config: dict[str, Any], weights: dict[str, Array], start: int = 0
) -> Array:
    """Final-normed [m, H] of a block with embeddings ``embedded`` after context rows ``features`` from ``start`` on."""
    weights = {name: value.astype(np.float64) for name, value in weights.items()}
    eps = config["rms_norm_eps"]
    ctx = norm(features.astype(np.float64) @ weights["fc.weight"].T, weights["hidden_norm.weight"], eps)
    x = embedded.astype(np.float64) * config["dflash_config"].get("input_embedding_scale", 1.0)
    for i, kind in enumerate(config["layer_types"]):
        layer = f"layers.{i}"
        a = norm(x, weights[f"{layer}.input_layernorm.weight"], eps)
        x = x + attention(a, ctx, start, layer, kind, config, weights)
        a = norm(x, weights[f"{layer}.post_attention_layernorm.weight"], eps)
        gate = a @ weights[f"{layer}.mlp.gate_proj.weight"].T
        up = a @ weights[f"{layer}.mlp.up_proj.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ weights[f"{layer}.mlp.down_proj.weight"].T
    return norm(x, weights["norm.weight"], eps)


def draft_logits(hidden: Array, head: Array, config: dict[str, Any]) -> Array:
    """[m - 1, V]: slot 0 (the anchor's) predicts nothing."""
    logits = hidden[1:] @ head.astype(np.float64).T * config["dflash_config"].get("output_multiplier", 1.0)
    cap = config["dflash_config"].get("final_logit_softcapping")
    return logits if not cap else cap * np.tanh(logits / cap)
