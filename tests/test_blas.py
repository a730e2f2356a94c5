"""Which BLAS is used, found out in fresh processes; and the check that keeps a wrong one out. Nothing is timed.

A copy of MLX's own reference BLAS under another name stands for an installed OpenBLAS: a real library, loaded and
interposed as one, whose results are known bit for bit. Where a real OpenBLAS or MKL is installed it is tried too.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_spec import _blas_check, blas
from mlx_spec.errors import OptionError

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="macOS has Metal and Accelerate")

# Prints active(), the report, and the bits of a product, after PRELUDE and prepare(CHOICE).
PROGRAM = """
import json, pathlib, sys
prelude, choice, *found = sys.argv[1:]
from mlx_spec import blas
kinds = [item.split("=", 1) for item in found]
if found:
    blas._installed = lambda: iter([(kind, pathlib.Path(path)) for kind, path in kinds])
exec(prelude)
before = blas.active()
report = blas.prepare(choice)
import mlx.core as mx
x = mx.random.normal((16, 512), key=mx.random.key(1))
w = mx.random.normal((64, 512), key=mx.random.key(2))
product = (x @ w.T).tolist()
again = blas.prepare("auto")
print(json.dumps({"before": before, "active": blas.active(), "name": report.name, "detail": report.detail,
                  "advice": report.advice, "library": report.library, "again": again.name, "product": product}))
"""


def fresh(
    env: dict[str, str], choice: str = "auto", found: tuple[str, ...] = (), prelude: str = "", **extra: str
) -> Any:
    words = [sys.executable, "-c", PROGRAM, prelude, choice, *found]
    done = subprocess.run(words, env=env | extra, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """MLX's reference BLAS, named like Debian's OpenBLAS."""
    package = Path(mx.__file__).parent.parent / "mlx_cpu.libs"
    sources = sorted(package.glob("libblas-*.so*"))
    if not sources:
        pytest.skip("this build of MLX brings no BLAS of its own")
    folder = tmp_path_factory.mktemp("blas") / "openblas-pthread"
    folder.mkdir()
    for path in package.iterdir():
        (folder / path.name).symlink_to(path)
    target = folder / "libopenblas.so.0"
    shutil.copy(sources[0], target)
    return target


@pytest.fixture(scope="module")
def reference() -> np.ndarray:
    x = np.array(mx.random.normal((16, 512), key=mx.random.key(1)), dtype=np.float64)
    w = np.array(mx.random.normal((64, 512), key=mx.random.key(2)), dtype=np.float64)
    return x @ w.T


def test_bundled_is_left_alone(cli_env: dict[str, str], stand_in: Path) -> None:
    found = fresh(cli_env, "bundled", (f"openblas={stand_in}",))
    assert (found["before"], found["name"], found["active"]) == ("bundled", "bundled", "bundled")
    assert found["library"] is None
    assert found["advice"] == ""


def test_a_library_loaded_first_is_really_used(cli_env: dict[str, str], stand_in: Path) -> None:
    found = fresh(cli_env, "auto", (f"openblas={stand_in}",))
    assert (found["before"], found["name"], found["active"]) == ("bundled", "openblas", "openblas")
    assert found["library"] == str(stand_in)
    assert found["product"] == fresh(cli_env, "bundled")["product"]  # the same code, so the same bits


@pytest.mark.parametrize("prelude", ["import numpy", "import transformers", "import mlx_lm.tokenizer_utils"])
def test_other_imports_do_not_matter(cli_env: dict[str, str], stand_in: Path, prelude: str) -> None:
    """numpy's private OpenBLAS is in the process by then and must not count; only mlx_lm imports mlx."""
    found = fresh(cli_env, "bundled", prelude=prelude)
    assert (found["before"], found["active"]) == ("bundled", "bundled")
    found = fresh(cli_env, "auto", (f"openblas={stand_in}",), prelude)
    assert found["active"] == ("bundled" if "mlx_lm" in prelude else "openblas")


def test_after_mlx_nothing_is_changed_and_it_is_said(cli_env: dict[str, str], stand_in: Path) -> None:
    found = fresh(cli_env, "auto", (f"openblas={stand_in}",), "import mlx.core")
    assert (found["name"], found["active"]) == ("bundled", "bundled")
    assert "imported before" in found["detail"]


def test_a_preloaded_library_shows(cli_env: dict[str, str], stand_in: Path) -> None:
    found = fresh(cli_env, "auto", LD_PRELOAD=str(stand_in))
    assert (found["before"], found["name"], found["active"]) == ("openblas", "openblas", "openblas")
    assert "loaded before" in found["detail"]
    assert not found["advice"]
    asked = fresh(cli_env, "bundled", LD_PRELOAD=str(stand_in))
    assert asked["name"] == "openblas"
    assert "no effect" in asked["advice"]


def test_a_library_of_any_name_is_not_called_bundled(cli_env: dict[str, str], stand_in: Path, tmp_path: Path) -> None:
    other = tmp_path / "libodd.so.1"
    shutil.copy(stand_in, other)
    assert fresh(cli_env, LD_PRELOAD=str(other))["active"] == "libodd"


