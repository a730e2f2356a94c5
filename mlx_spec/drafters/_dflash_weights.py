"""A DFlash checkpoint's tensors onto the model, strictly: every name accounted for, every value a number."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlx_spec.drafters._dflash_config import DFlashConfig
from mlx_spec.drafters._dflash_model import DFlashModel
from mlx_spec.errors import CheckpointError, PairError
from mlx_spec.folders import FolderInfo

# Prefixes of other writers -> z-lab's, applied in this order.
ALIASES = (
    ("model.", ""),
    ("encoder.fc.", "fc."),
    ("encoder.output_norm_enc.", "hidden_norm."),
    ("midlayer.", "layers.0."),
    ("context_proj.", "fc."),
    ("context_norm.", "hidden_norm."),
    ("final_norm.", "norm."),
)
Weights = dict[str, mx.array]


def load_weights(source: FolderInfo, config: DFlashConfig, swa_causal: str) -> DFlashModel:
    """The model with a checked folder's weights, evaluated, in the checkpoint's dtype (float32 where a CPU computes).

    Raises CheckpointError naming the missing, unknown, misshapen or non-finite tensors, PairError where ``fc`` was made
    for another number of taps.
    """
    folder = source.path
    weights = _split_qkv(_renamed(folder, _read(source.weights)), config)
    model = DFlashModel(config, swa_causal)
    if config.quantization is not None:
        _quantize(model, config.quantization, weights)
    _check_shapes(folder, config, dict(tree_flatten(model.parameters())), weights)
    dtype = _dtype(weights)
    floats = {name for name, value in weights.items() if mx.issubdtype(value.dtype, mx.floating)}
    _refuse_nan(folder, {name: weights[name] for name in sorted(floats)})
    model.load_weights([(name, value.astype(dtype) if name in floats else value) for name, value in weights.items()])
    model.eval()
    mx.eval(model.parameters())
    _check_draft_ids(folder, config, model)
    return model


def _check_draft_ids(folder: Path, config: DFlashConfig, model: DFlashModel) -> None:
    """Every draft id stands for another id of the target."""
    if model.draft_ids is None:
        return
    ids: list[int] = model.draft_ids.tolist()  # type: ignore[assignment]
    bad = next((i for i in ids if not 0 <= i < config.vocab_size), None)
    if bad is not None:
        raise CheckpointError(f"{folder}: d2t leads to id {bad}, outside the vocab_size of {config.vocab_size} rows")
    if len(set(ids)) < len(ids):
        raise CheckpointError(f"{folder}: d2t leads two draft ids to one id of the target; the file is damaged")


def _quantize(model: DFlashModel, quantization: dict[str, Any], weights: Weights) -> None:
    """As mlx-lm does: a layer named in the config has its own settings, others are quantised where scales exist."""
    options = {key: quantization[key] for key in ("group_size", "bits", "mode") if key in quantization}

    def chosen(path: str, module: nn.Module) -> Any:
        return quantization.get(path, f"{path}.scales" in weights) if hasattr(module, "to_quantized") else False

    nn.quantize(model, class_predicate=chosen, **options)


def _read(files: Iterable[Path]) -> Weights:
    weights: Weights = {}
    for path in files:
        try:
            tensors: Any = mx.load(str(path))
            mx.eval(tensors)
        except (RuntimeError, ValueError) as error:
            raise CheckpointError(f"{path} cannot be read ({error}); download it again") from error
        weights |= tensors
    return weights


def _renamed(folder: Path, weights: Weights) -> Weights:
    renamed: Weights = {}
    for original, value in weights.items():
        name = original
        for old, new in ALIASES:
            name = new + name.removeprefix(old) if name.startswith(old) else name
        if name in renamed:
            raise CheckpointError(f"{folder} holds {name} twice, under different names")
        renamed[name] = value
    return renamed


def _split_qkv(weights: Weights, config: DFlashConfig) -> Weights:
    """Fused ``qkv_proj`` rows are q, then k, then v."""
    q, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    split: Weights = {}
    for name, value in weights.items():
        if ".qkv_proj." not in name:
            split[name] = value
            continue
        for part, rows in (("q", value[:q]), ("k", value[q : q + kv]), ("v", value[q + kv :])):
            split[name.replace(".qkv_proj.", f".{part}_proj.")] = rows
    return split


def _check_shapes(folder: Path, config: DFlashConfig, wanted: Weights, weights: Weights) -> None:
    problems = []
    for what, names in (("missing", wanted.keys() - weights.keys()), ("unknown", weights.keys() - wanted.keys())):
        if names:
            problems.append(f"{what}: {_listed(names)}")
    if problems:
        raise CheckpointError(f"{folder} does not match its config.json ({'; '.join(problems)})")
    have, need = weights["fc.weight"].shape, wanted["fc.weight"].shape
    if have[-1] != need[-1]:
        raise PairError(
            f"fc.weight takes {have[-1]} features, but {len(config.target_layer_ids)} taps of hidden size "
            f"{config.hidden_size} give {need[-1]}; target_layer_ids and weights do not belong together"
        )
    shapes = [(name, weights[name].shape, value.shape) for name, value in wanted.items()]
    bad = [f"{name} {have} where {need} is needed" for name, have, need in shapes if have != need]
    if bad:
        raise CheckpointError(f"{folder} holds tensors of the wrong shape: {_listed(bad)}")


def _listed(names: Iterable[str], most: int = 8) -> str:
    names = sorted(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _dtype(weights: Weights) -> mx.Dtype:
    if mx.default_device() == mx.Device(mx.cpu):
        return mx.float32
    return weights.get("fc.scales", weights["fc.weight"]).dtype


def _refuse_nan(folder: Path, weights: Weights) -> None:
    """One reduction a tensor, one read in all."""
    finite = mx.stack([mx.isfinite(value).all() for value in weights.values()])
    flags: list[bool] = finite.tolist()  # type: ignore[assignment]
    bad = [name for name, good in zip(weights, flags, strict=True) if not good]
    if bad:
        raise CheckpointError(f"{folder} holds values that are not numbers in {_listed(bad)}; download it again")
