"""Whether a model can be a target, told from its config.json alone, so that nobody downloads 18 GB to learn that it
cannot. Builds the model without weights: MLX computes nothing before it has to.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from mlx_lm.utils import MODEL_REMAPPING

from mlx_spec import hub, targets
from mlx_spec.errors import CheckpointError


def refuse_unsupported(config: Mapping[str, Any], name: object) -> None:
    """Raise what loading would raise once the weights were here: UnsupportedError naming the model type, layer or
    cache kind, PairError for a drafter, CheckpointError for a config that lacks keys."""
    hub.refuse_drafter(config, name)
    hub.check_config(config, name)
    if config.get("model_file"):  # code that travels with the model; only loading runs it, and only when allowed
        return
    kind = MODEL_REMAPPING.get(config["model_type"], config["model_type"])
    family = importlib.import_module(f"mlx_lm.models.{kind}")
    try:
        model = family.Model(family.ModelArgs.from_dict(dict(config)))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise CheckpointError(f"{name}: config.json does not describe a {kind} model ({error})") from error
    targets.wrap(model, dict(config))
