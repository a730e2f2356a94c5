"""Trains the tiny target: ``python train.py --tokenizer FOLDER --run FOLDER --minutes 35``.

bfloat16 forward and backward, float32 master weights. Matrices are trained with Muon (orthogonalised momentum), the
embedding and the norms with AdamW. The schedule follows the wall clock, so that a run ends with its learning rate at
zero however busy the machine is: warm-up, a plateau up to ``--hold`` of the time, then linear to zero. Windows are 256
tokens long up to ``--short`` of the time, then 512. A run resumes from its folder; time between runs does not count.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path

import corpus
import numpy as np
import torch
from model import CONFIG, Model
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

TOKENS = 2048  # in a step
MUON_LR, MUON_MOMENTUM, MUON_DECAY = 0.02, 0.95, 0.05
ADAM_LR, ADAM_BETAS, ADAM_DECAY = 3e-3, (0.9, 0.95), 0.0
SAVE_EVERY_S = 150.0


def orthogonalise(g: Tensor) -> Tensor:
    """Newton-Schulz iteration of Muon on a stack [n, r, c] with r <= c: singular values to about 1."""
    x = g.bfloat16()
    x = x / (x.float().norm(dim=(1, 2), keepdim=True).bfloat16() + 1e-7)
    for _ in range(5):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.float()


class Optimiser:
    """Holds the float32 weights of a bfloat16 model and writes them back after each step."""

    def __init__(self, model: Model) -> None:
        self.params = dict(model.named_parameters())
        self.master = {name: p.detach().float().clone() for name, p in self.params.items()}
        self.matrices: dict[tuple[int, int], list[str]] = {}
        for name, p in self.params.items():
            if p.ndim == 2 and "embed" not in name:
                self.matrices.setdefault((min(p.shape), max(p.shape)), []).append(name)
        stacked = {name for group in self.matrices.values() for name in group}
        self.momentum = {name: torch.zeros_like(self.master[name]) for name in stacked}
        rest = [name for name in self.params if name not in stacked]
        self.adam = {name: [torch.zeros_like(self.master[name]) for _ in range(2)] for name in rest}
        self.steps = 0
        self.publish()

    def publish(self) -> None:
        for name, p in self.params.items():
            p.data.copy_(self.master[name])

    @torch.no_grad()
    def step(self, scale: float) -> None:
        self.steps += 1
        for group in self.matrices.values():
            self._muon(group, scale * MUON_LR)
        for name, (m, v) in self.adam.items():
            g = self.params[name].grad.float()
            m.lerp_(g, 1 - ADAM_BETAS[0])
            v.lerp_(g * g, 1 - ADAM_BETAS[1])
            mean, square = m / (1 - ADAM_BETAS[0] ** self.steps), v / (1 - ADAM_BETAS[1] ** self.steps)
            self.master[name] -= scale * ADAM_LR * (mean / (square.sqrt() + 1e-8))
        for p in self.params.values():
            p.grad = None
        self.publish()

    def _muon(self, group: list[str], lr: float) -> None:
        updates = []
        for name in group:
            g, m = self.params[name].grad.float(), self.momentum[name]
            m.lerp_(g, 1 - MUON_MOMENTUM)
            update = g.lerp(m, MUON_MOMENTUM)
            updates.append(update if update.shape[0] <= update.shape[1] else update.mT)
        for name, update in zip(group, orthogonalise(torch.stack(updates)), strict=True):
            w = self.master[name]
            tall = w.shape[0] > w.shape[1]
            w *= 1 - lr * MUON_DECAY
            w -= lr * max(1.0, w.shape[0] / w.shape[1]) ** 0.5 * (update.mT if tall else update)

    def state(self) -> dict:
        return {"master": self.master, "momentum": self.momentum, "adam": self.adam, "steps": self.steps}

    def restore(self, state: dict) -> None:
        for name, value in state.items():
            setattr(self, name, value)
        self.publish()


def windows(files: list[list[int]], length: int, rng: random.Random) -> Iterator[Tensor]:
    """Endless batches [TOKENS / length, length + 1] over the files in new order each epoch, a text end before each."""
    batch: list[np.ndarray] = []
    while True:
        order = rng.sample(range(len(files)), len(files))
        stream = np.concatenate([np.asarray([0, *files[i]], dtype=np.int64) for i in order])
        starts = list(range(rng.randrange(length), len(stream) - length - 1, length))
        rng.shuffle(starts)
        for start in starts:
            batch.append(stream[start : start + length + 1])
            if len(batch) == TOKENS // length:
                yield torch.from_numpy(np.stack(batch))
                batch = []


@torch.no_grad()
def held_out_loss(model: Model, files: list[list[int]], most: int = 10**9, length: int = 512) -> float:
    """Nats a token over windows of the held-out files, each window without what was before it."""
    total, count = 0.0, 0
    for ids in files:
        stream = [0, *ids]
        for start in range(0, len(stream) - 1, length):
            row = torch.tensor([stream[start : start + length + 1]])
            total += model(row[:, :-1], row[:, 1:]).item() * (row.shape[1] - 1)
            count += row.shape[1] - 1
            if count >= most:
                return total / count
    return total / count


def rate(progress: float, steps: int, hold: float) -> float:
    return min(1.0, (steps + 1) / 30) * min(1.0, max(0.0, (1 - progress) / (1 - hold)))


def save(run: Path, optimiser: Optimiser, elapsed: float, seen: int) -> None:
    state = {"optimiser": optimiser.state(), "elapsed": elapsed, "seen": seen}
    torch.save(state, run / "state.new")
    (run / "state.new").replace(run / "state.pt")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=35)
    parser.add_argument("--hold", type=float, default=0.4)
    parser.add_argument("--short", type=float, default=0.7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--compile", action="store_true", help="a third faster once compiled, which takes minutes")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    args.run.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer.from_file(str(args.tokenizer / "tokenizer.json"))
    files = {split: [tokenizer.encode(text).ids for _, text in corpus.texts(split)] for split in ("train", "held-out")}

    torch.manual_seed(0)
    model = Model(CONFIG).bfloat16()
    optimiser = Optimiser(model)
    elapsed, seen = 0.0, 0
    if (args.run / "state.pt").exists():
        state = torch.load(args.run / "state.pt", weights_only=True)
        optimiser.restore(state["optimiser"])
        elapsed, seen = state["elapsed"], state["seen"]
    forward = torch.compile(model, dynamic=False) if args.compile else model
    print(f"{sum(p.numel() for p in model.parameters())} parameters, from step {optimiser.steps}", flush=True)

    sources: dict[int, Iterator[Tensor]] = {}
    limit, last, saved, losses = args.minutes * 60, time.monotonic(), elapsed, []
    log = (args.run / "log.jsonl").open("a", encoding="utf-8")
    while elapsed < limit:
        length = 256 if elapsed < args.short * limit else 512
        if length not in sources:
            sources[length] = windows(files["train"], length, random.Random(optimiser.steps))
        batch = next(sources[length])
        loss = forward(batch[:, :-1].contiguous(), batch[:, 1:].contiguous())
        loss.backward()
        optimiser.step(rate(elapsed / limit, optimiser.steps, args.hold))
        losses.append(loss.item())
        seen += batch.shape[0] * length
        now = time.monotonic()
        elapsed, last = elapsed + now - last, now
        if elapsed - saved > SAVE_EVERY_S or elapsed >= limit:
            row = {
                "step": optimiser.steps, "seconds": round(elapsed), "cpu_s": round(time.process_time()), "tokens": seen,
                "train": round(float(np.mean(losses)), 4),
                "held_out_20k": round(held_out_loss(model, files["held-out"], 20000), 4),
                "rate": round(rate(elapsed / limit, optimiser.steps, args.hold), 4),
            }  # fmt: skip
            print(json.dumps(row), file=log, flush=True)
            save(args.run, optimiser, elapsed, seen)
            saved, losses = elapsed, []
    print(json.dumps({"held_out": round(held_out_loss(model, files["held-out"]), 4)}), file=log, flush=True)
    save_file({name: value.contiguous() for name, value in optimiser.master.items()}, args.run / "model.safetensors")


if __name__ == "__main__":
    main()
