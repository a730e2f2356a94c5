"""The loop's own time per round, beside z-lab's MLX loop and mlx-lm's speculative loop on the same toy and widths.

The toy's forward is one table lookup and its drafter one addition, so nearly all of a round is the loop itself. Runs
are interleaved; figures are medians with the quartiles, in microseconds per round. Our loop is measured twice: as the
rounds alone (what z-lab's loop does: one item a round) and through ``stream`` (one response a token, as mlx-lm).

Run: ``make bench-host`` (installs the peer ``dflash`` 0.1.0 without its dependencies into ``.peers``).
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import speculative_generate_step
from mlx_lm.models.cache import KVCache
from mlx_lm.utils import load as mlx_lm_load

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from toys import save_tiny

from mlx_spec import Engine, Options
from mlx_spec.contracts import Draft

VOCAB = 256
PROMPT = list(range(1, 17))


class ToyLayer(nn.Module):
    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        if cache is not None:
            cache.update_and_fetch(x[:, None], x[:, None])
        return x


class Toy(nn.Module):
    """Next token = token + 1, by table; one layer with a KVCache so that rolling back costs what it costs."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, 8)
        self.layers = [ToyLayer()]
        self.table = mx.roll(mx.eye(VOCAB), 1, axis=1)
        mx.eval(self.parameters())

    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        h = self.embed_tokens(inputs)
        for layer, entry in zip(self.layers, cache or [None], strict=True):
            h = layer(h, None, entry)
        return self.table[inputs]

    def make_cache(self) -> list[KVCache]:
        return [KVCache()]


def steps(width: int, accepted: int) -> mx.array:
    """What a drafter adds to the anchor: right ``accepted`` times, then wrong."""
    return mx.array([i + 1 if i < accepted else i + 2 for i in range(width - 1)])


class OurDrafter:
    """``contracts.Drafter``: anchor + steps, on the device."""

    name, layers, max_width, mask_id = "toy", (0,), None, None

    def __init__(self, width: int, accepted: int) -> None:
        self.default_width, self.steps, self.length = width, steps(width, accepted), 0

    def bind(self, target: Any) -> None: ...

    def open(self, first: int, start: int = 0, draft_window: int | None = None) -> OurDrafter:
        self.length = start
        return self

    def ingest(self, tokens: Any, features: Any, start: int) -> None:
        self.features, self.length = features, self.length + len(tokens)

    def propose(self, anchor: int, count: int) -> Draft:
        return Draft(((mx.array(anchor) + self.steps[:count]) % VOCAB).astype(mx.int32))

    def trim(self, length: int) -> int:
        self.length = min(length, self.length)
        return self.length

    def arrays(self) -> list[mx.array]:
        return []


class TheirDrafter:
    """The same for z-lab's loop, which asks for logits."""

    def __init__(self, width: int, accepted: int) -> None:
        types = SimpleNamespace(target_layer_ids=[0], block_size=width, mask_token_id=0, sliding_window=None)
        types.layer_types = ["full_attention"]
        self.config, self.steps, self.eye = types, steps(width, accepted), mx.eye(VOCAB)

    def bind(self, model: Any) -> None: ...

    def make_cache(self) -> list[KVCache]:
        return [KVCache()]

    def __call__(self, block: mx.array, hidden: mx.array, cache: Any, logits_start: int = 1) -> mx.array:
        cache[0].offset += hidden.shape[1]
        ids = (block[:, :1] + self.steps[: block.shape[1] - 1]) % VOCAB
        return self.eye[ids]


def ours_rounds(engine: Engine, width: int, tokens: int) -> int:
    from mlx_spec.loop import rounds

    seen = 0
    stream = engine.stream(PROMPT, Options(max_tokens=tokens, width=width))
    request, ids, step, progress = _parts(stream)
    request.talk.prefill(ids, step, request.cancel, progress)
    for _ in rounds(request):
        seen += 1
    return seen


def _parts(stream: Any) -> tuple[Any, ...]:
    local = stream.gi_frame.f_locals
    return tuple(local[name] for name in ("request", "ids", "step", "progress"))


def ours_stream(engine: Engine, width: int, tokens: int) -> int:
    rounds_seen = 0
    for response in engine.stream(PROMPT, Options(max_tokens=tokens, width=width)):
        rounds_seen = response.round + 1
    return rounds_seen


def zlab(module: Any, model: Any, tokenizer: Any, drafter: Any, width: int, tokens: int) -> int:
    seen = 0
    for _ in module.stream_generate(model, drafter, tokenizer, PROMPT, block_size=width, max_tokens=tokens):
        seen += 1
    return seen - 2  # the token of the prefill and the closing item are no rounds


def mlx_lm_loop(model: Any, drafter: Any, width: int, tokens: int) -> int:
    seen = 0
    steps_ = speculative_generate_step(mx.array(PROMPT), model, drafter, num_draft_tokens=width - 1, max_tokens=tokens)
    for _, _, drafted in steps_:
        seen += not drafted
    return max(seen, 1)


def timed(run: Callable[[], int]) -> float:
    began = time.perf_counter()
    count = run()
    return (time.perf_counter() - began) / count * 1e6


def lanes(folder: Path, width: int, accepted: int, tokens: int) -> dict[str, Callable[[], int]]:
    _, tokenizer = mlx_lm_load(str(folder))
    tokenizer.eos_token_ids = set()
    config = {"model_type": "toy", "vocab_size": VOCAB, "hidden_size": 8}
    engine = Engine(Toy(), tokenizer, config, OurDrafter(width, accepted))
    found: dict[str, Callable[[], int]] = {
        "ours, rounds": lambda: ours_rounds(engine, width, tokens),
        "ours, stream": lambda: ours_stream(engine, width, tokens),
    }
    drafter = Toy()  # accepts everything: mlx-lm drafts with a model, one step a token
    target = Toy()
    found["mlx-lm speculative (all accepted)"] = lambda: mlx_lm_loop(target, drafter, width, tokens)
    try:
        from dflash import model_mlx
    except ImportError as error:
        print(f"z-lab's loop is left out: {error}", file=sys.stderr)
        return found
    theirs = Toy()
    found["z-lab dflash 0.1.0"] = lambda: zlab(
        model_mlx, theirs, tokenizer, TheirDrafter(width, accepted), width, tokens
    )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    mx.set_default_device(mx.cpu)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as home:
        folder = save_tiny(Path(home) / "tiny")
        for width, accepted in ((4, 0), (4, 3), (8, 0), (8, 3), (8, 7), (16, 5)):
            runs = lanes(folder, width, accepted, args.tokens)
            times: dict[str, list[float]] = {name: [] for name in runs}
            for repeat in range(args.repeats + 1):
                for name, run in runs.items():
                    cost = timed(run)
                    if repeat:  # the first is warm-up
                        times[name].append(cost)
            for name, seen in times.items():
                low, middle, high = statistics.quantiles(seen, n=4)
                rows.append(
                    {"width": width, "accepted": accepted, "loop": name, "us": middle, "low": low, "high": high}
                )
    print("| width | accepted | loop | us per round (median) | quartiles |\n|---|---|---|---|---|")
    for row in rows:
        spread = f"{row['low']:.0f}-{row['high']:.0f}"
        print(f"| {row['width']} | {row['accepted']} | {row['loop']} | {row['us']:.0f} | {spread} |")
    if args.json:
        about = {
            "mlx": version("mlx"),
            "mlx-lm": version("mlx-lm"),
            "machine": platform.processor() or platform.machine(),
        }
        args.json.write_text(json.dumps({"about": about, "command": sys.argv, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
