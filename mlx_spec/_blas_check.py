"""Does a BLAS library multiply correctly on this CPU? Run in a child process, because a wrong kernel may end it.

Standard library only, so that a bare interpreter can run the file:

    python -I -S _blas_check.py LIBRARY [CORE]

prints ``{"core": ..., "fault": ...}``. CORE is put into ``OPENBLAS_CORETYPE`` first. Knows nothing of MLX.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from array import array
from collections.abc import Sequence
from itertools import product
from typing import Any

ROW_MAJOR, COLUMN_MAJOR = 101, 102  # CBLAS_LAYOUT of cblas.h
PLAIN, TRANSPOSED = 111, 112  # CBLAS_TRANSPOSE
SMALL = ((1, 48, 64), (3, 5, 17), (16, 33, 96))  # (m, n, k): odd tails and one row
LARGE = (96, 128, 256)  # wide enough that libraries split it over threads
A_SPAN, B_SPAN = 8191, 15  # 12 and 3 bits: exact in float32 up to k = 256, not exact in bfloat16 or TF32

Rows = list[list[int]]


def fault(library: Any) -> str | None:
    """Multiply integers whose float32 product is exact in any order of summation, in both layouts, plain and
    transposed. Returns None where all agree, else what was wrong. ``library`` has ``cblas_sgemm``."""
    flags = (PLAIN, TRANSPOSED)
    cases = [(shape, *how) for shape in SMALL for how in product((ROW_MAJOR, COLUMN_MAJOR), flags, flags)]
    cases += [(LARGE, ROW_MAJOR, PLAIN, flag) for flag in flags]
    for (m, n, k), order, flag_a, flag_b in cases:
        a, b = _numbers(m, k, A_SPAN), _numbers(k, n, B_SPAN)
        if not _is_product(a, b, _multiply(library, order, flag_a, flag_b, a, b)):
            layout = "row" if order == ROW_MAJOR else "column"
            turned = "".join(name for name, flag in (("A", flag_a), ("B", flag_b)) if flag == TRANSPOSED) or "nothing"
            return f"wrong product of {m}x{k} and {k}x{n} ({layout}-major, {turned} transposed)"
    return None


def _numbers(rows: int, columns: int, span: int) -> Rows:
    """Arbitrary but fixed integers in +-span/2."""
    return [[(7919 * i + 104729 * j + 31 * i * j) % span - span // 2 for j in range(columns)] for i in range(rows)]


def _multiply(library: Any, order: int, flag_a: int, flag_b: int, a: Rows, b: Rows) -> list[list[float]]:
    """``a @ b`` by the library, as rows."""
    m, n, k = len(a), len(b[0]), len(b)
    a_data, a_lead = _stored(a, (order == ROW_MAJOR) == (flag_a == PLAIN))
    b_data, b_lead = _stored(b, (order == ROW_MAJOR) == (flag_b == PLAIN))
    out = array("f", [float("nan")]) * (m * n)  # beta 0 must not read what was there
    gemm = library.cblas_sgemm
    gemm.restype = None
    gemm.argtypes = [ctypes.c_int] * 6 + [ctypes.c_float] + [ctypes.c_void_p, ctypes.c_int] * 2
    gemm.argtypes += [ctypes.c_float, ctypes.c_void_p, ctypes.c_int]
    c_lead = n if order == ROW_MAJOR else m
    addresses = [data.buffer_info()[0] for data in (a_data, b_data, out)]
    sizes = (order, flag_a, flag_b, m, n, k)
    gemm(*sizes, 1.0, addresses[0], a_lead, addresses[1], b_lead, 0.0, addresses[2], c_lead)
    if order == ROW_MAJOR:
        return [list(out[i * n : (i + 1) * n]) for i in range(m)]
    return [[out[j * m + i] for j in range(n)] for i in range(m)]


def _stored(rows: Rows, by_row: bool) -> tuple[array[float], int]:
    """The numbers as they lie in memory, and the leading dimension."""
    lines = rows if by_row else [list(column) for column in zip(*rows, strict=True)]
    return array("f", [value for line in lines for value in line]), len(lines[0])


def _is_product(a: Rows, b: Rows, c: list[list[float]]) -> bool:
    """Freivalds' check: c @ x == a @ (b @ x), in exact integers; NaN fails."""
    x = [(6151 * j) % 997 + 1 for j in range(len(b[0]))]
    right = _times(a, _times(b, x))
    return all(got == want for got, want in zip(_times(c, x), right, strict=True))


def _times(rows: Sequence[Sequence[float]], x: Sequence[float]) -> list[float]:
    return [sum(value * weight for value, weight in zip(row, x, strict=True)) for row in rows]


def core_name(library: Any) -> str:
    """The kernel family OpenBLAS picked; "" from a library that does not say."""
    if not hasattr(library, "openblas_get_corename"):
        return ""
    library.openblas_get_corename.restype = ctypes.c_char_p
    return str(library.openblas_get_corename().decode())


def main(path: str, core: str = "") -> None:
    if core:
        os.environ["OPENBLAS_CORETYPE"] = core
    library = ctypes.CDLL(path)
    print(json.dumps({"core": core_name(library), "fault": fault(library)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
