"""Which library multiplies matrices for MLX's CPU backend. Imports no mlx and knows no model.

MLX for Linux carries the reference BLAS: exact and slow. A faster one that is loaded with global symbols *before*
mlx is imported takes its place, because the dynamic linker looks there first. Only float32 products gain; bfloat16
and quantised ones never reach a BLAS. Under the bundled one a row does not depend on how many rows are multiplied
together, under the others it may: ``active`` tells the engine which promises hold.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mlx_spec._blas_check import core_name
from mlx_spec.errors import OptionError

CHOICES = ("auto", "bundled")
CHECK = Path(__file__).with_name("_blas_check.py")
CHECK_SECONDS = 60
DEBIAN = ("openblas-pthread", "openblas-openmp", "openblas-serial")  # fastest first
UNKNOWN_CPU = ("prescott", "generic", "unknown")  # what OpenBLAS falls back to (Debian's 0.3.21 on newer CPUs)
CORES = (  # OPENBLAS_CORETYPE, the CPU flags its kernels need
    ("SkylakeX", {"avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl"}),
    ("Haswell", {"avx2", "fma"}),
)


@dataclass(frozen=True)
class BlasReport:
    """What ``prepare`` did. ``name`` as in ``active``; ``detail``: which file, or why not; ``advice``: one line for a
    user who could do better, else ""; ``library``: the file loaded, if any."""

    name: str
    detail: str
    advice: str = ""
    library: str | None = None


def prepare(choice: str = "auto") -> BlasReport:
    """Load the fastest BLAS that is installed and multiplies correctly. Call before mlx is imported.

    "auto": PyPI's ``mkl``, else a system OpenBLAS, else the bundled one. "bundled": change nothing. Raises
    OptionError for any other word. Tried libraries run first in a child process, so a bad one cannot harm this one.
    """
    if choice not in CHOICES:
        raise OptionError(f"blas must be one of {', '.join(CHOICES)}, not {choice!r}")
    name = active()
    if not sys.platform.startswith("linux"):
        return BlasReport(name, "Metal, with Apple's Accelerate on the CPU" if name == "accelerate" else "as installed")
    if name != "bundled":
        return _already(name, choice)
    if choice == "bundled":
        return BlasReport(name, "as asked for")
    if "mlx.core" in sys.modules:
        return BlasReport(name, "mlx was imported before a BLAS could be chosen, so nothing was changed")
    refused: list[str] = []
    for kind, path in _installed():
        report = _use(kind, path, refused)
        if report is not None:
            return report
    return BlasReport(name, "; ".join(refused) or "no faster BLAS is installed", _advice(refused))


def active() -> str:
    """The BLAS that this process really uses: "bundled", "mkl", "openblas", "accelerate" (macOS) or, where something
    else was put in its place, that library's file name. A private copy inside another package does not count."""
    if sys.platform == "darwin":
        return "accelerate"
    if not sys.platform.startswith("linux"):
        return "unknown"
    provider = _provider()
    if provider is None or any(part.startswith(("mlx_cpu.libs", "mlx.libs")) for part in provider.parts):
        return "bundled"
    tail = "/".join(provider.parts[-2:]).lower()
    return next((name for name in ("mkl", "openblas") if name in tail), provider.name.split(".")[0])


class _Symbol(ctypes.Structure):
    """Dl_info of dlfcn.h."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def _provider() -> Path | None:
    """The file whose ``cblas_sgemm`` MLX calls. The linker searches the process's global symbols first (a library
    that was preloaded, or loaded by ``prepare``), then MLX's own dependencies; None before mlx is imported."""
    core = getattr(sys.modules.get("mlx.core"), "__file__", None)
    for where in (None, core) if core else (None,):
        gemm = getattr(ctypes.CDLL(where), "cblas_sgemm", None)
        found = _Symbol()
        if gemm is not None and ctypes.CDLL(None).dladdr(ctypes.cast(gemm, ctypes.c_void_p), ctypes.byref(found)):
            return Path(os.fsdecode(found.file)).resolve()
    return None


