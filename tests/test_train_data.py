"""Data for training: what prompts are read, that the target's own answers are kept, and that a kill changes nothing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from toys import tiny_qwen3
from train_fixture import data_settings, small_target, write_prompts

from mlx_spec.convert.train import answers, shards
from mlx_spec.convert.train import data as data_module
from mlx_spec.convert.train.data import DataProgress, make_data
from mlx_spec.convert.train.prompts import code_files, read_prompts
from mlx_spec.convert.train.settings import DataSettings, TrainSettings, read_recipe
from mlx_spec.convert.train.trouble import TrainingError
from mlx_spec.engine import Engine
from mlx_spec.errors import ModelNotFoundError, OptionError
from mlx_spec.options import Options


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_target(tmp_path_factory.mktemp("target") / "small")


def letters(text: str) -> list[int]:
    return [ord(letter) % 256 for letter in text]


def prompts_of(**changes: Any):
    settings = DataSettings(target="t", out="o", **changes)
    return read_prompts(settings, letters)


def test_answers_are_the_targets_own(target: Path, tmp_path: Path) -> None:
    """Greedy answers in batches equal the engine's, one by one; prompts come through the chat template."""
    prompts = write_prompts(tmp_path / "p.txt", 6)
    settings = data_settings(target, prompts, tmp_path / "data", shard=4)
    said: list[DataProgress] = []
    manifest = make_data(settings, report=said.append, command="the command")
    assert manifest["complete"]
    assert manifest["command"] == "the command"
    assert [entry["sequences"] for entry in manifest["shards"]] == [4, 2]
    assert manifest["template_sha256"]
    assert said[-1].prompts == said[-1].of == 6
    assert "tokens/s" in said[-1].line
    kept = shards.read_data(tmp_path / "data", 1000)
    assert len(kept.samples) == 6
    with Engine.load(target, draft=None) as engine:
        for sample in kept.samples:
            tokens = sample.tokens.tolist()
            assert engine.tokenizer.decode(tokens[: sample.prompt]).endswith("[assistant]")
            answer = [r.token for r in engine.stream(tokens[: sample.prompt], Options(max_tokens=20))]
            assert answer == tokens[sample.prompt :]
    stored = shards.load_arrays(tmp_path / "data" / "tokens-00000.safetensors", "data")
    assert str(stored["tokens"].dtype) == "mlx.core.uint16"


