"""Trains the tiny pair's tokenizer on the training files: ``python tokenizer.py FOLDER``.

Byte-level BPE of 2048 tokens. A newline goes with the blank lines before it and the indentation after it, so that the
layout of code is one token; digits stand alone. Id 0 ends a text, id 1 is the drafter's mask.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import corpus
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCABULARY = 2048
END, MASK = "<|endoftext|>", "<|mask|>"
PIECES = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s*\n[ \t]*|[^\S\n]+"
# A plain model that goes on with the text: messages are joined as they are.
TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}"
    "{% if not loop.last %}{{ '\\n' }}{% endif %}{% endfor %}"
)


def train(texts: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END, MASK],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """tokenizer.json and what mlx-lm wants beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "mask_token": MASK,
        "model_max_length": 2048,
        "clean_up_tokenization_spaces": False,
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    folder = Path(sys.argv[1])
    tokenizer = train([text for _, text in corpus.texts("train")])
    save(tokenizer, folder)
    for split in ("train", "held-out"):
        texts = [text for _, text in corpus.texts(split)]
        coded = [tokenizer.encode(text).ids for text in texts]
        back = [tokenizer.decode(ids, skip_special_tokens=False) for ids in coded]
        assert back == texts, "text does not survive the tokenizer"
        tokens, characters = sum(map(len, coded)), sum(map(len, texts))
        print(f"{split}: {tokens} tokens, {characters / tokens:.3f} characters a token")


if __name__ == "__main__":
    main()
