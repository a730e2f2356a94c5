"""The drafter that learns: its network with the target's embedding and head, new or taken up. Knows no data."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map

from mlx_spec import hub
from mlx_spec.convert.train import initial, network, shape
from mlx_spec.convert.train.settings import TrainSettings
from mlx_spec.drafters import dflash
from mlx_spec.drafters._dflash_config import DFlashConfig
from mlx_spec.drafters._dflash_model import DFlashModel
from mlx_spec.folders import read_config
from mlx_spec.targets.decoder import DecoderTarget

Params = dict[str, Any]


@dataclass
class Learner:
    """``raw``: the drafter's config.json. ``params``: the weights that learn, float32, as a tree of ``model``'s."""

    raw: dict[str, Any]
    config: DFlashConfig
    model: DFlashModel
    target: DecoderTarget
    params: Params
    dtype: mx.Dtype  # of the forward

    def __post_init__(self) -> None:
        row = self.target.embed(mx.array([self.config.mask_token_id]))[0]
        self._head_dtype = row.dtype
        self._mask = row
        mx.eval(self._mask)

    @property
    def slots(self) -> int:
        """The trained block."""
        return self.config.block_size

    @cached_property
    def kinds(self) -> list[network.Kind]:
        """The different kinds of its layers."""
        return network.kinds(self.model)

    @property
    def vocab(self) -> int:
        """Ids that can be drafted."""
        return self.target.vocab_size

    def wear(self, params: Params) -> None:
        """Let the network compute with these weights, in the forward's dtype."""
        self.model.update(tree_map(lambda value: value.astype(self.dtype), params))

    def embed(self, ids: mx.array) -> mx.array:
        """[B, m] anchors -> [B, m, k, H] blocks ``[anchor, mask, ...]``."""
        B, m = ids.shape
        masks = mx.broadcast_to(self._mask, (B, m, self.slots - 1, self.config.hidden_size))
        blocks = mx.concatenate([self.target.embed(ids)[:, :, None], masks], axis=2)
        return (blocks * self.config.input_embedding_scale).astype(self.dtype)

    def project(self, hidden: mx.array) -> mx.array:
        """[R, H] after the final norm -> [R, vocab]."""
        return self.model.finish(self.target.head(hidden.astype(self._head_dtype)))


def begin(
    settings: TrainSettings, target: DecoderTarget, config: dict[str, Any], tokenizer: Any, seen: set[int]
) -> Learner:
    """A drafter to train: taken up from ``settings.start_from``, or new. ``seen``: ids that the data uses.

    Raises PairError where a drafter that is taken up belongs to another target, and what reading one raises.
    """
    if settings.start_from is not None:
        return _taken_up(hub.resolve(settings.start_from), settings, target)
    mask_id = settings.mask_id
    if mask_id is None:
        mask_id = shape.choose_mask_id(tokenizer, target.vocab_size, seen)
    raw = shape.new_config(settings, target, config, mask_id)
    made = DFlashConfig.parse(raw)
    model = DFlashModel(made)
    dflash.DFlashDrafter(made, model).bind(target)
    if settings.init == "target":
        weights = initial.from_target(model, made, target, settings.seed)
    else:
        weights = initial.random_weights(model, settings.seed)
    if settings.features == "off":
        weights["fc.weight"] = mx.zeros_like(weights["fc.weight"])  # and so it stays, in decoding too
    return _learner(raw, made, model, target, weights, settings)


def _taken_up(folder: Path, settings: TrainSettings, target: DecoderTarget) -> Learner:
    drafter = dflash.load(folder, {})
    drafter.bind(target)
    raw = {key: value for key, value in read_config(folder).items() if not key.startswith("quantization")}
    config = DFlashConfig.parse(raw)
    model = DFlashModel(config)
    return _learner(raw, config, model, target, dense_weights(drafter.model), settings)


def dense_weights(model: DFlashModel) -> dict[str, mx.array]:
    """All weights as float32, packed ones unpacked."""
    weights: dict[str, mx.array] = {}
    for path, module in model.named_modules():
        if isinstance(module, nn.QuantizedLinear):
            weights[f"{path}.weight"] = initial.dense(module)
            if "bias" in module:
                weights[f"{path}.bias"] = module.bias.astype(mx.float32)
    packed = tuple(f"{name.removesuffix('weight')}" for name in weights if name.endswith("weight"))
    for name, value in tree_flatten(model.parameters()):
        if not name.startswith(packed) if packed else True:
            weights[name] = value.astype(mx.float32)
    return weights


def restored(
    raw: dict[str, Any], weights: dict[str, mx.array], settings: TrainSettings, target: DecoderTarget
) -> Learner:
    """The learner of a checkpoint."""
    config = DFlashConfig.parse(raw)
    return _learner(raw, config, DFlashModel(config), target, weights, settings)


def _learner(
    raw: dict[str, Any], config: DFlashConfig, model: DFlashModel, target: DecoderTarget,
    weights: dict[str, mx.array], settings: TrainSettings,
) -> Learner:  # fmt: skip
    model.load_weights(list(weights.items()))
    mx.eval(model.parameters())
    on_cpu = mx.default_device() == mx.Device(mx.cpu)
    kind = settings.dtype if settings.dtype != "auto" else "float32" if on_cpu else "bfloat16"
    return Learner(raw, config, model, target, model.parameters(), getattr(mx, kind))
