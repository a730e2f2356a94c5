"""The tiny target continues pieces of its training files: ``python responses.py --target FOLDER --out FOLDER``.

``--target`` holds float32 weights as mlx-lm wants them (``q8-float32`` of export.py: what a CPU computes with). A part
of the answers is sampled at temperature 0.7, the rest is greedy. Writes ``NNNN.npy`` ([n, prompt + new] uint16, rows of
one prompt length; a row's text ends at its first id 0 after the prompt) and ``manifest.json``; goes on where it ended.
bfloat16, logits in float32: near-ties may fall otherwise than in float32.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import time
from pathlib import Path

import corpus
import numpy as np
import torch
from model import CONFIG, Model
from safetensors.torch import load_file
from tokenizers import Tokenizer

END = 0


@torch.no_grad()
def continued(model: Model, prompts: torch.Tensor, new: int, temperature: float) -> torch.Tensor:
    """[B, P] ids to [B, P + new]."""
    B, P = prompts.shape
    out = torch.zeros((B, P + new), dtype=torch.long)
    out[:, :P] = prompts
    caches, rows = model.caches(B, P + new, torch.bfloat16), prompts
    for at in range(P, P + new):
        logits = model(rows, caches=caches, at=at - rows.shape[1])[:, -1].float()
        if temperature:
            chosen = torch.multinomial((logits / temperature).softmax(-1), 1)
        else:
            chosen = logits.argmax(-1, keepdim=True)
        out[:, at : at + 1] = rows = chosen
    return out


def pieces(files: list[list[int]], starts: list[np.ndarray], count: int, length: int, rng: random.Random) -> np.ndarray:
    """[count, length] ids, each from the beginning of a line of a file; long files are drawn more often."""
    usable = [i for i, at in enumerate(starts) if len(files[i]) > length and at[0] + length < len(files[i])]
    weights = [len(starts[i]) for i in usable]
    rows = []
    while len(rows) < count:
        (i,) = rng.choices(usable, weights)
        at = int(rng.choice(starts[i]))
        if at + length <= len(files[i]):
            rows.append(files[i][at : at + length])
    return np.asarray(rows, dtype=np.int64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--split", choices=("train", "held-out"), default="train")
    parser.add_argument("--minutes", type=float, default=15)
    parser.add_argument("--batches", type=int, default=10**6, help="in all, at most")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--new", type=int, default=224)
    parser.add_argument("--sampled", type=float, default=0.25, help="share of batches at temperature 0.7")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    model = Model(CONFIG)
    model.load_state_dict(load_file(args.target / "model.safetensors"))
    model = model.bfloat16()
    tokenizer = Tokenizer.from_file(str(args.target / "tokenizer.json"))
    files = [tokenizer.encode(text).ids for _, text in corpus.texts(args.split)]
    breaks = np.array([i for i in range(tokenizer.get_vocab_size()) if "\n" in tokenizer.decode([i])])
    starts = [np.concatenate([[0], np.flatnonzero(np.isin(ids, breaks))]) for ids in files]
    record = {
        "target_sha256": hashlib.sha256((args.target / "model.safetensors").read_bytes()).hexdigest(),
        "split": args.split, "new": args.new, "files": [],
    }  # fmt: skip
    if (args.out / "manifest.json").exists():
        found = json.loads((args.out / "manifest.json").read_text(encoding="utf-8"))
        assert found["target_sha256"] == record["target_sha256"], "these are another target's answers"
        record = found
    began = time.monotonic()
    while time.monotonic() - began < args.minutes * 60 and len(record["files"]) < args.batches:
        number = len(record["files"])
        rng = random.Random(f"{args.split} {number}")
        torch.manual_seed(number)
        length, temperature = rng.randrange(64, 129), 0.7 if rng.random() < args.sampled else 0.0
        prompts = torch.from_numpy(pieces(files, starts, args.batch, length, rng))
        rows = continued(model, prompts, args.new, temperature).numpy().astype(np.uint16)
        path = args.out / f"{number:04d}.npy"
        np.save(path, rows)
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        record["files"].append({"file": path.name, "prompt": length, "temperature": temperature, "sha256": digest})
        (args.out / "manifest.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        print(f"{number + 1} batches, {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
