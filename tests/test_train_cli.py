"""``mlx-spec train`` as people call it: from prompts to a drafter that generates, stopped and resumed on the way."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from pathlib import Path

import mlx.core as mx
import pytest
from train_fixture import random_data, small_target, write_prompts

from mlx_spec.apps import cli
from mlx_spec.convert.train import curve
from mlx_spec.convert.train.settings import DataSettings, TrainSettings, flag

COMMAND = str(Path(sys.executable).with_name("mlx-spec"))
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(cli_env: dict[str, str]) -> Run:
    def start(*args: object) -> subprocess.CompletedProcess[str]:
        words = [COMMAND, *map(str, args)]
        return subprocess.run(words, capture_output=True, text=True, env=cli_env, timeout=300, stdin=subprocess.DEVNULL)

    return start


def recipe(path: Path, target: Path, home: Path, steps: int = 6) -> Path:
    path.write_text(
        f"""
        [data]
        target = "{target}"
        prompts = ["{home / "p.txt"}"]
        out = "{home / "data"}"
        max_tokens = 20
        max_prompt = 80
        [train]
        target = "{target}"
        data = "{home / "data"}"
        out = "{home / "run"}"
        layers = 1
        block = 4
        steps = {steps}
        evaluate_every = 3
        save_every = 2
        batch = 2
        compile = "off"
        """
    )
    return path


def test_from_prompts_to_a_drafter(run: Run, tmp_path: Path) -> None:
    target = small_target(tmp_path / "target")
    write_prompts(tmp_path / "p.txt")
    made = recipe(tmp_path / "r.toml", target, tmp_path)
    data = run("train", "data", "--recipe", made)
    assert data.returncode == 0, data.stderr
    assert data.stdout.startswith(f"{tmp_path / 'data'}: 8 sequences, ")
    done = run("train", "run", "--recipe", made, "--steps", "4")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{tmp_path / 'run' / 'drafter'}: 4 updates, held-out acceptance length ")
    assert "training: update 4 of 4" in done.stderr or "training: update 0 of 4" in done.stderr
    assert done.stderr.count("matplotlib is not installed") == (not curve.can_plot())
    assert cli.run(["train", "export", str(tmp_path / "run"), str(tmp_path / "small"), "--bits", "8"]) == 0
    answer = run("generate", "-m", target, "--draft", tmp_path / "small", "-p", "hi", "--max-tokens", "8", "--json")
    assert json.loads(answer.stdout)["mlx_spec"]["lane"] == "dflash"


@pytest.mark.parametrize(
    ("words", "code", "line"),
    [
        (("train", "run", "--target", "t", "--out", "o"), 2, "error: --data is needed"),
        (("train", "data", "--target", "t", "--prompts", "p"), 2, "error: --out is needed"),
        (("train", "run", "--resume"), 2, "error: --resume needs the --out folder"),
        (("train", "run", "--resume", "--out", "nowhere"), 2, "error: nowhere holds no training run to resume"),
        (("train", "run", "--recipe", "none.toml"), 2, "error: the recipe none.toml cannot be read"),
        (("train", "run", "--taps", "1,x"), 2, "error: --taps must be whole numbers"),
        (("train", "run", "--steps", "0", "--target", "t", "--data", "d", "--out", "o"), 2, "error: --steps must be"),
        (("train", "export", "a", "b", "--bits", "3"), 2, "error: --bits must be"),
    ],
)
def test_usage_errors(
    words: tuple[str, ...], code: int, line: str, capsys: pytest.CaptureFixture[str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert cli.run(words) == code
    errors = capsys.readouterr().err.splitlines()
    assert errors[-1].startswith(line)
    assert not list(tmp_path.iterdir())


def test_help_names_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    for command, table in (("data", DataSettings), ("run", TrainSettings)):
        assert cli.run(("train", command, "--help")) == 0
        shown = capsys.readouterr().out
        assert all(flag(item.name) in shown for item in fields(table))


def started(cli_env: dict[str, str], *words: object) -> subprocess.Popen[str]:
    return subprocess.Popen([COMMAND, *map(str, words)], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                            env=cli_env, stdin=subprocess.DEVNULL)  # fmt: skip


def checkpoints_in(run: Path) -> int:
    return sum(1 for _ in run.glob("checkpoints/step-*"))


def newest(run: Path) -> str:
    return max((path.name for path in run.glob("checkpoints/step-*")), default="")


def later(run: Path, than: str) -> bool:
    return newest(run) > than


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + 120
    while not condition() and process.poll() is None and time.monotonic() < end:
        time.sleep(0.02)


def test_ctrl_c_saves(run: Run, cli_env: dict[str, str], tmp_path: Path) -> None:
    target = small_target(tmp_path / "target")
    data, out = random_data(tmp_path / "data", target), tmp_path / "run"
    base = (
        "train",
        "run",
        "--target",
        target,
        "--data",
        data,
        "--layers",
        "1",
        "--block",
        "4",
        "--compile",
        "off",
        "--out",
        out,
    )
    with started(cli_env, *base, "--steps", "100000", "--batch", "2") as process:
        wait_for(lambda: checkpoints_in(out) > 0, process)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors
    assert "stopped at update" in errors
    assert "Traceback" not in errors
    step = max(int(path.name.split("-")[1]) for path in out.glob("checkpoints/step-*"))
    ended = run("train", "run", "--resume", "--out", out, "--steps", step + 2)
    assert ended.returncode == 0, ended.stderr
    assert f"{step + 2} updates" in ended.stdout


@pytest.mark.full
def test_killed_by_the_system_and_resumed(run: Run, cli_env: dict[str, str], tmp_path: Path) -> None:
    """SIGKILL at whatever moment it comes, five times; the weights are those of an undisturbed run."""
    target = small_target(tmp_path / "target")
    data = random_data(tmp_path / "data", target)
    base = ("train", "run", "--target", target, "--data", data, "--layers", "1", "--block", "4", "--steps", "300")
    base += ("--batch", "2", "--save-every", "7", "--evaluate-every", "50")
    assert run(*base, "--out", tmp_path / "straight").returncode == 0
    out = tmp_path / "killed"
    words: tuple[object, ...] = (*base, "--out", out)
    for number in range(5):
        with started(cli_env, *words) as process:
            wait_for(partial(later, out, newest(out)), process)
            time.sleep(0.01 * number)
            process.kill()
            process.communicate()
        words = ("train", "run", "--resume", "--out", out)
    assert run(*words).returncode == 0
    one, other = (mx.load(str(tmp_path / name / "drafter" / "model.safetensors")) for name in ("straight", "killed"))
    assert all(mx.array_equal(one[name], other[name]).item() for name in one)
