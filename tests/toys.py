"""Small targets, drafters and a byte tokenizer for tests: no download, no accelerator."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlx_spec.contracts import NO_DRAFT, Draft

VOCAB = 256


def randomize(model: nn.Module, seed: int = 0, scale: float = 0.08) -> nn.Module:
    """Random weights, norms included (case A2: a skipped norm must show)."""
    keys = iter(mx.random.split(mx.random.key(seed), 4096))

    def draw(path: str, value: mx.array) -> mx.array:
        noise = mx.random.normal(value.shape, key=next(keys))
        return (1.0 + 0.2 * noise if "norm" in path else scale * noise).astype(value.dtype)

    flat = tree_flatten(model.parameters())
    model.load_weights([(path, draw(path, value)) for path, value in flat], strict=False)
    mx.eval(model.parameters())
    return model


def tiny_qwen3(layers: int = 2, hidden: int = 64, vocab: int = VOCAB, seed: int = 0, **changes: Any) -> nn.Module:
    """A random mlx-lm Qwen3; every call builds a new instance."""
    from mlx_lm.models.qwen3 import Model, ModelArgs

    config = qwen3_config(layers, hidden, vocab) | changes
    return randomize(Model(ModelArgs.from_dict(config)), seed, scale=0.3 / (hidden / 64) ** 0.5)


def qwen3_config(layers: int = 2, hidden: int = 64, vocab: int = VOCAB) -> dict[str, Any]:
    return {
        "model_type": "qwen3",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": 2 * hidden,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": hidden // 4,
        "vocab_size": vocab,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
    }


def save_tiny(folder: Path, layers: int = 2, hidden: int = 64, vocab: int = VOCAB, seed: int = 0) -> Path:
    """The same model as an mlx-lm folder with a byte tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    model = tiny_qwen3(layers, hidden, vocab, seed)
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())), {"format": "mlx"})
    config = qwen3_config(layers, hidden, vocab) | {"eos_token_id": 0}
    (folder / "config.json").write_text(json.dumps(config))
    save_byte_tokenizer(folder)
    return folder


def save_byte_tokenizer(folder: Path) -> None:
    """256 byte tokens, GPT-2 byte alphabet; id 0 is ``<|end|>`` (EOS), then the bytes in order of their letters."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<|end|>": 0} | {letter: i + 1 for i, letter in enumerate(letters[: VOCAB - 1])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|end|>",
        "clean_up_tokenization_spaces": False,
        "chat_template": "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


class ScriptModel(nn.Module):
    """A fake mlx-lm model whose output is a written list of ids: the token at position p is ``script[p]``.

    Keeps a real KVCache per layer, so lengths and trims are those of a real target.
    """

    def __init__(self, script: Sequence[int], vocab: int = VOCAB, layers: int = 2) -> None:
        super().__init__()
        self.model_type = "script"
        self._script = list(script)
        self.embed_tokens = nn.Embedding(vocab, 8)
        self.layers = [_ScriptLayer() for _ in range(layers)]

    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        start = cache[0].offset if cache is not None else 0
        h = self.embed_tokens(inputs)
        for layer, entry in zip(self.layers, cache or [None] * len(self.layers), strict=True):
            h = layer(h, None, entry)
        rows = [self._row(start + i + 1) for i in range(inputs.shape[1])]
        return mx.stack(rows)[None] + 0.0 * h.sum()

    def _row(self, position: int) -> mx.array:
        wanted = self._script[position % len(self._script)]
        return 10.0 * (mx.arange(self.embed_tokens.weight.shape[0]) == wanted).astype(mx.float32)


class _ScriptLayer(nn.Module):
    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        if cache is not None:
            keys, _ = cache.update_and_fetch(x[:, None], x[:, None])
            return x + 0.0 * keys.sum()
        return x


class PlannedDrafter:
    """ADV: a drafter under test control. ``plan(position, count) -> ids`` sees the position of the first draft."""

    def __init__(self, plan: Callable[[int, int], Sequence[int]], name: str = "planned") -> None:
        self.plan = plan
        self.name = name
        self.layers: tuple[int, ...] = ()
        self.default_width = 4
        self.max_width: int | None = None
        self.mask_id: int | None = None

    def bind(self, target: Any) -> None:
        self.target = target

    def open(self, first: int, start: int = 0, draft_window: int | None = None) -> PlannedSession:
        return PlannedSession(self, start)


class PlannedSession:
    def __init__(self, drafter: PlannedDrafter, start: int) -> None:
        self.drafter = drafter
        self.length = start

    def ingest(self, tokens: Sequence[int], features: Any, start: int) -> None:
        assert start == self.length, f"ingest at {start}, drafter holds {self.length}"
        self.length += len(tokens)

    def propose(self, anchor: int, count: int) -> Draft:
        ids = list(self.drafter.plan(self.length + 1, count))[:count]
        return Draft(mx.array(ids, dtype=mx.int32)) if ids else NO_DRAFT

    def trim(self, length: int) -> int:
        self.length = min(self.length, length)
        return self.length

    def arrays(self) -> list[mx.array]:
        return []
