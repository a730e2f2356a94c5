"""What the documents promise, and what is refused by name before the first token instead of going quietly wrong."""

from __future__ import annotations

import importlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
from dflash_fixture import save_drafter
from families import COMMON, MOE
from mlx.utils import tree_flatten
from mlx_lm.models.cache import KVCache, QuantizedKVCache, load_prompt_cache, save_prompt_cache
from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, TokenizerWrapper
from test_cli import thinking_folder
from toys import PlannedDrafter, ScriptModel, randomize, save_byte_tokenizer, save_tiny
from transformers import AutoTokenizer

from mlx_spec import Engine, Options, load, make_prompt_cache, stream_generate
from mlx_spec.apps import cli
from mlx_spec.errors import CheckpointError, OptionError, UnsupportedError
from mlx_spec.targets.skeleton import refuse_unsupported

ROOT = Path(__file__).resolve().parent.parent
PROMPT = "the cat sat on the mat, the cat sat on"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("promises") / "tiny")


# -- documents ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("document", ["README.md", "docs/exactness.md"])
def test_equality_is_promised_with_its_conditions(document: str) -> None:
    """One table: device and BLAS x weights x greedy and sampled; bit equality only where tests hold it."""
    rows = [line for line in (ROOT / document).read_text().splitlines() if re.match(r"\| (Metal|CPU)", line)]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    places = {(where.split("(")[0].split(",")[-1].strip(), weights[:5]) for where, weights, *_ in cells}
    assert {("Metal", "full "), ("Metal", "quant"), ("bundled BLAS", "full "), ("bundled BLAS", "quant")} <= places
    assert {where for where, _ in places} == {"Metal", "fast BLAS", "bundled BLAS"}
    for where, weights, greedy, sampled, *rest in cells:
        promised = f"{greedy} {sampled}"
        if where == "CPU, bundled BLAS":
            assert "bit" in promised or "the same" in promised
        else:
            assert "bit for bit" not in promised
            assert "near-ties" in promised or "as above" in promised, f"{where}, {weights}: no condition"
        if where == "Metal":
            assert "not measured by us" in f"{promised} {rest}"


def test_nothing_promises_identical_text_without_a_condition() -> None:
    """Every sentence with a strong word names where it holds, is about something else, or is a heading."""
    readme = (ROOT / "README.md").read_text()
    for line in readme.splitlines():
        if "identical" in line.lower():
            assert "bundled BLAS" in line or "near-ties" in line, line
    assert re.search(r"refused by name where they cannot be had", re.sub(r"\s+", " ", readme))


# -- kinds of model that are refused -----------------------------------------------------------------------------------

MAMBA = {"num_heads": 4, "state_size": 16, "conv_kernel": 4, "n_groups": 1, "use_bias": False, "use_conv_bias": True}
GATED = {"full_attention_interval": 2, "linear_num_value_heads": 4, "linear_num_key_heads": 2}
GATED |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4, "norm_topk_prob": False}
GATED |= {"shared_expert_intermediate_size": 32, "mlp_only_layers": [], "partial_rotary_factor": 0.5}
CONV = {"conv_bias": False, "conv_L_cache": 3, "block_dim": 64, "block_ff_dim": 96, "block_multiple_of": 32}
CONV |= {"block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": False, "full_attn_idxs": [0]}
SLIDING = {"layer_types": ["sliding_attention", "full_attention", "full_attention"], "sliding_window": 32}

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "qwen3_next": (MOE | GATED, "layer 0 keeps a ArraysCache"),
    "mamba2": (MAMBA | {"time_step_limit": [0.0, 1.0], "time_step_rank": 4}, "layer 0 keeps a ArraysCache"),
    "lfm2": (CONV, "layer 1 keeps a ArraysCache"),
    "gemma3_text": ({"sliding_window": 32, "sliding_window_pattern": 2}, "layer 0 keeps a RotatingKVCache"),
    "gpt_oss": (SLIDING | {"num_local_experts": 4, "num_experts_per_tok": 2}, "layer 0 keeps a RotatingKVCache"),
    "llama": (SLIDING, "layer 0 keeps a RotatingKVCache"),
}


@pytest.mark.parametrize("family", REFUSED)
def test_caches_that_cannot_roll_back_are_refused_from_the_config_alone(family: str) -> None:
    changes, words = REFUSED[family]
    with pytest.raises(UnsupportedError, match=words):
        refuse_unsupported(COMMON | changes | {"model_type": family}, family)


