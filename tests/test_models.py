"""Names to folders: aliases, pulling from a mock hub, removing, listing. Needs no network."""

from __future__ import annotations

import fcntl
import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
from dflash_fixture import save_drafter
from hub_mock import Hub, closed_port, commit_of, point_at, serving, start_afresh
from huggingface_hub import constants

from mlx_spec import hub
from mlx_spec.apps import models, pull
from mlx_spec.apps.aliases import ALIASES, TABLE, Alias, best
from mlx_spec.errors import (
    ModelNotFoundError,
    OptionError,
    PairError,
    UnsupportedError,
)

GB = 2**30
PAIR = Alias("pair", "a tiny pair", "owner/tiny", "owner/drafter", 0.1, 0.1, {"enable_thinking": False})


@pytest.fixture
def mock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_folder: Path) -> Iterator[Hub]:
    """A hub with a target and its drafter, and the alias ``pair`` for both."""
    start_afresh(tmp_path, monkeypatch)
    monkeypatch.setitem(ALIASES, "pair", PAIR)
    with serving(Hub()) as server:
        server.add("owner/tiny", tiny_folder)
        server.add("owner/drafter", save_drafter(tmp_path / "drafter"))
        point_at(server.url, monkeypatch)
        yield server


def refuse(question: str) -> bool:
    raise AssertionError(f"asked: {question}")


# --- the table --------------------------------------------------------------------------------------------------------


def test_every_pair_is_told_as_it_is() -> None:
    assert {"smollm2", "qwen3-4b", "qwen3-8b", "llama-3.1-8b", "qwen3-coder-30b-a3b"} <= set(models.names())
    for alias in TABLE:
        assert ALIASES[alias.name] is alias
        assert alias.target.count("/") == 1
        assert alias.draft is None or alias.draft.count("/") == 1
        assert alias.name == alias.name.lower()
        assert (alias.missing is None) == (alias.name in models.names())
    assert ALIASES["qwen3-4b"].template == ALIASES["qwen3-8b"].template == {"enable_thinking": False}


