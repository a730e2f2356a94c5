"""DFlash checkpoints: every place of every key, refusals by name, strict tensors, and pairs that do not belong."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from dflash_fixture import SLIDING, FakeTarget, drafter_config, drafter_weights, random_features, write_drafter
from mlx.utils import tree_flatten
from toys import save_tiny

from mlx_spec import drafters
from mlx_spec.drafters._dflash_config import DFlashConfig
from mlx_spec.errors import CheckpointError, ModelNotFoundError, OptionError, PairError, UnsupportedError


def test_resolver_knows_methods_by_file_name() -> None:
    assert drafters.names() == ("dflash", "ngram", "plain")
    for name in drafters.names():
        assert Path(str(drafters.resolve(name).__file__)).stem == name
    with pytest.raises(OptionError, match="unknown method 'eagle'; known are dflash, ngram, plain"):
        drafters.resolve("eagle")
    with pytest.raises(OptionError, match="unknown method '_formats'"):
        drafters.load("_formats")


YARN = {"factor": 2.0, "original_max_position_embeddings": 64}


def nest(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    """``config`` with dflash_config's ``keys`` moved to the top level."""
    inner = dict(config["dflash_config"])
    return config | {key: inner.pop(key) for key in keys} | {"dflash_config": inner}


def rope_nested(config: dict[str, Any]) -> dict[str, Any]:
    """The newer layout: everything about rope in one object."""
    rest = {key: value for key, value in config.items() if key not in ("rope_theta", "rope_scaling")}
    return rest | {"rope_parameters": {"rope_theta": config["rope_theta"]} | (config["rope_scaling"] or {})}


