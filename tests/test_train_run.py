"""Training runs: what they write, that a kill leaves no trace in the weights, and that they fail in one clear line."""

from __future__ import annotations

import json
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from train_fixture import random_data, small_target, train_settings, write_data

from mlx_spec.convert.train import checkpoints, curve, shards
from mlx_spec.convert.train.features import Recorder
from mlx_spec.convert.train.run import export, resume, train
from mlx_spec.convert.train.settings import TrainSettings
from mlx_spec.convert.train.trainer import Trainer, TrainProgress
from mlx_spec.convert.train.trouble import TrainingError
from mlx_spec.drafters import dflash
from mlx_spec.engine import Engine
from mlx_spec.errors import CheckpointError, ModelNotFoundError, OptionError, PairError, ResourceError, UnsupportedError
from mlx_spec.options import Options
from mlx_spec.targets.decoder import DecoderTarget


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_target(tmp_path_factory.mktemp("target") / "small")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, target: Path) -> Path:
    return random_data(tmp_path_factory.mktemp("data") / "data", target)


def weights_of(folder: Path) -> dict[str, mx.array]:
    return dict(mx.load(str(folder / "model.safetensors")))


def same(one: dict[str, mx.array], other: dict[str, mx.array]) -> bool:
    assert one.keys() == other.keys()
    return all(mx.array_equal(one[name], other[name]).item() for name in one)


def leftovers(folder: Path) -> list[str]:
    """Temporary names that something forgot."""
    return [path.name for path in folder.rglob(".*")]


def test_a_run_writes_a_drafter_with_its_record(target: Path, data: Path, tmp_path: Path) -> None:
    said: list[TrainProgress] = []
    result = train(train_settings(target, data, tmp_path / "run", evaluate_every=3), report=said.append, command="x y")
    assert (result.finished, result.step, result.steps) == (True, 6, 6)
    drafter = dflash.load(result.drafter, {})
    assert (drafter.config.num_hidden_layers, drafter.default_width) == (1, 4)
    record = json.loads((result.drafter / "provenance.json").read_text())
    assert record["command"] == "x y"
    assert record["data"]["sha256"] == shards.combined_hash(shards.read_manifest(data))
    assert {"mlx", "mlx-lm", "mlx-spec", "device"} <= set(record["versions"])
    assert record["step"] == 6
    points = curve.read(tmp_path / "run" / "curve.jsonl")
    assert [point["step"] for point in points] == list(range(7))
    assert [point["step"] for point in points if point["held_out"]] == [0, 3, 6]
    assert points == curve.read(result.drafter / "curve.jsonl")
    assert len(points[-1]["accuracy"]) == len(points[-1]["held_out"]["accuracy"]) == 3
    assert "held-out acceptance length" in said[-1].line
    assert (result.drafter / "README.md").read_text().count("6 updates") == 1
    assert not leftovers(tmp_path)
    assert [step for step, _ in checkpoints.listed(tmp_path / "run")] == [4, 6]


class Killed(BaseException):
    """Like SIGKILL: nothing of ours catches it."""


def killed_at(step: int, patch: pytest.MonkeyPatch) -> None:
    """The process dies in the middle of this update."""
    right = Trainer.pull

    def pull(self: Trainer, number: int) -> Any:
        if self.step == step:
            raise Killed
        return right(self, number)

    patch.setattr(Trainer, "pull", pull)


def killed_and_resumed(settings: TrainSettings, steps: list[int]) -> Path:
    """The drafter of a run that dies at each of these updates and is resumed each time."""
    for number, step in enumerate(steps):
        with pytest.MonkeyPatch.context() as patch:
            killed_at(step, patch)
            with pytest.raises(Killed):
                train(settings) if number == 0 else resume(settings.out)
    result = resume(settings.out)
    assert result.finished
    return result.drafter


@pytest.mark.parametrize("loss", ["decay", "dpace"])
def test_kill_and_resume_bit_for_bit(target: Path, data: Path, tmp_path: Path, loss: str) -> None:
    """Two random updates; accumulation, a reduced draft vocabulary and the feature cache included."""
    changes = {"loss": loss, "accumulate": 2, "draft_vocab": 120, "steps": 7}
    straight = train(train_settings(target, data, tmp_path / "straight", **changes))
    steps = np.random.default_rng().integers(0, 7, 2).tolist()
    drafter = killed_and_resumed(train_settings(target, data, tmp_path / "killed", **changes), sorted(steps))
    assert same(weights_of(straight.drafter), weights_of(drafter)), steps
    one, other = (checkpoints.newest(tmp_path / name).moments for name in ("straight", "killed"))
    assert same(dict(tree_flatten(one.first)), dict(tree_flatten(other.first)))
    assert same(dict(tree_flatten(one.second)), dict(tree_flatten(other.second)))
    lines = [(p["step"], p["loss"]) for p in curve.read(tmp_path / "straight" / "curve.jsonl")]
    again = [(p["step"], p["loss"]) for p in curve.read(tmp_path / "killed" / "curve.jsonl")]
    assert [step for step, _ in again] == [step for step, _ in lines]


