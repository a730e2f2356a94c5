"""A drafter that can only say some of the target's ids: read from ``d2t``, proposed as the target's ids, refused when
the file is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from dflash_fixture import FakeTarget, drafter_config, drafter_weights, random_features, write_drafter
from toys import qwen3_config, save_tiny, tiny_qwen3

from mlx_spec.drafters import dflash
from mlx_spec.engine import Engine
from mlx_spec.errors import CheckpointError
from mlx_spec.options import Options
from mlx_spec.targets.decoder import DecoderTarget

IDS = np.array([3, 7, 8, 40, 41, 100, 200, 255])


def write(folder: Path, ids: np.ndarray = IDS, seed: int = 0, **shape: Any) -> Path:
    config = drafter_config(draft_vocab_size=len(ids), **shape)
    weights: dict[str, Any] = drafter_weights(config, seed)
    write_drafter(folder, config, weights)
    tensors = dict(mx.load(str(folder / "model.safetensors")))
    tensors["d2t"] = mx.array(ids - np.arange(len(ids)), dtype=mx.int32)
    mx.save_safetensors(str(folder / "model.safetensors"), tensors)
    return folder


def test_proposes_the_best_of_its_own_ids(tmp_path: Path) -> None:
    """The same weights with all ids: the reduced drafter picks the best among those it has."""
    target = FakeTarget()
    some = dflash.load(write(tmp_path / "some"), {})
    config = drafter_config()
    every = dflash.load(write_drafter(tmp_path / "every", config, drafter_weights(config)), {})
    features = mx.array(random_features(9, config))
    sessions = []
    for drafter in (some, every):
        drafter.bind(target)
        sessions.append(drafter.open(5))
        sessions[-1].ingest([0] * 9, features, 0)
    logits = np.array(sessions[1].logits(sessions[1].hidden(5)[1:]))
    np.testing.assert_allclose(np.array(sessions[0].logits(sessions[0].hidden(5)[1:])), logits[:, IDS], atol=1e-4)
    assert sessions[0].propose(5, 7).tokens.tolist() == IDS[logits[:, IDS].argmax(axis=-1)].tolist()


@pytest.mark.parametrize("kind", ["tied", "untied", "packed", "packed and untied"])
def test_head_over_is_rows_of_the_head(kind: str) -> None:
    model = tiny_qwen3(tie_word_embeddings="untied" not in kind)
    if "packed" in kind:
        nn.quantize(model, group_size=32, bits=8)
    target = DecoderTarget(model, qwen3_config())
    hidden = mx.random.normal((5, 64))
    whole, part = target.head(hidden), target.head_over(mx.array(IDS))(hidden)
    np.testing.assert_allclose(np.array(part), np.array(whole)[:, IDS], atol=1e-5)


def test_text_is_the_targets_own(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "target")
    with Engine.load(folder, draft=None) as engine:
        plain = [r.token for r in engine.stream([5, 6, 7], Options(max_tokens=40))]
    with Engine.load(folder, draft=write(tmp_path / "drafter")) as engine:
        responses = list(engine.stream([5, 6, 7], Options(max_tokens=40)))
    assert [r.token for r in responses] == plain
    assert responses[-1].stats.drafted > 0


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        (np.array([3, 7, 256]), "d2t leads to id 256, outside the vocab_size of 256"),
        (np.array([-1, 7, 9]), "d2t leads to id -1"),
        (np.array([3, 7, 7]), "two draft ids to one"),
    ],
)
def test_wrong_ids(tmp_path: Path, ids: np.ndarray, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        dflash.load(write(tmp_path, ids), {})


def test_the_key_and_the_tensor_go_together(tmp_path: Path) -> None:
    config = drafter_config(draft_vocab_size=8)
    with pytest.raises(CheckpointError, match="missing: d2t"):
        dflash.load(write_drafter(tmp_path / "one", config, drafter_weights(config)), {})
    config = drafter_config(draft_vocab_size=300)
    with pytest.raises(CheckpointError, match="draft_vocab_size 300 is larger than the vocab_size of 256"):
        dflash.load(write_drafter(tmp_path / "two", config, drafter_weights(config)), {})
    config = drafter_config(draft_vocab_size=256)
    assert dflash.load(write_drafter(tmp_path / "all", config, drafter_weights(config)), {}).model.draft_ids is None
