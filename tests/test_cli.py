"""``mlx-spec generate`` and its neighbours as people call them; what fails early is run in this process."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from dflash_fixture import save_drafter
from toys import save_tiny

from mlx_spec.apps import cli

COMMAND = str(Path(sys.executable).with_name("mlx-spec"))
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(cli_env: dict[str, str]) -> Run:
    def start(*args: str, stdin: str | None = None, **env: str) -> subprocess.CompletedProcess[str]:
        source: dict[str, Any] = {"input": stdin} if stdin is not None else {"stdin": subprocess.DEVNULL}
        return subprocess.run(
            [COMMAND, *args], capture_output=True, text=True, env=cli_env | env, timeout=120, **source
        )

    return start


@pytest.fixture
def here(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    """Run in this process: (exit code, stderr)."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name, place in (("XDG_DATA_HOME", "data"), ("XDG_CONFIG_HOME", "config"), ("HF_HUB_OFFLINE", "1")):
        monkeypatch.setenv(name, str(tmp_path / place) if name.startswith("XDG") else place)
    monkeypatch.delenv("MLX_SPEC_DEBUG", raising=False)

    def start(*args: str) -> tuple[int, str]:
        code = cli.run(args)
        return code, capsys.readouterr().err

    return start


def errors_of(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("error: ")]