def _already(name: str, choice: str) -> BlasReport:
    asked = "" if choice == "auto" else f"--blas {choice} has no effect: {name} was loaded before; start without it"
    return BlasReport(name, f"{_provider()}, loaded before", asked, str(_provider()))


def _installed() -> Iterator[tuple[str, Path]]:
    """(kind, file) of every library worth trying, best first."""
    if platform.machine() in ("x86_64", "AMD64"):
        yield from (("mkl", path) for path in _mkl())
    if platform.machine() in ("x86_64", "AMD64", "aarch64"):
        yield from (("openblas", path) for path in _openblas())


def _mkl() -> Iterator[Path]:
    """The dispatcher library of PyPI's ``mkl``, from the package's own list of files."""
    try:
        files = importlib.metadata.files("mkl") or []
    except importlib.metadata.PackageNotFoundError:
        return
    yield from (Path(str(file.locate())).resolve() for file in files if file.name.startswith("libmkl_rt.so"))


def _openblas() -> Iterator[Path]:
    """The system's own choice, then Debian's variants (their 64-bit-index twins have another name)."""
    name = ctypes.util.find_library("openblas")
    if name:
        yield Path(name)
    for folder in DEBIAN:
        yield from sorted(Path("/usr/lib").glob(f"*-linux-gnu/{folder}/libopenblas.so.0"))


def _use(kind: str, path: Path, refused: list[str]) -> BlasReport | None:
    """Check and load one library; None, and a reason in ``refused``, where it cannot be trusted."""
    core, detected = "", ""
    found = _checked(path)
    if kind == "openblas" and found["core"].lower() in UNKNOWN_CPU:
        detected, core = found["core"], _better_core()
        found = _checked(path, core) if core else found
    if found["fault"]:
        refused.append(f"{path.name} was not used: {found['fault']}")
        return None
    if core:
        # OpenBLAS reads the core type from the environment while it loads, and nowhere else; the user's own wins.
        os.environ.setdefault("OPENBLAS_CORETYPE", core)
    library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    detail = str(_provider())
    used = core_name(library)
    if used:
        detail += f", core {used}" + (f" (it took this CPU for {detected})" if detected not in ("", used) else "")
    return BlasReport(active(), detail, "", str(path))


def _checked(path: Path, core: str = "") -> dict[str, str]:
    """{"core", "fault"} of a library, found in a child process; "" for none."""
    words = [sys.executable, "-I", "-S", str(CHECK), str(path), *([core] if core else [])]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=CHECK_SECONDS, stdin=subprocess.DEVNULL)
        answer = json.loads(done.stdout) if done.returncode == 0 else None
    except (OSError, subprocess.TimeoutExpired, json.JSONDecodeError) as error:
        return {"core": "", "fault": f"its check failed ({type(error).__name__})"}
    if not isinstance(answer, dict):
        last = done.stderr.strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
        return {"core": "", "fault": f"it cannot be loaded here ({last[0]})"}
    return {"core": str(answer.get("core") or ""), "fault": str(answer.get("fault") or "")}


def _better_core() -> str:
    """The OpenBLAS core type that this CPU's flags allow; "" where none is known to fit."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    flags = set(next((line for line in lines if line.startswith("flags")), "").split())
    return next((core for core, needed in CORES if needed <= flags), "")


def _advice(refused: list[str]) -> str:
    why = "".join(f" ({reason})" for reason in refused)
    package = "Debian's libopenblas0-pthread"
    if platform.machine() in ("x86_64", "AMD64"):
        # The extra "fast-cpu", spelled so that it reaches this very environment.
        package = f"`{sys.executable} -m pip install mkl` (655 MB), or {package},"
    return f"the bundled BLAS is slow{why}; {package} makes float32 models several times faster on this CPU"


__all__ = ["CHOICES", "BlasReport", "active", "prepare"]
