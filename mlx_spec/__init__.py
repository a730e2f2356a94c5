"""mlx-spec: lossless speculative decoding for MLX; the target's own text in fewer passes.

Names resolve on first use, so that importing a leaf (``mlx_spec.errors``, ``mlx_spec.blas``) does not import mlx.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlx_spec.api import Engine, GenerationResponse, generate, load, make_prompt_cache, stream_generate
    from mlx_spec.options import Options, SpeculativeConfig
    from mlx_spec.sampling import make_logits_processors, make_sampler

_HOMES = {
    "Engine": "api",
    "GenerationResponse": "api",
    "Options": "options",
    "SpeculativeConfig": "options",
    "generate": "api",
    "load": "api",
    "make_logits_processors": "sampling",
    "make_prompt_cache": "api",
    "make_sampler": "sampling",
    "stream_generate": "api",
}

__all__ = [
    "Engine",
    "GenerationResponse",
    "Options",
    "SpeculativeConfig",
    "generate",
    "load",
    "make_logits_processors",
    "make_prompt_cache",
    "make_sampler",
    "stream_generate",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'mlx_spec' has no attribute {name!r}")
    return getattr(import_module(f"mlx_spec.{_HOMES[name]}"), name)
