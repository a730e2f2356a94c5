"""z-lab's DFlash config.json, read from every place where published checkpoints keep a key. Knows no weights.

Keys that this version does not implement are refused by name, never ignored: an ignored one keeps the text right and
quietly ruins acceptance.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlx_spec.drafters._dflash_rope import Rope, parse_rope
from mlx_spec.errors import CheckpointError, UnsupportedError

Config = Mapping[str, Any]
FULL, SLIDING = "full_attention", "sliding_attention"
DEFAULT_BLOCK = 16  # z-lab 0.1.0's, where a checkpoint names none

# Refused unless the value is one of these: (key, values that change nothing). Looked up in dflash_config and on top.
REFUSED: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("conv_kernel_size", (0,)),
    ("conv_group_size", (0,)),
    ("selector_rank", (0,)),
    ("selector_top_k", (0,)),
    ("projector_type", ("", "dflash")),
    ("attention_sink_bias", (False,)),
    ("add_swa_attention_sink_bias", (False,)),
    ("add_full_attention_sink_bias", (False,)),
    ("attention_value_scale", (1, 1.0)),
    ("mask_embedding", (False,)),
    ("has_embed_tokens", (False,)),
    ("has_own_lm_head", (False,)),
    ("sample_from_anchor", (False,)),
    ("markov_rank", ()),
    ("markov_head_type", ()),
    ("use_aux_hidden_state", (True,)),
    ("aux_hidden_state_layer_ids", ()),
    ("speculators_model_type", ()),
    ("speculators_config", ()),
    ("transformer_layer_config", ()),
    ("target_num_hidden_layers", ()),
    ("hidden_correction_intermediate_size", ()),
    ("logit_scale", (1, 1.0)),
    ("partial_rotary_factor", (1, 1.0)),
    ("mlp_bias", (False,)),
    ("hidden_act", ("silu", "swish")),
    ("quantization_config", ()),
)
# Everything else inside dflash_config is unknown, and refused.
NESTED = {
    *(key for key, _ in REFUSED),
    *("block_size", "target_layer_ids", "mask_token_id", "mask_token", "num_target_layers", "causal", "is_causal"),
    *("use_swa", "swa_window_size", "final_logit_softcapping", "input_embedding_scale", "output_multiplier"),
    *("draft_vocab_size", "target_hidden_size", "is_neox_style", "rope_is_neox_style"),
}


def nested(config: Config) -> Config:
    """The ``dflash_config`` object, empty where there is none."""
    inner = config.get("dflash_config")
    return inner if isinstance(inner, Mapping) else {}


@dataclass(frozen=True)
class DFlashConfig:
    """The resolved shape of a drafter. ``causal`` None: sliding layers are causal within the block, full ones not."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int | None  # ids that can be drafted, where not all can; ``d2t`` says which (our extension)
    rms_norm_eps: float
    max_position_embeddings: int | None
    attention_bias: bool
    rope: Rope
    block_size: int  # the trained block: anchor + masks
    target_layer_ids: tuple[int, ...]  # the target layers whose outputs are tapped, 0-based, in fc's order
    mask_token_id: int
    num_target_layers: int | None
    layer_types: tuple[str, ...]
    sliding_window: int | None  # tokens, the query's own included
    causal: bool | None
    final_logit_softcapping: float | None
    input_embedding_scale: float
    output_multiplier: float
    quantization: dict[str, Any] | None  # mlx-lm's {"group_size", "bits", ...}, None: not quantised

    @classmethod
    def parse(cls, config: Config) -> DFlashConfig:
        """Raises UnsupportedError naming a key that is not implemented, CheckpointError naming one that is missing or
        contradicts another."""
        _refuse(config)
        layers = _whole(config, "num_hidden_layers")
        types, window = _layer_types(config, layers)
        heads, hidden = _whole(config, "num_attention_heads"), _whole(config, "hidden_size")
        softcap = _first(config, "final_logit_softcapping")
        causal = config.get("is_causal", nested(config).get("causal", nested(config).get("is_causal")))
        quantization = config.get("quantization")
        made = cls(
            hidden_size=hidden,
            intermediate_size=_whole(config, "intermediate_size"),
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=_whole(config, "num_key_value_heads", heads),
            head_dim=_whole(config, "head_dim", hidden // heads),
            vocab_size=_whole(config, "vocab_size"),
            draft_vocab_size=_draft_vocab(config),
            rms_norm_eps=float(_need(config, "rms_norm_eps")),
            max_position_embeddings=config.get("max_position_embeddings"),
            attention_bias=bool(config.get("attention_bias", False)),
            rope=parse_rope(config, nested(config)),
            block_size=_whole(config, "block_size", DEFAULT_BLOCK),
            target_layer_ids=_taps(config),
            mask_token_id=_whole(config, "mask_token_id", low=0),
            num_target_layers=_target_layers(config),
            layer_types=types,
            sliding_window=window,
            causal=None if causal is None else bool(causal),
            final_logit_softcapping=float(softcap) if softcap and float(softcap) > 0 else None,
            input_embedding_scale=float(_first(config, "input_embedding_scale", 1.0)),
            output_multiplier=float(_first(config, "output_multiplier", 1.0)),
            quantization=dict(quantization) if quantization else None,
        )
        made._check()
        _check_sizes(config, made)
        return made

    def causal_layer(self, index: int, swa_causal: str = "auto") -> bool:
        """Whether layer ``index`` is causal within the block: z-lab 0.1.0's rule (causal flag, else the sliding
        layers are); ``swa_causal`` "on" / "off" overrules both for the sliding layers."""
        sliding = self.layer_types[index] == SLIDING
        if sliding and swa_causal != "auto":
            return swa_causal == "on"
        return sliding if self.causal is None else self.causal

    def _check(self) -> None:
        layers, limit = self.num_target_layers, self.vocab_size
        if self.block_size < 2:
            raise CheckpointError(f"block_size {self.block_size} leaves no slot to draft; the config is wrong")
        bad = next((tap for tap in self.target_layer_ids if layers is not None and tap >= layers), None)
        if bad is not None:
            raise CheckpointError(f"target_layer_ids holds {bad}, but num_target_layers is {layers} (ids count from 0)")
        if self.mask_token_id >= limit:
            raise CheckpointError(f"mask_token_id {self.mask_token_id} is outside the vocab_size of {limit} rows")
        if self.num_attention_heads % self.num_key_value_heads:
            raise CheckpointError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of num_key_value_heads "
                f"{self.num_key_value_heads}"
            )


