"""Fixtures every test may use, and the guard that exactness is tested where it can hold.

mlx is imported first of all: a command that runs inside this process can then no longer change the BLAS, and bit
equality means what it says.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_spec import blas

KEPT = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "SSL_CERT_FILE", "TMPDIR")


def pytest_sessionstart(session: pytest.Session) -> None:
    """Equality is demanded bit for bit, which only the bundled BLAS promises on Linux."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # Started in the background: the programs under test would inherit deafness to Ctrl-C.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if sys.platform.startswith("linux") and mx.default_device() == mx.cpu and blas.active() != "bundled":
        pytest.exit(f"the tests need MLX's bundled BLAS, but {blas.active()} is loaded; unset LD_PRELOAD", returncode=4)


def clean_environment(home: Path) -> dict[str, str]:
    """The environment of a first start: an empty home, no settings, no network, no colour."""
    home.mkdir(parents=True, exist_ok=True)
    places = {"XDG_CONFIG_HOME": ".config", "XDG_DATA_HOME": ".local/share", "XDG_CACHE_HOME": ".cache"}
    kept = {name: os.environ[name] for name in KEPT if name in os.environ}
    return kept | {
        "HOME": str(home),
        **{name: str(home / place) for name, place in places.items()},
        "XDG_STATE_HOME": str(home / ".local/state"),
        "HF_HOME": str(home / ".cache/huggingface"),
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "NO_COLOR": "1",
        "TERM": "dumb",
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "MLX_SPEC_BLAS": "bundled",  # so that texts can be compared with those of this process
    }


@pytest.fixture
def cli_env(tmp_path: Path) -> dict[str, str]:
    """``clean_environment`` with its home in this test's own folder."""
    return clean_environment(tmp_path / "home")


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-layer random Qwen3 with a byte tokenizer, as an mlx-lm folder. Read only."""
    from toys import save_tiny

    return save_tiny(tmp_path_factory.mktemp("tiny") / "tiny")
