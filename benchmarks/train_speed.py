"""Seconds of one training update by part, on a random target of a given shape: where training's time goes.

    python benchmarks/train_speed.py [--hidden 192 --layers 10 --vocab 2048] [--batch 16 --anchors 24 --block 8]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

from mlx_spec import blas


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, value in (("hidden", 192), ("layers", 10), ("vocab", 2048), ("heads", 3), ("kv-heads", 1), ("ffn", 512)):
        parser.add_argument(f"--{name}", type=int, default=value)
    for name, value in (("batch", 16), ("anchors", 24), ("block", 8), ("drafter-layers", 2), ("length", 256)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--draft-vocab", type=int)
    parser.add_argument("--compile", default="on", choices=("on", "off"))
    parser.add_argument("--cpu-time", action="store_true", help="count CPU seconds, for a machine that is shared")
    parser.add_argument("--blas", default="auto", choices=blas.CHOICES)
    return parser.parse_args()


def target_of(args: argparse.Namespace) -> Any:
    from mlx_lm.models.qwen3 import Model, ModelArgs

    from mlx_spec.targets.decoder import DecoderTarget

    config = {
        "model_type": "qwen3", "hidden_size": args.hidden, "num_hidden_layers": args.layers,
        "intermediate_size": args.ffn, "num_attention_heads": args.heads, "num_key_value_heads": args.kv_heads,
        "head_dim": 64, "vocab_size": args.vocab, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
        "max_position_embeddings": 4096, "tie_word_embeddings": True,
    }  # fmt: skip
    return DecoderTarget(Model(ModelArgs.from_dict(config)), config), config


def clock(work: Callable[[], Any], repeats: int, now: Callable[[], float]) -> float:
    import mlx.core as mx

    times = []
    for _ in range(repeats + 1):
        began = now()
        mx.eval(work())
        times.append(now() - began)
    return min(times[1:])


def main() -> None:
    args = arguments()
    report = blas.prepare(args.blas)
    import mlx.core as mx
    import numpy as np

    from mlx_spec.convert.train import forward, head, network, optimiser
    from mlx_spec.convert.train.batches import Batches
    from mlx_spec.convert.train.features import Recorder, padded
    from mlx_spec.convert.train.learner import begin
    from mlx_spec.convert.train.settings import TrainSettings
    from mlx_spec.convert.train.shards import Sample

    target, config = target_of(args)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, args.vocab - 1, (args.batch, args.length)).astype(np.int32)
    samples = [Sample(row, args.length // 4) for row in tokens]
    with TemporaryDirectory() as folder:
        settings = TrainSettings(
            target=folder, data=folder, out=str(Path(folder) / "run"), layers=args.drafter_layers, block=args.block,
            draft_vocab=args.draft_vocab, mask_id=args.vocab - 1,
        )  # fmt: skip
        names = SimpleNamespace(eos_token_ids=[])
        learner = begin(settings, target, config, names, samples)
    record = Recorder(target, learner.config.target_layer_ids)
    batches = Batches(samples, args.batch, args.anchors, args.block, 4.0, "random", 0, learner.to_draft)
    batch = batches[0]
    features = record(padded([samples[i] for i in batch.samples], batch.length))
    mx.eval(features)
    inputs = forward.prepare(learner, batch.blocks, features)
    params, moments = learner.params, optimiser.Moments.zeros(learner.params)
    learner.wear(params)
    shown = dict(zip(learner.kinds, inputs.masks, strict=True))
    hidden = forward.hidden_rows(learner, inputs)
    step = forward.make_step(learner, None, args.compile == "on")
    grads, _ = step(params, inputs.arrays())
    mx.eval(hidden, grads)
    learner.wear(params)

    def scored() -> Any:
        rows = head.score(learner.project, hidden, inputs.labels, learner.vocab)
        return rows.losses, rows.slopes, rows.right

    def denoised() -> Any:
        blocks = learner.embed(inputs.ids)
        return network.denoise(learner.model, inputs.features, blocks, inputs.anchors, shown)

    def updated() -> Any:
        new, state = optimiser.update(params, grads, moments, 3, 1e-4, 0.0, 1.0)
        return new, state.first, state.second

    def masks() -> Any:
        made = forward.prepare(learner, batches[0].blocks, features)
        return made.index, made.labels, made.masks

    parts = {
        "blocks and masks": masks,
        "features (target)": lambda: record(padded([samples[i] for i in batch.samples], batch.length)),
        "drafter forward": denoised,
        "head and its slope": scored,
        "forward and backward, head included": lambda: step(params, inputs.arrays()),
        "update": updated,
    }
    now = time.process_time if args.cpu_time else time.perf_counter
    blocks = int((batch.blocks.labels[:, :, 1] >= 0).sum())
    slots = int((batch.blocks.labels >= 0).sum())
    print(f"blas {report.name}, device {mx.default_device()}; {blocks} blocks, {slots} loss rows an update")
    times = {name: clock(work, args.repeats, now) for name, work in parts.items()}
    for name, seconds in times.items():
        print(f"{name:<38}{seconds * 1e3:9.1f} ms")
    whole = sum(times[name] for name in ("blocks and masks", "forward and backward, head included", "update"))
    print(f"{blocks / whole:.0f} blocks/s, {slots / whole:.0f} loss rows/s with cached features")


if __name__ == "__main__":
    main()
