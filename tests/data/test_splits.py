from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from maskgr.data.sequences import Sequences
from maskgr.data.splits import DROP_RATES, leave_out, sparsify
from maskgr.errors import DataError, RequestError


def lists(sequences: Sequences) -> list[list[int]]:
    return [row.tolist() for row in sequences]


def test_leave_one_out() -> None:
    split = leave_out(Sequences.of([[1, 2, 3, 4], [5, 6], [7, 8, 9]]))
    assert lists(split.train) == [[1, 2], [5, 6], [7]]
    assert split.validation.users.tolist() == split.test.users.tolist() == [0, 2]
    assert lists(split.validation.histories) == [[1, 2], [7]]
    assert split.validation.targets.tolist() == [[3], [8]]
    assert lists(split.test.histories) == [[1, 2, 3], [7, 8]]
    assert split.test.targets.tolist() == [[4], [9]]


@given(st.lists(st.lists(st.integers(0, 50), max_size=12), min_size=1), st.integers(1, 3))
def test_leave_k_out_against_slicing(rows: list[list[int]], k: int) -> None:
    long = [row for row in rows if len(row) > 2 * k]
    if not long:
        with pytest.raises(DataError, match=f"leave-{k}-out needs"):
            leave_out(Sequences.of(rows), k)
        return
    split = leave_out(Sequences.of(rows), k)
    assert lists(split.train) == [row[: -2 * k] if len(row) > 2 * k else row for row in rows]
    assert lists(split.validation.histories) == [row[: -2 * k] for row in long]
    assert split.validation.targets.tolist() == [row[-2 * k : -k] for row in long]
    assert lists(split.test.histories) == [row[:-k] for row in long]
    assert split.test.targets.tolist() == [row[-k:] for row in long]


def test_unknown_split_and_impossible_k() -> None:
    split = leave_out(Sequences.of([[1, 2, 3]]))
    assert split.holdout("test") is split.test
    with pytest.raises(RequestError, match="no split 'train'; choose validation or test"):
        split.holdout("train")
    with pytest.raises(RequestError, match="hold out at least one"):
        leave_out(Sequences.of([[1, 2, 3]]), 0)


@given(st.lists(st.lists(st.integers(0, 50), max_size=12), min_size=1), st.integers(0, 5))
def test_sparsified_sets_are_nested_ordered_and_keep_three(
    rows: list[list[int]], seed: int
) -> None:
    # Numbered places instead of items, so that a subsequence can be recognised for certain.
    train = Sequences.of([range(len(row)) for row in rows])
    larger = lists(train)
    for drop in DROP_RATES:
        kept = lists(sparsify(train, drop, seed))
        for row, before, whole in zip(kept, larger, rows, strict=True):
            assert row == sorted(set(row) & set(before))
            assert len(row) == max(min(3, len(whole)), int(np.ceil(len(whole) * (1 - drop))))
        larger = kept


def test_sparsify_is_random_by_seed_and_refuses_nonsense() -> None:
    train = Sequences.of([range(100)])
    assert sparsify(train, 0.5, 1) == sparsify(train, 0.5, 1)
    assert sparsify(train, 0.5, 1) != sparsify(train, 0.5, 2)
    assert sparsify(train, 0) == train
    for drop in (-0.1, 1.0, float("nan")):
        with pytest.raises(RequestError, match="cannot drop a share"):
            sparsify(train, drop)


def test_a_sample_of_the_questions() -> None:
    test = leave_out(Sequences.of([[n, n + 1, n + 2] for n in range(30)])).test
    some = test.sample(5, seed=1)
    assert len(some.users) == 5
    assert some.users.tolist() == test.sample(5, seed=1).users.tolist()
    for row, user in enumerate(some.users):
        assert some.targets[row].tolist() == test.targets[user].tolist()
        assert some.histories[row].tolist() == test.histories[user].tolist()
    assert len(test.sample(99).users) == 30
