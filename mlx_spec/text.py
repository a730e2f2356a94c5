"""Between ids and text: templates, incremental detokenizing, stop strings, the end of the output. Knows no model."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import Any

from mlx_spec.errors import OptionError, UnsupportedError

NO_LIMIT = 1 << 30


def encode_prompt(tokenizer: Any, prompt: str | Sequence[int]) -> list[int]:
    """Ids of a raw prompt; special tokens are added unless the text already starts with BOS (mlx-lm's rule). Ids stay
    as they are. Raises OptionError for what is neither."""
    if not isinstance(prompt, str):
        try:
            return [index(token) for token in prompt]
        except TypeError as error:
            raise OptionError(f"the prompt must be text or a flat list of token ids ({error})") from error
    bos = tokenizer.bos_token
    return list(tokenizer.encode(prompt, add_special_tokens=bos is None or not prompt.startswith(bos)))


def encode_chat(tokenizer: Any, messages: Sequence[dict[str, Any]], **template_kwargs: Any) -> list[int]:
    """Ids of a conversation through the model's chat template, with the generation prompt and exactly one BOS.

    ``template_kwargs`` go to the template (``enable_thinking`` is mapped to the family's own switch by mlx-lm).
    Raises UnsupportedError where the model has no chat template.
    """
    if not tokenizer.has_chat_template:
        raise UnsupportedError("this model has no chat template; use `mlx-spec generate --raw` for a plain prompt")
    return list(tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, **template_kwargs))


class Emitter:
    """``contracts.Stops`` with the text: feeds a detokenizer token by token and decides where the output ends.

    ``take`` runs before anything is committed, so a stop string in the middle of a round ends it exactly there. Text
    that may be the beginning of a stop string is held back until it is clear; the stop string itself is never part of
    the text. ``segments`` gets one string per token taken; the held-back rest comes with the last one.
    """

    def __init__(self, tokenizer: Any, max_tokens: int, stop: Sequence[str] = ()) -> None:
        self._detokenizer = tokenizer.detokenizer
        self._tokenizer = tokenizer
        self._size = len(tokenizer)
        self._eos = frozenset(tokenizer.eos_token_ids)
        self._stop = tuple(stop)
        self._text = ""  # detokenized so far
        self._shown = 0  # of it, already in segments
        self._left = NO_LIMIT if max_tokens < 0 else max_tokens
        self.segments: list[str] = []
        self.stop_string: str | None = None

    @property
    def remaining(self) -> int:
        return self._left

    def take(self, token: int) -> str | None:
        """ "stop" at an end-of-sequence id or a completed stop string, "length" at the limit, else None."""
        self._left -= 1
        if token in self._eos:
            self._finish()
            return "stop"
        if token < self._size:  # ids of a padded vocabulary have no text
            self._detokenizer.add_token(token)
            self._text += self._detokenizer.last_segment
        if self._cut():
            self.segments.append(self._text[self._shown :])
            self._shown = len(self._text)
            return "stop"
        if self._left == 0:
            self._finish()
            return "stop" if self.stop_string else "length"
        clear = len(self._text) - self._held()
        self.segments.append(self._text[self._shown : max(clear, self._shown)])
        self._shown = max(clear, self._shown)
        return None

    def flush(self) -> str:
        """What is still held back; for an output that ends from outside (cancel)."""
        self._finish()
        return self.segments.pop()

    def _finish(self) -> None:
        try:
            self._detokenizer.finalize()
            self._text += self._detokenizer.last_segment
        except KeyError:
            # mlx-lm's BPE detokenizer cannot finalize a special token with letters outside its byte alphabet.
            self._text = self._tokenizer.decode(self._detokenizer.tokens)
        self._cut()
        self.segments.append(self._text[self._shown :])
        self._shown = len(self._text)

    def _cut(self) -> bool:
        """Shorten the text to before the first stop string, if one is complete."""
        found = [(self._text.find(stop, self._search_from(stop)), stop) for stop in self._stop]
        hits = [hit for hit in found if hit[0] >= 0]
        if not hits:
            return False
        at, self.stop_string = min(hits)
        self._text = self._text[:at]
        return True

    def _search_from(self, stop: str) -> int:
        return max(self._shown - len(stop) + 1, 0)

    def _held(self) -> int:
        """Characters at the end that may be the beginning of a stop string."""
        longest = 0
        for stop in self._stop:
            for size in range(min(len(stop) - 1, len(self._text) - self._shown), longest, -1):
                if self._text.endswith(stop[:size]):
                    longest = size
                    break
        return longest
