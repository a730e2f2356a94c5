"""Text equality on SmolLM2-135M-Instruct: every lane against lane plain, and greedy lane plain against mlx-lm.

6 prompts x {greedy, temperature 0.8} x {ngram, dflash with random weights} x rotating width {2, 4, 8, 16} x 96 tokens,
then one 320-token run each at width 4. Bundled BLAS, float32: differences must be 0. Finished runs are kept in --out
(JSON lines), so that an interrupted matrix goes on where it was. About 25 minutes on two cores.

Run: ``python benchmarks/equality.py --model FOLDER --out FILE [--share N]``; exits 1 on any difference.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from dflash_fixture import save_drafter

from mlx_spec import Engine, Options, blas, make_sampler
from mlx_spec.drafters import load as load_drafter
from mlx_spec.text import encode_chat

PROMPTS = (
    "What is the capital of France?",
    "Write a Python function that reverses a string, with a docstring.",
    "Repeat this list word for word, twice: apple, pear, plum, cherry, apple, pear, plum, cherry.",
    "Explain in three sentences why the sky is blue.",
    "Rewrite as a question: The cat sat on the mat because the mat was warm.",
    "Count from 1 to 30, separated by commas.",
)
ROTATING = (2, 4, 8, 16)
SEED = 7


def matrix() -> list[dict[str, Any]]:
    runs = [
        {"prompt": p, "temp": temp, "lane": lane, "tokens": 96, "width": ROTATING}
        for p in range(len(PROMPTS))
        for temp in (0.0, 0.8)
        for lane in ("plain", "ngram", "dflash")
    ]
    runs += [
        {"prompt": 2, "temp": temp, "lane": lane, "tokens": 320, "width": (4,)}
        for temp in (0.0, 0.8)
        for lane in ("plain", "ngram", "dflash")
    ]
    return runs


def options(run: dict[str, Any]) -> Options:
    sampler = make_sampler(temp=run["temp"], seed=SEED) if run["temp"] else None
    return Options(max_tokens=run["tokens"], sampler=sampler, width=tuple(run["width"]))


def generate(engines: dict[str, Engine], ids: list[int], run: dict[str, Any]) -> dict[str, Any]:
    began = time.perf_counter()
    responses = list(engines[run["lane"]].stream(ids, options(run)))
    stats = responses[-1].stats
    return run | {
        "ids": [r.token for r in responses],
        "rounds": stats.rounds,
        "drafted": stats.drafted,
        "accepted": stats.accepted,
        "seconds": round(time.perf_counter() - began, 1),
    }


def engines_for(model: Any, tokenizer: Any, folder: Path) -> dict[str, Engine]:
    args = model.args
    save_drafter(
        folder,
        hidden=args.hidden_size,
        vocab=args.vocab_size,
        target_layers=args.num_hidden_layers,
        taps=(1, 14, 27),
        block=16,
        mask=2,
    )
    return {
        "plain": Engine(model, tokenizer),
        "ngram": Engine(model, tokenizer, drafter=load_drafter("ngram")),
        "dflash": Engine(model, tokenizer, drafter=load_drafter("dflash", folder)),
    }


def key(run: dict[str, Any]) -> tuple[Any, ...]:
    return run["prompt"], run["temp"], run["lane"], run["tokens"]


def compare(done: dict[tuple[Any, ...], dict[str, Any]]) -> int:
    """Print a row for each drafted run; the number that differ from plain."""
    faults = 0
    print("| prompt | temp | lane | tokens | rounds | drafted | accepted | first difference |")
    print("|---|---|---|---|---|---|---|---|")
    for run in done.values():
        if run["lane"] == "plain":
            continue
        plain = done[(run["prompt"], run["temp"], "plain", run["tokens"])]["ids"]
        pairs = zip(run["ids"], plain, strict=False)
        first = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        same = run["ids"] == plain
        faults += not same
        where = "none" if same else f"token {first}"
        counts = f"{run['rounds']} | {run['drafted']} | {run['accepted']}"
        print(f"| {run['prompt']} | {run['temp']} | {run['lane']} | {len(run['ids'])} | {counts} | {where} |")
    return faults


def against_mlx_lm(model: Any, tokenizer: Any, ids: list[int], plain: list[int]) -> bool:
    reference = [r.token for r in mlx_lm.stream_generate(model, tokenizer, ids, max_tokens=len(plain))]
    return reference == plain


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--share", type=int, default=1, help="run only every Nth prompt")
    parser.add_argument("--any-blas", action="store_true", help="look for near-ties under a preloaded BLAS")
    args = parser.parse_args()
    if blas.active() != "bundled" and not args.any_blas:
        parser.error(f"equality is shown under the bundled BLAS, not {blas.active()}")
    model, tokenizer = mlx_lm.load(args.model)
    tokenizer.eos_token_ids = set()  # every run takes all its tokens; where an answer ends is tested elsewhere
    done: dict[tuple[Any, ...], dict[str, Any]] = {}
    if args.out.exists():
        done = {key(run): run for run in map(json.loads, args.out.read_text().splitlines())}
    prompts = [encode_chat(tokenizer, [{"role": "user", "content": text}]) for text in PROMPTS]
    faults = 0
    with tempfile.TemporaryDirectory() as home, args.out.open("a") as log:
        engines = engines_for(model, tokenizer, Path(home) / "drafter")
        for run in matrix():
            if run["prompt"] % args.share or key(run) in done:
                continue
            done[key(run)] = generate(engines, prompts[run["prompt"]], run)
            log.write(json.dumps(done[key(run)]) + "\n")
            log.flush()
        faults = compare(done)
        greedy = [run for run in done.values() if run["lane"] == "plain" and not run["temp"]]
        for run in greedy:
            same = against_mlx_lm(model, tokenizer, prompts[run["prompt"]], run["ids"])
            told = "equal" if same else "DIFFERS"
            print(f"mlx_lm.stream_generate, prompt {run['prompt']}, {run['tokens']} tokens: {told}")
            faults += not same
    drafted = sum(run["lane"] != "plain" for run in done.values())
    print(f"{faults} differences in {drafted + len(greedy)} comparisons; mlx {mx.__version__}, BLAS {blas.active()}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
