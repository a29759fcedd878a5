from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from maskgr.data.sequences import Sequences

LISTS = st.lists(st.lists(st.integers(0, 9), max_size=6), max_size=6)


def lists(sequences: Sequences) -> list[list[int]]:
    return [row.tolist() for row in sequences]


@given(LISTS)
def test_lists_round_trip(rows: list[list[int]]) -> None:
    sequences = Sequences.of(rows)
    assert lists(sequences) == rows
    assert sequences.lengths.tolist() == [len(row) for row in rows]
    assert sequences.places.tolist() == [p for row in rows for p in range(len(row))]
    assert sequences.owners.tolist() == [i for i, row in enumerate(rows) for _ in row]


@given(LISTS, st.integers(0, 4))
def test_last_keeps_the_most_recent_values(rows: list[list[int]], limit: int) -> None:
    assert lists(Sequences.of(rows).last(limit)) == [
        row[max(0, len(row) - limit) :] for row in rows
    ]


@given(LISTS)
def test_without_last_drops_the_last_value_of_each(rows: list[list[int]]) -> None:
    assert lists(Sequences.of(rows).without_last()) == [row[:-1] for row in rows]


@given(LISTS, st.data())
def test_select_returns_rows_in_the_given_order(rows: list[list[int]], data: st.DataObject) -> None:
    picks = data.draw(st.lists(st.integers(0, len(rows) - 1))) if rows else []
    chosen = Sequences.of(rows).select(np.array(picks, dtype=np.int64))
    assert lists(chosen) == [rows[i] for i in picks]


@given(LISTS)
def test_repeats_marks_all_but_the_first_occurrence(rows: list[list[int]]) -> None:
    expected = [value in row[:place] for row in rows for place, value in enumerate(row)]
    assert Sequences.of(rows).repeats().tolist() == expected


def test_keep_retains_empty_sequences() -> None:
    kept = Sequences.of([[1, 2], [3], [4, 5]]).keep(np.array([False, True, False, True, True]))
    assert lists(kept) == [[2], [], [4, 5]]


def test_raises_when_index_is_out_of_range() -> None:
    with pytest.raises(IndexError, match="sequence 2 of 2"):
        Sequences.of([[1], [2]])[2]
    assert Sequences.of([[1], [2]])[-1].tolist() == [2]


def test_equality_compares_content() -> None:
    assert Sequences.of([[1, 2]]) == Sequences.of([[1, 2]])
    assert Sequences.of([[1, 2]]) != Sequences.of([[1], [2]])


def test_weights_go_with_their_values() -> None:
    weights = np.array([1, 0, 0.5, 2, 0, 3], dtype=np.float32)
    sequences = replace(Sequences.of([[7, 8, 9], [4], [5, 6]]), weights=weights)
    assert sequences.is_target.tolist() == [True, False, True, True, False, True]
    assert sequences.target_counts.tolist() == [2, 1, 1]
    assert sequences.total_weight == 6.5
    assert sequences.counts(10).tolist() == [0, 0, 0, 0, 2, 0, 3, 1, 0, 0.5]
    for found, expected in (
        (sequences.select(np.array([2, 0])), [0, 3, 1, 0, 0.5]),
        (sequences.last(1), [0.5, 2, 3]),
        (sequences.without_last(), [1, 0, 0]),
        (sequences.keep(sequences.values > 6), [1, 0, 0.5]),
    ):
        assert found.weights is not None
        assert found.weights.tolist() == expected
    assert sequences == replace(sequences, weights=weights.copy())
    assert sequences != replace(sequences, weights=None)
    assert sequences != replace(sequences, weights=weights + 1)
    plain = replace(sequences, weights=None)
    assert (plain.is_target.all(), plain.total_weight) == (True, 6.0)
    assert plain.counts(10).tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 1, 1]