def _first(config: Config, key: str, default: Any = None) -> Any:
    """From dflash_config, else the top level; null counts as absent."""
    for place in (nested(config), config):
        if place.get(key) is not None:
            return place[key]
    return default


def _need(config: Config, key: str) -> Any:
    value = _first(config, key)
    if value is None:
        raise CheckpointError(f"the drafter's config.json has no {key}; it is not guessed, get the published file")
    return value


def _whole(config: Config, key: str, default: int | None = None, low: int = 1) -> int:
    value = _first(config, key, default) if default is not None else _need(config, key)
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise CheckpointError(f"{key} must be a whole number of at least {low}, not {value!r}")
    return value


def _taps(config: Config) -> tuple[int, ...]:
    taps = _need(config, "target_layer_ids")
    if not isinstance(taps, (list, tuple)) or not taps or not all(type(tap) is int for tap in taps):
        raise CheckpointError(f"target_layer_ids must be a list of layer numbers, not {taps!r}")
    if min(taps) < 0:
        raise UnsupportedError(f"target_layer_ids holds {min(taps)}; taps of the embedding are not implemented")
    return tuple(taps)


def _target_layers(config: Config) -> int | None:
    value = config.get("num_target_layers", nested(config).get("num_target_layers"))
    return None if value is None else int(value)


def _draft_vocab(config: Config) -> int | None:
    """None where every id can be drafted."""
    limit = _whole(config, "vocab_size")
    value = _whole(config, "draft_vocab_size", limit)
    if value > limit:
        raise CheckpointError(f"draft_vocab_size {value} is larger than the vocab_size of {limit} rows")
    return None if value == limit else value


def _layer_types(config: Config, layers: int) -> tuple[tuple[str, ...], int | None]:
    """(type per layer, window). ``layer_types`` decides; vLLM's ``use_swa`` only where it is absent; switches of the
    host format (``use_sliding_window``, ``max_window_layers``) say nothing here."""
    inner = nested(config)
    types = config.get("layer_types")
    if not types:
        types = [SLIDING if inner.get("use_swa") else FULL] * layers
    if len(types) != layers:
        raise CheckpointError(f"layer_types names {len(types)} layers, num_hidden_layers is {layers}")
    unknown = sorted(set(types) - {FULL, SLIDING})
    if unknown:
        raise UnsupportedError(f"layer_types holds {unknown[0]!r}; known are {FULL} and {SLIDING}")
    if SLIDING not in types:
        return tuple(types), None
    window = config.get("sliding_window") or inner.get("swa_window_size")
    if type(window) is not int or window < 2:
        raise CheckpointError(f"layer_types has sliding layers, but sliding_window is {window!r}")
    return tuple(types), window


def _refuse(config: Config) -> None:
    inner = nested(config)
    for key in inner:
        if key not in NESTED:
            raise UnsupportedError(f"dflash_config.{key} is not known to this version; it is refused, not ignored")
    for key, neutral in REFUSED:
        for where, place in (("dflash_config.", inner), ("", config)):
            value = place.get(key)
            if key == "quantization_config" and config.get("quantization"):
                continue  # mlx-lm's converter writes the same object under both names
            if value is not None and value not in neutral:
                raise UnsupportedError(f"{where}{key} = {value!r} is not implemented; use --method ngram")


def _check_sizes(config: Config, made: DFlashConfig) -> None:
    value = _first(config, "target_hidden_size")
    if value is not None and value != made.hidden_size:
        raise UnsupportedError(
            f"target_hidden_size {value} differs from the drafter's {made.hidden_size}; this is not implemented"
        )
