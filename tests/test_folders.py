"""What a folder is, and what is wrong with it, in one sentence that names it."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dflash_fixture import save_drafter

from mlx_spec.errors import CheckpointError, MlxSpecError, ModelNotFoundError, PairError, UnsupportedError
from mlx_spec.folders import check_drafter, check_folder, check_target, drafter_format

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def copy(tiny_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_folder, tmp_path / "copy"))


def change_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def index(folder: Path, *names: str) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": {f"tensor{i}": name for i, name in enumerate(names)}}))


def only(folder: Path, *kept: str) -> None:
    for path in folder.iterdir():
        if path.name not in kept:
            path.unlink()


def shard(folder: Path, number: int, count: int) -> None:
    shutil.copy(folder / WEIGHTS, folder / f"model-{number:05d}-of-{count:05d}.safetensors")


def cut(folder: Path, size: int) -> None:
    with (folder / WEIGHTS).open("r+b") as file:
        file.truncate(size)


def damage_header(folder: Path) -> None:
    data = bytearray((folder / WEIGHTS).read_bytes())
    data[9:12] = b"\x00\xff{"
    (folder / WEIGHTS).write_bytes(data)


FAULTS: list[tuple[Callable[[Path], object], type[MlxSpecError], tuple[str, ...]]] = [
    (lambda f: only(f), CheckpointError, ("no config.json", "it is empty")),
    (lambda f: only(f, WEIGHTS), CheckpointError, ("no config.json", WEIGHTS)),
    (lambda f: only(f, "config.json"), CheckpointError, ("config.json but no weights",)),
    (lambda f: (only(f, "config.json"), (f / "m.gguf").touch()), CheckpointError, ("GGUF", "converted")),
    (lambda f: (only(f, "config.json"), (f / "pytorch_model.bin").touch()), CheckpointError, ("PyTorch",)),
    (lambda f: (only(f), (f / "adapter_config.json").touch()), CheckpointError, ("an adapter",)),
    (lambda f: (f / "config.json").write_text("{broken"), CheckpointError, ("config.json", "JSON")),
    (lambda f: (f / "config.json").write_text("[]"), CheckpointError, ("a list instead of an object",)),
    (lambda f: change_config(f, model_type=None), CheckpointError, ("no model_type",)),
    (lambda f: change_config(f, model_type="brand_new"), UnsupportedError, ("'brand_new'", "mlx-lm")),
    (lambda f: change_config(f, model_type="../evil"), UnsupportedError, ("../evil",)),
    (lambda f: cut(f, 0), CheckpointError, (WEIGHTS, "cut short (0 bytes)")),
    (lambda f: cut(f, 100), CheckpointError, ("cut short (100 bytes)",)),
    (lambda f: cut(f, (f / WEIGHTS).stat().st_size - 1), CheckpointError, ("bytes where its header needs",)),
    (lambda f: (f / WEIGHTS).write_bytes(struct.pack("<Q", 1 << 60) + b"x" * 99), CheckpointError, ("not a safe",)),
    (
        lambda f: (f / WEIGHTS).write_bytes(b"version https://git-lfs.github.com/spec/v1\noid"),
        CheckpointError,
        ("lfs",),
    ),
    (damage_header, CheckpointError, ("damaged header",)),
    (lambda f: index(f, WEIGHTS, "model-a.safetensors"), CheckpointError, ("half-downloaded: 1 of 2", "model-a.")),
    (lambda f: (shard(f, 1, 5), shard(f, 4, 5)), CheckpointError, ("3 of 5", "model-00002-of-00005")),
    (lambda f: (f / INDEX).write_text("{}"), CheckpointError, ("weight_map",)),
    (lambda f: (f / INDEX).write_text("not json"), CheckpointError, ("JSON",)),
    (lambda f: index(f, "../../etc/passwd"), CheckpointError, ("points outside its folder", "../../etc/passwd")),
    (lambda f: index(f, "/etc/passwd"), CheckpointError, ("points outside",)),
    (lambda f: index(f, "a\\b.safetensors"), CheckpointError, ("points outside",)),
    (lambda f: (f / "tokenizer.json").unlink(), CheckpointError, ("no tokenizer",)),
    (shutil.rmtree, ModelNotFoundError, ("does not exist",)),
]


@pytest.mark.parametrize(("fault", "kind", "words"), FAULTS)
def test_a_fault_is_named(
    fault: Callable[[Path], object], kind: type[MlxSpecError], words: tuple[str, ...], copy: Path
) -> None:
    assert check_target(copy).kind == "target"
    fault(copy)
    with pytest.raises(kind) as caught:
        check_target(copy)
    assert type(caught.value) is kind
    for word in (str(copy), *words):
        assert word in str(caught.value)


def test_the_model_type_is_told_before_missing_weights(copy: Path) -> None:
    change_config(copy, model_type="brand_new")
    (copy / WEIGHTS).unlink()
    with pytest.raises(UnsupportedError, match="brand_new"):
        check_folder(copy)


def test_a_folder_that_is_whole(tiny_folder: Path, tmp_path: Path) -> None:
    info = check_target(tiny_folder)
    assert (info.kind, info.format) == ("target", "qwen3")
    assert info.size == (tiny_folder / WEIGHTS).stat().st_size
    assert [file.name for file in info.weights] == [WEIGHTS]
    drafter = check_drafter(save_drafter(tmp_path / "drafter"))
    assert (drafter.kind, drafter.format) == ("drafter", "DFlash")


def test_each_in_the_others_place(tiny_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(PairError, match="is a DFlash drafter, not a model; give it with --draft"):
        check_target(save_drafter(tmp_path / "drafter"))
    with pytest.raises(PairError, match=r"is a language model \(qwen3\), not a drafter; give it with --model"):
        check_drafter(tiny_folder)


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({"architectures": ["DFlashDraftModel"], "dflash_config": {"target_layer_ids": [1]}}, "DFlash"),
        ({"target_layer_ids": [1], "mask_token_id": 3}, "DFlash"),
        ({"architectures": ["DFlash2DraftModel"], "dflash_config": {}}, "DFlash2"),
        ({"architectures": ["DFlashDraftModel"], "dflash_config": {"selector_rank": 256}}, "DFlash2"),
        ({"architectures": ["Qwen3DSparkModel"], "markov_rank": 0, "target_layer_ids": [1]}, "DeepSpec"),
        ({"speculators_model_type": "dflash", "architectures": ["DFlashSpeculator"]}, "speculators"),
        ({"dflash_config": {"projector_type": "domino"}}, "DFlash successor"),
        ({"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"}, "EAGLE"),
        ({"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 9}, None),
        ({}, None),
    ],
)
def test_formats(config: dict[str, Any], kind: str | None) -> None:
    assert drafter_format(config) == kind
