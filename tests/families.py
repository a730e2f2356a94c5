"""A tiny random model of every plain-decoder family that the tests cover, by mlx-lm model type."""

from __future__ import annotations

import importlib
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 256,
    "rms_norm_eps": 1e-6,
    "layer_norm_eps": 1e-5,
    "layer_norm_epsilon": 1e-5,
    "norm_epsilon": 1e-5,
    "norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1}

# model type -> what differs from COMMON
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"tie_word_embeddings": True},
    "qwen3_moe": MOE | {"mlp_only_layers": [], "norm_topk_prob": True},
    "mistral": {},
    "phi3": {"tie_word_embeddings": False},
    "smollm3": {"no_rope_layer_interval": 2, "tie_word_embeddings": True},
    "glm4": {"attention_bias": True, "partial_rotary_factor": 0.5},
    "glm": {"attention_bias": True, "partial_rotary_factor": 0.5},
    "gemma": {"tie_word_embeddings": True},
    "gemma2": {
        "query_pre_attn_scalar": 16,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "tie_word_embeddings": True,
    },
    "cohere": {"logit_scale": 0.25, "tie_word_embeddings": True},
    "olmo2": {},
    "starcoder2": {"tie_word_embeddings": True},
    "granite": {
        "logits_scaling": 4.0,
        "attention_multiplier": 0.25,
        "embedding_multiplier": 6.0,
        "residual_multiplier": 0.5,
        "attention_bias": False,
        "mlp_bias": False,
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "stablelm": {"use_qkv_bias": True, "partial_rotary_factor": 0.5},
    "seed_oss": {"attention_bias": False, "attention_out_bias": False},
    "ernie4_5": {"use_bias": False},
    "olmoe": MOE | {"norm_topk_prob": True},
    "phi": {"partial_rotary_factor": 0.5},
}


def build(family: str, seed: int = 0, **changes: Any) -> tuple[nn.Module, dict[str, Any]]:
    """(model, config) of one family with random weights, norms included."""
    kind = importlib.import_module("mlx_lm.utils").MODEL_REMAPPING.get(family, family)
    module = importlib.import_module(f"mlx_lm.models.{kind}")
    config = COMMON | FAMILIES[family] | {"model_type": kind} | changes
    model = module.Model(module.ModelArgs.from_dict(config))
    key = mx.random.key(seed)
    drawn = []
    for path, value in tree_flatten(model.parameters()):
        key, now = mx.random.split(key)
        noise = mx.random.normal(value.shape, key=now)
        drawn.append((path, 1.0 + 0.2 * noise if value.ndim == 1 and "bias" not in path else 0.15 * noise))
    model.load_weights(drawn)
    mx.eval(model.parameters())
    return model, config