def test_a_hybrid_pair_fails_at_the_start_and_not_at_the_first_request(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights, tokenizer and drafter are all there; loading alone ends it, with the layer named."""
    monkeypatch.setenv("MLX_SPEC_CONFIG", str(tmp_path / "none.toml"))
    module = importlib.import_module("mlx_lm.models.qwen3_next")
    config = COMMON | REFUSED["qwen3_next"][0] | {"model_type": "qwen3_next", "eos_token_id": 0}
    model = randomize(module.Model(module.ModelArgs.from_dict(config)))
    target = tmp_path / "hybrid"
    target.mkdir()
    mx.save_safetensors(str(target / "model.safetensors"), dict(tree_flatten(model.parameters())), {"format": "mlx"})
    (target / "config.json").write_text(json.dumps(config))
    save_byte_tokenizer(target)
    drafter = save_drafter(tmp_path / "drafter", target_layers=3)
    with pytest.raises(UnsupportedError, match="layer 0 keeps a ArraysCache"):
        Engine.load(target, draft=drafter)
    for words in (["--draft", str(drafter)], ["--method", "plain"], ["--fallback"]):
        assert cli.run(["generate", "-m", str(target), "-p", "x", *words]) == 1
        out, err = capfd.readouterr()
        assert out == ""
        assert "layer 0 keeps a ArraysCache" in err.splitlines()[-1]


@pytest.mark.parametrize("key", ["model_type", "hidden_size", "vocab_size", "rope_theta", "tie_word_embeddings"])
def test_a_config_that_lacks_a_key_is_a_sentence_that_names_it(folder: Path, tmp_path: Path, key: str) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    config = json.loads((copy / "config.json").read_text())
    del config[key]
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=key):
        Engine.load(copy, draft=None)


# -- prompt caches of others -------------------------------------------------------------------------------------------


def test_a_quantised_prompt_cache_is_refused_by_name(folder: Path) -> None:
    pair = load(folder, draft="ngram")
    entries = [KVCache() for _ in range(2)]
    pair[0](mx.array([[5, 6, 7]]), cache=entries)
    for cache, layer in (([QuantizedKVCache(), QuantizedKVCache()], 0), ([entries[0], QuantizedKVCache()], 1)):
        with pytest.raises(UnsupportedError, match=f"layer {layer} keeps a QuantizedKVCache"):
            list(stream_generate(*pair, PROMPT, prompt_cache=cache))


@pytest.mark.parametrize("first", [None, "dflash"])
def test_a_prompt_cache_saved_with_a_drafter_or_without_continues_with_the_other(
    folder: Path, tmp_path: Path, first: str | None
) -> None:
    drafter = str(save_drafter(tmp_path / "drafter"))
    theirs, reference = mlx_lm.load(str(folder)), mlx_lm.models.cache.make_prompt_cache(mlx_lm.load(str(folder))[0])
    wanted = [
        [r.token for r in mlx_lm.stream_generate(*theirs, text, max_tokens=10, prompt_cache=reference)]
        for text in (PROMPT, " more", " still")
    ]
    one = load(folder, draft=first and drafter)
    cache = make_prompt_cache(one[0])
    got = [[r.token for r in stream_generate(*one, PROMPT, max_tokens=10, prompt_cache=cache)]]
    save_prompt_cache(str(tmp_path / "cache.safetensors"), cache)
    loaded = load_prompt_cache(str(tmp_path / "cache.safetensors"))
    other = load(folder, draft=None if first else drafter)
    for text in (" more", " still"):
        responses = list(stream_generate(*other, text, max_tokens=10, prompt_cache=loaded, width=4))
        got.append([r.token for r in responses])
        assert responses[-1].lane == ("plain" if first else "dflash")
    assert got == wanted


# -- stops and ids -----------------------------------------------------------------------------------------------------

TEXT = "abcdefghijklmnopqrstuvwxyz"
Stop = str | list[str] | tuple[str, ...] | None


@pytest.fixture(scope="module")
def script(folder: Path) -> Callable[..., Engine]:
    """An engine whose answer to a prompt of two ids is written down; every draft is right."""
    tokenizer = mlx_lm.load(str(folder))[1]

    def make(ids: list[int], vocab: int = 256) -> Engine:
        whole = [1, 1, *ids, 0]
        drafter = PlannedDrafter(lambda position, count: (whole + [0] * 99)[position : position + count])
        return Engine(ScriptModel(whole, vocab), tokenizer, {"model_type": "script", "vocab_size": vocab}, drafter)

    return make


@pytest.mark.parametrize("width", [1, 8])
@pytest.mark.parametrize(
    ("stop", "shown"),
    [
        (None, TEXT),
        ([], TEXT),
        ((), TEXT),
        ("mno", "abcdefghijkl"),
        (["mno"], "abcdefghijkl"),
        (("zzz", "mno"), "abcdefghijkl"),
        (["5", "4", "3", "2", "ef"], "abcd"),
        (["xyz", "ab"], ""),
    ],
    ids=str,
)
def test_stop_in_every_form_is_honoured(script: Any, stop: Stop, shown: str, width: int) -> None:
    engine = script(mlx_tokens(script, TEXT))
    engine.model.args = SimpleNamespace(model_type="script", vocab_size=256)
    pair = (engine.model, engine.tokenizer)
    found = list(stream_generate(*pair, [1, 1], draft_model=engine.drafter, stop=stop, width=width))
    assert "".join(r.text for r in found) == shown
    assert found[-1].finish_reason == "stop"
    assert len(found) == found[-1].stats.committed


def mlx_tokens(script: Any, text: str) -> list[int]:
    ids: list[int] = script([2]).tokenizer.encode(text, add_special_tokens=False)
    return ids


@pytest.mark.parametrize("stop", ["", [""], ["a", ""], [7], 7])
def test_a_stop_that_cannot_be_meant_is_refused(folder: Path, stop: Any) -> None:
    pair = load(folder, draft=None)
    with pytest.raises(OptionError, match="stop"):
        stream_generate(*pair, PROMPT, stop=stop)


def test_a_stop_string_is_not_taken_for_a_list_of_its_letters() -> None:
    with pytest.raises(OptionError, match="stop must be a tuple of strings, not 'END'"):
        Options(stop="END")  # type: ignore[arg-type]


@pytest.mark.parametrize("width", [1, 8])
def test_ids_past_the_tokenizer_are_kept_as_ids_and_have_no_text(script: Any, width: int) -> None:
    """A padded vocabulary: the target's own choice is reported, nothing is shown for it and nothing shifts."""
    ids = mlx_tokens(script, "abcd")
    ids[2:2] = [300, 301]
    found = list(script(ids, vocab=320).stream([1, 1], Options(width=width)))
    assert [r.token for r in found] == [*ids, 0]
    assert "".join(r.text for r in found) == "abcd"


def test_an_end_of_sequence_with_letters_that_are_no_bytes_is_not_shown(tmp_path: Path) -> None:
    """Through the detokenizer that mlx-lm gives byte-level tokenizers, which cannot spell such a token."""
    save_byte_tokenizer(tmp_path)
    plain = AutoTokenizer.from_pretrained(str(tmp_path))
    plain.add_special_tokens({"additional_special_tokens": ["<｜end｜>"]})
    end = plain.convert_tokens_to_ids("<｜end｜>")
    tokenizer = TokenizerWrapper(plain, BPEStreamingDetokenizer, eos_token_ids=[0, end])
    ids = plain.encode("abc", add_special_tokens=False)
    engine = Engine(ScriptModel([1, *ids, end], 300), tokenizer, {"model_type": "script", "vocab_size": 300})
    found = list(engine.stream([1], Options()))
    assert "".join(r.text for r in found) == "abc"
    assert (found[-1].token, found[-1].finish_reason) == (end, "stop")


# -- one prompt, one conversation --------------------------------------------------------------------------------------


@pytest.fixture
def prompts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[list[int]]:
    """The ids of every request that the command line makes in this process."""
    monkeypatch.setenv("MLX_SPEC_CONFIG", str(tmp_path / "none.toml"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    seen: list[list[int]] = []
    right = Engine.stream

    def stream(self: Engine, prompt: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(list(prompt))
        return right(self, prompt, *args, **kwargs)

    monkeypatch.setattr(Engine, "stream", stream)
    return seen


@pytest.mark.parametrize(
    ("thinking", "system"), [(None, ()), (None, ("--system", "Be brief.")), ("on", ()), ("off", ())], ids=str
)
def test_chat_and_generate_make_the_same_prompt_and_answer(
    folder: Path,
    tmp_path: Path,
    prompts: list[list[int]],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    system: tuple[str, ...],
    thinking: str | None,
) -> None:
    """One message, through every command that takes one; the figures say whether thinking was on."""
    model = folder if thinking is None else thinking_folder(tmp_path / "model")
    flags = ["-m", str(model), "--max-tokens", "8", "--stats", *system]
    flags += ["--think", thinking] if thinking else []
    (tmp_path / "message").write_text("hello there\n")
    outputs = []
    for words, piped in ((["generate", "-p", "hello there"], False), (["generate"], True), (["chat"], True)):
        with monkeypatch.context() as patch, (tmp_path / "message").open() as stdin:
            if piped:
                patch.setattr("sys.stdin", stdin)
            assert cli.run([*words, *flags]) == 0
        out, err = capfd.readouterr()
        outputs.append(out.strip())
        assert thinking is None or f"thinking {thinking}" in err
    assert len(prompts) == 3
    assert prompts[0] == prompts[1] == prompts[2]
    assert outputs[0] == outputs[1] == outputs[2]
