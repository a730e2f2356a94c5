"""A GGUF file in, an mlx-lm folder out, for the llama architecture. Weights are renamed and put back into the row order
that Hugging Face's models use; packed 4- and 8-bit weights stay as they are stored unless floats are asked for.

Strict both ways: a tensor, a metadata key, a storage type or a tokenizer that is not known here is refused by name,
and the result is checked against mlx-lm's own model before it gets its name.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_spec.convert._gguf_header import read_header
from mlx_spec.convert._gguf_tokenizer import write_tokenizer
from mlx_spec.convert.files import check_loads, staged, write_json, write_weights
from mlx_spec.errors import CheckpointError, OptionError, UnsupportedError

DTYPES = ("native", "float32", "bfloat16")
GROUP = 32  # values that share a scale in GGUF's Q4_0, Q4_1 and Q8_0

Metadata = Mapping[str, Any]
Transform = Callable[[mx.array, dict[str, Any]], mx.array]  # (rows, config) -> rows


def keep(rows: mx.array, config: dict[str, Any]) -> mx.array:
    return rows


def query_rows(rows: mx.array, config: dict[str, Any]) -> mx.array:
    return unpermute(rows, config["num_attention_heads"])


def key_rows(rows: mx.array, config: dict[str, Any]) -> mx.array:
    return unpermute(rows, config["num_key_value_heads"])


def unpermute(rows: mx.array, heads: int) -> mx.array:
    """Undo llama.cpp's order of q and k rows ([heads*dim, ...]): it stores each head's halves interleaved, which turns
    rotary pairs (i, i + dim/2) into (2i, 2i + 1). Whole rows move, so packed weights, scales and biases move alike.
    Source: ``permute`` in llama.cpp's conversion of LlamaModel."""
    half = rows.shape[0] // heads // 2
    return rows.reshape(heads, half, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


@dataclass(frozen=True)
class Row:
    """One weight: its name in the GGUF file, its name in the folder ("#" is the layer), and what happens to it."""

    gguf: str
    hf: str
    transform: Transform = keep
    required: bool = True


LLAMA = (
    Row("token_embd", "model.embed_tokens"),
    Row("output_norm", "model.norm"),
    Row("output", "lm_head", required=False),
    Row("blk.#.attn_norm", "model.layers.#.input_layernorm"),
    Row("blk.#.attn_q", "model.layers.#.self_attn.q_proj", query_rows),
    Row("blk.#.attn_k", "model.layers.#.self_attn.k_proj", key_rows),
    Row("blk.#.attn_v", "model.layers.#.self_attn.v_proj"),
    Row("blk.#.attn_output", "model.layers.#.self_attn.o_proj"),
    Row("blk.#.ffn_norm", "model.layers.#.post_attention_layernorm"),
    Row("blk.#.ffn_gate", "model.layers.#.mlp.gate_proj"),
    Row("blk.#.ffn_up", "model.layers.#.mlp.up_proj"),
    Row("blk.#.ffn_down", "model.layers.#.mlp.down_proj"),
)
NAME = re.compile(r"(?P<stem>(?:blk\.(?P<layer>\d+)\.)?\w+)\.(?P<part>weight|scales|biases|bias)")

# Keys "<architecture>.<key>" by the config.json key they become. None: says nothing that the weights do not say.
KEYS: dict[str, str | None] = {
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
    "context_length": "max_position_embeddings",
    "attention.value_length": None,
    "rope.dimension_count": None,  # checked against head_dim
    "vocab_size": None,
}
NEEDED = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "rms_norm_eps")


def convert_gguf(source: str | Path, out: str | Path, dtype: str = "native") -> Path:
    """Write the model of the GGUF file ``source`` as a new folder ``out`` that mlx-lm loads; returns ``out``.

    ``dtype``: "native" keeps packed weights, scales and norms as stored; "float32" and "bfloat16" expand everything.
    Raises CheckpointError (damaged or incomplete), UnsupportedError (an architecture, tensor, key, storage type or
    tokenizer that is not known here) and OptionError (``out`` exists, unknown ``dtype``). Leaves nothing half-written.
    """
    if dtype not in DTYPES:
        raise OptionError(f"dtype {dtype!r} is none of {', '.join(DTYPES)}")
    source, out = Path(source), Path(out)
    read_header(source)
    arrays, metadata = mx.load(str(source), format="gguf", return_metadata=True)
    config = llama_config(metadata, arrays, source)
    weights = in_precision(rename(arrays, config, source), dtype)
    with staged(out) as folder:
        config |= write_tokenizer(folder, metadata, source)
        config |= {"torch_dtype": "float32" if dtype == "native" else dtype, **quantization(weights)}
        write_weights(folder, weights)
        write_json(folder / "config.json", config)
        check_loads(folder, source)
    return out


