"""Random DFlash drafters in z-lab's published layout, for any test: config.json + model.safetensors.

Written from the published format (config keys, tensor names and shapes), not with the loader's code.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

FULL, SLIDING = "full_attention", "sliding_attention"


def drafter_config(
    *,
    hidden: int = 64,
    vocab: int = 256,
    layers: int = 2,
    target_layers: int = 2,
    taps: tuple[int, ...] = (0, 1),
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    intermediate: int = 96,
    block: int = 8,
    mask: int = 255,
    layer_types: tuple[str, ...] | None = None,
    window: int | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    embedding_scale: float | None = None,
    multiplier: float | None = None,
    rope_theta: float = 10000.0,
    rope: dict[str, Any] | None = None,
    bias: bool = False,
    **top: Any,
) -> dict[str, Any]:
    """config.json as z-lab writes it; ``top`` adds or overwrites top-level keys."""
    inner: dict[str, Any] = {"block_size": block, "mask_token_id": mask, "target_layer_ids": list(taps)}
    extra = {
        "final_logit_softcapping": softcap,
        "input_embedding_scale": embedding_scale,
        "output_multiplier": multiplier,
    }
    config: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "model_type": "qwen3",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocab,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 4096,
        "attention_bias": bias,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "rope_theta": rope_theta,
        "rope_scaling": rope,
        "num_target_layers": target_layers,
        "layer_types": list(layer_types or (FULL,) * layers),
        "sliding_window": window,
        "use_sliding_window": window is not None,
        "max_window_layers": layers,
        "torch_dtype": "bfloat16",
        "dflash_config": inner | {key: value for key, value in extra.items() if value is not None},
    }
    if is_causal is not None:
        config["is_causal"] = is_causal
    return config | top


def drafter_weights(config: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """float32 tensors under the published names; norms near 1, matrices scaled to keep activations of order 1."""
    hidden, inter = config["hidden_size"], config["intermediate_size"]
    dim, heads, kv = config["head_dim"], config["num_attention_heads"], config["num_key_value_heads"]
    inner = config["dflash_config"]
    taps = inner.get("target_layer_ids") or config["target_layer_ids"]
    shapes = {"fc.weight": (hidden, len(taps) * hidden), "hidden_norm.weight": (hidden,), "norm.weight": (hidden,)}
    for i in range(config["num_hidden_layers"]):
        layer = f"layers.{i}"
        shapes |= {
            f"{layer}.input_layernorm.weight": (hidden,),
            f"{layer}.post_attention_layernorm.weight": (hidden,),
            f"{layer}.self_attn.q_proj.weight": (heads * dim, hidden),
            f"{layer}.self_attn.k_proj.weight": (kv * dim, hidden),
            f"{layer}.self_attn.v_proj.weight": (kv * dim, hidden),
            f"{layer}.self_attn.o_proj.weight": (hidden, heads * dim),
            f"{layer}.self_attn.q_norm.weight": (dim,),
            f"{layer}.self_attn.k_norm.weight": (dim,),
            f"{layer}.mlp.gate_proj.weight": (inter, hidden),
            f"{layer}.mlp.up_proj.weight": (inter, hidden),
            f"{layer}.mlp.down_proj.weight": (hidden, inter),
        }
        if config.get("attention_bias"):
            for name, rows in (("q", heads * dim), ("k", kv * dim), ("v", kv * dim), ("o", hidden)):
                shapes[f"{layer}.self_attn.{name}_proj.bias"] = (rows,)
    rng = np.random.default_rng(seed)
    made = {}
    for name, shape in shapes.items():
        noise = rng.standard_normal(shape)
        made[name] = (1 + 0.2 * noise if "norm" in name else noise * 1.5 / np.sqrt(shape[-1])).astype(np.float32)
    return made


def save_drafter(folder: Path, seed: int = 0, dtype: mx.Dtype = mx.float32, **shape: Any) -> Path:
    """Write a random drafter (``shape``: see ``drafter_config``) and return its folder."""
    config = drafter_config(**shape)
    return write_drafter(folder, config, drafter_weights(config, seed), dtype)


def write_drafter(
    folder: Path, config: dict[str, Any], weights: dict[str, np.ndarray], dtype: mx.Dtype = mx.float32
) -> Path:
    """A folder from a config and tensors that a test may have changed."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: mx.array(value).astype(dtype) for name, value in weights.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), tensors, {"format": "pt"})
    return folder


class FakeTarget:
    """As much of ``contracts.Target`` as a drafter borrows: a random embedding and an untied random head."""

    def __init__(self, vocab: int = 256, hidden: int = 64, layers: int = 2, seed: int = 7, scale: float = 1.0) -> None:
        self.vocab_size, self.hidden_size, self.num_layers, self.max_context = vocab, hidden, layers, None
        self.scale = scale
        rng = np.random.default_rng(seed)
        self.embedding = rng.standard_normal((vocab, hidden)).astype(np.float32)
        self.unembedding = (rng.standard_normal((vocab, hidden)) / np.sqrt(hidden)).astype(np.float32)

    def embed(self, ids: mx.array) -> mx.array:
        return mx.array(self.embedding)[ids] * self.scale

    def head(self, hidden: mx.array) -> mx.array:
        return hidden @ mx.array(self.unembedding).T

    def head_over(self, ids: mx.array) -> Callable[[mx.array], mx.array]:
        rows = mx.array(self.unembedding)[ids]
        return lambda hidden: hidden @ rows.T


def random_features(rows: int, config: dict[str, Any], seed: int = 0) -> np.ndarray:
    """[rows, taps * hidden] float32."""
    width = len(config["dflash_config"]["target_layer_ids"]) * config["hidden_size"]
    return np.random.default_rng(seed).standard_normal((rows, width)).astype(np.float32)
