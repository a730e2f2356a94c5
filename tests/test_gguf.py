"""GGUF in, mlx-lm folder out: the same numbers, the same tokens, or one sentence that says why not."""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf_fixture as fixture
import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from gguf_fixture import llama_metadata, llama_tensors, llama_weights, unpack, write_gguf, write_llama
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.llama import Model, ModelArgs
from tokenizers import Tokenizer

from mlx_spec.convert import files, gguf
from mlx_spec.convert.gguf import convert_gguf, unpermute
from mlx_spec.convert.recast import recast
from mlx_spec.errors import CheckpointError, MlxSpecError, OptionError, UnsupportedError
from mlx_spec.folders import check_target

IDS = mx.array([[5, 77, 200, 3, 3, 91, 14, 250, 8]])


def reference(weights: dict[str, np.ndarray], tied: bool = True) -> Model:
    """mlx-lm's llama with these weights, built without any of our code."""
    args = ModelArgs(
        "llama", hidden_size=fixture.HIDDEN, num_hidden_layers=fixture.LAYERS, intermediate_size=fixture.INNER,
        num_attention_heads=fixture.HEADS, num_key_value_heads=fixture.KV_HEADS, rms_norm_eps=1e-5,
        vocab_size=len(fixture.vocabulary()), rope_theta=50000.0, tie_word_embeddings=tied,
    )  # fmt: skip
    model = Model(args)
    model.update(tree_unflatten([(name, mx.array(values)) for name, values in weights.items()]))
    return model


@pytest.mark.parametrize("tied", [True, False])
def test_floats_give_the_same_logits(tied: bool, tmp_path: Path) -> None:
    out = convert_gguf(write_llama(tmp_path / "m.gguf", tied=tied), tmp_path / "out", "float32")
    model, _ = mlx_lm.load(str(out))
    expected = reference(llama_weights(tied=tied), tied)(IDS)
    assert mx.array_equal(model(IDS), expected)
    assert check_target(out).format == "llama"


def test_rows_go_back_where_they_were() -> None:
    rows = np.arange(64 * 3).reshape(64, 3)
    stored = mx.array(rows[fixture.stored_order(64)])
    assert not mx.array_equal(stored, mx.array(rows))
    assert mx.array_equal(unpermute(stored, fixture.HEADS), mx.array(rows))


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_packed_weights_mean_the_same(kind: str, tmp_path: Path) -> None:
    """float32 equals the format's own definition to the last bit, q and k included; native differs by rounding."""
    source = write_llama(tmp_path / "m.gguf", kind)
    expected = {}
    for name, values in llama_weights().items():
        shown = values if values.ndim == 1 else unpack(fixture.pack(values, kind), kind).reshape(values.shape)
        expected[name] = shown
    plain = mx.load(str(convert_gguf(source, tmp_path / "plain", "float32") / "model.safetensors"))
    assert set(plain) == set(expected)
    for name, values in expected.items():
        assert np.array_equal(np.array(plain[name]), values), name

    native = convert_gguf(source, tmp_path / "native")
    config = json.loads((native / "config.json").read_text())
    assert config["quantization"]["bits"] == (8 if kind == "Q8_0" else 4)
    packed, _ = mlx_lm.load(str(native))
    assert {p.rpartition(".")[2] for p, _ in tree_flatten(packed.parameters())} >= {"scales", "biases"}
    full = reference(expected)(IDS)
    assert mx.abs(packed(IDS) - full).max() < 5e-3 * mx.abs(full).max(), "16-bit scales, no more"


def test_layers_of_another_width_are_told(tmp_path: Path) -> None:
    tensors = llama_tensors(llama_weights(), "Q4_1")
    tensors["token_embd.weight"] = (tensors["token_embd.weight"][0], "Q8_0")
    tensors["blk.1.ffn_up.weight"] = (tensors["blk.1.ffn_up.weight"][0], "F16")
    out = convert_gguf(write_gguf(tmp_path / "m.gguf", llama_metadata(), tensors), tmp_path / "out")
    entry = json.loads((out / "config.json").read_text())["quantization"]
    assert entry == {
        "bits": 4, "group_size": 32, "mode": "affine",
        "model.embed_tokens": {"bits": 8, "group_size": 32, "mode": "affine"},
    }  # fmt: skip
    model, _ = mlx_lm.load(str(out))
    assert model.model.embed_tokens.bits == 8
    assert not hasattr(model.model.layers[1].mlp.up_proj, "bits")
    assert mx.isfinite(model(IDS)).all()