@pytest.mark.parametrize(("memory", "name"), [(4, None), (8, "qwen3-4b"), (16, "qwen3-8b"), (128, "qwen3-8b")])
def test_the_pair_for_a_memory(memory: int, name: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    found = models.recommend(memory * GB)
    assert (found.name if found else None) == name
    if found:
        row = best(memory * GB)
        assert row is not None
        assert row.missing is None
        assert row.memory_gb < 0.7 * memory * GB / 1e9
        assert f"{memory} GB of memory" in found.line
        assert "GB to download" in found.line
    assert models.recommend() is None or mx.metal.is_available()


def test_what_cannot_run_yet_is_refused_before_any_download(mock: Hub) -> None:
    for alias in TABLE:
        if alias.missing:
            with pytest.raises(UnsupportedError, match=f"{alias.name} cannot run in this version: it needs"):
                models.ensure(alias.name, ask=refuse)
    assert not mock.requests


# --- from the hub -----------------------------------------------------------------------------------------------------


def test_a_pair_is_pulled_once(mock: Hub, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    paths = models.ensure("pair", ask=refuse, progress=said.append)
    assert paths.template_kwargs == {"enable_thinking": False}
    assert paths.draft == paths.target / "drafter"
    assert (paths.target / "model.safetensors").read_bytes() == (tiny_folder / "model.safetensors").read_bytes()
    assert hub.check_target(paths.target).kind == "target"
    assert hub.check_drafter(paths.draft).format == "DFlash"
    assert any(text.startswith("fetching owner/tiny: ") and text.endswith("(100%)") for text in said)
    point_at(closed_port(), monkeypatch)
    asked = len(mock.requests)
    assert models.ensure("pair", ask=refuse) == paths
    assert hub.resolve("pair") == paths.target, "the engine knows it by its name too"
    assert len(mock.requests) == asked
    assert models.pulled() == {"pair": paths.target}
    mlx_lm.load(str(paths.target))


def test_a_hub_id(mock: Hub) -> None:
    paths = models.ensure("owner/tiny")
    assert (paths.draft, paths.template_kwargs) == (None, {})
    assert models.pulled() == {"owner/tiny": paths.target}
    assert "owner/tiny" in models.names()
    asked = len(mock.requests)
    assert models.ensure("owner/tiny") == paths
    assert len(mock.requests) == asked


def test_what_another_program_cached_is_used_and_not_ours(mock: Hub) -> None:
    cached = hub.resolve("owner/tiny")
    assert models.ensure("owner/tiny").target == cached
    assert models.pulled() == {}
    models.ensure("pair")
    models.remove("pair")
    assert hub.local("owner/tiny") == cached, "it was there before"
    assert hub.local("owner/drafter") is None


def test_a_folder(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert models.ensure(tiny_folder).target == tiny_folder
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelNotFoundError, match="no folder"):
        models.ensure("./smollm2")
    (tmp_path / "smollm2").mkdir()
    assert models.ensure("./smollm2").target == Path("smollm2")


def test_both_are_looked_at_before_either_is_fetched(
    mock: Hub, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mock.add("owner/drafter", tiny_folder)
    with pytest.raises(PairError, match="owner/drafter is a language model"):
        models.ensure("pair")
    mock.add("owner/other", {"config.json": b'{"architectures": ["Eagle3"]}', "model.safetensors": b""})
    monkeypatch.setitem(ALIASES, "pair", replace(PAIR, draft="owner/other"))
    with pytest.raises(UnsupportedError, match="owner/other is a EAGLE drafter, which no method here reads"):
        models.ensure("pair")
    assert not mock.asked_for("model.safetensors")
    assert not pull.place_of("pair").exists()


def test_a_question_before_much_is_fetched(mock: Hub) -> None:
    for repo in ("owner/tiny", "owner/drafter"):
        mock.repos[repo].claimed["model.safetensors"] = 700_000_000
    questions: list[str] = []

    def no(question: str) -> bool:
        questions.append(question)
        return False

    with pytest.raises(OptionError, match="not fetched, as you wished"):
        models.ensure("pair", ask=no)
    assert questions == ["pair is not here; fetch 1.4 GB?"], "one question, for both"
    with pytest.raises(OptionError, match="--yes"):
        models.ensure("pair")
    assert not mock.asked_for("model.safetensors")
    assert models.ensure("pair", ask=lambda question: True).draft


def test_a_cache_that_was_emptied(mock: Hub) -> None:
    paths = models.ensure("pair")
    shutil.rmtree(constants.HF_HUB_CACHE)
    said: list[str] = []
    assert models.ensure("pair", progress=said.append) == paths
    assert any("incomplete" in text for text in said)
    assert hub.check_target(paths.target)


def test_removing(mock: Hub, tiny_folder: Path) -> None:
    models.ensure("owner/tiny")
    models.ensure("pair")
    snapshot = Path(constants.HF_HUB_CACHE) / "models--owner--tiny/snapshots" / commit_of("owner/tiny")
    models.remove("owner/tiny")
    assert snapshot.is_dir(), "the pair still links to it"
    assert models.ensure("pair", ask=refuse).draft
    assert models.remove("pair") > (tiny_folder / "model.safetensors").stat().st_size
    assert not snapshot.exists()
    assert models.pulled() == {}
    with pytest.raises(ModelNotFoundError, match=r"pair was not pulled by mlx-spec.*pulled: nothing"):
        models.remove("pair")


def test_two_at_once(mock: Hub) -> None:
    """The second says what it waits for, and finds the work done."""
    place = pull.place_of("pair")
    place.parent.mkdir(parents=True)
    waits = threading.Event()
    said: list[str] = []
    got: list[models.ModelPaths] = []

    def say(text: str) -> None:
        said.append(text)
        waits.set()

    with place.with_name(".pair.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        second = threading.Thread(target=lambda: got.append(models.ensure("pair", progress=say)))
        second.start()
        assert waits.wait(20)
        assert "waiting for another mlx-spec that is fetching pair" in said[0]
        pull.from_hub("pair", PAIR.target, PAIR.draft, refuse, print)
        asked = len(mock.requests)
    second.join(20)
    assert got[0].target == place
    assert len(mock.requests) == asked


# --- the command ------------------------------------------------------------------------------------------------------


def command(env: dict[str, str], *words: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-c", "from mlx_spec.apps.cli import main; main()", *words],
        env=env, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def test_list(cli_env: dict[str, str]) -> None:
    code, out, err = command(cli_env, "models", "list")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert len(lines) == 1 + len(TABLE)
    assert "not yet: needs sliding-window caches" in next(line for line in lines if line.startswith("gpt-oss-20b"))
    code, out, _ = command(cli_env, "models", "list", "--json")
    rows: list[dict[str, Any]] = json.loads(out)
    assert code == 0
    assert [row["name"] for row in rows] == [alias.name for alias in TABLE]
    assert rows[0].keys() >= {"name", "what", "size_gb", "here", "fits", "drafter", "state"}


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("pull", "qwen3.5-9b"), 1, "qwen3.5-9b cannot run in this version"),
        (("pull", "qwen3-4b"), 3, "mlx-community/Qwen3-4B-4bit is not on this machine and offline mode is on"),
        (("pull", "nonsense"), 3, "nonsense is not on this machine"),
        (("rm", "qwen3-4b"), 3, "qwen3-4b was not pulled"),
        (("rm", ".."), 3, ".. was not pulled"),
    ],
)
def test_one_line_and_an_exit_code(words: tuple[str, ...], code: int, said: str, cli_env: dict[str, str]) -> None:
    got, out, err = command(cli_env, "models", *words)
    assert got == code
    assert out == ""
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert said in errors[0]
