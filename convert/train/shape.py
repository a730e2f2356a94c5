"""The config.json of a new drafter, from its target and the settings, in z-lab's layout. Knows no weights."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mlx_spec.convert.train.settings import TrainSettings, default_taps
from mlx_spec.drafters._dflash_config import FULL, SLIDING
from mlx_spec.drafters._dflash_rope import parse_rope
from mlx_spec.errors import CheckpointError, OptionError, UnsupportedError
from mlx_spec.targets.decoder import DecoderTarget

DEFAULT_BLOCK = 16
DEFAULT_LAYERS = ((24, 5), (8, 2), (0, 1))  # (target layers from, drafter layers)
DEFAULT_TAPS = 5
DEFAULT_THETA = 10000.0


def new_config(settings: TrainSettings, target: DecoderTarget, config: dict[str, Any], mask_id: int) -> dict[str, Any]:
    """What a setting leaves open is as the target has it."""
    text = config.get("text_config") or config
    layers = settings.layers or next(n for least, n in DEFAULT_LAYERS if target.num_layers >= least)
    heads = settings.heads or int(_of(text, "num_attention_heads"))
    kv_heads = settings.kv_heads or int(text.get("num_key_value_heads") or heads)
    head_dim = int(text.get("head_dim") or target.hidden_size // int(_of(text, "num_attention_heads")))
    if heads % kv_heads:
        raise OptionError(f"--heads {heads} is not a multiple of --kv-heads {kv_heads}")
    taps = settings.taps or default_taps(min(DEFAULT_TAPS, target.num_layers), target.num_layers)
    if max(taps) >= target.num_layers:
        raise OptionError(f"--taps holds {max(taps)}, but the target's layers are 0 to {target.num_layers - 1}")
    if not 0 <= mask_id < target.vocab_size:
        raise OptionError(f"--mask-id {mask_id} is outside the target's vocabulary of {target.vocab_size}")
    return {
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "model_type": "qwen3",
        "hidden_size": target.hidden_size,
        "intermediate_size": settings.intermediate or int(_of(text, "intermediate_size")),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": target.vocab_size,
        **_draft_vocab(settings, target),
        "rms_norm_eps": float(text.get("rms_norm_eps") or 1e-6),
        "max_position_embeddings": text.get("max_position_embeddings"),
        "attention_bias": False,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        **_rope(text),
        "num_target_layers": target.num_layers,
        "layer_types": [SLIDING if settings.window else FULL] * layers,
        "sliding_window": settings.window,
        "use_sliding_window": settings.window is not None,
        "max_window_layers": layers,
        "block_size": settings.block or DEFAULT_BLOCK,
        "dflash_config": {
            "block_size": settings.block or DEFAULT_BLOCK,
            "mask_token_id": mask_id,
            "target_layer_ids": list(taps),
        },
    }


def _draft_vocab(settings: TrainSettings, target: DecoderTarget) -> dict[str, int]:
    count = settings.draft_vocab
    if count is not None and count > target.vocab_size:
        raise OptionError(f"--draft-vocab {count} is above the target's vocabulary of {target.vocab_size}")
    return {} if count in (None, target.vocab_size) else {"draft_vocab_size": count}


def _of(text: dict[str, Any], key: str) -> Any:
    if text.get(key) is None:
        raise OptionError(f"the target's config.json has no {key}; give --{key.split('_')[-1]} or its like yourself")
    return text[key]


def _rope(text: dict[str, Any]) -> dict[str, Any]:
    """The target's rotary embedding where a drafter can have it, else its base alone."""
    inner = text.get("rope_parameters") or {}
    theta = float(text.get("rope_theta") or inner.get("rope_theta") or DEFAULT_THETA)
    scaling = text.get("rope_scaling") or (inner if inner.get("rope_type", "default") != "default" else None)
    try:
        parse_rope({"rope_scaling": scaling}, {})
    except (UnsupportedError, CheckpointError):
        scaling = None
    return {"rope_theta": theta, "rope_scaling": scaling}


def choose_mask_id(tokenizer: Any, vocab: int, seen: Iterable[int]) -> int:
    """An id that text never has: the tokenizer's mask token, the first row without a token, a special token that the
    data does not use, or the last id that it does not use. Raises OptionError where the data uses all."""
    used = {*seen, *tokenizer.eos_token_ids}
    mask = getattr(tokenizer, "mask_token_id", None)
    if mask is not None and mask not in used:
        return int(mask)
    if len(tokenizer) < vocab:
        return len(tokenizer)
    special = [i for i in tokenizer.all_special_ids if i not in used]
    special += [i for i in getattr(tokenizer, "added_tokens_decoder", {}) if i not in used]
    if special:
        return int(max(special))
    unused = next((i for i in range(vocab - 1, -1, -1) if i not in used), None)
    if unused is None:
        raise OptionError("every id of the vocabulary occurs in the data; name one for the masked slots with --mask-id")
    return unused
