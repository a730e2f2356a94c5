"""A target around any mlx-lm decoder whose layers keep append caches. Knows no family by name.

What differs between families (embedding scale, tied head, soft cap) is read off the model itself: logits are the
model's own call, and the embedding scale is what really enters layer 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from mlx_spec.caches import CacheSet
from mlx_spec.contracts import Cache, Forward, Taps
from mlx_spec.errors import UnsupportedError
from mlx_spec.targets.taps import LayerTaps, attach, detach

HEAD_NAMES = ("lm_head", "output", "embed_out")  # what mlx-lm's families call an untied head
EMBEDDINGS = (nn.Embedding, nn.QuantizedEmbedding)


class DecoderTarget:
    """``contracts.Target`` for an mlx-lm model. ``config`` is its config.json as loaded.

    Raises UnsupportedError for a model without a list of layers, or with a cache kind that cannot roll back (the layer
    and kind are named).
    """

    def __init__(self, model: Any, config: dict[str, Any]) -> None:
        self.model = model
        text = config.get("text_config") or config
        layers = getattr(model, "layers", None)
        if not isinstance(layers, (list, tuple)) or not layers:
            raise UnsupportedError(f"model type {config.get('model_type')!r} has no list of layers to be a target with")
        self._layers = list(layers)
        self.num_layers = len(self._layers)
        self.new_cache()
        self._embedding_path = _embedding_path(model)
        self.vocab_size = int(text.get("vocab_size") or self._embedding.weight.shape[0])
        self.hidden_size = int(text.get("hidden_size") or self._embed_width())
        limit = text.get("max_position_embeddings")
        self.max_context: int | None = int(limit) if limit else None
        self._scale: float | None = None

    def new_cache(self) -> CacheSet:
        return CacheSet(make_prompt_cache(self.model))

    def open_taps(self, layers: Sequence[int]) -> LayerTaps:
        for index in layers:
            if not 0 <= index < self.num_layers:
                raise UnsupportedError(f"tap {index} is outside this target's layers 0..{self.num_layers - 1}")
        return LayerTaps(self._layers, layers)

    def forward(self, tokens: mx.array, cache: Cache, taps: Taps | None = None) -> Forward:
        if not isinstance(taps, LayerTaps):
            return Forward(self.model(tokens[None], cache=cache.entries)[0], None)
        with taps.recording() as recorded:
            logits = self.model(tokens[None], cache=cache.entries)[0]
        return Forward(logits, taps.join(recorded))

    def embed(self, ids: mx.array) -> mx.array:
        if self._scale is None:
            self._scale = self._embedding_scale()
        rows: mx.array = self._embedding(ids)
        return rows if self._scale == 1.0 else rows * self._scale

    def head(self, hidden: mx.array) -> mx.array:
        head = _head(self.model)
        logits: mx.array = self._embedding.as_linear(hidden) if head is None else head(hidden)
        return logits

    def head_over(self, ids: mx.array) -> Callable[[mx.array], mx.array]:
        module: Any = _head(self.model) or self._embedding
        rows = {name: module[name][ids] for name in ("weight", "scales", "biases", "bias") if name in module}
        mx.eval(rows)
        weight, bias = rows["weight"], rows.get("bias")

        def restricted(hidden: mx.array) -> mx.array:
            if "scales" in rows:
                packed = (weight, rows["scales"], rows.get("biases"))
                options = {"group_size": module.group_size, "bits": module.bits, "mode": module.mode}
                logits = mx.quantized_matmul(hidden, *packed, transpose=True, **options)
            else:
                logits = hidden @ weight.T
            return logits if bias is None else logits + bias

        return restricted

    @property
    def _embedding(self) -> Any:
        # Looked up, not kept: quantising the model later replaces the module.
        module = self.model
        for name in self._embedding_path.split("."):
            module = getattr(module, name)
        return module

    def _embed_width(self) -> int:
        return int(self._embedding(mx.array([0])).shape[-1])

    def _embedding_scale(self) -> float:
        """What the family multiplies its embedding rows by before layer 0, measured on three ids."""
        seen: list[mx.array] = []

        def sink(first: Any, _: Any) -> None:
            seen.append(first)

        ids = mx.array([1, 2, 3])
        attach(self._layers[0], sink)
        try:
            self.model(ids[None])
        finally:
            detach(self._layers[0], sink)
        rows, entered = self._embedding(ids).astype(mx.float32), seen[0][0].astype(mx.float32)
        scale = float(((rows * entered).sum() / mx.maximum((rows * rows).sum(), 1e-30)).item())
        error = mx.abs(rows * scale - entered).max() / mx.maximum(mx.abs(entered).max(), 1e-30)
        if float(error.item()) > 2e-2:  # type: ignore[arg-type]
            raise UnsupportedError(
                f"{type(self.model).__module__}: what enters layer 0 is not a multiple of the token embedding, "
                "so a drafter cannot borrow it; use --method ngram"
            )
        near_one = abs(scale - 1.0) < 1e-3
        return 1.0 if near_one else scale


def _embedding_path(model: nn.Module) -> str:
    """Where the token embedding is: the outermost embedding module that is not a position table."""
    found = [(path, module) for path, module in model.named_modules() if isinstance(module, EMBEDDINGS)]
    tables = [(path, module) for path, module in found if path.rsplit(".", 1)[-1] not in ("wpe", "embed_positions")]
    if not tables:
        raise UnsupportedError(f"{type(model).__module__}: no token embedding found")
    path: str = min(tables, key=lambda item: item[0].count("."))[0]
    return path


def _head(model: nn.Module) -> Any:
    """The untied head, or None where the embedding serves as head."""
    for path, module in model.named_modules():
        parts = path.split(".")
        if parts[-1] in HEAD_NAMES and len(parts) <= 2 and isinstance(module, (nn.Linear, nn.QuantizedLinear)):
            return module
    return None


__all__ = ["DecoderTarget"]
