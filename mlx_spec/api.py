"""The one door: mlx-lm's functions over our engine (same names, arguments and fields) and ``Engine`` itself.

Every front end comes in here. Knows the engine, no terminal, HTTP or alias.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache as mlx_lm_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_spec.caches import CacheSet
from mlx_spec.contracts import Drafter, Progress
from mlx_spec.engine import Engine, GenerationResponse
from mlx_spec.errors import OptionError, SessionError, UnsupportedError
from mlx_spec.options import Options, SpeculativeConfig, with_stop
from mlx_spec.sessions import PromptCache, Session
from mlx_spec.text import encode_prompt

__all__ = ["Engine", "GenerationResponse", "generate", "load", "make_prompt_cache", "stream_generate"]

Prompt = str | mx.array | Sequence[int]
ENGINE = "_mlx_spec_engine"  # where a model object keeps its engine; gone after Engine.close


def load(
    path_or_hf_repo: str | Path,
    tokenizer_config: dict[str, Any] | None = None,
    model_config: dict[str, Any] | None = None,
    adapter_path: str | None = None,
    lazy: bool = False,
    return_config: bool = False,
    revision: str | None = None,
    trust_remote_code: bool = False,
    *,
    draft: str | Path | Drafter | None = "auto",
    speculative: SpeculativeConfig | None = None,
    fallback: bool = False,
) -> tuple[Any, ...]:
    """``mlx_lm.load``, with a drafter: returns (model, tokenizer), or (model, tokenizer, config).

    The model is mlx-lm's own object and remembers its drafter, so ``stream_generate(model, tokenizer, ...)`` drafts.
    ``draft`` and ``speculative``: see ``Engine.load``.
    """
    gc.collect()  # a model and its engine hold each other: free those that were dropped before more memory is taken
    engine = Engine.load(
        path_or_hf_repo,
        draft,
        speculative=speculative,
        fallback=fallback,
        tokenizer_config=tokenizer_config,
        model_config=model_config,
        adapter_path=adapter_path,
        lazy=lazy,
        revision=revision,
        trust_remote_code=trust_remote_code,
    )
    object.__setattr__(engine.model, ENGINE, Link(engine))
    if return_config:
        return engine.model, engine.tokenizer, engine.config
    return engine.model, engine.tokenizer


def engine_of(model: Any, tokenizer: Any) -> Engine:
    """The engine that ``load`` gave ``model``, or a new one without a drafter for a model loaded by mlx-lm.

    It decodes with ``tokenizer``, as mlx-lm would: end-of-sequence ids are the tokenizer's.
    """
    engine = _linked(model)
    if engine is None:
        engine = Engine(model, tokenizer, reason="the model was loaded without a drafter (use mlx_spec.load)")
        object.__setattr__(model, ENGINE, Link(engine))
    if tokenizer is not engine.tokenizer:
        engine.tokenizer = tokenizer if isinstance(tokenizer, TokenizerWrapper) else TokenizerWrapper(tokenizer)
    return engine


@dataclass
class Link:
    """From a model object to its engine. Copies and pickles of the model do not carry the engine with them."""

    engine: Engine | None

    def __reduce__(self) -> tuple[Any, ...]:
        return Link, (None,)


def _linked(model: Any) -> Engine | None:
    link: Link | None = vars(model).get(ENGINE)
    return None if link is None else link.engine


def make_prompt_cache(model: Any, max_kv_size: int | None = None) -> list[Any]:
    """A prompt cache for ``stream_generate(prompt_cache=...)`` that also keeps the tokens and the drafter's context;
    mlx-lm's own for a model that mlx-lm loaded. With ours penalties see the whole conversation, with mlx-lm's only
    the call's own tokens.

    ``max_kv_size`` (a rotating cache) is refused with UnsupportedError until that cache kind can roll back.
    """
    if max_kv_size is not None:
        raise UnsupportedError(f"max_kv_size={max_kv_size}: rotating caches cannot roll back yet; leave it out")
    engine = _linked(model)
    if engine is None:
        return list(mlx_lm_cache(model))
    return PromptCache(engine.session())


def stream_generate(
    model: Any,
    tokenizer: Any,
    prompt: Prompt,
    max_tokens: int = 256,
    draft_model: Drafter | None = None,
    *,
    sampler: Callable[..., Any] | None = None,
    logits_processors: Sequence[Callable[..., Any]] | None = None,
    prompt_cache: Any = None,
    prefill_step_size: int = 2048,
    prompt_progress_callback: Callable[[int, int], None] | None = None,
    num_draft_tokens: int | None = None,
    seed: int | None = None,
    stop: str | Sequence[str] | None = None,
    width: int | Sequence[int] | None = None,
    draft_window: int | None = None,
    exactness: str = "fast",
    fallback: bool = False,
    **unsupported: Any,
) -> Iterator[GenerationResponse]:
    """``mlx_lm.stream_generate``, drafted: one response per token, the same text.

    ``prompt`` continues ``prompt_cache`` where one is given, as in mlx-lm. ``draft_model``, a drafter object, replaces
    the model's drafter from this call on. ``num_draft_tokens`` is ``width - 1``. mlx-lm options
    that this version cannot honour (``kv_bits``, ``max_kv_size``, ``input_embeddings``) raise UnsupportedError;
    mlx-lm's defaults for them are accepted.
    """
    _refuse(unsupported)
    if num_draft_tokens is not None and width is not None:
        raise OptionError(f"give width or num_draft_tokens, not both ({width} and {num_draft_tokens})")
    if num_draft_tokens is not None:
        width = num_draft_tokens + 1
    options = Options(
        max_tokens=max_tokens,
        sampler=sampler,
        processors=_callables(logits_processors),
        seed=seed,
        width=tuple(width) if isinstance(width, (list, tuple)) else width,  # type: ignore[arg-type]
        draft_window=draft_window,
        exactness=exactness,
        prefill_step=prefill_step_size,
        fallback=fallback,
    )
    engine = engine_of(model, tokenizer)
    cache = _open_cache(engine, prompt_cache, draft_model)
    ids = encode_prompt(engine.tokenizer, prompt.tolist() if isinstance(prompt, mx.array) else prompt)  # type: ignore[arg-type]
    options, progress = with_stop(options, stop), prompt_progress_callback or _quiet
    if cache is None:
        return engine.stream(ids, options, progress=progress)
    return _continue(engine, cache, prompt_cache, ids, options, progress)


def generate(model: Any, tokenizer: Any, prompt: Prompt, verbose: bool = False, **kwargs: Any) -> str:
    """``mlx_lm.generate``: the whole text. ``verbose`` prints it as it comes, then the figures."""
    parts: list[str] = []
    response: GenerationResponse | None = None
    for response in stream_generate(model, tokenizer, prompt, **kwargs):
        parts.append(response.text)
        if verbose:
            print(response.text, end="", flush=True)
    if verbose and response is not None:
        stats = response.stats
        print(f"\nPrompt: {response.prompt_tokens} tokens, {response.prompt_tps:.3f} tokens-per-sec")
        print(f"Generation: {response.generation_tokens} tokens, {response.generation_tps:.3f} tokens-per-sec")
        print(f"Lane: {stats.lane} ({stats.reason}), acceptance length {stats.acceptance_length:.2f}")
        print(f"Peak memory: {response.peak_memory:.3f} GB")
    return "".join(parts)


def _open_cache(engine: Engine, prompt_cache: Any, draft_model: Any) -> PromptCache | None:
    if draft_model is not None and not hasattr(draft_model, "bind"):
        raise UnsupportedError("draft_model: a draft language model is not supported yet; use load(draft=...)")
    if draft_model is not None and draft_model is not engine.drafter:
        engine.use(draft_model, "given as draft_model")
    if prompt_cache is None:
        return None
    held = [type(entry).__name__ for entry in prompt_cache]
    wanted = [type(entry).__name__ for entry in engine.target.new_cache().entries]
    CacheSet(prompt_cache)  # a kind that cannot be rolled back is named with its layer
    if held != wanted or (isinstance(prompt_cache, PromptCache) and prompt_cache.session.target is not engine.target):
        raise SessionError(
            f"this prompt cache ({len(held)} layers) was made for another model than this one ({len(wanted)} layers of "
            f"{wanted[0]}); make one with make_prompt_cache(model)"
        )
    if isinstance(prompt_cache, PromptCache):
        return prompt_cache
    return PromptCache(Session.over(prompt_cache, engine.target, engine.drafter, engine.taps))


def _continue(
    engine: Engine, cache: PromptCache, given: list[Any], ids: list[int], options: Options, progress: Progress
) -> Iterator[GenerationResponse]:
    """A call on a prompt cache. However it ends, ``given``, the caller's list, then holds what was handed out, as with
    mlx-lm."""
    use = cache.enter()
    session = cache.session
    prompt = [*session.tokens, *ids]
    cache.shown = shown = len(prompt)
    try:
        with closing(engine.stream(prompt, options, session, progress=progress)) as responses:
            for response in responses:
                if cache.uses == use:
                    cache.shown = shown = shown + 1
                yield response
    finally:
        cache.leave(use)
        if any(mine is not theirs for mine, theirs in zip(cache, given, strict=True)):
            given[:] = cache  # caches that a failure had broken were replaced


def _callables(processors: Any) -> tuple[Callable[..., Any], ...]:
    if processors is None or isinstance(processors, (list, tuple)):
        return tuple(processors or ())
    raise OptionError(f"logits_processors must be a list of callables, not {processors!r}")


# mlx-lm's options without effect here, with the value that asks for nothing; ANY: every value does.
ANY = object()
NO_EFFECT: dict[str, Any] = {
    "max_kv_size": None,
    "kv_bits": None,
    "kv_group_size": ANY,
    "quantized_kv_start": ANY,
    "input_embeddings": None,
    "stream": None,
}


def _refuse(given: dict[str, Any]) -> None:
    for name, value in given.items():
        if name not in NO_EFFECT:
            raise OptionError(f"stream_generate has no option {name!r}")
        if value is not None and NO_EFFECT[name] is None:
            shown = value if isinstance(value, (int, str)) else type(value).__name__
            raise UnsupportedError(f"{name}={shown} is not supported in this version; leave it out or use mlx-lm")


def _quiet(done: int, total: int) -> None:
    """No progress callback was given."""
