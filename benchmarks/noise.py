"""What choosing tokens costs: one ``chooser.rows`` call beside ``mx.random.categorical`` on the same rows.

Rows are float32 logits; ours includes the logprobs that a response carries, categorical draws alone. Runs are
interleaved; figures are medians in milliseconds, in brackets the quartiles.

Run: ``python benchmarks/noise.py``
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable

import mlx.core as mx
from mlx_lm import sample_utils

from mlx_spec.noise import gumbel, hash_ids, make_key
from mlx_spec.sampling import make_chooser, make_logits_processors, make_sampler

HISTORY = list(range(400))


def contenders(logits: mx.array) -> dict[str, Callable[[], object]]:
    """Name to a call that builds what is then evaluated."""
    count, size = logits.shape
    draft = mx.arange(count - 1, dtype=mx.uint32)
    key, positions = make_key(1), mx.arange(400, 400 + count, dtype=mx.uint32)
    every, forty = (hash_ids(key, mx.arange(m, dtype=mx.uint32)) for m in (size, 40))
    mx.eval(every, forty, positions, key, draft)

    def rows(sampler: object, processors: object = ()) -> Callable[[], object]:
        chooser = make_chooser(sampler, processors)  # type: ignore[arg-type]
        return lambda: chooser.rows(logits, HISTORY, draft)[0]

    def stock_top_p() -> mx.array:
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        return sample_utils.make_sampler(0.8, 0.9)(logprobs)

    penalties = make_logits_processors(repetition_penalty=1.1, frequency_penalty=0.1)
    return {
        "noise for 40 ids": lambda: gumbel(key, positions, forty),
        "noise for the full row": lambda: gumbel(key, positions, every),
        "mx.random.gumbel": lambda: mx.random.gumbel(logits.shape),
        "rows, greedy": rows(None),
        "rows, temp, top_k 40": rows(make_sampler(0.8, top_k=40, seed=1)),
        "rows, temp": rows(make_sampler(0.8, seed=1)),
        "rows, temp, min_p 0.05": rows(make_sampler(0.8, min_p=0.05, seed=1)),
        "rows, temp, top_p 0.9": rows(make_sampler(0.8, top_p=0.9, seed=1)),
        "mlx-lm, temp, top_p 0.9": stock_top_p,
        "rows, greedy, 2 penalties": rows(None, penalties),
        "mx.random.categorical": lambda: mx.random.categorical(logits),
        "logprobs alone": lambda: logits - mx.logsumexp(logits, axis=-1, keepdims=True),
    }


def measure(calls: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Milliseconds of each call, the calls taking turns; one turn before to warm up."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(repeats + 1):
        for name, call in calls.items():
            begin = time.perf_counter()
            mx.eval(call())
            if turn:
                taken[name].append(1e3 * (time.perf_counter() - begin))
    return taken


def figure(values: list[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.2f} ({low:.2f}-{high:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=15)
    repeats = max(2, parser.parse_args().repeats)
    shapes = [(size, width) for size in (49_152, 151_936) for width in (1, 16)]
    columns = []
    for size, width in shapes:
        logits = 3 * mx.random.normal((width, size), key=mx.random.key(0))
        mx.eval(logits)
        columns.append(measure(contenders(logits), repeats))
    print(f"mlx {mx.__version__}, {mx.default_device()}, {platform.machine()}, {repeats} repeats; ms")
    print("| | " + " | ".join(f"{size:,} x{width}" for size, width in shapes) + " |")
    print("|---" * (len(shapes) + 1) + "|")
    for name in columns[0]:
        print(f"| {name} | " + " | ".join(figure(column[name]) for column in columns) + " |")


if __name__ == "__main__":
    main()