def test_four_layouts_resolve_alike() -> None:
    config = drafter_config(
        rope_theta=1e6, rope={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, softcap=30.0
    )
    flat = nest(config, "block_size", "mask_token_id", "target_layer_ids", "final_logit_softcapping")
    del flat["dflash_config"]
    made = [DFlashConfig.parse(one) for one in (config, flat, rope_nested(config), rope_nested(flat))]
    assert made == [made[0]] * 4
    assert (made[0].block_size, made[0].mask_token_id, made[0].rope.base) == (8, 255, 1e6)
    assert made[0].rope.scaling is not None
    moved = rope_nested(config)
    moved["rope_scaling"] = moved.pop("rope_parameters")
    assert DFlashConfig.parse(moved) == made[0]


def test_defaults_and_other_places() -> None:
    config = drafter_config()
    inner = config["dflash_config"]
    del inner["block_size"], config["layer_types"], config["rope_theta"]
    made = DFlashConfig.parse(config)
    assert (made.block_size, made.layer_types, made.rope.base) == (16, ("full_attention",) * 2, 10000.0)
    del config["num_target_layers"]
    assert DFlashConfig.parse(config).num_target_layers is None
    inner |= {"num_target_layers": 2, "causal": True, "use_swa": True, "swa_window_size": 9, "draft_vocab_size": 256}
    made = DFlashConfig.parse(config)
    assert (made.num_target_layers, made.causal, made.layer_types, made.sliding_window) == (2, True, (SLIDING,) * 2, 9)
    assert DFlashConfig.parse(config | {"is_causal": False}).causal is False
    assert DFlashConfig.parse(config | {"is_neox_style": False}).rope.traditional
    assert DFlashConfig.parse(config | {"final_logit_softcapping": 30.0}).final_logit_softcapping == 30.0


def test_layer_types_decide_whatever_the_host_format_says() -> None:
    config = drafter_config(layer_types=(SLIDING, "full_attention"), window=7, use_sliding_window=False)
    made = DFlashConfig.parse(config)
    assert (made.sliding_window, made.layer_types) == (7, (SLIDING, "full_attention"))
    assert [made.causal_layer(i) for i in (0, 1)] == [True, False]
    with pytest.raises(CheckpointError, match="sliding_window is None"):
        DFlashConfig.parse(config | {"sliding_window": None})


@pytest.mark.parametrize("key", ["target_layer_ids", "mask_token_id"])
def test_what_wires_the_drafter_is_never_guessed(key: str) -> None:
    config = drafter_config()
    del config["dflash_config"][key]
    with pytest.raises(CheckpointError, match=key):
        DFlashConfig.parse(config)


INNER_REFUSED = {
    "conv_kernel_size": 2,
    "conv_group_size": 16,
    "selector_rank": 256,
    "selector_top_k": 16,
    "projector_type": "domino",
    "attention_sink_bias": True,
    "mask_embedding": "mask_embedding.pt",
    "sample_from_anchor": True,
    "use_aux_hidden_state": False,
    "something_new": 1,
}
TOP_REFUSED = {
    "add_swa_attention_sink_bias": True,
    "attention_value_scale": 0.5,
    "target_hidden_size": 32,
    "logit_scale": 0.1,
    "markov_rank": 0,
    "speculators_model_type": "dflash",
    "aux_hidden_state_layer_ids": [1, 2],
    "target_num_hidden_layers": 36,
    "partial_rotary_factor": 0.5,
    "hidden_act": "gelu",
    "quantization_config": {"quant_method": "fp8"},
}


@pytest.mark.parametrize(
    ("place", "key", "value"),
    [("dflash_config", key, value) for key, value in INNER_REFUSED.items()]
    + [("", key, value) for key, value in TOP_REFUSED.items()],
)
def test_what_is_not_implemented_is_refused_by_key(tmp_path: Path, place: str, key: str, value: Any) -> None:
    config = drafter_config()
    (config[place] if place else config)[key] = value
    folder = write_drafter(tmp_path, config, drafter_weights(config))
    assert drafters.detect(folder) == "dflash"
    with pytest.raises(UnsupportedError, match=key):
        drafters.load("dflash", folder)


@pytest.mark.parametrize(
    ("rope", "error", "words"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, UnsupportedError, "rope_type 'dynamic'"),
        ({"type": "spiral"}, UnsupportedError, "rope_type 'spiral'"),
        ({"rope_type": "linear"}, CheckpointError, "linear needs factor"),
        ({"rope_type": "linear", "factor": 2.0, "short_factor": [1]}, UnsupportedError, "short_factor"),
        ({"rope_type": "yarn", "factor": 2.0}, CheckpointError, "original_max_position_embeddings"),
        ({"rope_type": "yarn", "mscale": 2.0} | YARN, UnsupportedError, "mscale_all_dim are implemented together"),
        ({"rope_type": "default", "partial_rotary_factor": 0.25}, UnsupportedError, "partial_rotary_factor"),
    ],
)
def test_unknown_rope_is_refused(rope: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        DFlashConfig.parse(drafter_config(rope=rope))


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"taps": (0, 2)}, CheckpointError, "holds 2, but num_target_layers is 2"),
        ({"taps": (-1, 0)}, UnsupportedError, "target_layer_ids holds -1"),
        ({"mask": 256}, CheckpointError, "mask_token_id 256 .* 256 rows"),
        ({"block": 1}, CheckpointError, "block_size 1"),
        ({"layer_types": ("chunked_attention",) * 2}, UnsupportedError, "chunked_attention"),
        ({"layer_types": ("full_attention",)}, CheckpointError, "names 1 layers"),
        ({"kv_heads": 3}, CheckpointError, "num_key_value_heads"),
        ({"hidden_size": "64"}, CheckpointError, "hidden_size must be a whole number"),
    ],
)
def test_contradictions_are_named(change: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        DFlashConfig.parse(drafter_config(**change))


def saved(folder: Path, drop: str = "", add: str = "", rename: tuple[str, str] = ("", ""), **shape: Any) -> Path:
    config = drafter_config(**shape)
    weights = {name.replace(*rename, 1) if rename[0] else name: w for name, w in drafter_weights(config).items()}
    weights.pop(drop, None)
    return write_drafter(folder, config, weights | ({add: np.ones(3, np.float32)} if add else {}))


def test_unaccounted_tensors_are_listed(tmp_path: Path) -> None:
    folder = saved(tmp_path, drop="layers.1.mlp.up_proj.weight", add="layers.1.mlp.extra.weight")
    with pytest.raises(CheckpointError, match=r"missing: layers\.1\.mlp\.up_proj\.weight; unknown: .*extra"):
        drafters.load("dflash", folder)
    with pytest.raises(CheckpointError, match=r"missing: fc\.weight; unknown: fuse\.weight"):
        drafters.load("dflash", saved(tmp_path / "b", rename=("fc.", "fuse.")))


@pytest.mark.parametrize(
    "rename",
    [
        ("", "model."),
        ("fc.", "encoder.fc."),
        ("hidden_norm.", "encoder.output_norm_enc."),
        ("layers.0.", "midlayer."),
        ("fc.", "context_proj."),
        ("hidden_norm.", "context_norm."),
        ("norm.", "final_norm."),
    ],
)
def test_aliases_of_other_writers(tmp_path: Path, rename: tuple[str, str]) -> None:
    config = drafter_config()
    weights = drafter_weights(config)

    def other(name: str) -> str:
        return rename[1] + name.removeprefix(rename[0]) if name.startswith(rename[0]) else name

    folder = write_drafter(tmp_path, config, {other(name): value for name, value in weights.items()})
    drafter: Any = drafters.load("dflash", folder)
    for name, value in tree_flatten(drafter.model.parameters()):
        assert np.array_equal(np.array(value), weights[name]), name


def test_fused_qkv_is_split(tmp_path: Path) -> None:
    config = drafter_config(bias=True)
    weights = drafter_weights(config)
    fused = {name: value for name, value in weights.items() if not any(f"{p}_proj" in name for p in "qkv")}
    for i in range(2):
        for kind in ("weight", "bias"):
            parts = [weights[f"layers.{i}.self_attn.{p}_proj.{kind}"] for p in "qkv"]
            fused[f"layers.{i}.self_attn.qkv_proj.{kind}"] = np.concatenate(parts)
    drafter: Any = drafters.load("dflash", write_drafter(tmp_path, config, fused))
    for name, value in tree_flatten(drafter.model.parameters()):
        assert np.array_equal(np.array(value), weights[name]), name


def test_nan_is_named(tmp_path: Path) -> None:
    config = drafter_config()
    weights = drafter_weights(config)
    weights["layers.0.mlp.down_proj.weight"][3, 4] = np.nan
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.down_proj\.weight"):
        drafters.load("dflash", write_drafter(tmp_path, config, weights))


def test_weights_for_other_taps_do_not_pair(tmp_path: Path) -> None:
    weights = drafter_weights(drafter_config(taps=(0, 1, 1)))
    with pytest.raises(PairError, match="takes 192 features, but 2 taps of hidden size 64 give 128"):
        drafters.load("dflash", write_drafter(tmp_path, drafter_config(), weights))
    weights = drafter_weights(drafter_config()) | {"norm.weight": np.ones(32, np.float32)}
    folder = write_drafter(tmp_path, drafter_config(), weights)
    with pytest.raises(CheckpointError, match=r"norm\.weight \(32,\) where \(64,\)"):
        drafters.load("dflash", folder)


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ({"hidden": 32}, "hidden size 64 against the target's 32"),
        ({"layers": 3}, "number of target layers 2 against the target's 3"),
        ({"vocab": 300}, "vocabulary 256 against the target's 300"),
        ({"vocab": 240}, "vocabulary 256 against the target's 240"),
    ],
)
def test_wrong_pairs_are_refused_with_both_numbers(tmp_path: Path, target: dict[str, int], words: str) -> None:
    drafter = drafters.load("dflash", saved(tmp_path))
    with pytest.raises(PairError, match=words):
        drafter.bind(FakeTarget(**target))  # type: ignore[arg-type]
    with pytest.raises(PairError, match="bind it"):
        drafter.open(1)


