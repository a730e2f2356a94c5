"""An mlx-lm folder with its floats in another type: what a CPU runs well is not what is shipped."""

from __future__ import annotations

import shutil
from pathlib import Path

import mlx.core as mx

from mlx_spec.convert.files import check_loads, staged, write_json, write_weights
from mlx_spec.errors import UnsupportedError
from mlx_spec.folders import INDEX, check_folder

BESIDE = ("*.json", "*.jinja", "*.txt", "tokenizer.model", "LICENSE*")


def recast(source: str | Path, out: str | Path, dtype: str) -> Path:
    """Write the model of folder ``source`` as a new folder ``out``, floats as ``dtype`` ("float32", "bfloat16",
    "float16"); returns ``out``. Raises UnsupportedError for packed weights, and what ``check_folder`` raises."""
    source, out = Path(source), Path(out)
    info = check_folder(source)
    if "quantization" in info.config or "quantization_config" in info.config:
        raise UnsupportedError(f"{source} is quantised; its floats cannot be recast to {dtype}")
    kind: mx.Dtype = getattr(mx, dtype)
    weights: dict[str, mx.array] = {}
    for file in info.weights:
        weights |= mx.load(str(file))
    weights = {k: v.astype(kind) if mx.issubdtype(v.dtype, mx.floating) else v for k, v in weights.items()}
    with staged(out) as folder:
        for pattern in BESIDE:
            for path in source.glob(pattern):
                if path.name not in (INDEX, "config.json"):
                    shutil.copyfile(path, folder / path.name)
        write_weights(folder, weights)
        write_json(folder / "config.json", {**info.config, "torch_dtype": dtype})
        check_loads(folder, source)
    return out
