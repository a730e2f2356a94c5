"""The generic target on every plain-decoder family: taps, embedding, head, cache, and nothing left behind."""

from __future__ import annotations

import mlx.core as mx
import pytest
from families import FAMILIES, build
from mlx.utils import tree_flatten
from mlx_lm.models.base import create_attention_mask

from mlx_spec.errors import UnsupportedError
from mlx_spec.targets import wrap
from mlx_spec.targets.decoder import DecoderTarget

IDS = mx.array([5, 17, 3, 200, 41, 9, 77], dtype=mx.int32)


def by_hand(model, layer0_input: mx.array) -> list[mx.array]:
    """Every layer's output, calling the layers one after the other as the family's forward does."""
    hidden, outs = layer0_input, []
    mask = create_attention_mask(hidden, None, return_array=True)
    for layer in model.layers:
        hidden = layer(hidden, mask, None)
        hidden = hidden[0] if isinstance(hidden, tuple) else hidden
        outs.append(hidden)
    return outs


@pytest.mark.parametrize("family", FAMILIES)
def test_taps_are_the_outputs_of_their_layers(family):
    model, config = build(family)
    before = dict(tree_flatten(model.parameters()))
    classes = [type(layer) for layer in model.layers]
    plain = model(IDS[None])[0]
    target = wrap(model, config)
    last = target.num_layers - 1
    one, two = target.open_taps((0, 1, last)), target.open_taps((last, 0))
    first = target.forward(IDS, target.new_cache(), one)
    second = target.forward(IDS, target.new_cache(), two)
    outs = by_hand(model, target.embed(IDS)[None])
    assert mx.array_equal(first.logits, plain), "a tapped forward differs from an untapped one"
    for taps, seen in ((one, first.features), (two, second.features)):
        wanted = mx.concatenate([outs[index][0] for index in taps.layers], axis=-1)
        assert mx.allclose(seen, wanted, atol=1e-5), f"{family}: taps {taps.layers}"
    one.close()
    assert mx.allclose(target.forward(IDS, target.new_cache(), two).features, second.features, atol=0), (
        "closing one drafter's taps changed the other's"
    )
    two.close()
    two.close()
    assert [type(layer) for layer in model.layers] == classes
    assert all("_tap_sinks" not in layer.__dict__ for layer in model.layers)
    after = dict(tree_flatten(model.parameters()))
    assert after.keys() == before.keys()
    assert mx.array_equal(model(IDS[None])[0], plain)


@pytest.mark.parametrize("family", FAMILIES)
def test_verify_rows_equal_single_rows_and_roll_back(family):
    """Eight rows at once, three kept, then one by one: bit-equal to a run that only ever took single rows."""
    model, config = build(family)
    target = wrap(model, config)
    prompt, block = [int(i) for i in IDS.tolist()], [9, 8, 7, 6, 5, 4, 3, 2]
    cache, alone = target.new_cache(), target.new_cache()
    for each in (cache, alone):
        mx.eval(target.forward(mx.array(prompt, dtype=mx.int32), each).logits)
    cache.begin(8)
    rows = target.forward(mx.array(block, dtype=mx.int32), cache).logits
    cache.commit(range(3))
    singles = [target.forward(mx.array([token], dtype=mx.int32), alone).logits[0] for token in block[:3]]
    assert mx.array_equal(rows[:3], mx.stack(singles)), f"{family}: rows depend on how many run together"
    assert cache.length == alone.length == len(prompt) + 3
    for token in (50, 51):
        again = mx.array([token], dtype=mx.int32)
        assert mx.array_equal(target.forward(again, cache).logits, target.forward(again, alone).logits)


@pytest.mark.parametrize("family", FAMILIES)
def test_embed_is_what_enters_layer_0_and_head_gives_the_logits_up_to_scale(family):
    model, config = build(family)
    target = wrap(model, config)
    taps = target.open_taps((target.num_layers - 1,))
    out = target.forward(IDS, target.new_cache(), taps)
    norms = [m for path, m in model.named_modules() if path.split(".")[-1] in ("norm", "final_layernorm", "ln_f")]
    top = [m for m in norms if m.get("weight") is not None and m.weight.shape == (target.hidden_size,)]
    head = target.head(top[-1](out.features) if top else out.features)
    cap = config.get("final_logit_softcapping")
    scale = config.get("logit_scale") or 1.0 / config.get("logits_scaling", 1.0)
    wanted = mx.tanh(head / cap) * cap if cap else head * scale
    assert mx.allclose(wanted, out.logits, atol=1e-3, rtol=1e-3), family
    taps.close()


def test_taps_work_on_a_quantized_model_and_see_reloaded_weights():
    import mlx.nn as nn

    model, config = build("llama")
    target = wrap(model, config)
    taps = target.open_taps((1,))
    before = target.forward(IDS, target.new_cache(), taps).features
    model.load_weights([("model.layers.0.mlp.down_proj.weight", mx.zeros((64, 96)))], strict=False)
    assert not mx.allclose(before, target.forward(IDS, target.new_cache(), taps).features)
    nn.quantize(model, group_size=32, bits=8)
    outs = by_hand(model, target.embed(IDS)[None])
    assert mx.allclose(target.forward(IDS, target.new_cache(), taps).features, outs[1][0], atol=1e-5)
    taps.close()


def test_another_instance_is_untouched():
    (model, config), (other, _) = build("qwen2"), build("qwen2")
    taps = wrap(model, config).open_taps((0,))
    assert type(model.layers[0]) is not type(other.layers[0])
    assert type(other.layers[0]).__call__ is type(other.layers[1]).__call__
    taps.close()


def test_a_tap_outside_the_layers_is_refused():
    target = DecoderTarget(*build("llama"))
    with pytest.raises(UnsupportedError, match=r"tap 3 .* 0\.\.2"):
        target.open_taps((0, 3))


def test_unsupported_caches_are_named_before_any_token():
    model, config = build(
        "llama", layer_types=["sliding_attention", "full_attention", "full_attention"], sliding_window=16
    )
    with pytest.raises(UnsupportedError, match="layer 0 keeps a RotatingKVCache"):
        wrap(model, config)


def test_a_model_without_layers_is_refused():
    import mlx.nn as nn

    with pytest.raises(UnsupportedError, match="no list of layers"):
        wrap(nn.Linear(2, 2), {"model_type": "lonely"})
