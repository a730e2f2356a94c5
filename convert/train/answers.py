"""A target answers many prompts at once. Knows ids, no text and no file.

Models with append caches go through a decoder of our own, which computes no probability that nobody asked for; others
through mlx-lm's continuous batching, which takes a third to a half longer on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import mlx.core as mx
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import BatchKVCache, KVCache, make_prompt_cache
from mlx_lm.sample_utils import make_sampler

from mlx_spec.errors import UnsupportedError

PREFILL = 4096  # prompt tokens of one forward, about
CROWDED = 0.75  # a batch is repacked when no more than this share of it still speaks

Ids = Sequence[int]
Cancel = Callable[[], bool]
Told = Callable[[int], None]
Answers = list[list[int]]
Pick = Callable[[mx.array], mx.array]  # [n, V] logits -> [n] ids


def answer(
    model: Any,
    prompts: Sequence[Ids],
    ends: Ids,
    max_tokens: int,
    batch: int,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    cancel: Cancel = lambda: False,
    told: Told = lambda tokens: None,
) -> Answers | None:
    """The answer to each prompt, the end-of-sequence id included where one was said; None where ``cancel`` ended it.

    The same arguments give the same answers. ``told`` gets the tokens made so far. Raises UnsupportedError where the
    model's cache cannot be batched.
    """
    mx.random.seed(seed)
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))  # alike lengths side by side pad little
    lined = [list(prompts[i]) for i in order]
    appends = all(type(entry) is KVCache for entry in make_prompt_cache(model))
    speak = _by_waves if appends else _by_mlx_lm
    found = speak(model, lined, frozenset(ends), max_tokens, batch, _sampler(temperature, top_p), cancel, told)
    if found is None:
        return None
    answers = dict(zip(order, found, strict=True))
    return [answers[i] for i in range(len(prompts))]


def _sampler(temperature: float, top_p: float) -> Pick | None:
    """Of log-probabilities; None is greedy."""
    return make_sampler(temp=temperature, top_p=top_p if top_p < 1 else 0.0) if temperature else None


def _by_waves(
    model: Any, prompts: Sequence[Ids], ends: frozenset[int], max_tokens: int, batch: int, sampler: Pick | None,
    cancel: Cancel, told: Told,
) -> Answers | None:  # fmt: skip
    answers: Answers = []
    for begin in range(0, len(prompts), batch):
        done = sum(map(len, answers))
        wave = _Wave(model, prompts[begin : begin + batch], ends, max_tokens, sampler)
        while wave.speaking:
            if cancel():
                return None
            wave.step()
            told(done + wave.tokens)
        answers += wave.answers
    return answers


class _Wave:
    """Prompts that begin to be answered together. Rows that have ended are dropped when they are many."""

    def __init__(
        self, model: Any, prompts: Sequence[Ids], ends: frozenset[int], max_tokens: int, sampler: Pick | None
    ) -> None:
        self.model, self.ends, self.max_tokens, self.sampler = model, ends, max_tokens, sampler
        self.answers: Answers = [[] for _ in prompts]
        self.rows = list(range(len(prompts)))  # which answer each row of the cache belongs to
        self.last = mx.array([prompt[-1] for prompt in prompts])
        self.cache = _prefilled(model, prompts)
        self.tokens = 0

    @property
    def speaking(self) -> bool:
        return any(not self._ended(row) for row in self.rows)

    def _ended(self, row: int) -> bool:
        said = self.answers[row]
        return len(said) >= self.max_tokens or (bool(said) and said[-1] in self.ends)

    def step(self) -> None:
        """One token for every row."""
        logits = self.model(self.last[:, None], cache=self.cache)[:, -1]
        self.last = self._pick(logits)
        tokens: list[int] = self.last.tolist()  # type: ignore[assignment]
        for row, token in zip(self.rows, tokens, strict=True):
            if not self._ended(row):
                self.answers[row].append(token)
                self.tokens += 1
        keep = [i for i, row in enumerate(self.rows) if not self._ended(row)]
        if 0 < len(keep) <= CROWDED * len(self.rows):
            index = mx.array(keep)
            for entry in self.cache:
                entry.filter(index)
            self.rows, self.last = [self.rows[i] for i in keep], self.last[index]

    def _pick(self, logits: mx.array) -> mx.array:
        if self.sampler is None:
            return mx.argmax(logits, axis=-1)
        return self.sampler(logits - mx.logsumexp(logits, axis=-1, keepdims=True))


def _prefilled(model: Any, prompts: Sequence[Ids]) -> list[Any]:
    """Caches that hold every prompt but its last token, one row each."""
    whole: list[Any] = []
    size = max(1, PREFILL // max(map(len, prompts)))
    for begin in range(0, len(prompts), size):
        part = [prompt[:-1] for prompt in prompts[begin : begin + size]]
        longest = max(map(len, part))
        cache = [BatchKVCache([0] * len(part)) for _ in make_prompt_cache(model)]
        if longest:
            spare = [longest - len(ids) for ids in part]
            for entry in cache:
                entry.prepare(lengths=list(map(len, part)), right_padding=spare)
            model(mx.array([[*ids, *[0] * more] for ids, more in zip(part, spare, strict=True)]), cache=cache)
            for entry in cache:
                entry.finalize()
            mx.eval([entry.state for entry in cache])
        if whole:
            for entry, more in zip(whole, cache, strict=True):
                entry.extend(more)
        else:
            whole = cache
    return whole


def _by_mlx_lm(
    model: Any, prompts: Sequence[Ids], ends: frozenset[int], max_tokens: int, batch: int, sampler: Pick | None,
    cancel: Cancel, told: Told,
) -> Answers | None:  # fmt: skip
    generator = BatchGenerator(
        model,
        stop_tokens=[[end] for end in sorted(ends)],
        sampler=sampler or partial(mx.argmax, axis=-1),
        completion_batch_size=batch,
        prefill_batch_size=min(batch, 8),
        max_tokens=max_tokens,
    )
    try:
        uids = generator.insert([list(prompt) for prompt in prompts])
        found: dict[int, list[int]] = {uid: [] for uid in uids}
        tokens = 0
        while responses := generator.next_generated():
            for response in responses:
                found[response.uid].append(response.token)
            tokens += len(responses)
            told(tokens)
            if cancel():
                return None
    except ValueError as error:
        raise UnsupportedError(f"this model cannot answer several prompts at once ({error})") from error
    finally:
        generator.close()
    return [found[uid] for uid in uids]