@pytest.mark.parametrize(
    ("content", "reason"), [(b"not a library", "cannot be loaded"), (None, "cannot be loaded")], ids=["junk", "absent"]
)
def test_what_cannot_be_loaded_is_passed_over(
    cli_env: dict[str, str], stand_in: Path, tmp_path: Path, content: bytes | None, reason: str
) -> None:
    bad = tmp_path / "libmkl_rt.so.9"
    if content:
        bad.write_bytes(content)
    found = fresh(cli_env, "auto", (f"mkl={bad}",))
    assert found["active"] == "bundled"
    assert reason in found["detail"]
    assert "libmkl_rt.so.9" in found["detail"]
    assert "libopenblas0-pthread" in found["advice"]
    assert len(found["advice"].splitlines()) == 1
    assert fresh(cli_env, "auto", (f"mkl={bad}", f"openblas={stand_in}"))["active"] == "openblas"


def test_nothing_installed_gives_advice(cli_env: dict[str, str]) -> None:
    found = fresh(cli_env, "auto", prelude="blas._installed = lambda: iter(())")
    assert (found["name"], found["active"]) == ("bundled", "bundled")
    assert "several times faster" in found["advice"]


def test_real_libraries_where_installed(cli_env: dict[str, str], reference: np.ndarray) -> None:
    tried = list(blas._installed())
    if not tried:
        pytest.skip("neither mkl nor a system OpenBLAS is installed here")
    for kind, path in tried:
        found = fresh(cli_env, "auto", (f"{kind}={path}",))
        assert found["active"] == kind, found["detail"]
        assert np.abs(np.array(found["product"]) - reference).max() < 1e-3


def test_unknown_core_is_named_before_loading(cli_env: dict[str, str], stand_in: Path) -> None:
    """A library that takes this CPU for an old one is told the right core type before it is loaded."""
    prelude = (
        "import os\n"
        "blas._checked = lambda path, core='': {'core': core or 'Prescott', 'fault': ''}\n"
        "blas._better_core = lambda: 'Haswell'\n"
        "blas.core_name = lambda library: os.environ.get('OPENBLAS_CORETYPE', '')"
    )
    found = fresh(cli_env, "auto", (f"openblas={stand_in}",), prelude)
    assert found["detail"].endswith("core Haswell (it took this CPU for Prescott)")
    users = fresh(cli_env, "auto", (f"openblas={stand_in}",), prelude, OPENBLAS_CORETYPE="Zen")
    assert "core Zen" in users["detail"]


def test_core_types_follow_the_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    def with_flags(flags: str) -> str:
        monkeypatch.setattr(Path, "read_text", lambda self, *a, **k: f"processor : 0\nflags\t\t: {flags}\n")
        return blas._better_core()

    assert with_flags("fpu avx2 fma avx512f avx512cd avx512bw avx512dq avx512vl") == "SkylakeX"
    assert with_flags("fpu avx2 fma avx512f") == "Haswell"  # its AVX-512 kernels need more than the foundation
    assert with_flags("fpu sse4_2 avx") == ""


def test_unknown_choice() -> None:
    with pytest.raises(OptionError, match="auto, bundled, not 'mkl'"):
        blas.prepare("mkl")


def test_tests_run_on_the_bundled_blas() -> None:
    assert blas.active() == "bundled"


class Library:
    """A BLAS in Python: numpy behind ``cblas_sgemm``, with a fault of choice."""

    def __init__(self, spoil: Any = None, dtype: Any = np.float32) -> None:
        def cblas_sgemm(order, ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc) -> None:
            row = order == 101
            x, y = self.view(a, m, k, row, ta == 112), self.view(b, k, n, row, tb == 112)
            out = self.view(c, m, n, row, False)
            result = alpha * (x.astype(dtype).astype(np.float64) @ y.astype(dtype).astype(np.float64))
            if spoil is not None:
                spoil(result)
            out[:] = result

        self.cblas_sgemm = cblas_sgemm

    @staticmethod
    def view(address: int, rows: int, columns: int, row_major: bool, transposed: bool) -> np.ndarray:
        import ctypes

        if row_major == transposed:
            rows, columns = columns, rows
        flat = np.ctypeslib.as_array((ctypes.c_float * (rows * columns)).from_address(address))
        shaped = flat.reshape(rows, columns)
        return shaped.T if row_major == transposed else shaped


def nudge(result: np.ndarray) -> None:
    result[-1, -1] += 1


def tail(result: np.ndarray) -> None:
    if result.shape[1] % 16:
        result[:, result.shape[1] // 16 * 16] = 0


def unwritten(result: np.ndarray) -> None:
    result[0, 0] = np.nan


def swapped(result: np.ndarray) -> None:
    if result.shape[0] > 1:
        result[[0, 1]] = result[[1, 0]]


def test_a_right_library_passes() -> None:
    assert _blas_check.fault(Library()) is None


@pytest.mark.parametrize("spoil", [nudge, tail, unwritten, swapped])
def test_a_wrong_library_is_found(spoil: Any) -> None:
    assert "wrong product of" in str(_blas_check.fault(Library(spoil)))


def test_reduced_precision_is_found() -> None:
    """A library that multiplies float32 in half precision is fast and wrong."""
    assert _blas_check.fault(Library(dtype=np.float16)) is not None


def test_a_wrong_library_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(blas, "_checked", lambda path, core="": {"core": "", "fault": "wrong product of 1x1 and 1x1"})
    refused: list[str] = []
    assert blas._use("openblas", tmp_path / "libopenblas.so.0", refused) is None
    assert refused == ["libopenblas.so.0 was not used: wrong product of 1x1 and 1x1"]


def test_a_library_that_kills_its_process_is_survived(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    killer = tmp_path / "check.py"
    killer.write_text("import os, signal\nos.kill(os.getpid(), signal.SIGILL)\n")
    monkeypatch.setattr(blas, "CHECK", killer)
    assert blas._checked(tmp_path / "any.so")["fault"] == "it cannot be loaded here (exit status -4)"
