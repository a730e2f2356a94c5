"""The commands of the Makefile, as far as they can be tried without installing anything."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")

needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def make(*words: str) -> str:
    """Standard output of a make of its own, also where these tests run under ``make test``."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    return subprocess.run(["make", *words], cwd=ROOT, env=env, capture_output=True, text=True, check=True).stdout


def fake_python(folder: Path, version: str, check: str) -> Path:
    """A program that calls itself ``version`` and exits with ``check`` otherwise."""
    path = folder / "python"
    path.write_text(f'#!/bin/bash\nif [ "$1" = --version ]; then echo "{version}"; exit 0; fi\n{check}\n')
    path.chmod(0o755)
    return path


def venv(folder: Path, python: Path) -> subprocess.CompletedProcess[str]:
    words = [ROOT / ".ci" / "venv", folder, python]
    return subprocess.run(words, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)


@needs_make
def test_help_names_every_target() -> None:
    targets = set(re.search(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE).group(1).split()) - {"help"}
    assert set(re.findall(r"^make (\S+)", make(), re.MULTILINE)) == targets


@needs_make
def test_chat_passes_its_flags_on() -> None:
    shown = make("-n", "chat", "ARGS=--temp 0.7 --seed 1")
    assert shown.rstrip().endswith("mlx-spec chat --model smollm2 --temp 0.7 --seed 1")


def test_an_old_python_is_refused_in_one_line(tmp_path: Path) -> None:
    done = venv(tmp_path / "venv", fake_python(tmp_path, "Python 3.9.2", "exit 1"))
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "error: mlx-spec needs Python 3.11 or newer; found Python 3.9.2; install one, or give its path: "
        "make PYTHON=/path/to/python3.12"
    ]
    assert not (tmp_path / "venv").exists()


def test_an_absent_python_is_refused(tmp_path: Path) -> None:
    done = venv(tmp_path / "venv", tmp_path / "nowhere")
    assert done.returncode == 1
    assert "found none" in done.stderr


def test_neither_ensurepip_nor_pip(tmp_path: Path) -> None:
    """New enough, but every import of ensurepip and every -m fails."""
    only_version = 'case "$2" in *version_info*) exit 0;; *) exit 1;; esac'
    done = venv(tmp_path / "venv", fake_python(tmp_path, "Python 3.12.1", only_version))
    assert done.returncode == 1
    assert "apt install python3-venv" in done.stderr


def test_an_environment_that_works_is_kept(tmp_path: Path) -> None:
    folder = tmp_path / "venv" / "bin"
    folder.mkdir(parents=True)
    fake_python(folder, "Python 3.12.1", "exit 0")
    assert venv(tmp_path / "venv", tmp_path / "nowhere").returncode == 0
    assert (folder / "python").exists()


def test_scripts_are_executable() -> None:
    assert all(os.access(ROOT / ".ci" / name, os.X_OK) for name in ("run", "venv"))
