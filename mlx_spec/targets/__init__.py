"""A target around an mlx-lm model. Plain decoders share ``decoder.py``; a family that differs gets a file of its own
name (``targets/<model_type>.py`` with a class ``Target``), found by file name.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from mlx_spec.contracts import Target
from mlx_spec.targets.decoder import DecoderTarget


def wrap(model: Any, config: dict[str, Any]) -> Target:
    """The target for a loaded mlx-lm model. Raises UnsupportedError naming the layer or cache kind it cannot serve."""
    family = f"{__name__}.{config.get('model_type', 'decoder')}"
    if family.isascii() and importlib.util.find_spec(family) is not None:
        target: Target = importlib.import_module(family).Target(model, config)
        return target
    return DecoderTarget(model, config)