@pytest.mark.full
def test_compiled_updates_are_the_plain_ones(target: Path, data: Path, tmp_path: Path) -> None:
    one, other = (train(train_settings(target, data, tmp_path / c, compile=c)) for c in ("on", "off"))
    for name, value in weights_of(one.drafter).items():
        np.testing.assert_allclose(np.array(value), np.array(weights_of(other.drafter)[name]), atol=1e-4)


@pytest.mark.full
@pytest.mark.parametrize("compiled", ["off", "on"])
def test_ten_kills(target: Path, data: Path, tmp_path: Path, compiled: str) -> None:
    changes = {"steps": 40, "save_every": 3, "compile": compiled}
    straight = train(train_settings(target, data, tmp_path / "straight", **changes))
    steps = sorted(np.random.default_rng().integers(0, 40, 10).tolist())
    drafter = killed_and_resumed(train_settings(target, data, tmp_path / "killed", **changes), steps)
    assert same(weights_of(straight.drafter), weights_of(drafter)), steps


def test_cancel_saves_and_resumes(target: Path, data: Path, tmp_path: Path) -> None:
    straight = train(train_settings(target, data, tmp_path / "straight"))
    polls = iter([False] * 4 + [True] * 50)
    run = tmp_path / "run"
    stopped = train(train_settings(target, data, run), cancel=lambda: next(polls))
    assert not stopped.finished
    assert checkpoints.newest(run).step == stopped.step
    assert 0 < stopped.step < 6
    went_on = resume(run)
    assert went_on.finished
    assert same(weights_of(straight.drafter), weights_of(went_on.drafter))
    again = resume(run)
    assert (again.finished, again.step) == (True, 6), "resuming a finished run only writes its drafter"


