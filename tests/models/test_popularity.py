from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from maskgr.data.sequences import Sequences
from maskgr.models.popularity import Popularity

ITEMS = 6


@given(
    counts=st.lists(st.integers(0, 3), min_size=ITEMS, max_size=ITEMS),
    allowed=st.lists(st.booleans(), min_size=ITEMS, max_size=ITEMS),
    seen=st.lists(st.lists(st.integers(0, ITEMS - 1), max_size=8), min_size=1, max_size=4),
    top=st.integers(1, ITEMS),
)
def test_ranking_against_sorting_by_hand(
    counts: list[int], allowed: list[bool], seen: list[list[int]], top: int
) -> None:
    model = Popularity(np.array(counts, dtype=np.int64))
    histories = Sequences.of(seen)
    for excluded in (None, histories):
        ranked, scores, _ = model.rank(histories, top, np.array(allowed), excluded)
        assert ranked.shape == scores.shape == (len(seen), top)
        for row, row_scores, user in zip(ranked.tolist(), scores.tolist(), seen, strict=True):
            best = sorted(range(ITEMS), key=lambda i: (-counts[i], i))
            barred = user if excluded is not None else []
            expected = [i for i in best if allowed[i] and i not in barred][:top]
            assert row == expected + [-1] * (top - len(expected))
            assert row_scores[: len(expected)] == sorted(row_scores[: len(expected)], reverse=True)
            assert all(s == -np.inf for s in row_scores[len(expected) :])


def test_scores_are_log_probabilities() -> None:
    model = Popularity(np.array([3, 0, 1]))
    _, scores, _ = model.rank(Sequences.of([[]]), 3, np.ones(3, dtype=bool), None)
    assert np.exp(scores.astype(np.float64)).sum() == pytest.approx(1)
