from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from maskgr.data.sequences import Sequences
from maskgr.errors import DataError, RequestError
from maskgr.training.batches import Batches, Place

ROWS = st.lists(st.lists(st.integers(0, 99), min_size=0, max_size=30), min_size=1, max_size=20)


@given(ROWS, st.integers(2, 7), st.integers(7, 40), st.integers(0, 3))
def test_epoch_holds_every_item_once_in_windows_of_one_user(
    rows: list[list[int]], window: int, items: int, epoch: int
) -> None:
    sequences = Sequences.of(rows)
    if not len(sequences.values):
        return
    batches = Batches(sequences, window, items)
    windows = batches.windows(epoch)
    chosen = np.concatenate(batches.epoch(epoch))
    assert sorted(chosen.tolist()) == np.flatnonzero(windows.lengths > 0).tolist()
    assert windows.lengths.max() <= window
    assert windows.values.tolist() == sequences.values.tolist()
    # No window spans two users: every user's first item starts one.
    starts = set(windows.offsets.tolist())
    assert set(sequences.offsets[:-1][sequences.lengths > 0].tolist()) <= starts
    for batch in batches.epoch(epoch):
        assert 0 < windows.lengths[batch].sum() <= items


def test_short_sequences_stay_whole_and_long_ones_are_cut_elsewhere_each_epoch() -> None:
    sequences = Sequences.of([range(4), range(50)])
    batches = Batches(sequences, 5, 20)
    seen = {tuple(batches.windows(epoch).offsets.tolist()) for epoch in range(20)}
    assert len(seen) > 3
    assert all(4 in offsets for offsets in seen)


def test_batches_resume_from_any_place() -> None:
    sequences = Sequences.of([range(n % 9) for n in range(60)])
    batches = Batches(sequences, 6, 30, seed=5)
    whole = list(islice(batches.from_place(Place()), 40))
    assert whole[-1][0].epoch > 1
    for cut in (1, 7, 25):
        again = list(islice(batches.from_place(whole[cut - 1][0]), 40 - cut))
        assert [place for place, _ in again] == [place for place, _ in whole[cut:]]
        assert all(a == b for (_, a), (_, b) in zip(again, whole[cut:], strict=True))
    for _, batch in whole:
        assert (np.diff(batch.lengths) >= 0).all()


def test_order_follows_the_seed() -> None:
    sequences = Sequences.of([[n] * 3 for n in range(50)])
    first = [next(Batches(sequences, 5, 30, seed).from_place(Place()))[1] for seed in (1, 1, 2)]
    assert first[0] == first[1]
    assert first[0] != first[2]


def test_raises_when_batches_are_impossible() -> None:
    sequences = Sequences.of([[1, 2, 3]])
    with pytest.raises(RequestError, match="a window of 1 items has no history"):
        Batches(sequences, 1, 10)
    with pytest.raises(RequestError, match="a batch of 4 items has no room for a window of 5"):
        Batches(sequences, 5, 4)
    with pytest.raises(DataError, match="nothing to train on"):
        Batches(Sequences.of([[]]), 5, 10)
