"""Weights to begin with: random, or copied from the target's last layers. Named as in z-lab's checkpoints."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlx_spec.drafters._dflash_config import DFlashConfig
from mlx_spec.drafters._dflash_model import DFlashModel
from mlx_spec.errors import UnsupportedError
from mlx_spec.targets.decoder import DecoderTarget

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
INTO_RESIDUAL = ("o_proj", "down_proj")  # a random start writes little into the residual stream


def random_weights(model: DFlashModel, seed: int) -> dict[str, mx.array]:
    """Norms are 1; matrices normal with variance 1 / inputs, less where they write into the residual stream."""
    flat = tree_flatten(model.trainable_parameters())
    keys = mx.random.split(mx.random.key(seed), len(flat))
    return {name: _random(name, value, keys[i], len(model.layers)) for i, (name, value) in enumerate(flat)}


def _random(name: str, value: mx.array, key: mx.array, layers: int) -> mx.array:
    if value.ndim == 1:
        return mx.zeros(value.shape) if name.endswith("bias") else mx.ones(value.shape)
    scale = value.shape[-1] ** -0.5
    if any(part in name for part in INTO_RESIDUAL):
        scale *= (2 * layers) ** -0.5
    return mx.random.normal(value.shape, key=key) * scale


def from_target(model: DFlashModel, config: DFlashConfig, target: DecoderTarget, seed: int) -> dict[str, mx.array]:
    """The target's last layers and final norm; ``fc`` passes the deepest tap on, as the norm of the first copied layer
    would see it; what the target has no match for (norms of queries and keys) is 1.

    Raises UnsupportedError where the target's layers are of another make or size.
    """
    layers = list(target.model.layers)[-config.num_hidden_layers :]
    if len(layers) < config.num_hidden_layers:
        raise UnsupportedError(f"the target has {len(layers)} layers, the drafter more; use --init random")
    weights = random_weights(model, seed)
    for index, layer in enumerate(layers):
        for name, value in _layer(layer).items():
            _put(weights, f"layers.{index}.{name}", value)
    hidden, taps = config.hidden_size, config.target_layer_ids
    deepest = taps.index(max(taps))
    fc = weights["fc.weight"] * 0.1
    fc[:, deepest * hidden : (deepest + 1) * hidden] += mx.eye(hidden)
    weights["fc.weight"] = fc
    _put(weights, "hidden_norm.weight", _norm(layers[0], "input_layernorm"))
    inner = getattr(target.model, "model", target.model)
    _put(weights, "norm.weight", _norm(inner, "norm"))
    return weights


def _layer(layer: Any) -> dict[str, mx.array]:
    """A target layer's weights under the drafter's names."""
    attention, mlp = getattr(layer, "self_attn", None), getattr(layer, "mlp", None)
    found = {f"self_attn.{name}.weight": _matrix(attention, name) for name in ATTENTION}
    found |= {f"mlp.{name}.weight": _matrix(mlp, name) for name in MLP}
    for name in ("input_layernorm", "post_attention_layernorm"):
        found[f"{name}.weight"] = _norm(layer, name)
    for name in ("q_norm", "k_norm"):
        if isinstance(getattr(attention, name, None), nn.RMSNorm):
            found[f"self_attn.{name}.weight"] = _norm(attention, name)
    return found


def _matrix(home: Any, name: str) -> mx.array:
    module = getattr(home, name, None)
    if not isinstance(module, (nn.Linear, nn.QuantizedLinear)):
        raise UnsupportedError(f"the target's layers have no {name} to begin with; use --init random")
    return dense(module)


def _norm(home: Any, name: str) -> mx.array:
    module = getattr(home, name, None)
    if not isinstance(module, nn.RMSNorm):
        raise UnsupportedError(f"the target's {name} is not a plain RMSNorm; use --init random")
    weight: mx.array = module.weight
    return weight


def dense(module: Any) -> mx.array:
    """A linear layer's matrix as float32, packed or not."""
    if not isinstance(module, nn.QuantizedLinear):
        return module.weight.astype(mx.float32)
    biases = module.get("biases")
    packed = (module.weight, module.scales, biases, module.group_size, module.bits)
    return mx.dequantize(*packed, mode=module.mode).astype(mx.float32)


def _put(weights: dict[str, mx.array], name: str, value: mx.array) -> None:
    if weights[name].shape != value.shape:
        raise UnsupportedError(
            f"the target's {name.split('.', 2)[-1]} is {list(value.shape)}, the drafter's {list(weights[name].shape)}: "
            "these sizes cannot begin as copies; use --init random"
        )
    weights[name] = value.astype(mx.float32)
