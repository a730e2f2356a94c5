"""The acceptance rule alone."""

from __future__ import annotations

import itertools

import pytest

from mlx_spec.accept import count_accepted, walk


@pytest.mark.parametrize(
    ("draft", "picks", "emitted", "accepted"),
    [
        ([], [7], [7], 0),
        ([1, 2, 3], [1, 2, 3, 4], [1, 2, 3, 4], 3),
        ([1, 2, 3], [9, 2, 3, 4], [9], 0),
        ([1, 2, 3], [1, 9, 3, 4], [1, 9], 1),
        ([1, 1, 1], [1, 1, 2, 1], [1, 1, 2], 2),
    ],
)
def test_walk(draft, picks, emitted, accepted):
    assert list(walk(draft, picks)) == emitted
    assert count_accepted(draft, emitted) == accepted


def test_picks_are_pulled_only_while_they_are_emitted():
    pulled = []

    def picks():
        for token in (1, 9, 3):
            pulled.append(token)
            yield token

    assert list(walk([1, 2], picks())) == [1, 9]
    assert pulled == [1, 9]


@pytest.mark.parametrize(("draft", "picks"), [([], []), ([1, 2], [1]), ([1, 2], [1, 2])])
def test_missing_rows_are_an_error(draft, picks):
    with pytest.raises(ValueError, match="is missing"):
        list(walk(draft, picks))


def test_a_cut_output_counts_only_what_was_emitted():
    emitted = list(itertools.islice(walk([1, 2, 3], [1, 2, 3, 4]), 2))
    assert count_accepted([1, 2, 3], emitted) == 2
