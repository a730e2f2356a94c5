"""Float32 products of MLX's CPU backend under every BLAS installed here, each in a fresh process.

One weight of 4096 x 1024, 1 and 16 rows (a plain step and a verify): median and quartiles in milliseconds, and how
many times dearer 16 rows are than one, which is what decides whether drafting can pay.

Run: ``make bench-blas``, or ``python benchmarks/blas.py [--repeats 40] [--json FILE]``.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

OUT, IN = 4096, 1024
ROWS = (1, 2, 4, 8, 16)


def child(kind: str, repeats: int, openblas: Path | None) -> None:
    """Measure under one BLAS and print a JSON object."""
    from mlx_spec import blas

    report = blas.prepare("bundled") if kind == "bundled" else _only(kind, openblas)
    import mlx.core as mx

    mx.set_default_device(mx.cpu)
    weight = mx.random.normal((OUT, IN), key=mx.random.key(0))
    found: dict[str, Any] = {"blas": blas.active(), "detail": report.detail, "rows": {}}
    for rows in ROWS:
        x = mx.random.normal((rows, IN), key=mx.random.key(rows))
        mx.eval(x, weight)
        times = []
        for repeat in range(repeats + 3):
            began = time.perf_counter()
            mx.eval(x @ weight.T)
            if repeat >= 3:  # threads and pages are warm
                times.append((time.perf_counter() - began) * 1e3)
        found["rows"][rows] = statistics.quantiles(times, n=4)
    print(json.dumps(found))


def _only(kind: str, openblas: Path | None) -> Any:
    """``prepare`` with one kind of library to choose from."""
    from mlx_spec import blas

    libraries = [item for item in blas._installed() if item[0] == kind]
    if kind == "openblas" and openblas is not None:
        libraries = [(kind, openblas)]
    blas._installed = lambda: iter(libraries)
    return blas.prepare("auto")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--openblas", type=Path, help="a library that is not installed in the system")
    parser.add_argument("--child", choices=("bundled", "openblas", "mkl"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.child, args.repeats, args.openblas)
        return
    lanes = []
    for kind in ("bundled", "openblas", "mkl"):
        words = [sys.executable, *sys.argv, "--child", kind]
        found = json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout)
        if found["blas"] != kind:
            print(f"{kind}: left out ({found['detail']})", file=sys.stderr)
            continue
        lanes.append(found)
    columns = " | ".join(f"{rows} rows" for rows in ROWS)
    print(f"| BLAS | {columns} | 16 rows / 1 row |\n|---|{'---|' * (len(ROWS) + 1)}")
    for found in lanes:
        cells = [f"{mid:.2f} ({low:.2f}-{high:.2f})" for low, mid, high in found["rows"].values()]
        ratio = found["rows"][str(ROWS[-1])][1] / found["rows"][str(ROWS[0])][1]
        print(f"| {found['blas']} | {' | '.join(cells)} | {ratio:.1f} |")
    if args.json:
        about = {"mlx": version("mlx"), "machine": platform.processor() or platform.machine(), "command": sys.argv}
        args.json.write_text(json.dumps({"about": about, "lanes": lanes}, indent=1))


if __name__ == "__main__":
    main()
