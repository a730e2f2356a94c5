"""The drafter that learns: its network with the target's embedding and head, new or taken up. Knows no data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_map

from mlx_spec import hub
from mlx_spec.convert.train import initial, network, shape
from mlx_spec.convert.train.blocks import NO_LABEL, Array
from mlx_spec.convert.train.settings import TrainSettings
from mlx_spec.convert.train.shards import Sample
from mlx_spec.drafters import dflash
from mlx_spec.drafters._dflash_config import DFlashConfig
from mlx_spec.drafters._dflash_model import DFlashModel
from mlx_spec.folders import read_config
from mlx_spec.targets.decoder import DecoderTarget

Params = dict[str, Any]
Weights = dict[str, mx.array]  # by name; ``d2t``, which does not learn, included


@dataclass
class Learner:
    """``raw``: the drafter's config.json. ``params``: the weights that learn, float32, as a tree of ``model``'s."""

    raw: dict[str, Any]
    config: DFlashConfig
    model: DFlashModel
    target: DecoderTarget
    dtype: mx.Dtype  # of the forward

    def __post_init__(self) -> None:
        drafter = dflash.DFlashDrafter(self.config, self.model)
        drafter.bind(self.target)  # refuses a target that is not its own
        assert drafter.head is not None
        self._head = drafter.head
        self._mask = self.target.embed(mx.array([self.config.mask_token_id]))[0]
        mx.eval(self._mask)
        self._head_dtype = self._mask.dtype
        self.params: Params = self.model.trainable_parameters()

    @property
    def slots(self) -> int:
        """The trained block."""
        return self.config.block_size

    @property
    def vocab(self) -> int:
        """How many ids can be drafted."""
        return self.config.draft_vocab_size or self.target.vocab_size

    @cached_property
    def kinds(self) -> list[network.Kind]:
        """The different kinds of its layers."""
        return network.kinds(self.model)

    @cached_property
    def to_draft(self) -> Array | None:
        """[V] each id's number among those that can be drafted, NO_LABEL where it cannot; None: all can."""
        if self.model.draft_ids is None:
            return None
        numbers = np.full(self.target.vocab_size, NO_LABEL, dtype=np.int32)
        numbers[np.array(self.model.draft_ids)] = np.arange(self.vocab)
        return numbers

    def weights(self, params: Params) -> Weights:
        """All that a drafter's file holds."""
        fixed = {"d2t": self.model.d2t} if "d2t" in self.model else {}
        return dict(tree_flatten(params)) | fixed

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
        return self.model.finish(self._head(hidden.astype(self._head_dtype)))


def begin(
    settings: TrainSettings, target: DecoderTarget, config: dict[str, Any], tokenizer: Any, samples: Sequence[Sample]
) -> Learner:
    """A drafter to train on ``samples``: taken up from ``settings.start_from``, or new.

    Raises PairError where a drafter that is taken up belongs to another target, and what reading one raises.
    """
    if settings.start_from is not None:
        folder = hub.resolve(settings.start_from)
        raw = {key: value for key, value in read_config(folder).items() if not key.startswith("quantization")}
        return restored(raw, dense_weights(dflash.load(folder, {}).model), settings, target)
    mask_id = settings.mask_id
    if mask_id is None:
        seen = {int(i) for sample in samples for i in np.unique(sample.tokens)}
        mask_id = shape.choose_mask_id(tokenizer, target.vocab_size, seen)
    raw = shape.new_config(settings, target, config, mask_id)
    made = DFlashConfig.parse(raw)
    model = DFlashModel(made)
    if settings.init == "target":
        weights = initial.from_target(model, made, target, settings.seed)
    else:
        weights = initial.random_weights(model, settings.seed)
    if settings.features == "off":
        weights["fc.weight"] = mx.zeros_like(weights["fc.weight"])  # and so it stays, in decoding too
    if made.draft_vocab_size is not None:
        ids = frequent_ids(samples, made.draft_vocab_size, target.vocab_size, tokenizer.eos_token_ids)
        weights["d2t"] = mx.array(ids - np.arange(len(ids)), dtype=mx.int32)
    return restored(raw, weights, settings, target)


def restored(raw: dict[str, Any], weights: Weights, settings: TrainSettings, target: DecoderTarget) -> Learner:
    """The learner with these weights."""
    config = DFlashConfig.parse(raw)
    model = DFlashModel(config)
    model.load_weights(list(weights.items()))
    mx.eval(model.parameters())
    on_cpu = mx.default_device() == mx.Device(mx.cpu)
    kind = settings.dtype if settings.dtype != "auto" else "float32" if on_cpu else "bfloat16"
    return Learner(raw, config, model, target, getattr(mx, kind))


def dense_weights(model: DFlashModel) -> Weights:
    """All weights, floats as float32, packed ones unpacked."""
    weights: Weights = {}
    for path, module in model.named_modules():
        if isinstance(module, nn.QuantizedLinear):
            weights[f"{path}.weight"] = initial.dense(module)
            if "bias" in module:
                weights[f"{path}.bias"] = module.bias.astype(mx.float32)
    packed = {name.rsplit(".", 1)[0] for name in weights}
    for name, value in tree_flatten(model.parameters()):
        if name.rsplit(".", 1)[0] not in packed:
            weights[name] = value.astype(mx.float32) if mx.issubdtype(value.dtype, mx.floating) else value
    return weights


def frequent_ids(samples: Sequence[Sample], count: int, vocab: int, ends: Iterable[int]) -> Array:
    """[count] ascending: the ids that answers say most often, those that end an answer among them."""
    said = np.zeros(vocab, dtype=np.int64)
    for sample in samples:
        said += np.bincount(sample.tokens[sample.prompt :], minlength=vocab)
    said[[i for i in ends if i < vocab]] += said.sum() + 1
    return np.sort(np.argsort(-said, kind="stable")[:count])