def test_text_figures_and_json_agree(run: Run, tiny_folder: Path) -> None:
    base = ["generate", "-m", str(tiny_folder), "--blas", "bundled", "--max-tokens", "24", "--width", "4"]
    plain = run(*base, "-p", "hello", "--method", "plain")
    assert plain.returncode == 0, plain.stderr
    assert "lane plain (" in plain.stderr
    assert "\x1b" not in plain.stdout + plain.stderr

    done = run(*base, "-p", "hello", "--json")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    found = json.loads(done.stdout)
    assert list(found) == ["text", "tokens", "finish_reason", "usage", "timings", "mlx_spec"]
    assert found["text"] == plain.stdout.removesuffix("\n") or found["text"] == plain.stdout
    assert found["finish_reason"] == "length"
    assert len(found["tokens"]) == found["usage"]["completion_tokens"] == 24
    usage, timings, ours = found["usage"], found["timings"], found["mlx_spec"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + 24
    assert timings["predicted_n"] == 24
    assert (timings["draft_n"], timings["draft_n_accepted"]) == (ours["drafted"], ours["accepted"])
    assert ours["lane"] == "ngram"
    assert ours["blas"] == "bundled"
    assert len(ours["widths"]) == ours["rounds"] == len(ours["accepted_per_round"])
    assert ours["accepted"] + ours["rounds"] == 24

    lines = run(*base, "-p", "-", "--jsonl", "--stats", stdin="hello\n")
    *events, last = map(json.loads, lines.stdout.splitlines())
    assert [event["token"] for event in events] == found["tokens"] == last["tokens"]
    assert "".join(event["text"] for event in events) == found["text"]
    assert {event["type"] for event in events} == {"token"}
    assert last["type"] == "done"
    assert set(found) | {"type"} == set(last)
    assert "tok/s" in lines.stderr, "--stats shows the line beside JSON too"


def test_pipes_settings_and_ctrl_c(run: Run, cli_env: dict[str, str], tiny_folder: Path) -> None:
    base = ["generate", "-m", str(tiny_folder), "--blas", "bundled", "--json"]
    ids = json.loads(run(*base, "-p", "sum up", stdin="some notes\n", MLX_SPEC_MAX_TOKENS="3").stdout)
    assert ids["usage"]["prompt_tokens"] == len("[user]some notes\n\nsum up\n[assistant]")
    assert ids["usage"]["completion_tokens"] == 3

    head = f"{COMMAND} generate -m {tiny_folder} -p hello --max-tokens 300 --no-stats | head -c 5"
    piped = subprocess.run(["bash", "-c", f"set -o pipefail; {head}"], capture_output=True, env=cli_env, timeout=120)
    assert piped.returncode == 141
    assert b"Error" not in piped.stderr
    assert b"error" not in piped.stderr

    words = [COMMAND, "generate", "-m", str(tiny_folder), "-p", "hello", "--max-tokens", "-1", "--jsonl"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=cli_env) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        process.send_signal(signal.SIGINT)
        rest = process.stdout.read().splitlines()
        code = process.wait()
    assert code == 130
    last = json.loads(rest[-1])
    assert (last["type"], last["finish_reason"]) == ("done", "cancel")
    assert last["tokens"][0] == json.loads(first)["token"]
    assert len(last["tokens"]) == last["usage"]["completion_tokens"] == len(rest)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["generate", "-p", "x", "--json", "--jsonl"], "--json and --jsonl"),
        (["generate", "-p", "x", "--raw", "--system", "s"], "--raw and --system"),
        (["generate", "-p", "x", "-v", "-q"], "--verbose and --quiet"),
        (["generate", "-p", "x", "--method", "plain", "--draft", "a/b"], "--method plain and --draft a/b"),
        (["generate", "-p", "x", "--method", "guess"], "must be one of dflash, ngram, plain"),
        (["generate", "-p", "x", "--speculative-config", '{"metod": "ngram"}'], "unknown option 'metod'"),
        (["generate", "-p", "x", "--speculative-config", '{"num_speculative_tokens": 0}'], "num_speculative_tokens"),
        (["generate", "-p", "x", "--temp", "-1"], "--temp must be a number from 0"),
        (["generate", "-p", "x", "--width", "0"], "--width must be a whole number"),
        (["generate", "-p", "x", "--exactness", "very"], "--exactness must be one of fast, exact, stock"),
        (["generate", "-p", "x", "--wdth", "4"], "No such option"),
        (["generate", "-p", "   "], "the prompt is empty"),
        (["generate", "-p", "\udcff"], "not UTF-8"),
        (["chatt"], "no such command 'chatt'"),
        (["config", "get", "tmperature"], "unknown setting 'tmperature'"),
        (["config", "set", "seed", "x"], "seed must be a whole number"),
        (["completion", "show", "tcsh"], "tcsh"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_2(args: list[str], words: str, here: Callable[..., tuple[int, str]]) -> None:
    code, text = here(*args)
    assert code == 2
    assert text.count("\n") == 1
    assert text.startswith("error: ")
    assert words in text


def spoil(folder: Path, tiny: Path, kind: str) -> Path:
    """A copy of the tiny model with one thing wrong."""
    if kind == "nowhere":
        return folder / "nowhere"
    copy = Path(shutil.copytree(tiny, folder / kind))
    if kind == "no weights":
        (copy / "model.safetensors").unlink()
    elif kind == "no config":
        (copy / "config.json").unlink()
    elif kind == "half a file":
        data = (copy / "model.safetensors").read_bytes()
        (copy / "model.safetensors").write_bytes(data[: len(data) // 2])
    elif kind == "a missing shard":
        index = {"metadata": {}, "weight_map": {"model.norm.weight": "model-00002-of-00002.safetensors"}}
        (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    elif kind == "not a number":
        weights = dict(mx.load(str(copy / "model.safetensors")))
        weights["model.norm.weight"] = weights["model.norm.weight"] * float("nan")
        mx.save_safetensors(str(copy / "model.safetensors"), weights, {"format": "mlx"})
    elif kind == "unknown family":
        config = json.loads((copy / "config.json").read_text()) | {"model_type": "flying_carpet"}
        (copy / "config.json").write_text(json.dumps(config))
    return copy


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        ("nowhere", 3),
        ("no weights", 1),
        ("no config", 1),
        ("half a file", 1),
        ("a missing shard", 1),
        ("not a number", 1),
        ("unknown family", 1),
    ],
)
def test_a_model_that_is_not_right_is_one_line(
    kind: str, code: int, here: Callable[..., tuple[int, str]], tiny_folder: Path, tmp_path: Path
) -> None:
    found, text = here("generate", "-p", "x", "-m", str(spoil(tmp_path, tiny_folder, kind)))
    assert len(errors_of(text)) == 1, text
    assert text.endswith(errors_of(text)[0] + "\n"), text
    assert found == code, text
    assert "fault of mlx-spec" not in text


def thinking_folder(folder: Path) -> Path:
    """The tiny model with a template that opens a thinking block, unless it is switched off, and refuses systems."""
    from tokenizers import Tokenizer

    save_tiny(folder, vocab=258)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(["<think>", "</think>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config["chat_template"] = (
        "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system here') }}{% endif %}"
        "[{{ m['role'] }}]{{ m['content'] }}{% endfor %}<think>{% if not enable_thinking %}</think>{% endif %}"
    )
    path.write_text(json.dumps(config))
    return folder


def test_thinking_is_apart_and_can_be_switched(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_folder: Path
) -> None:
    monkeypatch.setenv("MLX_SPEC_CONFIG", str(tmp_path / "none.toml"))
    base = [
        "generate",
        "-p",
        "hello",
        "--max-tokens",
        "8",
        "--no-stats",
        "-m",
        str(thinking_folder(tmp_path / "model")),
    ]

    def run(*args: str) -> tuple[str, str]:
        assert cli.run([*base, *args]) == 0
        return capfd.readouterr()

    found = json.loads(run("--json")[0])
    assert found["text"] == ""
    assert found["reasoning"]
    off = json.loads(run("--json", "--think", "off")[0])
    assert off["text"]
    assert off["reasoning"] == ""
    assert off["usage"]["prompt_tokens"] == found["usage"]["prompt_tokens"] + 1
    assert "thinking off" in run("--stats", "--think", "off")[1]
    out, err = run("--show-thinking", "--stats")
    assert "thinking on" in err
    assert out.strip() == ""
    assert found["reasoning"] in err
    assert found["reasoning"] not in run("--hide-thinking")[1]
    assert cli.run([*base, "--system", "s"]) == 2
    assert "no system here" in capfd.readouterr().err
    assert cli.run([*base[:-1], str(tiny_folder), "--think", "on"]) == 0
    assert "no thinking switch" in capfd.readouterr().err


def test_a_seed_gives_one_text_with_any_drafter(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_folder: Path
) -> None:
    monkeypatch.setenv("MLX_SPEC_CONFIG", str(tmp_path / "none.toml"))
    base = ["generate", "-p", "hello", "-m", str(tiny_folder), "--json", "--max-tokens", "48", "--temp", "0.8"]

    def tokens(*args: str) -> list[int]:
        assert cli.run([*base, *args]) == 0
        found: list[int] = json.loads(capfd.readouterr().out)["tokens"]
        return found

    plain = tokens("--seed", "3", "--method", "plain", "--top-p", "0.95")
    assert tokens("--seed", "3", "--width", "2,8", "--top-p", "0.95") == plain
    assert tokens("--seed", "4", "--method", "plain", "--top-p", "0.95") != plain


def test_exactly_one_bos(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A template that writes BOS, and a tokenizer that adds it."""
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing

    monkeypatch.setenv("MLX_SPEC_CONFIG", str(tmp_path / "none.toml"))
    folder = save_tiny(tmp_path / "model", vocab=257)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = json.loads((folder / "tokenizer_config.json").read_text()) | {"bos_token": "<s>"}
    config["chat_template"] = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    for args in (["-p", "hello"], ["--raw", "-p", "hello"], ["--raw", "-p", "<s>hello"]):
        assert cli.run(["generate", "-m", str(folder), "--json", "--max-tokens", "1", *args]) == 0
        assert json.loads(capfd.readouterr().out)["usage"]["prompt_tokens"] == 1 + len("hello"), args


def test_closed_streams(cli_env: dict[str, str], tiny_folder: Path) -> None:
    """A shell may close what it likes: no traceback."""
    line = f"{COMMAND} generate -m {tiny_folder} --blas bundled --max-tokens 3"
    done = subprocess.run(
        ["bash", "-c", f"{line} -p x <&- >&-"], capture_output=True, text=True, env=cli_env, timeout=60
    )
    assert done.returncode == 0
    assert "Traceback" not in done.stderr
    assert "3 tok" in done.stderr


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ({"hidden": 32, "head_dim": 8}, ("32", "64")),
        ({"target_layers": 5, "taps": (0, 4)}, ("5", "2")),
        ({"vocab": 300}, ("300", "256")),
    ],
)
def test_a_wrong_pair_is_one_line(
    shape: dict[str, Any], words: tuple[str, str], here: Callable[..., tuple[int, str]], tiny_folder: Path,
    tmp_path: Path,
) -> None:  # fmt: skip
    drafter = str(save_drafter(tmp_path / "drafter", **shape))
    code, text = here("generate", "-p", "x", "-m", str(tiny_folder), "--draft", drafter)
    assert code == 1
    assert len(errors_of(text)) == 1
    assert all(word in errors_of(text)[0] for word in words), text


def test_models_in_each_others_place(here: Callable[..., tuple[int, str]], tiny_folder: Path, tmp_path: Path) -> None:
    drafter = str(save_drafter(tmp_path / "drafter"))
    for words in (["-m", drafter], ["-m", str(tiny_folder), "--draft", str(tiny_folder)]):
        code, text = here("generate", "-p", "x", *words)
        assert code == 1
        assert len(errors_of(text)) == 1, text
    code, text = here("generate", "-p", "x", "-m", str(tiny_folder), "--draft", str(tmp_path / "nowhere"))
    assert code == 3
    done = ["generate", "-p", "x", "-m", str(tiny_folder), "--draft", str(tmp_path / "nowhere"), "--fallback"]
    code, text = here(*done, "--max-tokens", "2")
    assert code == 0
    assert "lane plain (the drafter could not be used" in text, "the lane that ran is shown"


def test_no_network_and_a_long_prompt(here: Callable[..., tuple[int, str]], tiny_folder: Path) -> None:
    code, text = here("generate", "-p", "x", "-m", "nobody/nothing-here")
    assert code == 3
    assert "nobody/nothing-here" in errors_of(text)[0]
    code, text = here("generate", "-p", "x" * 5000, "-m", str(tiny_folder))
    assert code == 1
    assert "4096" in errors_of(text)[0]


def test_debug_shows_where(here: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    assert "Traceback" in here("generate", "-p", "x", "--temp", "-1", "--debug")[1]
    monkeypatch.setenv("MLX_SPEC_DEBUG", "1")
    assert "Traceback" in here("generate", "-p", "x", "--temp", "-1")[1]


def test_config_and_completion(run: Run, tmp_path: Path) -> None:
    """Nothing here imports mlx, so each start is quick."""
    path = tmp_path / "home/.config/mlx-spec/config.toml"
    assert run("config", "path").stdout.strip() == str(path)
    assert run("config", "set", "width", "2,4").returncode == 0
    assert run("config", "get", "width", MLX_SPEC_TOP_P="0.5").stdout == "2,4\n"
    listed = run("config", "list", MLX_SPEC_TOP_P="0.5").stdout
    assert "0.5       environment" in listed
    assert run("config", "unset", "width").returncode == 0
    assert path.read_text().strip() == ""
    assert run("--version").stdout.startswith("mlx-spec, version ")
    script = run("completion", "show", "zsh")
    assert "_MLX_SPEC_COMPLETE=zsh_complete" in script.stdout
    words = run(_MLX_SPEC_COMPLETE="bash_complete", COMP_WORDS="mlx-spec generate --meth", COMP_CWORD="2").stdout
    assert words == "plain,--method\n"
    words = run(_MLX_SPEC_COMPLETE="bash_complete", COMP_WORDS="mlx-spec generate --method n", COMP_CWORD="3").stdout
    assert words == "plain,ngram\n"


@pytest.mark.full
def test_completion_is_installed_once(run: Run, tmp_path: Path) -> None:
    for _ in range(2):
        assert run("completion", "install", "zsh").returncode == 0
    rc = (tmp_path / "home/.zshrc").read_text()
    assert rc.count("mlx-spec") == 1 + rc.count("# mlx-spec completion")
    assert (tmp_path / "home/.config/mlx-spec/completion.zsh").is_file()
    assert run("completion", "install", "fish").returncode == 0
    assert (tmp_path / "home/.config/fish/completions/mlx-spec.fish").is_file()


def test_no_heavy_import_before_the_blas_is_chosen() -> None:
    """Importing the commands and settling their flags leaves mlx alone."""
    code = """
import sys
import mlx_spec.apps.cli.chat, mlx_spec.apps.cli.generate, mlx_spec.blas
from mlx_spec.apps.cli import options
options.settle({"method": options.methods()[0]})
sys.exit("mlx.core" in sys.modules or "transformers" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