def test_pairs_without_a_stated_layer_count_are_checked_by_taps_and_mask(tmp_path: Path) -> None:
    folder = saved(tmp_path, taps=(0, 5), num_target_layers=None, vocab=100_032, mask=100_030)
    drafter = drafters.load("dflash", folder)
    with pytest.raises(PairError, match="taps layer 5, the target's last is 1"):
        drafter.bind(FakeTarget(vocab=100_032))  # type: ignore[arg-type]
    with pytest.raises(PairError, match=r"mask_token_id 100030 .* 99968"):
        drafter.bind(FakeTarget(vocab=99_968, layers=6))  # type: ignore[arg-type]
    drafter.bind(FakeTarget(vocab=100_160, layers=6))  # type: ignore[arg-type]  # one vocabulary, padded otherwise


def test_an_embedding_that_cannot_be_borrowed_is_refused_when_bound(tmp_path: Path) -> None:
    class Positions(FakeTarget):
        def embed(self, ids: mx.array) -> mx.array:
            raise UnsupportedError("what enters layer 0 is not the embedding")

    with pytest.raises(UnsupportedError, match="layer 0"):
        drafters.load("dflash", saved(tmp_path)).bind(Positions())  # type: ignore[arg-type]


def test_folders_that_are_something_else(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "model")
    with pytest.raises(PairError, match="is a language model"):
        drafters.load("dflash", model)
    with pytest.raises(PairError, match="is a language model"):
        drafters.detect(model)
    with pytest.raises(ModelNotFoundError, match="does not exist"):
        drafters.load("dflash", tmp_path / "nowhere")
    with pytest.raises(OptionError, match="needs a drafter checkpoint"):
        drafters.load("dflash")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        drafters.load("dflash", tmp_path / "empty")
    eagle = write_drafter(tmp_path / "eagle", {"architectures": ["LlamaForCausalLMEagle3"], "vocab_size": 1}, {})
    with pytest.raises(UnsupportedError, match="EAGLE drafter, which no method here reads"):
        drafters.detect(eagle)
    config = drafter_config(architectures=["DFlash2DraftModel"])
    with pytest.raises(UnsupportedError, match="DFlash2"):
        drafters.load("dflash", write_drafter(tmp_path / "two", config, drafter_weights(config)))