def test_config_and_tokenizer(tmp_path: Path) -> None:
    out = convert_gguf(write_llama(tmp_path / "m.gguf"), tmp_path / "out")
    config = json.loads((out / "config.json").read_text())
    tokens = fixture.vocabulary()
    ends = [tokens.index("<|im_end|>"), tokens.index("<|endoftext|>")]
    expected = {"rms_norm_eps": 1e-5, "rope_theta": 50000.0, "max_position_embeddings": 512, "head_dim": 16,
                "tie_word_embeddings": True, "vocab_size": len(tokens), "eos_token_id": ends}  # fmt: skip
    assert {key: config[key] for key in expected} == expected
    assert "quantization" not in config
    _, tokenizer = mlx_lm.load(str(out))
    assert tokenizer.eos_token_ids == set(ends)
    assert tokenizer.eos_token == "<|im_end|>"
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "the 12"}])
    text = [tokens[i] for i in ids]
    assert text[0] == "<|im_start|>"
    assert text[-2:] == ["<|im_end|>", "Ċ"]
    assert text[text.index("Ċ") + 1 : -2] == ["the", "Ġ", "1", "2"], "digits stay single though a merge exists"
    assert tokenizer.decode(ids, skip_special_tokens=True) == "user\nthe 12\n"


def stdlib_texts(count: int) -> list[str]:
    paths = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return [path.read_text(encoding="utf-8") for path in paths[:count]]


def test_every_text_comes_back(tmp_path: Path) -> None:
    out = convert_gguf(write_llama(tmp_path / "m.gguf"), tmp_path / "out")
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    texts = [text[:20_000] for text in stdlib_texts(6)]
    for text in [*texts, "naïve 中文 🙂\r\n\t\x00 <|im_end|> 2024-01-31"]:
        encoded = tokenizer.encode(text)
        assert tokenizer.decode(encoded.ids, skip_special_tokens=False) == text
        assert not any(len(token) > 1 and any(c.isdigit() for c in token) for token in encoded.tokens)


Change = Callable[[dict[str, Any], dict[str, Any]], object]
REFUSALS: list[tuple[Change, type[MlxSpecError], str]] = [
    (lambda m, t: m.update({"general.architecture": "mamba"}), UnsupportedError, "architecture 'mamba'"),
    (lambda m, t: m.pop("general.architecture"), UnsupportedError, "architecture None"),
    (lambda m, t: m.update({"llama.expert_count": 8}), UnsupportedError, "llama.expert_count"),
    (lambda m, t: m.update({"llama.rope.scaling.type": "yarn"}), UnsupportedError, "llama.rope.scaling.type"),
    (lambda m, t: m.update({"llama.rope.dimension_count": 8}), UnsupportedError, "8 of 16 dimensions"),
    (lambda m, t: m.update({"tokenizer.ggml.pre": "qwen2"}), UnsupportedError, "pre-tokenizer 'qwen2'.*smollm"),
    (lambda m, t: m.update({"tokenizer.ggml.model": "llama"}), UnsupportedError, "tokenizer model 'llama'"),
    (lambda m, t: m.update({"tokenizer.ggml.add_bos_token": True}), UnsupportedError, "add_bos_token"),
    (lambda m, t: m.update({"llama.block_count": 1}), UnsupportedError, r"blk\.1\.\w+\.weight has no place"),
    (lambda m, t: t.update({"rope_freqs.weight": t["output_norm.weight"]}), UnsupportedError, "rope_freqs.weight"),
    (lambda m, t: t.update({"blk.0.attn_q.weight": (t["blk.0.attn_q.weight"][0], "Q5_0")}), UnsupportedError,
     "blk.0.attn_q.weight is stored as Q5_0"),
    (lambda m, t: t.pop("blk.1.attn_v.weight"), CheckpointError, "lacks tensor blk.1.attn_v.weight"),
    (lambda m, t: m.pop("llama.embedding_length"), CheckpointError, "no hidden_size"),
    (lambda m, t: m.pop("tokenizer.ggml.tokens"), CheckpointError, "tokenizer.ggml.tokens"),
    (lambda m, t: m["tokenizer.ggml.token_type"].pop(), CheckpointError, "token types"),
    (lambda m, t: t.update({"blk.0.ffn_up.weight": (np.zeros((8, 64), np.float32), "F32")}), CheckpointError,
     "not make a complete model"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "kind", "words"), REFUSALS)
