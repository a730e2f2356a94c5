"""A target and a DFlash drafter that fit each other by construction: with right wiring every draft is accepted.

The target is a random Qwen3 whose head is solved by least squares so that its greedy text is one fixed cycle of ids.
The drafter looks the cycle up in the target's features: biases alone make every slot attend to the row ``PERIOD``
positions before it, ``fc`` (least squares again) turns that row's features into what the head reads as its token. So a
wrong tap, a wrong slot, a position off by one or a missing row each end acceptance, while the text stays. The mask
id is one of the cycle's own ids. No training, no luck.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from dflash_fixture import drafter_config, drafter_weights, write_drafter
from mlx.utils import tree_flatten
from mlx_lm.models.base import create_attention_mask
from toys import qwen3_config, save_byte_tokenizer, tiny_qwen3

PERIOD, BLOCK, TAPS, LAYERS, HIDDEN = 17, 8, (1, 3), 4, 64
CYCLE = [int(i) for i in np.random.default_rng(5).permutation(np.arange(33, 127))[:PERIOD]]
MASK = CYCLE[3]
SHARPNESS = 8.0  # norm weight of queries and keys: one position off costs about 8 in the exponent


def cycle(start: int, count: int) -> list[int]:
    """``count`` ids of the text from position ``start`` on."""
    return [CYCLE[(start + i) % PERIOD] for i in range(count)]


def save_pair(folder: Path) -> Path:
    """``folder/target`` and ``folder/target/drafter`` (so that the drafter travels with its target)."""
    target = folder / "target"
    target.mkdir(parents=True)
    ids, following = (np.array([cycle(k + ahead, 96) for k in range(PERIOD)]) for ahead in (0, 1))
    model = tiny_qwen3(LAYERS, HIDDEN, tie_word_embeddings=False)
    for layer in model.layers:  # a token's own state outweighs its history, so that the cycle pulls any text in
        layer.self_attn.o_proj.weight = 0.05 * layer.self_attn.o_proj.weight
    outputs, final = _states(model, ids)
    head = np.zeros((256, HIDDEN), np.float32)
    head[CYCLE] = _solve(final, 10.0 * (following.reshape(-1, 1) == CYCLE)).T
    model.lm_head.weight = mx.array(head)
    mx.save_safetensors(str(target / "model.safetensors"), dict(tree_flatten(model.parameters())), {"format": "mlx"})
    config = qwen3_config(LAYERS, HIDDEN) | {"eos_token_id": 0, "tie_word_embeddings": False}
    (target / "config.json").write_text(json.dumps(config))
    save_byte_tokenizer(target)
    shape = drafter_config(
        layers=1, target_layers=LAYERS, taps=TAPS, heads=4, kv_heads=4, head_dim=16, block=BLOCK, bias=True,
        mask=MASK, rope_theta=100.0,
    )  # fmt: skip
    read_as = {i: final[following.ravel() == i].mean(0) for i in CYCLE}  # a state that the head reads as i
    write_drafter(target / "drafter", shape, _weights(shape, _fuse(outputs, final, [read_as[i] for i in ids.ravel()])))
    return target


def _states(model: Any, ids: np.ndarray) -> tuple[list[np.ndarray], np.ndarray]:
    """([rows, HIDDEN] after each layer, the same after the final norm), the texts of ``ids`` one after the other."""
    h = model.model.embed_tokens(mx.array(ids))
    mask, outputs = create_attention_mask(h, None), []
    for layer in model.model.layers:
        h = layer(h, mask, None)
        outputs.append(np.array(h).reshape(-1, HIDDEN))
    return outputs, np.array(model.model.norm(h)).reshape(-1, HIDDEN)


def _fuse(outputs: list[np.ndarray], final: np.ndarray, codes: list[np.ndarray]) -> np.ndarray:
    """fc, transposed: the tapped layers give their row's code; other layers, another order, or the final norm on top
    give the code of a row further on. (Layers of one residual stream are alike: a plain fit would read them all.)"""
    one, two = TAPS
    right = [(outputs[one], outputs[two])]
    wrong = [(outputs[one - 1], outputs[two - 1]), (outputs[two], outputs[one]), (outputs[one], final)]
    rows = np.concatenate([np.concatenate(pair, axis=-1) for pair in right * 4 + wrong])
    return _solve(rows, np.concatenate([np.stack(codes)] * 4 + [np.stack(codes[9:] + codes[:9])] * len(wrong)))


def _solve(rows: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Ridge regression: rows @ result is nearly ``wanted``."""
    ridge = 1e-4 * len(rows) * np.eye(rows.shape[1])
    return np.linalg.solve(rows.T @ rows + ridge, rows.T @ wanted).astype(np.float32)


def _weights(config: dict[str, Any], fused: np.ndarray) -> dict[str, np.ndarray]:
    """``fused`` [taps * HIDDEN, HIDDEN]: features to what the head reads as their token."""
    made = {name: np.zeros_like(value) for name, value in drafter_weights(config).items()}
    made |= {name: np.ones_like(value) for name, value in made.items() if "norm" in name}
    made["fc.weight"] = fused.T
    attention = "layers.0.self_attn."
    made[f"{attention}v_proj.weight"] = np.eye(HIDDEN, dtype=np.float32)
    made[f"{attention}o_proj.weight"] = 50.0 * np.eye(HIDDEN, dtype=np.float32)
    angles = PERIOD * config["rope_theta"] ** (-np.arange(8) / 8)  # rope turns the first half against the second
    made[f"{attention}k_proj.bias"] = np.tile(np.r_[np.ones(8), np.zeros(8)], 4).astype(np.float32)
    made[f"{attention}q_proj.bias"] = np.tile(np.r_[np.cos(angles), -np.sin(angles)], 4).astype(np.float32)
    for which in "qk":
        made[f"{attention}{which}_norm.weight"] *= SHARPNESS
    return made
