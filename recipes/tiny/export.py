"""From a training run to mlx-lm folders: ``python export.py --run FOLDER --tokenizer FOLDER --out FOLDER``.

Writes ``float32``, ``q8`` and ``q4`` (affine, groups of 64, scales in float16) below ``--out``, and ``q8-float32`` /
``q4-float32``: the quantised weights expanded again, which is what a CPU computes with. Prints the loss of each on the
held-out files, the largest difference between PyTorch's and MLX's logits, and two greedy continuations.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import corpus
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import torch
from mlx.utils import tree_flatten, tree_map
from mlx_lm import generate, load
from model import CONFIG, Model
from safetensors.torch import load_file
from tokenizers import Tokenizer

GROUP = 64
CONTEXT = 512


def write(folder: Path, tokenizer: Path, model: nn.Module, config: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, folder / name)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())), {"format": "mlx"})


def quantised(source: Path, folder: Path, tokenizer: Path, bits: int) -> None:
    model, _ = load(str(source))
    model.update(tree_map(lambda value: value.astype(mx.float16), model.parameters()))
    nn.quantize(model, group_size=GROUP, bits=bits)
    entry = {"group_size": GROUP, "bits": bits, "mode": "affine"}
    write(folder, tokenizer, model, CONFIG | {"torch_dtype": "float16", "quantization": entry})


def expanded(source: Path, folder: Path, tokenizer: Path, bits: int) -> None:
    """float32 weights of a quantised folder; scale * q + bias is computed in float32."""
    weights = dict(mx.load(str(source / "model.safetensors")))
    packed = [name.removesuffix(".scales") for name in weights if name.endswith(".scales")]
    for name in packed:
        scales, biases = (weights.pop(f"{name}.{part}").astype(mx.float32) for part in ("scales", "biases"))
        weights[f"{name}.weight"] = mx.dequantize(weights[f"{name}.weight"], scales, biases, GROUP, bits)
    model, _ = load(str(source.parent / "float32"))
    model.load_weights([(name, value.astype(mx.float32)) for name, value in weights.items()])
    write(folder, tokenizer, model, CONFIG | {"torch_dtype": "float32"})


def coded(tokenizer: Path) -> list[list[int]]:
    encode = Tokenizer.from_file(str(tokenizer / "tokenizer.json")).encode
    return [[0, *encode(text).ids] for _, text in corpus.texts("held-out")]


def loss(folder: Path, files: list[list[int]]) -> float:
    """Nats a token, windows of 512 tokens without what was before them, as in training."""
    model, _ = load(str(folder))
    total, count = 0.0, 0
    rows = [ids[i : i + CONTEXT + 1] for ids in files for i in range(0, len(ids) - 1, CONTEXT)]
    whole = [row for row in rows if len(row) == CONTEXT + 1]
    batches = [whole[i : i + 8] for i in range(0, len(whole), 8)] + [[row] for row in rows if len(row) <= CONTEXT]
    for batch in batches:
        ids = mx.array(batch)
        total += nn.losses.cross_entropy(model(ids[:, :-1]), ids[:, 1:], reduction="sum").item()
        count += ids[:, 1:].size
    return total / count


def parity(folder: Path, weights: Path, ids: list[int]) -> float:
    """Largest difference of a logit between PyTorch and MLX, float32, one held-out window."""
    twin = Model(CONFIG)
    twin.load_state_dict(load_file(weights), strict=True)
    with torch.no_grad():
        theirs = twin(torch.tensor([ids])).numpy()
    model, _ = load(str(folder))
    return float(np.abs(theirs - np.array(model(mx.array([ids])))).max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--files", type=int, default=1000, help="held-out files to measure on, at most")
    args = parser.parse_args()
    out, tokenizer = args.out, args.tokenizer
    from mlx_lm.models.qwen3 import Model as Qwen3
    from mlx_lm.models.qwen3 import ModelArgs

    model = Qwen3(ModelArgs.from_dict(CONFIG))
    model.load_weights(str(args.run / "model.safetensors"))
    write(out / "float32", tokenizer, model, CONFIG | {"torch_dtype": "float32"})
    for bits in (8, 4):
        quantised(out / "float32", out / f"q{bits}", tokenizer, bits)
        expanded(out / f"q{bits}", out / f"q{bits}-float32", tokenizer, bits)

    files = coded(tokenizer)
    gap = parity(out / "float32", args.run / "model.safetensors", files[0][:CONTEXT])
    print(f"largest logit difference to PyTorch: {gap:.2e}")
    for name in ("float32", "q8-float32", "q4-float32"):
        path = out / name.removesuffix("-float32") / "model.safetensors"
        value = hashlib.sha256(path.read_bytes()).hexdigest()
        nats = loss(out / name, files[: args.files])
        print(f"{name}: {nats:.4f} nats a token; {path.stat().st_size} bytes, sha256 {value}")
    model, words = load(str(out / "q8-float32"))
    for prompt in ("def read_lines(path):\n    ", "import os\n\nclass Cache:\n    def __init__(self"):
        print("---", prompt, generate(model, words, prompt, max_tokens=160), sep="\n")


if __name__ == "__main__":
    main()
