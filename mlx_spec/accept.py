"""Which rows of a verify are kept. Pure rules: no model, no cache, no device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence


def walk(draft: Sequence[int], picks: Iterable[int]) -> Iterator[int]:
    """The tokens that a round emits, in order, pulling each pick only when it is needed.

    ``picks[i]`` is the target's own choice at row i, which judges ``draft[i]``; there is one row more than drafts.
    Picks are emitted while they equal the draft, then once more: the first that differs, or the last row's.
    Keeping a draft token while it equals the target's own choice is optimal for a deterministic draft and gives
    the target's exact law at any temperature (sample and compare). Raises ValueError when rows run out.
    """
    rows = iter(picks)
    for index, wanted in enumerate(draft):
        token = next(rows, None)
        if token is None:
            raise ValueError(f"row {index} is missing: {len(draft)} drafts need {len(draft) + 1} rows")
        yield token
        if token != wanted:
            return
    last = next(rows, None)
    if last is None:
        raise ValueError(f"row {len(draft)} is missing: {len(draft)} drafts need {len(draft) + 1} rows")
    yield last


def count_accepted(draft: Sequence[int], emitted: Sequence[int]) -> int:
    """Draft tokens kept in ``emitted`` (a prefix of what ``walk`` yields). Never counts the target's own token."""
    accepted = 0
    for wanted, token in zip(draft, emitted, strict=False):
        if wanted != token:
            break
        accepted += 1
    return accepted