def test_both_decoders_say_the_same() -> None:
    """Ours and mlx-lm's batching, prompts of several lengths, rows that end early; waves smaller than the prompts."""
    model, rng = tiny_qwen3(layers=2, hidden=32, seed=3), np.random.default_rng(0)
    prompts = [rng.integers(1, 250, n).tolist() for n in (1, 2, 9, 9, 30, 31, 4)]
    whole = answers.answer(model, prompts, [], 24, batch=3)
    assert whole is not None
    assert [len(said) for said in whole] == [24] * 7
    ends = frozenset({whole[2][5], whole[4][1], whole[0][11]})
    options = {"batch": 3, "sampler": None, "cancel": lambda: False, "told": lambda tokens: None}
    ours = answers._by_waves(model, prompts, ends, 24, **options)
    theirs = answers._by_mlx_lm(model, prompts, ends, 24, **options)
    assert ours == theirs
    for said, all_ in zip(ours, whole, strict=True):
        assert said == all_[: next((i + 1 for i, token in enumerate(all_) if token in ends), 24)]
    assert answers.answer(model, prompts, [], 24, batch=3, cancel=lambda: True) is None


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_resumed_data_are_the_same_files(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    prompts = write_prompts(tmp_path / "p.txt", 10)
    changes = {"temperature": temperature, "shard": 3}
    whole = make_data(data_settings(target, prompts, tmp_path / "whole", **changes))
    polls = iter([False] * 30 + [True] * 99)
    out = tmp_path / "killed"
    begun = make_data(data_settings(target, prompts, out, **changes), cancel=lambda: next(polls))
    assert not begun["complete"]
    assert 0 < len(begun["shards"]) < 4

    def dies(*args: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shards, "write_manifest", dies)  # killed between a shard and the manifest that lists it
        with pytest.raises(KeyboardInterrupt):
            make_data(data_settings(target, prompts, out, **changes), resume=True)
    ended = make_data(data_settings(target, prompts, out, **changes), resume=True)
    assert ended["shards"] == whole["shards"]
    assert ended["complete"]
    assert ended["left_out"] == whole["left_out"]
    with pytest.raises(OptionError, match="begun with another max_tokens"):
        make_data(data_settings(target, prompts, out, **changes | {"max_tokens": 9}), resume=True)
    with pytest.raises(OptionError, match="holds training data already; give --resume"):
        make_data(data_settings(target, prompts, out, **changes))
    prompts.write_text("another\n")
    with pytest.raises(OptionError, match="begun with another prompts"):
        make_data(data_settings(target, prompts, out, **changes), resume=True)


def test_chats_and_texts(tmp_path: Path) -> None:
    chats = tmp_path / "chats.jsonl"
    turns = [
        {"role": "user", "content": "a"}, {"role": "assistant", "content": "not this"},
        {"role": "user", "content": "b"}, {"role": "assistant", "content": "nor this"},
    ]  # fmt: skip
    chats.write_text(json.dumps({"messages": turns}) + "\n\n" + json.dumps({"prompt": "c\nd"}) + "\n")
    found, sources = prompts_of(prompts=(str(chats),), system="be brief")
    messages = sorted([[m["content"] for m in prompt.messages] for prompt in found])
    assert messages == [["be brief", "a", "not this", "b"], ["be brief", "c\nd"]]
    assert (sources[0].prompts, len(sources[0].sha256)) == (2, 64)

    text = tmp_path / "t.txt"
    text.write_text("one\n\ntwo\none\n")
    found, _ = prompts_of(prompts=(str(text), str(chats)))
    assert len(found) == 4, "each prompt once"
    assert [p.messages for p in found] == [p.messages for p in prompts_of(prompts=(str(text), str(chats)))[0]]
    assert len(prompts_of(prompts=(str(text),), limit=1)[0]) == 1
    raw, _ = prompts_of(prompts=(str(text),), raw=True)
    assert sorted(prompt.text for prompt in raw) == ["one", "two"]


def test_code(tmp_path: Path) -> None:
    home = tmp_path / "project"
    for name in ("a.py", "b/c.py", ".venv/d.py", "e.txt"):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text("\n".join(f"def f{i}():\n    return {i}" for i in range(60)))
    assert [path.name for path in code_files(home, (".py",))] == ["a.py", "c.py"]
    found, _ = prompts_of(prompts=(str(home),), code_lines=20, per_file=3, instructions=("Say", "Ask"))
    texts = [prompt.messages[0]["content"] for prompt in found]
    assert {text.split("\n")[0] for text in texts} == {"Say", "Ask"}
    assert all("```py\ndef f" in text and text.count("\n") == 23 for text in texts)
    raw, _ = prompts_of(prompts=(str(home),), raw=True, code_tokens=30, per_file=2)
    assert {len(prompt.ids) for prompt in raw} == {30}
    assert prompts_of(prompts=(str(home),), raw=True, seed=1, code_tokens=30, per_file=2)[0] != raw
    (home / "a.py").write_text("x = 1\n" * 3)
    assert prompts_of(prompts=(str(home),))[1][0].sha256 != prompts_of(prompts=(str(home / "b"),))[1][0].sha256


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("e.txt", "\n \n", "holds no prompt"),
        ("e.jsonl", '{"prompt": 3}\n', r"e.jsonl:1 has neither messages"),
        ("e.jsonl", '{"prompt": "a"}\n{"prompt', r"e.jsonl:2 is not JSON"),
        ("e.jsonl", '{"messages": [{"role": "assistant", "content": "a"}]}', "has no user message"),
        ("e.jsonl", '{"messages": [{"role": "user"}]}', "neither messages"),
        ("e.txt", b"\xff\xfe\x00", "not UTF-8"),
    ],
)
def test_malformed_prompts(tmp_path: Path, name: str, content: str | bytes, words: str) -> None:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(OptionError, match=words):
        prompts_of(prompts=(str(path),))


