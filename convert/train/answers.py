"""A target answers many prompts at once, by mlx-lm's continuous batching. Knows ids, no text and no file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.generate import BatchGenerator
from mlx_lm.sample_utils import make_sampler

from mlx_spec.errors import UnsupportedError


def answer(
    model: Any,
    prompts: Sequence[Sequence[int]],
    ends: Sequence[int],
    max_tokens: int,
    batch: int,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    cancel: Callable[[], bool] = lambda: False,
    told: Callable[[int], None] = lambda tokens: None,
) -> list[list[int]] | None:
    """The answer to each prompt, the end-of-sequence id included where one was said; None where ``cancel`` ended it.

    The same arguments give the same answers. ``told`` gets the tokens made so far. Raises UnsupportedError where the
    model's cache cannot be batched.
    """
    mx.random.seed(seed)
    sampler = make_sampler(temp=temperature, top_p=top_p if top_p < 1 else 0.0)
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))  # alike lengths side by side pad little
    generator = BatchGenerator(
        model,
        stop_tokens=[[end] for end in ends],
        sampler=sampler,
        completion_batch_size=batch,
        prefill_batch_size=min(batch, 8),
        max_tokens=max_tokens,
    )
    try:
        uids = generator.insert([list(prompts[i]) for i in order])
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
    answers = dict(zip(order, (found[uid] for uid in uids), strict=True))
    return [answers[i] for i in range(len(prompts))]
