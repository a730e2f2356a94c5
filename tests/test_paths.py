"""Every path that yields text, each against the same request without a drafter. A path that is not here is not tested.

The reference is mlx-lm's own loop for greedy and lane plain of the plainest call (``Engine.stream``) for seeds.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx_lm
import pytest
from dflash_fixture import save_drafter

from mlx_spec import Engine, Options, generate, load, make_prompt_cache, make_sampler, stream_generate
from mlx_spec.apps import cli
from mlx_spec.text import encode_chat

MESSAGE = "tell me of the cat and the cat and the cat"
TOKENS = 60
SEED = 5


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_drafter(tmp_path_factory.mktemp("paths") / "drafter", block=8)


@pytest.fixture(scope="module")
def tokenizer(tiny_folder: Path) -> Any:
    return mlx_lm.load(str(tiny_folder))[1]


@pytest.fixture(scope="module")
def reference(tiny_folder: Path, tokenizer: Any) -> Callable[[float], tuple[list[int], str]]:
    """(ids, text) of the chat prompt, drafted by nobody."""
    model, _ = mlx_lm.load(str(tiny_folder))
    ids = encode_chat(tokenizer, [{"role": "user", "content": MESSAGE}])

    def run(temp: float) -> tuple[list[int], str]:
        if not temp:
            found = list(mlx_lm.stream_generate(model, tokenizer, ids, max_tokens=TOKENS))
        else:
            found = list(Engine(model, tokenizer).stream(ids, settings(temp)))
        return [r.token for r in found], "".join(r.text for r in found)

    return run


def settings(temp: float, **more: Any) -> Options:
    return Options(max_tokens=TOKENS, sampler=make_sampler(temp=temp, seed=SEED) if temp else None, **more)


LANES = ("plain", "ngram", "dflash")
TEMPS = (0.0, 0.8)


@pytest.mark.parametrize("temp", TEMPS)
@pytest.mark.parametrize("lane", LANES)
def test_python_paths(lane: str, temp: float, tiny_folder: Path, drafter: Path, tokenizer: Any, reference: Any) -> None:
    ids, text = reference(temp)
    prompt = encode_chat(tokenizer, [{"role": "user", "content": MESSAGE}])
    pair = load(tiny_folder, draft=str(drafter) if lane == "dflash" else lane)
    keywords = {
        "max_tokens": TOKENS,
        "sampler": make_sampler(temp=temp, seed=SEED),
        "width": None if lane == "plain" else 4,
    }
    streamed = list(stream_generate(*pair, prompt, **keywords))
    assert [r.token for r in streamed] == ids and "".join(r.text for r in streamed) == text
    assert streamed[-1].lane == lane
    assert generate(*pair, prompt, **keywords) == text
    cache = make_prompt_cache(pair[0])
    assert [r.token for r in stream_generate(*pair, prompt, prompt_cache=cache, **keywords)] == ids


@pytest.mark.parametrize("lane", LANES)
def test_a_cached_turn(lane: str, tiny_folder: Path, drafter: Path, tokenizer: Any) -> None:
    """Two turns on one session, against two cold requests of lane plain."""
    engine = Engine.load(tiny_folder, draft=str(drafter) if lane == "dflash" else lane)
    plain = Engine.load(tiny_folder, draft=None)
    session, messages = engine.session(), []
    for text in (MESSAGE, "and the cat?", "go on"):
        messages.append({"role": "user", "content": text})
        ids = encode_chat(tokenizer, messages)
        warm = list(engine.stream(ids, settings(0.8, width=None if lane == "plain" else 5), session))
        assert [r.token for r in warm] == [r.token for r in plain.stream(ids, settings(0.8))]
        messages.append({"role": "assistant", "content": "".join(r.text for r in warm)})


@pytest.mark.parametrize("temp", TEMPS)
@pytest.mark.parametrize("lane", LANES)
def test_command_line_paths(
    lane: str,
    temp: float,
    tiny_folder: Path,
    drafter: Path,
    reference: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """``generate`` as text, as JSON and as events."""
    for name in ("XDG_DATA_HOME", "XDG_CONFIG_HOME", "HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    ids, text = reference(temp)
    words = ["generate", "-m", str(tiny_folder), "-p", MESSAGE, "--max-tokens", str(TOKENS), "--temp", str(temp)]
    words += ["--seed", str(SEED)] if temp else []
    words += {"plain": ["--method", "plain"], "ngram": ["--method", "ngram", "--width", "4"]}.get(
        lane, ["--draft", str(drafter), "--width", "2,8"]
    )

    def output(*more: str) -> str:
        assert cli.run([*words, *more]) == 0
        return capfd.readouterr().out

    assert output().rstrip("\n") == text.rstrip("\n")
    found = json.loads(output("--json"))
    assert (found["tokens"], found["text"], found["mlx_spec"]["lane"]) == (ids, text, lane)
    events = [json.loads(line) for line in output("--jsonl").splitlines()]
    assert [event["token"] for event in events[:-1]] == ids == events[-1]["tokens"]
    assert "".join(event["text"] for event in events[:-1]) == text
