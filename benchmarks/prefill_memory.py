"""Peak memory of a long prefill with feature taps, beside the same prefill without.

Bar: at most 1.15 times, plus the features (or context) that the drafter keeps. Each lane runs in a fresh process.

Run: ``python benchmarks/prefill_memory.py [--tokens 8192]``; exits 1 above the bar.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

BAR = 1.15


def one(lane: str, tokens: int, home: Path) -> None:
    """In the child: prefill and print {peak, kept} in bytes."""
    import mlx.core as mx

    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
    import mlx_lm
    from dflash_fixture import save_drafter
    from toys import save_tiny, tiny_qwen3

    from mlx_spec import Engine, Options
    from mlx_spec.drafters import load as load_drafter

    _, tokenizer = mlx_lm.load(str(save_tiny(home / "tokenizer")))
    model = tiny_qwen3(layers=12, hidden=256, max_position_embeddings=16384)
    drafter = None
    if lane == "dflash":
        save_drafter(home / "drafter", hidden=256, target_layers=12, taps=(1, 4, 7, 10), max_position_embeddings=16384)
        drafter = load_drafter("dflash", home / "drafter")
    engine = Engine(model, tokenizer, drafter=drafter)
    session = engine.session()
    prompt = [1 + (i * 31) % 255 for i in range(tokens)]
    mx.clear_cache()
    mx.reset_peak_memory()
    for _ in engine.stream(prompt, Options(max_tokens=1), session):
        pass
    kept = sum(array.nbytes for array in session.draft.arrays()) if session.draft else 0
    print(json.dumps({"peak": mx.get_peak_memory(), "kept": kept}))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--lane", choices=("plain", "dflash"))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        if args.lane:
            one(args.lane, args.tokens, Path(home))
            return 0
        seen = {}
        for lane in ("plain", "dflash"):
            command = [sys.executable, __file__, "--tokens", str(args.tokens), "--lane", lane]
            seen[lane] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    plain, dflash = seen["plain"], seen["dflash"]
    ratio = (dflash["peak"] - dflash["kept"]) / plain["peak"]
    print(
        f"prefill of {args.tokens} tokens: plain peak {plain['peak'] / 1e6:.1f} MB, with 4 taps "
        f"{dflash['peak'] / 1e6:.1f} MB of which {dflash['kept'] / 1e6:.1f} MB is kept context; ratio {ratio:.3f}"
    )
    return 0 if ratio <= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
