"""A small GGUF writer, after ggml's docs/gguf.md, and a small llama model written with it. No test of its own.

Shares no code with the converter: blocks are packed and rows permuted here in the plainest way.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np

TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q8_0": 8}
LAYERS, HIDDEN, HEADS, KV_HEADS, INNER, CONTEXT = 2, 64, 4, 2, 96, 512
EXTRA = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<user>")
MERGES = ("t h", "th e", "Ġ the", "Ġ Ġ", "1 2")
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"


def pack(values: np.ndarray, kind: str) -> bytes:
    """Rows of float32 as the bytes of a storage type."""
    if kind == "F32":
        return values.astype("<f4").tobytes()
    if kind == "F16":
        return values.astype("<f2").tobytes()
    return b"".join(_block(row, kind) for row in values.astype(np.float32).reshape(-1, 32))


def _block(v: np.ndarray, kind: str) -> bytes:
    if kind == "Q8_0":
        d = np.float16(np.abs(v).max() / 127 or 1)
        return d.tobytes() + np.clip(np.round(v / np.float32(d)), -127, 127).astype(np.int8).tobytes()
    if kind == "Q4_0":
        d = np.float16(np.abs(v).max() / 7 or 1)
        q = np.clip(np.round(v / np.float32(d)) + 8, 0, 15).astype(np.uint8)
        return d.tobytes() + (q[:16] | q[16:] << 4).tobytes()
    if kind == "Q4_1":
        d, m = np.float16((v.max() - v.min()) / 15 or 1), np.float16(v.min())
        q = np.clip(np.round((v - np.float32(m)) / np.float32(d)), 0, 15).astype(np.uint8)
        return d.tobytes() + m.tobytes() + (q[:16] | q[16:] << 4).tobytes()
    return bytes(22)  # Q5_0: only its name is read


def unpack(data: bytes, kind: str) -> np.ndarray:
    """The float32 values of blocks, computed from the format's definition alone."""
    size = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}[kind]
    values = []
    for start in range(0, len(data), size):
        block = data[start : start + size]
        d = np.float32(np.frombuffer(block[:2], "<f2")[0])
        if kind == "Q8_0":
            values += [d * np.float32(q) for q in np.frombuffer(block[2:], np.int8)]
            continue
        low = np.float32(np.frombuffer(block[2:4], "<f2")[0]) if kind == "Q4_1" else d * np.float32(-8)
        halves = np.frombuffer(block[4 if kind == "Q4_1" else 2 :], np.uint8)
        values += [d * np.float32(q) + low for q in [*(halves & 15), *(halves >> 4)]]
    return np.array(values, np.float32)


def write_gguf(path: Path, metadata: dict[str, Any], tensors: dict[str, tuple[np.ndarray, str]]) -> Path:
    """Metadata (str, bool, int, float, lists of str or int) and tensors (values, storage type)."""
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    head += b"".join(_string(key) + _value(value) for key, value in metadata.items())
    body = b""
    for name, (values, kind) in tensors.items():
        body += bytes(-len(body) % 32)
        dims = values.shape[::-1]
        head += _string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, TYPES[kind], len(body))
        body += pack(values, kind)
    path.write_bytes(head + bytes(-len(head) % 32) + body)
    return path


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _value(value: Any) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", 8) + _string(value)
    if isinstance(value, bool):
        return struct.pack("<IB", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    texts = isinstance(value[0], str)
    items = b"".join(_string(v) for v in value) if texts else struct.pack(f"<{len(value)}i", *value)
    return struct.pack("<IIQ", 9, 8 if texts else 5, len(value)) + items


def vocabulary() -> list[str]:
    from tokenizers import pre_tokenizers

    return [*sorted(pre_tokenizers.ByteLevel.alphabet()), "th", "the", "Ġthe", "ĠĠ", "12", *EXTRA]


def llama_metadata() -> dict[str, Any]:
    tokens = vocabulary()
    end = tokens.index("<|im_end|>")
    types = [3 if token in EXTRA[:3] else 4 if token == EXTRA[3] else 1 for token in tokens]
    return {
        "general.architecture": "llama",
        "llama.block_count": LAYERS,
        "llama.embedding_length": HIDDEN,
        "llama.feed_forward_length": INNER,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.dimension_count": HIDDEN // HEADS,
        "llama.rope.freq_base": 50000.0,
        "llama.context_length": CONTEXT,
        "llama.vocab_size": len(tokens),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": list(MERGES),
        "tokenizer.ggml.bos_token_id": tokens.index("<|im_start|>"),
        "tokenizer.ggml.eos_token_id": end,
        "tokenizer.ggml.padding_token_id": end,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": TEMPLATE,
    }


def llama_weights(seed: int = 0, tied: bool = True) -> dict[str, np.ndarray]:
    """Random weights under Hugging Face's names, in its row order."""
    rng = np.random.default_rng(seed)
    rows = len(vocabulary())
    kv = HIDDEN // HEADS * KV_HEADS
    shapes = {"model.embed_tokens": (rows, HIDDEN), "model.norm": (HIDDEN,)}
    for i in range(LAYERS):
        here = f"model.layers.{i}"
        shapes |= {f"{here}.input_layernorm": (HIDDEN,), f"{here}.post_attention_layernorm": (HIDDEN,)}
        shapes |= {f"{here}.self_attn.{p}_proj": (kv if p in "kv" else HIDDEN, HIDDEN) for p in "qkvo"}
        shapes |= {f"{here}.mlp.{p}_proj": (INNER, HIDDEN) for p in ("gate", "up")}
        shapes |= {f"{here}.mlp.down_proj": (HIDDEN, INNER)}
    if not tied:
        shapes["lm_head"] = (rows, HIDDEN)
    weights = {f"{name}.weight": rng.standard_normal(shape).astype(np.float32) * 0.3 for name, shape in shapes.items()}
    return weights


GGUF_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def llama_tensors(weights: dict[str, np.ndarray], kind: str = "F32") -> dict[str, tuple[np.ndarray, str]]:
    """The same weights as llama.cpp stores them; matrices as ``kind``, norms as F32."""
    tensors = {}
    for name, values in weights.items():
        stem = name.removesuffix(".weight")
        outer = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
        if stem in outer:
            gguf = outer[stem]
        else:
            layer, part = stem.removeprefix("model.layers.").split(".", 1)
            gguf = f"blk.{layer}.{GGUF_NAMES[part]}"
            if part.endswith(("q_proj", "k_proj")):
                values = values[stored_order(len(values))]
        tensors[f"{gguf}.weight"] = (values, "F32" if values.ndim == 1 else kind)
    return tensors


def stored_order(rows: int) -> list[int]:
    """Which of Hugging Face's rows lies at each stored row: per head 0, half, 1, half + 1, ..."""
    dim = HIDDEN // HEADS
    return [head + i + side * dim // 2 for head in range(0, rows, dim) for i in range(dim // 2) for side in (0, 1)]


def write_llama(path: Path, kind: str = "F32", tied: bool = True, seed: int = 0) -> Path:
    return write_gguf(path, llama_metadata(), llama_tensors(llama_weights(seed, tied), kind))
