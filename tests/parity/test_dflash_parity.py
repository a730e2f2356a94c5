"""Our DFlash beside z-lab's published code (PyPI ``dflash`` 0.1.0), its MLX and its PyTorch implementation.

The same random weights, in z-lab's format, and the same features, embedding and head go through all three; the peers
run as subprocesses in the parity environment (``.venv-parity``, made by ``make test-parity``) and hand back .npz files.
Three rounds a shape, the context growing by what a partial accept would commit.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from dflash_fixture import FULL, SLIDING, FakeTarget, drafter_config, drafter_weights, random_features, write_drafter

from mlx_spec import drafters

pytestmark = pytest.mark.parity

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv-parity" / "bin" / "python"
MIXED = (SLIDING, SLIDING, FULL)
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32}
CASES: dict[str, dict[str, Any]] = {
    "taps-differ-from-layers": {"taps": (3, 0, 2), "target_layers": 5, "heads": 8, "kv_heads": 1, "head_dim": 8},
    "sliding-and-full": {"layers": 3, "layer_types": MIXED, "window": 16, "target_layers": 4, "taps": (1, 2)},
    "causal": {"layers": 3, "layer_types": MIXED, "window": 16, "is_causal": True},
    "two-way": {"layers": 3, "layer_types": MIXED, "window": 16, "is_causal": False},
    "softcap-and-scale": {"softcap": 2.0, "embedding_scale": 3.0, "multiplier": 0.5, "block": 16},
    "rope-scaling": {"rope": YARN, "rope_theta": 1e6, "layers": 4},
}
ROUNDS = ((21, 3), (4, 77), (7, 130))  # (context rows added, anchor)
ONE_ROW_ROUNDS = ((21, 3), (1, 77), (1, 130), (2, 4))
# Where z-lab's two implementations part, we go with PyTorch's: (shape, rounds, does its MLX code run it?).
PARTED: dict[str, tuple[dict[str, Any], tuple[tuple[int, int], ...], bool]] = {
    "nothing-accepted-in-a-full-window": (CASES["sliding-and-full"], ONE_ROW_ROUNDS, True),
    "window-below-the-block": ({"layer_types": (SLIDING,) * 2, "window": 5, "is_causal": False}, ROUNDS, True),
    "bias-and-unrounded-yarn": ({"bias": True, "rope": YARN | {"truncate": False, "beta_fast": 8.0}}, ROUNDS, False),
}


def save_case(folder: Path, shape: dict[str, Any], rounds: tuple[tuple[int, int], ...]) -> None:
    config = drafter_config(**shape)
    write_drafter(folder, config, drafter_weights(config, seed=11))
    target = FakeTarget()
    features = random_features(sum(rows for rows, _ in rounds), config, seed=5)
    np.savez(
        folder / "inputs.npz",
        embedding=target.embedding,
        head=target.unembedding,
        features=features,
        rounds=np.array(rounds),
    )


def run_peer(name: str, folder: Path) -> None:
    assert PYTHON.exists(), f"no {PYTHON}; run `make test-parity`, which makes it"
    command = [str(PYTHON), str(Path(__file__).with_name("peer.py")), name, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr[-3000:]}"


def ours(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    inputs = np.load(folder / "inputs.npz")
    drafter: Any = drafters.load("dflash", folder)
    drafter.bind(FakeTarget(layers=drafter.config.num_target_layers))
    session = drafter.open(1)
    hidden, drafts, done = [], [], 0
    for rows, anchor in inputs["rounds"].tolist():
        session.ingest([1] * rows, mx.array(inputs["features"][done : done + rows]), done)
        done += rows
        hidden.append(np.array(session.model.norm(session.hidden(anchor))))
        drafts.append(session.propose(anchor, drafter.config.block_size - 1).tokens.tolist())
    return np.stack(hidden), np.array(drafts)


def gap(hidden: np.ndarray, folder: Path, peer: str) -> float:
    """The largest difference of the hidden states, relative to their largest value."""
    theirs = np.load(folder / f"{peer}.npz")["hidden"]
    assert hidden.shape == theirs.shape
    return float(np.abs(hidden - theirs).max() / np.abs(theirs).max())


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parity")
    for name, shape in CASES.items():
        save_case(folder / name, shape, ROUNDS)
    for peer in ("mlx", "torch"):
        run_peer(peer, folder)
    return folder


@pytest.mark.parametrize("peer", ["mlx", "torch"])
@pytest.mark.parametrize("name", CASES)
def test_hidden_states_and_drafts_equal_the_peer(cases: Path, name: str, peer: str) -> None:
    hidden, drafts = ours(cases / name)
    assert len(hidden) == 3
    worst = gap(hidden, cases / name, peer)
    print(f"{name} {peer}: {worst:.2e}")
    assert worst <= 1e-4
    assert drafts.tolist() == np.load(cases / name / f"{peer}.npz")["drafts"].tolist()


def test_where_the_peers_part_we_follow_pytorch(tmp_path: Path) -> None:
    """Three places where z-lab's MLX code does not compute what its PyTorch code computes.

    One row appended to a full sliding window: mlx-lm's rotating cache then holds rows out of order, and the MLX mask,
    which counts by index, hides the wrong ones. A window below the block: the MLX mask lets a block see all of itself,
    PyTorch's keeps to the window. Attention bias and ``truncate: false`` of YaRN (both gpt-oss): MLX refuses the first
    and ignores the second. We keep true positions everywhere, as PyTorch does.

    In a fourth we follow MLX: with ``use_sliding_window: false`` transformers drops the window and PyTorch's code stops
    with a TypeError; ``layer_types`` decides in MLX's and in ours.
    """
    torch_only, both = tmp_path / "torch", tmp_path / "both"
    for name, (shape, rounds, in_mlx) in PARTED.items():
        save_case((both if in_mlx else torch_only) / name, shape, rounds)
    run_peer("torch", torch_only)
    run_peer("torch", both)
    run_peer("mlx", both)
    for name, (_, _, in_mlx) in PARTED.items():
        folder = (both if in_mlx else torch_only) / name
        hidden, drafts = ours(folder)
        print(f"{name} torch: {gap(hidden, folder, 'torch'):.2e}")
        assert gap(hidden, folder, "torch") <= 1e-4, name
        assert drafts.tolist() == np.load(folder / "torch.npz")["drafts"].tolist(), name
        assert not in_mlx or gap(hidden, folder, "mlx") > 1e-3, name