def test_what_is_not_known_is_refused_by_name(
    change: Change, kind: type[MlxSpecError], words: str, tmp_path: Path
) -> None:
    metadata, tensors = llama_metadata(), llama_tensors(llama_weights())
    change(metadata, tensors)
    source = write_gguf(tmp_path / "m.gguf", metadata, tensors)
    with pytest.raises(kind, match=words) as caught:
        convert_gguf(source, tmp_path / "out")
    assert "m.gguf" in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"], "nothing half-written"


def test_damaged_files(tmp_path: Path) -> None:
    source = write_llama(tmp_path / "m.gguf")
    whole = source.read_bytes()
    for data in (whole[:-1], whole[:3000], whole[:40], b"GGUF", b"", b"GGML" + whole[4:], whole[:8] + b"\xff" * 16):
        source.write_bytes(data)
        with pytest.raises(CheckpointError, match=r"m\.gguf"):
            convert_gguf(source, tmp_path / "out")
    source.write_bytes(whole[:4] + b"\x01\0\0\0" + whole[8:])
    with pytest.raises(UnsupportedError, match="version 1"):
        convert_gguf(source, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


def test_nothing_is_overwritten_and_nothing_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_llama(tmp_path / "m.gguf")
    with pytest.raises(OptionError, match="float64"):
        convert_gguf(source, tmp_path / "out", "float64")
    (tmp_path / "out").mkdir()
    with pytest.raises(OptionError, match="exists already"):
        convert_gguf(source, tmp_path / "out")
    (tmp_path / "out").rmdir()
    for fault in (KeyboardInterrupt(), OSError(28, "No space left on device")):

        def fail(folder: Path, weights: dict[str, mx.array], fault: BaseException = fault) -> None:
            (folder / "model.safetensors").write_bytes(b"half")
            raise fault

        monkeypatch.setattr(gguf, "write_weights", fail)
        with pytest.raises(type(fault)):
            convert_gguf(source, tmp_path / "out")
        assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


def test_recast(tmp_path: Path) -> None:
    half = convert_gguf(write_llama(tmp_path / "m.gguf"), tmp_path / "half", "bfloat16")
    full = recast(half, tmp_path / "full", "float32")
    before, after = (mx.load(str(folder / "model.safetensors")) for folder in (half, full))
    assert {array.dtype for array in before.values()} == {mx.bfloat16}
    assert {array.dtype for array in after.values()} == {mx.float32}
    assert all(mx.array_equal(before[name].astype(mx.float32), after[name]) for name in before)
    assert {path.name for path in half.iterdir()} == {path.name for path in full.iterdir()}
    mlx_lm.load(str(full))
    packed = convert_gguf(write_llama(tmp_path / "q.gguf", "Q4_1"), tmp_path / "packed")
    with pytest.raises(UnsupportedError, match="quantised"):
        recast(packed, tmp_path / "again", "float32")


def test_many_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make = files.make_shards
    monkeypatch.setattr(files, "make_shards", lambda weights: [{k: v} for k, v in make(weights)[0].items()])
    out = convert_gguf(write_llama(tmp_path / "m.gguf"), tmp_path / "out")
    assert len(check_target(out).weights) == len(llama_weights())
    model, _ = mlx_lm.load(str(out))
    assert mx.array_equal(model(IDS), reference(llama_weights())(IDS))