def test_incomplete_and_broken_files(tmp_path: Path) -> None:
    whole = saved(tmp_path / "whole")

    def copy(name: str) -> Path:
        return Path(shutil.copytree(whole, tmp_path / name))

    for name, text in (("json", "{"), ("list", "[]")):
        folder = copy(name)
        (folder / "config.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"config\.json"):
            drafters.load("dflash", folder)
    folder = copy("no weights")
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="no weights"):
        drafters.load("dflash", folder)
    folder = copy("half")
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(CheckpointError, match=r"has .* bytes|cut short"):
        drafters.load("dflash", folder)
    folder = copy("shards")
    index = {"weight_map": {"fc.weight": "model-00001-of-00002.safetensors", "norm.weight": "model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"half-downloaded.*model-00001-of-00002"):
        drafters.load("dflash", folder)


def test_shards_are_joined(tmp_path: Path) -> None:
    config = drafter_config()
    weights = {name: mx.array(value) for name, value in drafter_weights(config).items()}
    write_drafter(tmp_path, config, {})
    (tmp_path / "model.safetensors").unlink()
    halves = ({n: w for n, w in weights.items() if ("layers.0" in n) == first} for first in (True, False))
    names = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    for name, half in zip(names, halves, strict=True):
        mx.save_safetensors(str(tmp_path / name), half)
    drafters.load("dflash", tmp_path)


def test_bfloat16_becomes_float32_on_the_cpu(tmp_path: Path) -> None:
    config = drafter_config()
    drafter: Any = drafters.load("dflash", write_drafter(tmp_path, config, drafter_weights(config), mx.bfloat16))
    if mx.default_device() == mx.cpu:
        assert {value.dtype for _, value in tree_flatten(drafter.model.parameters())} == {mx.float32}


def test_quantised_drafter_equals_its_dequantised_self(tmp_path: Path) -> None:
    config = drafter_config()
    write_drafter(tmp_path / "float", config, drafter_weights(config))
    source: Any = drafters.load("dflash", tmp_path / "float")
    nn.quantize(source.model, 32, 8, class_predicate=lambda path, m: path != "fc" and isinstance(m, nn.Linear))
    flat = dict(tree_flatten(source.model.parameters()))
    quantization = {"group_size": 32, "bits": 8}
    both = {"quantization": quantization, "quantization_config": quantization}
    write_drafter(tmp_path / "q", config | both, {})
    mx.save_safetensors(str(tmp_path / "q" / "model.safetensors"), flat)
    plain = {}
    for name, value in flat.items():
        path = name.removesuffix(".weight")
        if f"{path}.scales" in flat and name.endswith(".weight"):
            plain[name] = np.array(mx.dequantize(value, flat[f"{path}.scales"], flat[f"{path}.biases"], 32, 8))
        elif not name.endswith((".scales", ".biases")):
            plain[name] = np.array(value)
    write_drafter(tmp_path / "d", config, plain)
    target, features, drafts = FakeTarget(), mx.array(random_features(9, config)), []
    for name in ("q", "d"):
        drafter: Any = drafters.load("dflash", tmp_path / name)
        assert isinstance(drafter.model.layers[0].mlp.up_proj, nn.QuantizedLinear) == (name == "q")
        drafter.bind(target)
        session = drafter.open(1)
        session.ingest([1] * 9, features, 0)
        drafts.append(np.array(session.hidden(3)))
    assert np.allclose(*drafts, atol=1e-3)
