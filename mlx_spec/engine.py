"""A target, at most one drafter, and the requests that run on them. Knows how the rooms fit together; no terminal,
HTTP or alias. Front ends come in through ``api.py``.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.generate import GenerationResponse as _MlxLmResponse
from mlx_lm.generate import wired_limit
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_spec import blas, targets
from mlx_spec.contracts import Cancel, Drafter, Progress, Round
from mlx_spec.drafters._pairing import choose
from mlx_spec.errors import (
    ContextLengthError,
    DrafterError,
    MlxSpecError,
    OptionError,
    SessionError,
    UnsupportedError,
)
from mlx_spec.loop import Request, give_up, rounds
from mlx_spec.measure import rows_are_exact
from mlx_spec.options import Options, SpeculativeConfig
from mlx_spec.policy import Rotation
from mlx_spec.sampling import make_chooser
from mlx_spec.sessions import Session
from mlx_spec.stats import Stats
from mlx_spec.targets.loading import find_target, load_target
from mlx_spec.targets.skeleton import refuse_unsupported
from mlx_spec.text import NO_LIMIT, Emitter, encode_prompt


@dataclass
class GenerationResponse(_MlxLmResponse):
    """mlx-lm's ten fields, one response per token, plus ours.

    ``round``: index of the verify that committed the token; ``drafted`` and ``accepted``: that round's counts, the
    same on each of its tokens; ``lane``: how the request runs; ``stats``: live totals. The last response carries
    ``finish_reason`` "stop", "length" or, where ``cancel`` ended it, "cancel" (then ``token`` is -1: none).
    """

    round: int = 0
    drafted: int = 0
    accepted: int = 0
    lane: str = "plain"
    stats: Stats = field(default_factory=Stats)


def never() -> bool:
    """The default ``cancel``: nothing is cancelled."""
    return False


def _ignore(done: int, total: int) -> None:
    """The default ``progress``."""


class Engine:
    """A target with at most one drafter, for as many conversations as wanted. Usable as a context manager.

    ``model`` and ``tokenizer`` are mlx-lm's. Not thread-safe: use it from the thread that loaded it. Raises
    UnsupportedError for a model that cannot be a target, PairError for a drafter that does not fit it.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        config: dict[str, Any] | None = None,
        drafter: Drafter | None = None,
        reason: str = "no drafter was asked for",
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer if isinstance(tokenizer, TokenizerWrapper) else TokenizerWrapper(tokenizer)
        self.config = config if config is not None else vars(model.args)
        self.target = targets.wrap(model, self.config)
        self.drafter: Drafter | None = None
        self.reason = reason
        self.taps: Any = None
        self.folder: Path | None = None  # where ``load`` found the target
        self._exact: dict[tuple[int, ...], int | None] = {}
        self.use(drafter, reason)

    @classmethod
    def load(
        cls,
        name: str | Path,
        draft: str | Path | Drafter | None = "auto",
        *,
        speculative: SpeculativeConfig | None = None,
        fallback: bool = False,
        **mlx_lm_options: Any,
    ) -> Engine:
        """Load a target and its drafter.

        ``name``: a folder, a hub id, or the name of a pulled model. ``draft``: "auto" (the drafter that travels with
        the target, else n-gram lookup), a folder, a hub id, a method without weights ("ngram", "plain"), a drafter
        object, or None. ``speculative`` adds a method and its settings. ``fallback``: a drafter that cannot be loaded
        leaves the engine on lane plain, with the reason, instead of raising. Other keywords are ``mlx_lm.load``'s.
        """
        found = find_target(name, mlx_lm_options.pop("revision", None))
        refuse_unsupported(found.config | (mlx_lm_options.get("model_config") or {}), name)
        engine = cls(*load_target(found.path, **mlx_lm_options))
        engine.folder = found.path
        try:
            engine.redraft(draft, speculative)
        except MlxSpecError as error:
            if not fallback:
                engine.close()
                raise
            engine.use(None, f"the drafter could not be used: {error}")
        return engine

    def use(self, drafter: Drafter | None, reason: str = "") -> None:
        """Draft with ``drafter`` from now on (None: not at all). Sessions follow with their next request; a request
        that is running with taps fails with DrafterError, or goes on plain where it may fall back."""
        if drafter is not None:
            if not hasattr(drafter, "bind"):
                raise OptionError(f"a drafter object is needed, not {drafter!r:.80}; names are for load(draft=...)")
            drafter.bind(self.target)
        taps = self.target.open_taps(drafter.layers) if drafter is not None and drafter.layers else None
        if self.taps is not None:
            self.taps.close()
        if drafter is not None and drafter.mask_id in self.tokenizer.eos_token_ids:
            reason = f"{reason}; its mask id {drafter.mask_id} is an end-of-sequence id here: a wrong pair?"
        self.taps, self.drafter, self.reason = taps, drafter, reason

    def redraft(self, draft: str | Path | Drafter | None, speculative: SpeculativeConfig | None = None) -> None:
        """Choose a drafter anew, by the rules of ``load``. Where that raises, the former one stays."""
        if self.folder is None:
            raise OptionError("this engine was not made by Engine.load; hand a drafter to Engine.use")
        self.use(*choose(draft, speculative or SpeculativeConfig(), self.folder))

    @property
    def lane(self) -> str:
        """The lane of a request that drafts."""
        return self.drafter.name if self.drafter is not None else "plain"

    def session(self, drafting: bool = True) -> Session:
        """A new conversation; ``drafting=False`` never drafts and records no features (the reference lane)."""
        return Session(self.target, self.drafter if drafting else None, self.taps if drafting else None, drafting)

    def stream(
        self,
        prompt: str | Sequence[int],
        options: Options | None = None,
        session: Session | None = None,
        cancel: Cancel = never,
        progress: Progress = _ignore,
    ) -> Generator[GenerationResponse, None, None]:
        """One response per token. ``prompt`` is the whole conversation so far (text or ids); what ``session`` already
        holds of it is reused. ``cancel`` is polled between prefill chunks and rounds.

        Raises, before the first token: OptionError, ContextLengthError, UnsupportedError (an exactness that cannot be
        had here), SessionError (another engine's session). Raises DrafterError where the drafter fails and
        ``options.fallback`` is off. After any exception, cancel or close the session equals a cold run on its committed
        tokens. Of several streams on one session the latest goes on; the others raise SessionError.
        """
        options = options or Options()
        ids = encode_prompt(self.tokenizer, prompt)
        session = session or self.session()
        if session.target is not self.target:
            raise SessionError("this conversation was opened by another engine; open one with this engine's session()")
        session.follow(self.drafter, self.taps)
        limit = self._room(ids, session, options)
        widths = self._widths(session, options)
        self._check_exactness(options, widths)
        chooser = make_chooser(options.sampler, options.processors, options.seed)
        emitter = Emitter(self.tokenizer, limit, options.stop)
        stats = Stats(prompt_tokens=len(ids), exactness=options.exactness, seed=chooser.seed)
        stats.blas = blas.active() if mx.default_device() == mx.cpu else "metal"
        stats.lane, stats.reason = self._lane(session, widths)
        if 0 < options.max_tokens != limit:
            stats.notes.append(f"max_tokens {options.max_tokens} cut to {limit}: the context holds no more")
        if session.drafter is None and (options.widths or options.draft_window):
            stats.notes.append("width and draft_window have no effect: nothing drafts here")
        try:
            stats.cached_tokens = session.match(ids, options.draft_window)
        except DrafterError as error:
            give_up(stats, options.fallback, error, "its opening")
            stats.cached_tokens = session.match(ids, options.draft_window, parked=True)
        request = Request(
            self.target, session, chooser, emitter, Rotation(widths), stats, cancel, session.turn, options.fallback
        )
        return self._run(request, session, emitter, ids, options.prefill_step, progress)

    def _run(
        self, request: Request, session: Session, emitter: Emitter, ids: list[int], step: int, progress: Progress
    ) -> Generator[GenerationResponse, None, None]:
        stats, began = request.stats, time.perf_counter()
        session.hold(request.turn)
        with wired_limit(self.model):
            ready = self._prefill(request, session, ids, step, progress)
            stats.prompt_s = time.perf_counter() - began
            began, sent, done = time.perf_counter(), 0, None
            for done in rounds(request) if ready else ():
                stats.generated_s = time.perf_counter() - began
                if not sent:
                    progress(len(ids), len(ids))
                yield from self._responses(request, done, emitter.segments, sent)
                sent += len(done.tokens)
            if done is None or done.finish is None:
                yield self._cancelled(request, done, emitter)

    def _prefill(self, request: Request, session: Session, ids: list[int], step: int, progress: Progress) -> bool:
        try:
            return session.prefill(ids, step, request.cancel, progress)
        except DrafterError as error:
            give_up(request.stats, request.fallback, error, "prefill")
            return session.prefill(ids, step, request.cancel, progress)

    def _responses(
        self, request: Request, done: Round, segments: Sequence[str], sent: int
    ) -> Iterator[GenerationResponse]:
        """One response per token of a round; ``segments[sent]`` is the text of its first."""
        stats, last = request.stats, len(done.tokens) - 1
        speed, peak = stats.generation_tps, mx.get_peak_memory() / 1e9
        for row, token in enumerate(done.tokens):
            yield GenerationResponse(
                text=segments[sent + row],
                token=token,
                logprobs=done.logprobs[row],
                from_draft=row < done.accepted,
                prompt_tokens=stats.prompt_tokens,
                prompt_tps=stats.prompt_tps,
                generation_tokens=sent + row + 1,
                generation_tps=speed,
                peak_memory=peak,
                finish_reason=done.finish if row == last else None,
                round=done.index,
                drafted=done.drafted,
                accepted=done.accepted,
                lane=stats.lane,
                stats=stats,
            )

    def _cancelled(self, request: Request, done: Round | None, emitter: Emitter) -> GenerationResponse:
        committed = request.stats.committed
        empty = Round(done.index if done is not None else 0, (-1,), 0, 0, [mx.array([])], "cancel")
        segments = [*emitter.segments, emitter.flush()]
        response = next(self._responses(request, empty, segments, committed))
        response.generation_tokens = committed
        return response

    def _room(self, ids: Sequence[int], session: Session, options: Options) -> int:
        """The tokens that may be generated: max_tokens, or what the context leaves."""
        if not ids:
            raise OptionError("the prompt is empty; give at least one token")
        bad = next((i for i in ids if not 0 <= i < self.target.vocab_size), None)
        if bad is not None:
            raise OptionError(f"token id {bad} is outside this model's vocabulary of {self.target.vocab_size}")
        context = self.target.max_context
        room = NO_LIMIT if context is None else context - session.start - len(ids)
        if room < 1:
            raise ContextLengthError(
                f"the prompt has {session.start + len(ids)} tokens, this model's context is {context}; shorten it"
            )
        return room if options.max_tokens < 0 else min(room, options.max_tokens)

    def _widths(self, session: Session, options: Options) -> tuple[int, ...]:
        drafter = session.drafter
        if drafter is None:
            return (1,)
        widths = options.widths or (drafter.default_width,)
        if drafter.max_width is not None and max(widths) > drafter.max_width:
            raise OptionError(
                f"width {max(widths)} is above the {drafter.max_width} rows that drafter {drafter.name} can fill"
            )
        return widths

    def _lane(self, session: Session, widths: tuple[int, ...]) -> tuple[str, str]:
        if session.drafter is None:
            return "plain", self.reason if self.drafter is None else "this conversation was opened without drafting"
        if max(widths) == 1:
            return "plain", "width 1 leaves no room for a draft"
        return session.drafter.name, self.reason

    def _check_exactness(self, options: Options, widths: tuple[int, ...]) -> None:
        """*exact* and *stock* hold where rows do not depend on how many run together; elsewhere they are refused."""
        if options.exactness == "fast":
            return
        where = blas.active() if mx.default_device() == mx.cpu else "metal"
        if where != "bundled":
            raise UnsupportedError(
                f"exactness {options.exactness!r} cannot be had with {where} kernels in this version; "
                "use --exactness fast, or --blas bundled on a CPU"
            )
        tried = tuple(sorted(set(widths)))
        if tried not in self._exact:
            self._exact[tried] = rows_are_exact(self.target, tried)
        if self._exact[tried] is not None:
            raise UnsupportedError(
                f"exactness {options.exactness!r} does not hold for this model at width {self._exact[tried]}: its rows "
                "change with the width; use --exactness fast"
            )

    def close(self) -> None:
        """Give the model object back as it was: taps closed, no trace of the engine."""
        self.use(None, "the engine was closed")

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