def llama_config(metadata: Metadata, arrays: Mapping[str, mx.array], source: Path) -> dict[str, Any]:
    """config.json from the file's metadata. What it would have to leave out is refused."""
    family = metadata.get("general.architecture")
    if family != "llama":
        raise UnsupportedError(f"{source} is of GGUF architecture {family!r}; llama is the one that is read")
    config: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu"}
    own = {key.removeprefix("llama."): value for key, value in metadata.items() if key.startswith("llama.")}
    unknown = sorted(set(own) - set(KEYS))
    if unknown:
        raise UnsupportedError(f"{source}: metadata key llama.{unknown[0]} is not known here")
    config |= {KEYS[key]: number(own[key]) for key in own if KEYS[key] is not None}
    lacking = [key for key in NEEDED if key not in config]
    if lacking:
        raise CheckpointError(f"{source}: the metadata gives no {lacking[0]}; the file is incomplete")
    config.setdefault("num_key_value_heads", config["num_attention_heads"])
    config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
    config.setdefault("rope_theta", 10000.0)
    rotated = number(own.get("rope.dimension_count", config["head_dim"]))
    if rotated != config["head_dim"]:
        raise UnsupportedError(f"{source}: rotary embedding of {rotated} of {config['head_dim']} dimensions")
    config["vocab_size"] = arrays["token_embd.weight"].shape[0] if "token_embd.weight" in arrays else 0
    config["tie_word_embeddings"] = "output.weight" not in arrays
    config["attention_bias"] = any(re.fullmatch(r"blk\.\d+\.attn_\w+\.bias", name) for name in arrays)
    config["mlp_bias"] = any(re.fullmatch(r"blk\.\d+\.ffn_\w+\.bias", name) for name in arrays)
    return config


def rename(arrays: Mapping[str, mx.array], config: dict[str, Any], source: Path) -> dict[str, mx.array]:
    """Every tensor under its name in the folder, its rows in place."""
    rows = {row.gguf: row for row in LLAMA}
    layers = config["num_hidden_layers"]
    weights: dict[str, mx.array] = {}
    for name, array in arrays.items():
        match = NAME.fullmatch(name)
        layer = match["layer"] if match else None
        row = rows.get(match["stem"].replace(f"blk.{layer}.", "blk.#.")) if match else None
        if match is None or row is None or (layer is not None and int(layer) >= layers):
            raise UnsupportedError(f"{source}: tensor {name} has no place in a llama model of {layers} layers")
        weights[f"{row.hf.replace('#', layer or '')}.{match['part']}"] = row.transform(array, config)
    for row in LLAMA:
        for layer in range(layers if "#" in row.gguf else 1):
            if row.required and f"{row.hf.replace('#', str(layer))}.weight" not in weights:
                lacking = row.gguf.replace("#", str(layer))
                raise CheckpointError(f"{source} lacks tensor {lacking}.weight; the file is incomplete")
    return weights


def in_precision(weights: dict[str, mx.array], dtype: str) -> dict[str, mx.array]:
    """Packed weights expanded and all floats in one type, unless ``dtype`` is native: then all is as stored (norms in
    float32, so activations are float32 too, which is by far the fastest for MLX's CPU backend)."""
    if dtype == "native":
        return weights
    kind = getattr(mx, dtype)
    plain: dict[str, mx.array] = {}
    for name, array in weights.items():
        stem, _, part = name.rpartition(".")
        if part == "weight" and f"{stem}.scales" in weights:
            plain[name] = expand(array, weights[f"{stem}.scales"], weights[f"{stem}.biases"]).astype(kind)
        elif part not in ("scales", "biases"):
            plain[name] = array.astype(kind)
    return plain


def expand(packed: mx.array, scales: mx.array, biases: mx.array) -> mx.array:
    """[out, in] float32 of packed rows; scale * q + bias is computed in float32, where it loses nothing."""
    wide, low = scales.astype(mx.float32), biases.astype(mx.float32)
    return mx.dequantize(packed, wide, low, group_size=GROUP, bits=bits(packed, scales))


def bits(packed: mx.array, scales: mx.array) -> int:
    """Bits a value: [out, in*bits/32] words over [out, in/GROUP] scales."""
    return packed.shape[1] * 32 // (scales.shape[1] * GROUP)


def quantization(weights: Mapping[str, mx.array]) -> dict[str, Any]:
    """mlx-lm's ``quantization`` entry: the most common width, and an own entry for each layer that has another."""
    widths = {
        name.removesuffix(".scales"): bits(weights[name.removesuffix("scales") + "weight"], array)
        for name, array in weights.items()
        if name.endswith(".scales")
    }
    if not widths:
        return {}
    usual = Counter(widths.values()).most_common(1)[0][0]
    entry: dict[str, Any] = {"group_size": GROUP, "bits": usual, "mode": "affine"}
    entry |= {k: {"group_size": GROUP, "bits": n, "mode": "affine"} for k, n in widths.items() if n != usual}
    return {"quantization": entry, "quantization_config": entry}


def number(value: Any) -> Any:
    """A metadata number as Python's; float32 values as the shortest decimal that means them."""
    if isinstance(value, mx.array):
        return float(str(np.float32(value.item()))) if mx.issubdtype(value.dtype, mx.floating) else value.item()
    return value
