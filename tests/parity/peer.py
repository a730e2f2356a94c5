"""z-lab's published DFlash code (PyPI ``dflash``) on given cases. Runs in the parity environment, never in ours.

    python peer.py mlx|torch FOLDER

FOLDER holds one folder a case: config.json and model.safetensors as z-lab publishes them, and inputs.npz with
``embedding`` [V, H], ``head`` [V, H], ``features`` [rows, taps*H] and ``rounds`` [r, 2] (context rows added, anchor).
Written beside it: mlx.npz or torch.npz with ``hidden`` [r, block, H] (final-normed) and ``drafts`` [r, block-1].
Imports nothing of the project.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np


class MlxPeer:
    """``dflash.model_mlx``: its loader, model and context caches, driven as its own ``stream_generate`` drives them."""

    def __init__(self, folder: Path, inputs: Any) -> None:
        import mlx.core as mx
        from dflash import model_mlx
        from mlx import nn

        model_mlx.snapshot_download = lambda name, **_: name  # the folder is local
        self.mx = mx
        self.model = model_mlx.load_draft(str(folder))
        vocab, hidden = inputs["embedding"].shape
        target = nn.Module()
        target.embed_tokens = nn.Embedding(vocab, hidden)
        target.embed_tokens.weight = mx.array(inputs["embedding"])
        target.lm_head = nn.Linear(hidden, vocab, bias=False)
        target.lm_head.weight = mx.array(inputs["head"])
        self.model.bind(target)
        self.cache = self.model.make_cache()

    def round(self, features: np.ndarray, anchor: int) -> tuple[np.ndarray, np.ndarray]:
        mx, config = self.mx, self.model.config
        block = mx.array([[anchor] + [config.mask_token_id] * (config.block_size - 1)])
        hidden = self.model.hidden_states(block, mx.array(features)[None], self.cache)
        drafts = mx.argmax(self.model.compute_logits(hidden[:, 1:]), axis=-1)
        return np.array(hidden[0]), np.array(drafts[0])


class TorchPeer:
    """``dflash.model``: the model and its DynamicCache, driven as its own ``dflash_generate`` drives them."""

    def __init__(self, folder: Path, inputs: Any) -> None:
        import torch
        from dflash import model

        self.torch, self.peer = torch, model
        self.model = model.DFlashDraftModel.from_pretrained(str(folder), dtype=torch.float32).eval()
        self.embedding = torch.tensor(inputs["embedding"])
        vocab, hidden = inputs["head"].shape
        self.head = torch.nn.Linear(hidden, vocab, bias=False)
        self.head.weight.data = torch.tensor(inputs["head"])
        self.cache = model._make_cache(self.model.config)
        self.start = 0

    def round(self, features: np.ndarray, anchor: int) -> tuple[np.ndarray, np.ndarray]:
        torch, model = self.torch, self.model
        self.start += len(features)
        ids = torch.tensor([anchor] + [model.mask_token_id] * (model.block_size - 1))
        scale = float(self.peer._draft_value(model.config, "input_embedding_scale", 1.0))
        with torch.inference_mode():
            hidden = model(
                target_hidden=torch.tensor(features)[None],
                noise_embedding=(self.embedding[ids] * scale)[None],
                position_ids=torch.arange(self.start - len(features), self.start + len(ids))[None],
                past_key_values=self.cache,
                use_cache=True,
            )
            self.peer._crop_to(self.cache, self.start)
            drafts = model.compute_logits(hidden[:, 1:], self.head).argmax(-1)
        return hidden[0].numpy(), drafts[0].numpy()


def main(name: str, folder: Path) -> None:
    peer_class = {"mlx": MlxPeer, "torch": TorchPeer}[name]
    for case in sorted(path for path in folder.iterdir() if path.is_dir()):
        inputs = np.load(case / "inputs.npz")
        peer, done, hidden, drafts = peer_class(case, inputs), 0, [], []
        for rows, anchor in inputs["rounds"].tolist():
            states, tokens = peer.round(inputs["features"][done : done + rows], anchor)
            done += rows
            hidden.append(states)
            drafts.append(tokens)
        np.savez(case / f"{name}.npz", hidden=np.stack(hidden), drafts=np.stack(drafts))
        print(f"{name} {case.name}: {len(hidden)} rounds", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
