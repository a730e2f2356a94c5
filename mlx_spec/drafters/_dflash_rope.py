"""A drafter's rotary embedding: what the config asks for, as an mlx-lm module. Knows no layer.

Scaling kinds whose frequencies depend on the length so far are refused: cached keys would keep old angles.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.rope_utils import YarnRoPE, initialize_rope

from mlx_spec.errors import CheckpointError, UnsupportedError

Config = Mapping[str, Any]
DEFAULT_BASE = 10000.0
# Keys read per kind, beside its own name and the base. Others are refused by name.
KINDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "mrope": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (
        *("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
        *("truncate", "attention_factor"),
    ),
}
NEEDED = {"linear": ("factor",), "llama3": KINDS["llama3"], "yarn": ("factor", "original_max_position_embeddings")}
COMMON = ("rope_type", "type", "rope_theta", "mrope_section", "mrope_interleaved", "partial_rotary_factor")


@dataclass(frozen=True)
class Rope:
    """``base``, the scaling object (None: plain) and whether pairs are neighbours (True) or halves (False)."""

    base: float
    scaling: dict[str, Any] | None
    traditional: bool

    def build(self, head_dim: int) -> nn.Module:
        """A module called as ``rope(x [.., rows, head_dim], offset=position of row 0)``."""
        if self.scaling is None:
            return nn.RoPE(head_dim, traditional=self.traditional, base=self.base)
        rope: nn.Module = initialize_rope(head_dim, self.base, self.traditional, self.scaling)
        if isinstance(rope, YarnRoPE):
            _finish_yarn(rope, head_dim, self.base, self.scaling)
        return rope


def parse_rope(config: Config, inner: Config) -> Rope:
    """Base from ``rope_theta``, then ``rope_parameters``, then ``rope_scaling``; scaling from the last two.

    Raises UnsupportedError naming an unknown rope type or key, CheckpointError naming a missing one.
    """
    parameters, scaling = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
    bases = (config.get("rope_theta"), parameters.get("rope_theta"), scaling.get("rope_theta"))
    base = next((value for value in bases if value is not None), DEFAULT_BASE)
    place = parameters if _kind(parameters) != "default" or not scaling else scaling
    styles = [where.get(key) for where in (inner, config) for key in ("is_neox_style", "rope_is_neox_style")]
    return Rope(float(base), _scaling(place), any(style is False for style in styles))


def _kind(place: Config) -> str:
    return str(place.get("rope_type") or place.get("type") or "default")


def _scaling(place: Config) -> dict[str, Any] | None:
    kind = _kind(place)
    if kind not in KINDS:
        raise UnsupportedError(f"rope_type {kind!r} is not implemented for drafters; known are {', '.join(KINDS)}")
    for key, value in place.items():
        if key not in (*KINDS[kind], *COMMON) and value is not None:
            raise UnsupportedError(f"rope key {key} = {value!r} is not implemented for rope_type {kind}")
    if place.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise UnsupportedError(f"partial_rotary_factor {place['partial_rotary_factor']} is not implemented")
    for key in NEEDED.get(kind, ()):
        if place.get(key) is None:
            raise CheckpointError(f"rope_type {kind} needs {key}, which the drafter's config.json does not give")
    if (place.get("mscale") is None) != (place.get("mscale_all_dim") is None):
        raise UnsupportedError("rope keys mscale and mscale_all_dim are implemented together only")
    if kind in ("default", "mrope"):  # text positions are equal in all sections of mrope, which makes it plain rope
        return None
    return {"rope_type": kind} | {key: place[key] for key in KINDS[kind] if place.get(key) is not None}


def _finish_yarn(rope: Any, dims: int, base: float, scaling: Config) -> None:
    """What mlx-lm's YarnRoPE leaves out: ``attention_factor``, and ``truncate: false`` (gpt-oss), which keeps the
    correction range unrounded (YaRN, arXiv 2309.00071, section 3.2; transformers' ``_compute_yarn_parameters``)."""
    if scaling.get("attention_factor") is not None:
        rope.mscale = float(scaling["attention_factor"])
    if scaling.get("truncate", True):
        return
    original = scaling["original_max_position_embeddings"]

    def dimension(rotations: float) -> float:
        return dims * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low = max(dimension(scaling.get("beta_fast", 32)), 0.0)
    high = min(dimension(scaling.get("beta_slow", 1)), dims - 1.0)
    ramp = mx.clip((mx.arange(dims // 2) - low) / (max(high, low + 1e-3) - low), 0, 1)
    extra = base ** (mx.arange(0, dims, 2) / dims)
    rope._freqs = 1.0 / (ramp / (scaling["factor"] * extra) + (1 - ramp) / extra)
