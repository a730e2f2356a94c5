"""The only decode loop: draft, verify, accept, commit, roll back. Knows Protocols, no model, drafter or text.

Prefill stops before the prompt's last token; that token is the first anchor, so the first round is like any other.
A round reads the device once with built-in samplers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx

from mlx_spec.accept import count_accepted, walk
from mlx_spec.contracts import NO_DRAFT, Cancel, Chooser, Conversation, Draft, Policy, Round, Stops, Target
from mlx_spec.errors import DrafterError, EvaluationError
from mlx_spec.stats import Stats


@dataclass(frozen=True)
class Request:
    """One request's parts. ``fallback``: a failing drafter parks the conversation instead of ending the request."""

    target: Target
    talk: Conversation
    chooser: Chooser
    stops: Stops
    policy: Policy
    stats: Stats
    cancel: Cancel
    turn: int
    fallback: bool = False


def rounds(request: Request) -> Iterator[Round]:
    """Rounds until a stop, or until ``cancel`` between two rounds.

    At the top of a round the target's cache and the drafter's context hold every committed token but the last, the
    anchor, which is the first row of the next verify: ``cache.length == draft.length == start + len(tokens) - 1``.
    Whatever is raised, the cache is back at that point for the tokens committed so far, or empty after
    EvaluationError. Raises DrafterError, and SessionError where the conversation is no longer this request's.
    """
    finish: str | None = None
    index = 0
    while finish is None and not request.cancel():
        done = _round(request, index)
        finish, index = done.finish, index + 1
        yield done


def _round(request: Request, index: int) -> Round:
    talk = request.talk
    talk.hold(request.turn)
    start, draft = talk.cache.length, _propose(request)
    try:
        done, features = _verify(request, index, draft)
    except EvaluationError as error:
        talk.lose()
        if draft.host is not None:  # nothing of the drafter's was evaluated
            raise
        give_up(request.stats, request.fallback, error)
        talk.refill()
        done, features = _verify(request, index, NO_DRAFT)
    try:
        talk.ingest(done.tokens, features, start)
    except DrafterError as error:
        give_up(request.stats, request.fallback, error)
    return done


def _verify(request: Request, index: int, draft: Draft) -> tuple[Round, mx.array | None]:
    """The round and the features of its tokens. All or nothing is committed."""
    talk, stats = request.talk, request.stats
    width = len(draft) + 1
    emitted: list[int] = []
    finish, committed = None, False
    talk.cache.begin(width)
    try:
        block = mx.concatenate([mx.array(talk.tokens[-1:], dtype=mx.uint32), draft.tokens])
        out = request.target.forward(block, talk.cache, talk.taps)
        ids, picks, logprobs = _choose(request, out.logits, draft)
        for token in walk(ids, picks):
            emitted.append(token)
            finish = request.stops.take(token)
            if finish is not None:
                break
        talk.cache.commit(range(len(emitted)))
        committed = True
    finally:
        if not committed:
            talk.cache.abort()
    talk.tokens.extend(emitted)
    accepted = count_accepted(ids, emitted)
    stats.add_round(width, len(ids), accepted, len(emitted))
    request.policy.observe(len(ids), accepted)
    features = None if out.features is None else out.features[: len(emitted)]
    return Round(index, tuple(emitted), len(ids), accepted, logprobs, finish), features


def _propose(request: Request) -> Draft:
    count = min(request.policy.width(), request.stops.remaining) - 1
    try:
        return request.talk.propose(count)
    except DrafterError as error:
        give_up(request.stats, request.fallback, error)
        return NO_DRAFT


def give_up(stats: Stats, fallback: bool, error: Exception, where: str = "") -> None:
    """The drafter is parked: end the request, or go on as lane plain and say so."""
    what = f"drafter {stats.lane} failed in {where or f'round {stats.rounds}'}: {error}"
    if not fallback:
        raise DrafterError(f"{what}; use --method plain, or --fallback to go on without it") from error
    stats.lane, stats.reason = "plain", what
    stats.notes.append(what)


def _choose(
    request: Request, logits: mx.array, draft: Draft
) -> tuple[Sequence[int], Iterator[int], mx.array | list[mx.array]]:
    """(draft ids, the target's pick per row, logprobs by row). A lazy chooser's rows run only as they are pulled."""
    talk, chooser, stats = request.talk, request.chooser, request.stats
    if not chooser.lazy:
        tokens, rows = chooser.rows(logits, talk.tokens, draft.tokens)
        _read(stats, tokens, draft.tokens)
        picks: list[int] = tokens.tolist()  # type: ignore[assignment]
        return draft.ids(), iter(picks), rows
    _read(stats, logits, draft.tokens)
    ids = draft.ids()
    logprobs: list[mx.array] = []

    def one_by_one() -> Iterator[int]:
        for row in range(len(ids) + 1):
            token, logprob = chooser.one(logits[row : row + 1], [*talk.tokens, *ids[:row]])
            stats.host_syncs += 1
            logprobs.append(logprob)
            yield token

    return ids, one_by_one(), logprobs


def _read(stats: Stats, *arrays: mx.array) -> None:
    stats.host_syncs += 1
    try:
        mx.eval(*arrays)
    except RuntimeError as error:
        raise EvaluationError(f"MLX could not compute the round: {error}") from error