def test_nothing_half_written(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, out = write_prompts(tmp_path / "p.txt", 4), tmp_path / "data"
    with pytest.raises(OptionError, match="there are no prompts at"):
        make_data(data_settings(target, tmp_path / "nowhere", out))
    (tmp_path / "folder").mkdir()
    with pytest.raises(OptionError, match=r"holds no prompt \(files with suffix \.py are read\)"):
        make_data(data_settings(target, tmp_path / "folder", out))
    with pytest.raises(OptionError, match="all 4 prompts are longer than --max-prompt 3"):
        make_data(data_settings(target, prompts, out, max_prompt=3))
    with pytest.raises(OptionError, match="do not fit together"):
        make_data(data_settings(target, prompts, out, max_prompt=4000, max_tokens=200))
    with pytest.raises(ModelNotFoundError, match="no data folder"):
        make_data(data_settings(target, prompts, out), resume=True)
    assert not out.exists()
    monkeypatch.setattr(data_module, "answer", lambda model, part, *args, **kwargs: [[0] for _ in part])
    with pytest.raises(TrainingError, match="every one of the 4 answers is a single token"):
        make_data(data_settings(target, prompts, out))
    assert not out.exists()


def test_sequences_are_cut_and_counted(target: Path, tmp_path: Path) -> None:
    make_data(data_settings(target, write_prompts(tmp_path / "p.txt", 3), tmp_path / "data"))
    whole = shards.read_data(tmp_path / "data", 1000)
    cut = shards.read_data(tmp_path / "data", 40)
    assert max(map(len, cut.samples)) == 40
    assert cut.answer_tokens < whole.answer_tokens
    assert whole.sha256 == cut.sha256
    other = shutil.copytree(tmp_path / "data", tmp_path / "copy")
    manifest = json.loads((other / "data.json").read_text())
    (other / "data.json").write_text(json.dumps(manifest | {"format": 2}))
    with pytest.raises(Exception, match="format 2, this version reads 1"):
        shards.read_data(other, 40)


def test_a_large_vocabulary_takes_four_bytes(tmp_path: Path) -> None:
    sample = shards.Sample(np.array([70000, 1, 2], dtype=np.int32), 1)
    entry = shards.write_shard(tmp_path, 0, [sample], 100_000)
    (read,) = shards.read_shard(tmp_path, entry)
    assert read.tokens.tolist() == [70000, 1, 2]
    assert str(shards.load_arrays(tmp_path / entry["file"], "data")["tokens"].dtype) == "mlx.core.uint32"


# --- settings ---------------------------------------------------------------------------------------------------------

RECIPE = """
[data]
target = "t"
prompts = ["a.txt", "b"]
out = "answers"
max-tokens = 64

[train]
target = "t"
data = "answers"
out = "run"
taps = [1, 3]
lr = 1
"""


def test_recipe_and_flags(tmp_path: Path) -> None:
    path = tmp_path / "r.toml"
    path.write_text(RECIPE)
    made = DataSettings.make(path, {"max_tokens": None, "seed": 4})
    assert (made.prompts, made.max_tokens, made.seed) == (("a.txt", "b"), 64, 4)
    train = TrainSettings.make(path, {"out": "other", "steps": 3})
    assert (train.taps, train.out, train.lr, train.steps) == ((1, 3), "other", 1, 3)
    assert TrainSettings(**json.loads(json.dumps(train.as_dict()))) == train
    with pytest.raises(OptionError, match="unknown key 'speed'"):
        TrainSettings.make(path, {"speed": 3})
    with pytest.raises(OptionError, match="--target is needed"):
        TrainSettings.make(None, {"data": "d"})
    path.write_text('[train]\ntarget = "t"\ndata = "d"\nout = "o"\nfrom = "drafter"\n')
    assert TrainSettings.make(path, {}).start_from == "drafter"
    path.write_text("[trian]\n")
    with pytest.raises(OptionError, match="unknown table 'trian'"):
        read_recipe(path, "train")
    path.write_text("[train\n")
    with pytest.raises(OptionError, match="is not TOML"):
        read_recipe(path, "train")
    with pytest.raises(OptionError, match="cannot be read"):
        read_recipe(tmp_path / "none.toml", "train")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"steps": 0}, "--steps must be at least 1, not 0"),
        ({"steps": 1.5}, "--steps must be a whole number"),
        ({"steps": True}, "--steps must be a whole number"),
        ({"steps": 1, "epochs": 2}, "--steps and --epochs contradict"),
        ({"minutes": -1}, "--minutes must be a positive number"),
        ({"lr": float("nan")}, "--lr must be a number"),
        ({"lr": 0}, "--lr must be a positive"),
        ({"warmup": 1}, "--warmup must be from 0 to below 1"),
        ({"block": 1}, "--block must be at least 2"),
        ({"block": 200}, "--block must be at most 128"),
        ({"taps": (1, 1)}, "--taps must be different"),
        ({"bits": 3}, "--bits must be 4, 8 or 16"),
        ({"loss": "mse"}, "--loss must be one of decay, dpace"),
        ({"features": "off", "start_from": "x"}, "--features off and --from contradict"),
        ({"data": 3}, "--data must be text"),
    ],
)
def test_train_settings_refuse(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        TrainSettings(**{"target": "t", "data": "d", "out": "o"} | changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"prompts": ()}, "--prompts is needed"),
        ({"max_tokens": 1}, "--max-tokens must be at least 2"),
        ({"top_p": 0.5}, "--top-p has no effect at temperature 0"),
        ({"temperature": -1}, "--temperature must be at least 0"),
        ({"raw": True, "system": "x"}, "--raw knows no template"),
        ({"think": "maybe"}, "--think must be one of"),
    ],
)
def test_data_settings_refuse(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        DataSettings(**{"target": "t", "prompts": ("p",), "out": "o"} | changes)