def test_a_longer_run_goes_on(target: Path, data: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(train_settings(target, data, run))
    longer = resume(run, {"steps": 9})
    assert (longer.step, longer.steps) == (9, 9)
    with pytest.raises(OptionError, match=r"--lr 0.003, now 0.1"):
        resume(run, {"lr": 0.1})


def test_overfit_is_accepted_whole_in_the_engine(target: Path, tmp_path: Path) -> None:
    """What the trainer measures is what the engine gets: a drafter that knows one answer drafts all of it."""
    prompt = [20, 30, 40, 50]
    with Engine.load(target, draft=None) as engine:
        answer = [r.token for r in engine.stream(prompt, Options(max_tokens=48))]
    one = write_data(tmp_path / "data", target, [(prompt + answer, len(prompt))] * 2)
    settings = train_settings(
        target, one, tmp_path / "run", steps=60, held_out=str(one), anchors=48, lr=1e-2, block=8, batch=1,
        evaluate_every=60,
    )  # fmt: skip
    result = train(settings)
    assert result.measured is not None
    assert result.measured.acceptance_length > 6
    with Engine.load(target, draft=result.drafter) as engine:
        responses = list(engine.stream(prompt, Options(max_tokens=48)))
    assert [r.token for r in responses] == answer
    stats = responses[-1].stats
    assert stats.lane == "dflash"
    assert stats.acceptance_length == pytest.approx(result.measured.acceptance_length, abs=1e-6)


def test_adapting_starts_from_the_drafter(target: Path, data: Path, tmp_path: Path) -> None:
    first = train(train_settings(target, data, tmp_path / "one", steps=2, draft_vocab=100, bits=8))
    changes = {"layers": None, "block": None, "steps": 1, "start_from": str(first.drafter)}
    second = train(train_settings(target, data, tmp_path / "two", **changes))
    assert dflash.load(second.drafter, {}).config.draft_vocab_size == 100
    begun = json.loads((tmp_path / "two" / "curve.jsonl").read_text().splitlines()[0])["held_out"]
    ended = json.loads((tmp_path / "one" / "curve.jsonl").read_text().splitlines()[-1])["held_out"]
    assert begun["acceptance_length"] == pytest.approx(ended["acceptance_length"], abs=0.3)
    with pytest.raises(OptionError, match="--block and --from contradict"):
        train_settings(target, data, tmp_path / "three", **changes | {"block": 8})
    other = small_target(tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (first.drafter / "config.json").write_text(
        (first.drafter / "config.json").read_text().replace('"num_target_layers": 3', '"num_target_layers": 4')
    )
    assert config["num_hidden_layers"] == 3
    with pytest.raises(PairError, match="target layers 4 against the target's 3"):
        train(train_settings(target, data, tmp_path / "four", **changes))
    assert not (tmp_path / "four").exists()


def test_features_off_is_the_same_in_decoding(target: Path, data: Path, tmp_path: Path) -> None:
    """The ablation's drafter ignores whatever features the engine hands it."""
    result = train(train_settings(target, data, tmp_path / "run", features="off", steps=2, init="random"))
    assert not weights_of(result.drafter)["fc.weight"].any().item()
    assert not (tmp_path / "run" / "features").exists()


def test_online_features_are_the_cached_ones(target: Path, data: Path, tmp_path: Path) -> None:
    online = train(train_settings(target, data, tmp_path / "online", features="online", steps=3))
    cached = train(train_settings(target, data, tmp_path / "cached", cache_dtype="float32", steps=3))
    for name, value in weights_of(online.drafter).items():
        np.testing.assert_allclose(np.array(value), np.array(weights_of(cached.drafter)[name]), atol=1e-4)
    kept = json.loads((tmp_path / "cached" / "features" / "features.json").read_text())
    assert kept["dtype"] == "float32"


def test_export_of_a_checkpoint(target: Path, data: Path, tmp_path: Path) -> None:
    train(train_settings(target, data, tmp_path / "run", keep=4))
    export(tmp_path / "run", tmp_path / "out", step=4, bits=16)
    assert weights_of(tmp_path / "out")["norm.weight"].dtype == mx.bfloat16
    assert json.loads((tmp_path / "out" / "provenance.json").read_text())["step"] == 4
    with pytest.raises(OptionError, match="no checkpoint of update 3; it has 0, 2, 4, 6"):
        export(tmp_path / "run", tmp_path / "other", step=3)
    with pytest.raises(OptionError, match="exists already"):
        export(tmp_path / "run", tmp_path / "out")


# --- what goes wrong --------------------------------------------------------------------------------------------------


def test_empty_and_unlearnable_data(target: Path, data: Path, tmp_path: Path) -> None:
    short = write_data(tmp_path / "short", target, [([5, 6, 7], 2), ([5, 6], 1)])
    with pytest.raises(OptionError, match=r"none of the 2 sequences .* answer of two tokens"):
        train(train_settings(target, short, tmp_path / "run"))
    empty = write_data(tmp_path / "empty", target, [])
    with pytest.raises(OptionError, match="holds no sequence"):
        train(train_settings(target, empty, tmp_path / "run"))
    single = write_data(tmp_path / "single", target, [([5, 6, 7, 8, 9], 2)])
    with pytest.raises(OptionError, match="one sequence is too little"):
        train(train_settings(target, single, tmp_path / "run"))
    with pytest.raises(ModelNotFoundError, match="no data folder"):
        train(train_settings(target, tmp_path / "nowhere", tmp_path / "run"))
    with pytest.raises(OptionError, match="holds no training data"):
        train(train_settings(target, target, tmp_path / "run"))
    foreign = write_data(tmp_path / "foreign", target, [([5, 300, 7, 8, 9], 2)] * 2)
    with pytest.raises(PairError, match="holds token 300"):
        train(train_settings(target, foreign, tmp_path / "run"))
    damaged = shutil.copytree(data, tmp_path / "damaged")
    with (damaged / "tokens-00000.safetensors").open("ab") as file:
        file.write(b"x")
    with pytest.raises(CheckpointError, match=r"tokens-00000.safetensors is missing or not the file"):
        train(train_settings(target, damaged, tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_settings_that_do_not_fit_the_target(target: Path, data: Path, tmp_path: Path) -> None:
    for changes, words in (
        ({"taps": (1, 3)}, "--taps holds 3, but the target's layers are 0 to 2"),
        ({"mask_id": 256}, "--mask-id 256 is outside"),
        ({"mask_id": 0}, "--mask-id 0 ends answers"),
        ({"draft_vocab": 1000}, "--draft-vocab 1000 is above"),
        ({"heads": 3}, "--heads 3 is not a multiple"),
    ):
        with pytest.raises(OptionError, match=words):
            train(train_settings(target, data, tmp_path / "run", **changes))
    with pytest.raises(UnsupportedError, match="use --init random"):
        train(train_settings(target, data, tmp_path / "run", heads=8))
    assert not (tmp_path / "run").exists()


def test_a_target_whose_layer_is_never_called() -> None:
    from toys import qwen3_config, tiny_qwen3

    model = tiny_qwen3(layers=3, hidden=32)
    wrapped = DecoderTarget(model, qwen3_config(3, 32))
    record = Recorder(wrapped, (1,))
    model.model.layers = model.model.layers[:1]
    with pytest.raises(UnsupportedError, match="layer 1 of this target is never called"):
        record(mx.zeros((1, 4), dtype=mx.int32))


def test_a_loss_that_is_not_a_number(target: Path, data: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with pytest.raises(TrainingError, match=r"the loss is (nan|-?inf) at update \d: the last .* is whole; lower --lr"):
        train(train_settings(target, data, run, lr=1e30, save_every=1, warmup=0.0))
    assert checkpoints.newest(run).step < 6
    assert not leftovers(run)


@contextmanager
def files_at_most(size: int) -> Iterator[None]:
    """Writing beyond this many bytes into one file fails, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_disk_full(target: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    with files_at_most(60_000), pytest.raises(OSError, match="File too large"):
        train(train_settings(target, data, run, features="online"))
    assert not checkpoints.listed(run)
    assert not leftovers(run), "half a checkpoint is no checkpoint"
    with files_at_most(4_000), pytest.raises(OSError, match="File too large"):
        train(train_settings(target, data, tmp_path / "features"))
    assert not (tmp_path / "features" / "features" / "features.bin").exists()
    assert resume(run).finished, "what was begun can be gone on with"
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(ResourceError, match=r"the feature cache .* needs .* GB .* free"):
        train(train_settings(target, data, tmp_path / "other"))


def test_wrong_folder_to_resume(target: Path, data: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="holds no training run to resume"):
        resume(data)
    with pytest.raises(OptionError, match="holds no training run"):
        resume(tmp_path / "nowhere")
    run = tmp_path / "run"
    train(train_settings(target, data, run, steps=1))
    with pytest.raises(OptionError, match="holds a training run already; give --resume"):
        train(train_settings(target, data, run))
    full = tmp_path / "full"
    full.mkdir()
    (full / "mine.txt").write_text("x")
    with pytest.raises(OptionError, match="is not empty"):
        train(train_settings(target, data, full))
    other = random_data(tmp_path / "other", target, seed=9)
    with pytest.raises(OptionError, match="begun with another data"):
        resume(run, {"data": str(other), "steps": 2})
    (run / "run.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"run.json is damaged"):
        resume(run)


def test_progress_line() -> None:
    line = TrainProgress(5, 10, 1.5, (0.5, 0.25), 100.0, 2.0, 300.0).line
    assert line == (
        "training: update 5 of 10, loss 1.500, right .50 .25, held-out acceptance length 2.00, 100 blocks/s, 5 min left"
    )


def test_bfloat16_forward_keeps_float32_weights(target: Path, data: Path, tmp_path: Path) -> None:
    """Half the bits in the forward, all of them in weights and moments; the first losses are nearly the same."""
    for name in ("bfloat16", "float32"):
        train(train_settings(target, data, tmp_path / name, dtype=name, steps=2, evaluate_every=20))
    half, full = (curve.read(tmp_path / name / "curve.jsonl") for name in ("bfloat16", "float32"))
    assert half[1]["loss"] == pytest.approx(full[1]["loss"], rel=0.02)
    newest = checkpoints.newest(tmp_path / "bfloat16")
    kinds = {value.dtype for value in [*newest.weights.values(), *dict(tree_flatten(newest.moments.second)).values()]}
    assert kinds == {mx.float32}


def test_minutes_become_updates(target: Path, data: Path, tmp_path: Path) -> None:
    """Timed at the start, then fixed: the number is in the checkpoint and a resumed run keeps it."""
    run = tmp_path / "run"
    polls = iter([False] * 4 + [True] * 99)
    stopped = train(train_settings(target, data, run, steps=None, minutes=0.2), cancel=lambda: next(polls))
    assert stopped.steps > 5
    assert checkpoints.newest(run).state["steps"] == stopped.steps
    polls = iter([False] * 3 + [True] * 99)
    assert resume(run, cancel=lambda: next(polls)).steps == stopped.steps
    default = train(train_settings(target, data, tmp_path / "six", steps=None))
    assert default.steps == 6 * 3, "six passes over five sequences, two at once"


def test_a_curve_is_drawn_where_matplotlib_is(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra `plot` is not installed")
    held = {"acceptance_length": 2.5}
    points = [{"step": 0, "loss": None, "held_out": held}, {"step": 4, "loss": 3.0, "held_out": None}]
    (tmp_path / "curve.jsonl").write_text("".join(json.dumps(point) + "\n" for point in points) + '{"step": 5, "lo')
    course = curve.Curve(tmp_path, 4)
    assert course.points == points, "a line cut short by a kill is dropped"
    course.plot()
    assert (tmp_path / "curve.svg").read_text().count("<svg") == 1
