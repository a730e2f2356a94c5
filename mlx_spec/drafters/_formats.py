"""What a checkpoint folder is, told from its config.json alone. Knows the signatures of formats, loads no weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mlx_spec.errors import CheckpointError, ModelNotFoundError

Config = Mapping[str, Any]
DFLASH = "a DFlash drafter"
LANGUAGE_MODEL = "a full language model"


def read_config(folder: Path) -> dict[str, Any]:
    """config.json as a dict. Raises ModelNotFoundError (no folder) or CheckpointError (no or broken config.json)."""
    if not folder.is_dir():
        raise ModelNotFoundError(f"no folder {folder}; give the path of a downloaded checkpoint")
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder} has no config.json; download the checkpoint again") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is not readable JSON ({error}); download it again") from error
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path} holds a {type(raw).__name__} where an object is needed; download it again")
    return raw


def nested(config: Config) -> Config:
    """The ``dflash_config`` object, empty where there is none."""
    inner = config.get("dflash_config")
    return inner if isinstance(inner, Mapping) else {}


def _arch(config: Config, *words: str) -> bool:
    names = config.get("architectures") or []
    return any(word in str(name) for name in names for word in words)


def _projector(config: Config) -> bool:
    return nested(config).get("projector_type", config.get("projector_type")) not in (None, "", "dflash")


# First match wins: (is it this?, what to call it, of DFlash's family: the dflash method loads it or names the key it
# lacks). Successors come before plain DFlash.
SIGNATURES: tuple[tuple[Callable[[Config], bool], str, bool], ...] = (
    (lambda c: "speculators_model_type" in c, "a drafter in the speculators format", True),
    (lambda c: "speculators_config" in c, "a drafter in the speculators format", True),
    (lambda c: _arch(c, "DSpark"), "a DeepSpec (DSpark) drafter", True),
    (lambda c: "markov_rank" in c or "markov_head_type" in c, "a DeepSpec (DSpark) drafter", True),
    (lambda c: _arch(c, "DFly") or "hidden_correction_intermediate_size" in c, "a DFly drafter", True),
    (lambda c: _arch(c, "DFlash2") or "selector_rank" in nested(c), "a DFlash2 drafter", True),
    (_projector, "a drafter that succeeds DFlash (projector_type)", True),
    (lambda c: _arch(c, "DFlash") or "dflash_config" in c, DFLASH, True),
    (lambda c: "target_layer_ids" in c and "mask_token_id" in c, DFLASH, True),
    (lambda c: _arch(c, "Eagle", "EAGLE"), "an EAGLE drafter", False),
    (lambda c: _arch(c, "Medusa") or "medusa_num_heads" in c, "a Medusa drafter", False),
    (lambda c: _arch(c, "ForCausalLM", "ForConditionalGeneration"), LANGUAGE_MODEL, False),
    (lambda c: "model_type" in c and "vocab_size" in c, LANGUAGE_MODEL, False),
)


def describe(config: Config) -> str:
    """In words, what the checkpoint with this config.json is."""
    return next((name for test, name, _ in SIGNATURES if test(config)), "no checkpoint known here")


def of_dflash_family(config: Config) -> bool:
    """Whether it is DFlash or a relative of it."""
    return next((family for test, _, family in SIGNATURES if test(config)), False)


def is_drafter(config: Config) -> bool:
    """Whether the folder holds a drafter of any kind, so that it cannot serve as a target."""
    return "drafter" in describe(config)
