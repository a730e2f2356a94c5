"""The tiny target in PyTorch: Qwen3's architecture, for training and for fast batched generation on a CPU.

Parameter names are those of the published Qwen3 checkpoints, so a state dict saved as safetensors is the model's file.
A development tool: mlx-spec itself never imports it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 192,
    "num_hidden_layers": 10,
    "intermediate_size": 512,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "vocab_size": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": 0,
    "hidden_act": "silu",
    "attention_bias": False,
}


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of [B, H, L, D]; cos and sin are [L, D] or [B, 1, L, D]."""
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-b, a), dim=-1) * sin


def attend(q: Tensor, k: Tensor, v: Tensor, masked: bool) -> Tensor:
    """Attention, written out: on a CPU, in bfloat16 and at these lengths, faster than the fused one."""
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
    if masked:
        future = torch.full(scores.shape[-2:], -1e4, dtype=scores.dtype).triu_(1 + k.shape[-2] - q.shape[-2])
        scores = scores + future
    return scores.softmax(-1) @ v


class Attention(nn.Module):
    def __init__(self, c: dict) -> None:
        super().__init__()
        h, d = c["hidden_size"], c["head_dim"]
        self.heads, self.kv_heads, self.d = c["num_attention_heads"], c["num_key_value_heads"], d
        self.q_proj = nn.Linear(h, self.heads * d, bias=False)
        self.k_proj = nn.Linear(h, self.kv_heads * d, bias=False)
        self.v_proj = nn.Linear(h, self.kv_heads * d, bias=False)
        self.o_proj = nn.Linear(self.heads * d, h, bias=False)
        self.q_norm = nn.RMSNorm(d, eps=c["rms_norm_eps"])
        self.k_norm = nn.RMSNorm(d, eps=c["rms_norm_eps"])

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], cache: list[Tensor] | None, at: int) -> Tensor:
        B, L, _ = x.shape
        q = self.q_norm(self.q_proj(x).view(B, L, self.heads, self.d)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(B, L, self.kv_heads, self.d)).transpose(1, 2)
        v = self.v_proj(x).view(B, L, self.kv_heads, self.d).transpose(1, 2)
        q, k = rotate(q, *rope).to(v.dtype), rotate(k, *rope).to(v.dtype)
        if cache is not None:  # [B, kv, T, D] buffers, filled up to ``at``
            cache[0][:, :, at : at + L] = k
            cache[1][:, :, at : at + L] = v
            k, v = cache[0][:, :, : at + L], cache[1][:, :, : at + L]
        groups = self.heads // self.kv_heads
        if L == 1:  # one row: the queries of a group share their keys without a copy
            out = attend(q.reshape(B, self.kv_heads, groups, self.d), k, v, masked=False)
            return self.o_proj(out.reshape(B, 1, -1))
        k = k[:, :, None].expand(-1, -1, groups, -1, -1).flatten(1, 2)
        v = v[:, :, None].expand(-1, -1, groups, -1, -1).flatten(1, 2)
        out = attend(q, k, v, masked=True)
        return self.o_proj(out.transpose(1, 2).reshape(B, L, -1))


class MLP(nn.Module):
    def __init__(self, c: dict) -> None:
        super().__init__()
        h, m = c["hidden_size"], c["intermediate_size"]
        self.gate_proj = nn.Linear(h, m, bias=False)
        self.up_proj = nn.Linear(h, m, bias=False)
        self.down_proj = nn.Linear(m, h, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, c: dict) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(c["hidden_size"], eps=c["rms_norm_eps"])
        self.self_attn = Attention(c)
        self.post_attention_layernorm = nn.RMSNorm(c["hidden_size"], eps=c["rms_norm_eps"])
        self.mlp = MLP(c)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], cache: list[Tensor] | None, at: int) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rope, cache, at)
        return x + self.mlp(self.post_attention_layernorm(x))


class Body(nn.Module):
    def __init__(self, c: dict) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(c["vocab_size"], c["hidden_size"])
        self.layers = nn.ModuleList(Layer(c) for _ in range(c["num_hidden_layers"]))
        self.norm = nn.RMSNorm(c["hidden_size"], eps=c["rms_norm_eps"])


class Model(nn.Module):
    """Token ids [B, L] to logits [B, L, V], or to the mean cross-entropy where labels are given."""

    def __init__(self, c: dict) -> None:
        super().__init__()
        self.config = c
        self.model = Body(c)
        d, n = c["head_dim"], c["max_position_embeddings"]
        angles = torch.outer(torch.arange(n).float(), c["rope_theta"] ** (-torch.arange(0, d, 2).float() / d))
        angles = torch.cat((angles, angles), dim=-1)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for name, p in self.named_parameters():
            if p.ndim == 2:
                nn.init.normal_(p, std=0.02 if "embed" in name else p.shape[1] ** -0.5)
                if name.endswith(("o_proj.weight", "down_proj.weight")):
                    p.data *= (2 * c["num_hidden_layers"]) ** -0.5

    def forward(
        self, ids: Tensor, labels: Tensor | None = None, caches: list[list[Tensor]] | None = None, at: int = 0
    ) -> Tensor:
        L = ids.shape[1]
        x = self.model.embed_tokens(ids)
        rope = (self.cos[at : at + L].to(x.dtype), self.sin[at : at + L].to(x.dtype))
        for i, layer in enumerate(self.model.layers):
            x = layer(x, rope, caches[i] if caches else None, at)
        if caches:
            x = x[:, -1:]  # generating: only the last row is read
        logits = F.linear(self.model.norm(x), self.model.embed_tokens.weight)
        if labels is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())

    def caches(self, batch: int, length: int, dtype: torch.dtype) -> list[list[Tensor]]:
        c = self.config
        shape = (batch, c["num_key_value_heads"], length, c["head_dim"])
        return [[torch.zeros(shape, dtype=dtype) for _ in range(2)] for _ in self.model.layers]
