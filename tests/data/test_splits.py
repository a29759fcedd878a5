from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from maskgr.data.sequences import Sequences
from maskgr.data.splits import has_holdout, last_targets, leave_out, sparsify
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


def weighted(rows: list[list[tuple[int, float]]]) -> Sequences:
    flat = np.array([weight for row in rows for _, weight in row], dtype=np.float32)
    return replace(Sequences.of([[item for item, _ in row] for row in rows]), weights=flat)


def test_only_targets_are_held_out_and_the_rest_is_context() -> None:
    histories = weighted(
        [
            [(1, 0), (2, 1), (3, 0), (4, 1), (5, 0), (6, 2), (7, 0)],  # targets 2, 4, 6
            [(1, 1), (2, 1), (3, 0)],  # nothing comes before the first of its two targets
            [(8, 0), (9, 1), (1, 1)],
            [(1, 0), (2, 0), (3, 1)],  # one target: for training alone
        ]
    )
    split = leave_out(histories)
    assert split.test.users.tolist() == split.validation.users.tolist() == [0, 2]
    assert split.test.targets.tolist() == [[6], [1]]
    assert lists(split.test.histories) == [[1, 2, 3, 4, 5], [8, 9]]
    assert split.validation.targets.tolist() == [[4], [9]]
    assert lists(split.validation.histories) == [[1, 2, 3], [8]]
    assert lists(split.train) == [[1, 2, 3], [1, 2, 3], [8], [1, 2, 3]]
    assert split.train.weights is not None
    assert split.train.weights.tolist() == [0, 1, 0, 1, 1, 0, 0, 0, 0, 1]
    assert has_holdout(histories).tolist() == [True, False, True, False]
    known = last_targets(histories)
    assert known.targets.tolist() == [[6], [2], [1], [3]]
    assert lists(known.histories) == [[1, 2, 3, 4, 5], [1], [8, 9], [1, 2]]


def test_weights_of_one_split_as_no_weights() -> None:
    rows = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3]]
    ones = weighted([[(item, 1.0) for item in row] for row in rows])
    for k in (1, 2):
        own, plain = leave_out(ones, k), leave_out(Sequences.of(rows), k)
        assert lists(own.train) == lists(plain.train)
        assert own.test.targets.tolist() == plain.test.targets.tolist()
        assert lists(own.test.histories) == lists(plain.test.histories)
    with pytest.raises(DataError, match="no user has the 3 events that are targets"):
        leave_out(weighted([[(1, 0), (2, 0), (3, 1)]]))
