"""The tokenizer inside a GGUF file as tokenizer.json, tokenizer_config.json and chat_template.jinja.

Reads byte-level BPE (GGUF model "gpt2"). How text is split before BPE is only named in the file; the names known here
are the rows of SPLITTERS, after ``llama_vocab::impl::load`` in llama.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from mlx_spec.convert.files import write_json
from mlx_spec.errors import CheckpointError, UnsupportedError

CONTROL, USER_DEFINED = 3, 4  # token types; control tokens never appear in decoded text

SPLITTERS: dict[str, Callable[[], Any]] = {
    "gpt-2": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": lambda: pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
}
# Control tokens that end an answer whatever the metadata says; llama.cpp keeps the same kind of list.
ENDINGS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end_of_text|>", "<|end|>")
ID_KEYS = ("eos", "eot", "eom")
NEEDED = tuple(f"tokenizer.ggml.{key}" for key in ("tokens", "token_type", "merges"))


def write_tokenizer(folder: Path, metadata: Mapping[str, Any], source: Path) -> dict[str, Any]:
    """Write the tokenizer's files; returns the special ids that belong into config.json."""
    lacking = [key for key in NEEDED if key not in metadata]
    if lacking:
        raise CheckpointError(
            f"{source} has no metadata key {lacking[0]}; a model without its tokenizer cannot be used"
        )
    tokens, types = list(metadata["tokenizer.ggml.tokens"]), metadata["tokenizer.ggml.token_type"].tolist()
    build(metadata, tokens, types, source).save(str(folder / "tokenizer.json"))
    ids = special_ids(metadata, tokens, types)
    named = {
        f"{kind}_token": tokens[ids[f"{kind}_token_id"]] for kind in ("bos", "unk", "pad") if f"{kind}_token_id" in ids
    }
    if ids.get("eos_token_id"):
        named["eos_token"] = tokens[ids["eos_token_id"][0]]
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": _flag(metadata, "add_bos_token"),
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        **named,
    }
    context = metadata.get("llama.context_length")
    if context is not None:
        settings["model_max_length"] = int(context.item())
    write_json(folder / "tokenizer_config.json", settings)
    write_json(folder / "generation_config.json", ids)
    if template := metadata.get("tokenizer.chat_template"):
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return ids


def build(metadata: Mapping[str, Any], tokens: list[str], types: list[int], source: Path) -> Tokenizer:
    """A ``tokenizers`` tokenizer. Raises UnsupportedError naming the model or the splitter that is not known."""
    model, splitter = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if model != "gpt2":
        raise UnsupportedError(f"{source}: tokenizer model {model!r} is not read; byte-level BPE (gpt2) is")
    if splitter not in SPLITTERS:
        raise UnsupportedError(f"{source}: pre-tokenizer {splitter!r} is not known; known are {', '.join(SPLITTERS)}")
    if _flag(metadata, "add_bos_token"):
        raise UnsupportedError(f"{source}: a tokenizer that puts a BOS token before every text (add_bos_token)")
    if len(types) != len(tokens):
        raise CheckpointError(f"{source} has {len(tokens)} tokens and {len(types)} token types; it is damaged")
    merges = [tuple(pair.split(" ", 1)) for pair in metadata["tokenizer.ggml.merges"]]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = SPLITTERS[splitter]()
    tokenizer.decoder = decoders.ByteLevel()
    control = [
        AddedToken(t, special=True, normalized=False) for t, kind in zip(tokens, types, strict=True) if kind == CONTROL
    ]
    own = [AddedToken(t, normalized=False) for t, kind in zip(tokens, types, strict=True) if kind == USER_DEFINED]
    tokenizer.add_special_tokens(control)
    tokenizer.add_tokens(own)
    return tokenizer


def special_ids(metadata: Mapping[str, Any], tokens: list[str], types: list[int]) -> dict[str, Any]:
    """``bos_token_id`` and the like as single ids, ``eos_token_id`` as the list of all ids that end an answer."""
    found = {
        name: int(metadata[f"tokenizer.ggml.{key}_token_id"].item())
        for key, name in (("bos", "bos_token_id"), ("unknown", "unk_token_id"), ("padding", "pad_token_id"))
        if f"tokenizer.ggml.{key}_token_id" in metadata
    }
    keys = [f"tokenizer.ggml.{key}_token_id" for key in ID_KEYS]
    ends = [int(metadata[key].item()) for key in keys if key in metadata]
    ends += [i for i, token in enumerate(tokens) if types[i] == CONTROL and token in ENDINGS]
    return {**found, "eos_token_id": list(dict.fromkeys(ends))}


def _flag(metadata: Mapping[str, Any], key: str) -> bool:
    value = metadata.get(f"tokenizer.ggml.{key}")
    return bool(value.item()) if value is not None else False
