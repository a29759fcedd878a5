from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from maskgr.data.sequences import Sequences
from maskgr.data.splits import leave_out, sparsify
from maskgr.errors import DataError, RequestError


def lists(sequences: Sequences) -> list[list[int]]:
    return [row.tolist() for row in sequences]


def test_leave_one_out_example() -> None:
    split = leave_out(Sequences.of([[1, 2, 3, 4], [5, 6], [7, 8, 9]]))
    assert lists(split.train) == [[1, 2], [5, 6], [7]]
    assert split.validation.users.tolist() == split.test.users.tolist() == [0, 2]
    assert lists(split.validation.histories) == [[1, 2], [7]]
    assert split.validation.targets.tolist() == [[3], [8]]
    assert lists(split.test.histories) == [[1, 2, 3], [7, 8]]
    assert split.test.targets.tolist() == [[4], [9]]


@given(st.lists(st.lists(st.integers(0, 50), max_size=12), min_size=1), st.integers(1, 3))
def test_leave_k_out_equals_slicing(rows: list[list[int]], k: int) -> None:
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


def test_raises_when_split_is_unknown_or_k_is_zero() -> None:
    split = leave_out(Sequences.of([[1, 2, 3]]))
    assert split.holdout("test") is split.test
    with pytest.raises(RequestError, match="no split 'train'; choose validation or test"):
        split.holdout("train")  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="hold out at least one"):
        leave_out(Sequences.of([[1, 2, 3]]), 0)


@given(st.lists(st.lists(st.integers(0, 50), max_size=12), min_size=1), st.integers(0, 5))
def test_sparsified_sequences_are_nested_ordered_and_keep_three(
    rows: list[list[int]], seed: int
) -> None:
    # Positions instead of items: distinct, so that subsequences can be compared as sets.
    train = Sequences.of([range(len(row)) for row in rows])
    larger = lists(train)
    for drop in (0.25, 0.375, 0.5, 0.625, 0.75):  # the paper's rates
        kept = lists(sparsify(train, drop, seed))
        for row, before, whole in zip(kept, larger, rows, strict=True):
            assert row == sorted(set(row) & set(before))
            assert len(row) == max(min(3, len(whole)), int(np.ceil(len(whole) * (1 - drop))))
        larger = kept


def test_sparsify_depends_on_seed_and_raises_for_bad_share() -> None:
    train = Sequences.of([range(100)])
    assert sparsify(train, 0.5, 1) == sparsify(train, 0.5, 1)
    assert sparsify(train, 0.5, 1) != sparsify(train, 0.5, 2)
    assert sparsify(train, 0) == train
    for drop in (-0.1, 1.0, float("nan")):
        with pytest.raises(RequestError, match="cannot drop a share"):
            sparsify(train, drop)


def test_sample_keeps_users_histories_and_targets_together() -> None:
    test = leave_out(Sequences.of([[n, n + 1, n + 2] for n in range(30)])).test
    some = test.sample(5, seed=1)
    assert len(some.users) == 5
    assert some.users.tolist() == test.sample(5, seed=1).users.tolist()
    for row, user in enumerate(some.users):
        assert some.targets[row].tolist() == test.targets[user].tolist()
        assert some.histories[row].tolist() == test.histories[user].tolist()
    assert len(test.sample(99).users) == 30
