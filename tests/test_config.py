"""Settings: precedence, checks that name key and value, and a file that is never half written."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from mlx_spec.apps.config import KEYS, config_path, read_file, resolve, write_key
from mlx_spec.errors import OptionError


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "config.toml"


def test_flag_beats_environment_beats_file_beats_default(file: Path) -> None:
    file.write_text("temperature = 0.1\ntop_p = 0.5\nseed = 3\n")
    environ = {"MLX_SPEC_TEMPERATURE": "0.2", "MLX_SPEC_SEED": "4"}
    found = resolve({"temperature": 0.3, "seed": None}, environ, file)
    assert [found[name] for name in ("temperature", "seed", "top_p", "min_p")] == [0.3, 4, 0.5, 0.0]
    assert [found.source(name) for name in ("temperature", "seed", "top_p", "min_p")] == [
        "flag",
        "environment",
        "file",
        "default",
    ]
    assert found.notes == ()


@pytest.mark.parametrize(
    ("name", "raw", "wanted"),
    [
        ("temperature", "0.5", 0.5),
        ("temperature", 1, 1.0),
        ("max_tokens", "-1", -1),
        ("width", "4", 4),
        ("width", "2,4, 8", (2, 4, 8)),
        ("width", [2, 4], (2, 4)),
        ("markdown", "off", False),
        ("markdown", True, True),
        ("think", True, "on"),
        ("think", "OFF", "off"),
        ("model", "a/b", "a/b"),
    ],
)
def test_values_are_read_from_text_and_toml(name: str, raw: object, wanted: object) -> None:
    assert KEYS[name].parse(raw) == wanted


@pytest.mark.parametrize(
    ("name", "raw"),
    [
        ("temperature", "hot"),
        ("temperature", "nan"),
        ("temperature", "-0.1"),
        ("temperature", True),
        ("top_p", "1.5"),
        ("max_tokens", 1.5),
        ("seed", "-1"),
        ("width", "0"),
        ("width", ""),
        ("width", "4,x"),
        ("width", "1000"),
        ("exactness", "exactly"),
        ("markdown", "maybe"),
        ("model", 5),
    ],
)
def test_bad_values_name_the_key_and_the_value(name: str, raw: object) -> None:
    with pytest.raises(OptionError, match=name) as caught:
        KEYS[name].parse(raw)
    assert str(raw).split(",")[-1] in str(caught.value)


def test_bad_files_name_the_file_and_the_key(file: Path) -> None:
    file.write_text("temprature = 1\n")
    with pytest.raises(OptionError, match=r"config.toml: unknown setting 'temprature'; known are model"):
        read_file(file)
    file.write_text("seed = 'x'\n")
    with pytest.raises(OptionError, match=r"config.toml: seed must be a whole number"):
        read_file(file)
    file.write_text("seed = \n")
    with pytest.raises(OptionError, match=r"config.toml is not TOML.*line 1"):
        read_file(file)
    assert read_file(file.with_name("none.toml")) == {}


def test_a_bad_variable_is_named_and_a_strange_one_noted(file: Path) -> None:
    with pytest.raises(OptionError, match="MLX_SPEC_TOP_P"):
        resolve({}, {"MLX_SPEC_TOP_P": "2"}, file)
    assert "MLX_SPEC_TEMPRATURE" in resolve({}, {"MLX_SPEC_TEMPRATURE": "2", "MLX_SPEC_DEBUG": "1"}, file).notes[0]


def test_drafting_is_decided_by_one_source(file: Path) -> None:
    file.write_text("draft = 'some/drafter'\n")
    assert resolve({"method": "plain"}, {}, file)["draft"] is None
    assert resolve({"speculative_config": "{}"}, {}, file)["draft"] is None
    assert resolve({}, {}, file)["draft"] == "some/drafter"
    assert resolve({}, {"MLX_SPEC_METHOD": "ngram"}, file)["draft"] is None


def test_set_keeps_comments_and_modes_and_follows_links(file: Path, tmp_path: Path) -> None:
    real = tmp_path / "dotfiles" / "mlx.toml"
    real.parent.mkdir()
    real.write_text("# mine\nseed = 1  # lucky\n\nmodel = 'x'\n")
    real.chmod(0o640)
    file.symlink_to(real)
    assert write_key(file, "seed", "7") == 7
    assert write_key(file, "width", "2,4") == (2, 4)
    assert write_key(file, "markdown", "off") is False
    write_key(file, "model", None)
    assert real.read_text().startswith("# mine\nseed = 7  # lucky\n")
    assert file.is_symlink()
    assert stat.S_IMODE(real.stat().st_mode) == 0o640
    assert read_file(file) == {"seed": 7, "width": (2, 4), "markdown": False}
    assert [found.name for found in real.parent.iterdir()] == ["mlx.toml"]


def test_set_refuses_before_it_writes(file: Path) -> None:
    file.write_text("seed = 1\n")
    for name, text in (("seed", "x"), ("sed", "1")):
        with pytest.raises(OptionError):
            write_key(file, name, text)
    assert file.read_text() == "seed = 1\n"
    file.write_text("seed = = 1\n")
    with pytest.raises(OptionError, match="not TOML"):
        write_key(file, "seed", "2")
    assert file.read_text() == "seed = = 1\n"


def test_the_path_can_be_named() -> None:
    assert config_path({"MLX_SPEC_CONFIG": "~/x.toml"}) == Path.home() / "x.toml"
    assert config_path({}).name == "config.toml"
