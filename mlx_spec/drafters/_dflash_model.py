"""DFlash's network: fused target features as extra keys and values of a small Qwen3-shaped decoder over one block.

Shapes: B=1, ``m`` block rows, ``c`` context rows, ``H`` hidden, ``n`` taps. Has no embedding and no head of its own;
knows no target and no token. After arXiv 2602.06036 and z-lab's published code (dflash 0.1.0).
"""

from __future__ import annotations

from functools import lru_cache

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.qwen3 import MLP

from mlx_spec.drafters._dflash_config import SLIDING, DFlashConfig
from mlx_spec.drafters._dflash_context import LayerContext


class Attention(nn.Module):
    """Block rows attend to the context rows in reach and to the block."""

    def __init__(self, config: DFlashConfig, index: int, swa_causal: str) -> None:
        super().__init__()
        hidden, dim, bias = config.hidden_size, config.head_dim, config.attention_bias
        self.heads, self.kv_heads, self.scale = config.num_attention_heads, config.num_key_value_heads, dim**-0.5
        self.window = config.sliding_window if config.layer_types[index] == SLIDING else None
        self.causal = config.causal_layer(index, swa_causal)
        self.q_proj = nn.Linear(hidden, self.heads * dim, bias=bias)
        self.k_proj = nn.Linear(hidden, self.kv_heads * dim, bias=bias)
        self.v_proj = nn.Linear(hidden, self.kv_heads * dim, bias=bias)
        self.o_proj = nn.Linear(self.heads * dim, hidden, bias=bias)
        self.q_norm = nn.RMSNorm(dim, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(dim, eps=config.rms_norm_eps)

    def keys_values(self, x: mx.array, rope: nn.Module, position: int) -> tuple[mx.array, mx.array]:
        """Of [1, c, H] whose first row stands at ``position``: each [1, kv_heads, c, head_dim], keys rotated."""
        _, c, _ = x.shape
        keys = self.k_norm(self.k_proj(x).reshape(1, c, self.kv_heads, -1)).transpose(0, 2, 1, 3)
        values = self.v_proj(x).reshape(1, c, self.kv_heads, -1).transpose(0, 2, 1, 3)
        return rope(keys, offset=position), values

    def __call__(self, x: mx.array, rope: nn.Module, context: LayerContext) -> mx.array:
        _, m, _ = x.shape
        queries = self.q_norm(self.q_proj(x).reshape(1, m, self.heads, -1)).transpose(0, 2, 1, 3)
        queries = rope(queries, offset=context.length)
        mask = block_mask(context.visible(), m, self.window, self.causal)
        keys, values = context.view(*self.keys_values(x, rope, context.length))
        out = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=self.scale, mask=mask)
        merged: mx.array = self.o_proj(out.transpose(0, 2, 1, 3).reshape(1, m, -1))
        return merged


class Layer(nn.Module):
    """Pre-norm attention and SwiGLU MLP, each with a residual."""

    def __init__(self, config: DFlashConfig, index: int, swa_causal: str) -> None:
        super().__init__()
        self.self_attn = Attention(config, index, swa_causal)
        self.mlp = MLP(config.hidden_size, config.intermediate_size)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def __call__(self, x: mx.array, rope: nn.Module, context: LayerContext) -> mx.array:
        x = x + self.self_attn(self.input_layernorm(x), rope, context)
        out: mx.array = x + self.mlp(self.post_attention_layernorm(x))
        return out


class DFlashModel(nn.Module):
    """Parameters are named as in z-lab's checkpoints."""

    def __init__(self, config: DFlashConfig, swa_causal: str = "auto") -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(len(config.target_layer_ids) * hidden, hidden, bias=False)
        self.hidden_norm = nn.RMSNorm(hidden, eps=eps)
        self.layers = [Layer(config, index, swa_causal) for index in range(config.num_hidden_layers)]
        self.norm = nn.RMSNorm(hidden, eps=eps)
        if config.draft_vocab_size is not None:
            self.d2t = mx.zeros((config.draft_vocab_size,), dtype=mx.int32)
            self.freeze(recurse=False, keys=["d2t"])
        self._rope = config.rope.build(config.head_dim)
        self._scale, self._softcap = config.output_multiplier, config.final_logit_softcapping

    def new_context(self, start: int, slack: int) -> list[LayerContext]:
        """An empty context per layer, for rows from position ``start`` on."""
        return [LayerContext(layer.self_attn.window, start, slack) for layer in self.layers]

    def ingest(self, features: mx.array, contexts: list[LayerContext]) -> None:
        """Project [c, n*H], the rows that follow the contexts, once each, and commit them to every layer."""
        count = features.shape[0]
        read = max(context.wanted(count) for context in contexts)
        fused = self.hidden_norm(self.fc(features[None, count - read :]))
        for layer, context in zip(self.layers, contexts, strict=True):
            wanted = context.wanted(count)
            context.skip(count - wanted)
            rows = layer.self_attn.keys_values(fused[:, read - wanted :], self._rope, context.length)
            context.append(*rows)

    def __call__(self, x: mx.array, contexts: list[LayerContext]) -> mx.array:
        """[m, H] block embeddings -> [m, H] before the final norm; slot k speaks of the token at slot k."""
        x = x[None]
        for layer, context in zip(self.layers, contexts, strict=True):
            x = layer(x, self._rope, context)
        return x[0]

    @property
    def draft_ids(self) -> mx.array | None:
        """[draft vocabulary] the target's ids that can be drafted, None: all of them. ``d2t`` holds, as in
        speculators' checkpoints, what is to be added to a draft id."""
        return mx.arange(self.d2t.shape[0]) + self.d2t if "d2t" in self else None

    def finish(self, logits: mx.array) -> mx.array:
        """The drafter's own scale and soft cap on what the target's head gave."""
        if self._scale != 1.0:
            logits = logits * self._scale
        return logits if self._softcap is None else mx.tanh(logits / self._softcap) * self._softcap


@lru_cache(maxsize=64)
def block_mask(visible: int, m: int, window: int | None, causal: bool) -> mx.array | str | None:
    """For ``m`` queries over ``visible`` context rows and the block itself: None (see all), "causal", or [m, visible+m]
    bool. A query sees what lies less than ``window`` positions before it and, where not causal, after it."""
    if window is None or visible + m <= window:
        return "causal" if causal else None
    distance = (visible + np.arange(m))[:, None] - np.arange(visible + m)[None]
    return mx.array((distance < window) & (distance >= 0 if causal else -distance < window))
