"""DFlash on a real target in the real loop: every draft is what the oracle makes of independently computed features."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from dflash_fixture import FULL, SLIDING, drafter_config, drafter_weights, write_drafter
from dflash_numpy import draft_logits, hidden_states
from mlx_lm.models.base import create_attention_mask
from toys import save_tiny

from mlx_spec import Engine, Options
from mlx_spec.drafters.dflash import DFlashSession

SHAPE: dict[str, Any] = {
    "layers": 3,
    "layer_types": (SLIDING, SLIDING, FULL),
    "window": 12,
    "target_layers": 3,
    "taps": (2, 0),
    "embedding_scale": 1.5,
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    save_tiny(folder / "target", layers=3)
    config = drafter_config(**SHAPE)
    write_drafter(folder / "drafter", config, drafter_weights(config, 3))
    return folder


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, list[int]]]:
    """(length, anchor, draft) of every proposal."""
    seen: list[tuple[int, int, list[int]]] = []
    original = DFlashSession.propose

    def propose(self: DFlashSession, anchor: int, count: int) -> Any:
        draft = original(self, anchor, count)
        seen.append((self.length, anchor, draft.tokens.tolist()))  # type: ignore[arg-type]
        return draft

    monkeypatch.setattr(DFlashSession, "propose", propose)
    return seen


def layer_outputs(model: Any, ids: list[int]) -> list[np.ndarray]:
    """[rows, D] of every decoder layer, layer by layer, in one uncached forward."""
    h = model.model.embed_tokens(mx.array([ids]))
    mask, outputs = create_attention_mask(h, None), []
    for layer in model.model.layers:
        h = layer(h, mask, None)
        outputs.append(np.array(h[0]))
    return outputs


def test_drafts_come_from_the_right_features_anchor_and_positions(home: Path, rounds: list[Any]) -> None:
    model, _ = mlx_lm.load(str(home / "target"))
    prompt = [int(i) for i in np.random.default_rng(0).integers(1, 256, 45)]
    with Engine.load(home / "target", draft=home / "drafter") as engine:
        assert engine.lane == "dflash"
        options = Options(max_tokens=24, width=(8, 3, 5), prefill_step=16)
        responses = list(engine.stream(prompt, options))
    text = prompt + [r.token for r in responses]
    assert responses[-1].stats.lane == "dflash"
    outputs = layer_outputs(model, text)
    features = np.concatenate([outputs[i] for i in SHAPE["taps"]], axis=-1)
    config = drafter_config(**SHAPE)
    weights, table = drafter_weights(config, 3), np.array(model.model.embed_tokens.weight)
    assert len(rounds) >= 3
    for length, anchor, draft in rounds:
        assert anchor == text[length]
        hidden = hidden_states(features[:length], table[[anchor] + [255] * 7], config, weights)
        wanted = draft_logits(hidden, table, config).argmax(-1).tolist()  # tied head
        assert draft == wanted[: len(draft)]


def test_a_warm_conversation_drafts_as_a_cold_one(home: Path, rounds: list[Any]) -> None:
    with Engine.load(home / "target", draft=home / "drafter") as engine:
        session, prompt, options = engine.session(), list(range(1, 40)), Options(max_tokens=10, width=5)
        for edit in (40, 30, 44, 12):
            rounds.clear()
            warm = [r.token for r in engine.stream(prompt, options, session=session)]
            warm_rounds = list(rounds)
            rounds.clear()
            cold = [r.token for r in engine.stream(prompt, options)]
            assert (warm, warm_rounds) == (cold, rounds)
            prompt = [*(prompt + warm)[:edit], 7, 8, 9]


def test_draft_window_is_a_setting_and_an_option(home: Path, rounds: list[Any]) -> None:
    from mlx_spec.options import SpeculativeConfig

    narrow = SpeculativeConfig(draft_window=4)
    prompt, seen = list(range(1, 20)), []
    with Engine.load(home / "target", draft=home / "drafter") as engine:
        for window in (None, 4):
            rounds.clear()
            list(engine.stream(prompt, Options(max_tokens=8, width=3, draft_window=window)))
            seen.append(list(rounds))
    with Engine.load(home / "target", draft=home / "drafter", speculative=narrow) as engine:
        rounds.clear()
        list(engine.stream(prompt, Options(max_tokens=8, width=3)))
        assert rounds == seen[1]
    assert seen[0] != seen[1]
    assert all(len(draft) == 2 for _, _, draft in seen[1][:-3])
