"""The trained drafter as a folder in z-lab's format, with a card and the record of how it was made."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlx_spec.convert.files import write_json as write_config
from mlx_spec.convert.train import curve
from mlx_spec.convert.train.learner import Weights
from mlx_spec.convert.train.storage import replacing, save_arrays, write_json, write_text
from mlx_spec.drafters import dflash
from mlx_spec.drafters._dflash_config import DFlashConfig
from mlx_spec.drafters._dflash_model import DFlashModel
from mlx_spec.errors import OptionError

PROVENANCE = "provenance.json"


def write_bundle(
    place: Path,
    raw: dict[str, Any],
    weights: Weights,
    provenance: dict[str, Any],
    bits: int | None,
    run: Path | None = None,
) -> None:
    """Write ``place``, over what was there: config.json, model.safetensors, README.md, provenance.json and the curve
    of ``run``. ``bits``: see ``packed``. The result is read back by the engine's own loader before it counts."""
    config, tensors = packed(raw, weights, bits)
    with replacing(place) as folder:
        save_arrays(folder / "model.safetensors", tensors)
        write_config(folder / "config.json", config)
        write_json(folder / PROVENANCE, provenance)
        write_text(folder / "README.md", card(config, provenance))
        for name in (curve.FILE, curve.PLOT):
            if run is not None and (run / name).is_file():
                shutil.copyfile(run / name, folder / name)
        dflash.load(folder, {})


def packed(raw: dict[str, Any], weights: Weights, bits: int | None) -> tuple[dict[str, Any], Weights]:
    """(config.json, tensors) in float32, in bfloat16 (``bits`` 16), or quantised (8, 4). Raises OptionError for a size
    that no group divides."""
    if bits is None:
        return raw | {"torch_dtype": "float32"}, weights
    if bits == 16:
        halved = {k: v.astype(mx.bfloat16) if mx.issubdtype(v.dtype, mx.floating) else v for k, v in weights.items()}
        return raw | {"torch_dtype": "bfloat16"}, halved
    model = DFlashModel(DFlashConfig.parse(raw))
    model.load_weights(list(weights.items()))
    inputs = {m.weight.shape[-1] for _, m in model.named_modules() if isinstance(m, nn.Linear)}
    group = next((size for size in (64, 32) if all(count % size == 0 for count in inputs)), None)
    if group is None:
        raise OptionError(f"--bits {bits}: a matrix with {min(inputs)} inputs has no groups of 32; leave it out")
    nn.quantize(model, group_size=group, bits=bits, class_predicate=lambda _, m: isinstance(m, nn.Linear))
    entry = {"group_size": group, "bits": bits, "mode": "affine"}
    return raw | {"torch_dtype": "float32", "quantization": entry}, dict(tree_flatten(model.parameters()))


def slots(config: dict[str, Any]) -> int:
    """The trained block of a drafter's config.json."""
    inner = config.get("dflash_config") or {}
    return int(inner.get("block_size") or config.get("block_size") or 16)


CARD = """---
library_name: mlx
tags: [dflash, speculative-decoding, drafter]
---
# A DFlash drafter for {target}

A drafter proposes tokens which the target then checks, so it changes how fast the target answers and not what it says.
Trained by mlx-spec {version} for {step} updates on {tokens} tokens that the target itself said.

| | |
|---|---|
| target | {target} (fingerprint `{fingerprint}`) |
| layers, trained block | {layers}, {block} |
| tapped target layers | {taps} |
| draft vocabulary | {vocab} |
| thinking during data generation | {thinking} |
| held-out acceptance length (greedy, played back) | {length} |
| begun from | {begun} |

```
mlx-spec generate --model {target} --draft THIS_FOLDER -p "..."
```

How it was made, with hashes, versions and the command: `provenance.json`. Its course: `curve.jsonl`.
"""


def card(config: dict[str, Any], provenance: dict[str, Any]) -> str:
    """README.md, from the record alone."""
    made, held = DFlashConfig.parse(config), provenance.get("held_out_result")
    return CARD.format(
        target=provenance["target"],
        fingerprint=provenance["target_fingerprint"][:16],
        version=provenance["versions"]["mlx-spec"],
        step=provenance["step"],
        tokens=provenance["data"]["answer_tokens"],
        layers=made.num_hidden_layers,
        block=slots(config),
        taps=", ".join(map(str, made.target_layer_ids)),
        vocab=config.get("draft_vocab_size") or config["vocab_size"],
        thinking=provenance["data"]["thinking"] or "the template has no switch",
        length=f"{held['acceptance_length']:.2f} over {held['rounds']} rounds" if held else "not measured",
        begun=provenance["settings"]["start_from"] or f"init {provenance['settings']['init']}",
    )
