from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from maskgr.data.sequences import Sequences
from maskgr.data.splits import leave_out
from maskgr.evaluation.ranking import Query
from maskgr.models import popularity
from maskgr.models.base import Training, train_config
from maskgr.models.popularity import Popularity
from tests.models.tiny import shop, workspace

ITEMS = 6


@given(
    counts=st.lists(st.integers(0, 3), min_size=ITEMS, max_size=ITEMS),
    allowed=st.lists(st.booleans(), min_size=ITEMS, max_size=ITEMS),
    seen=st.lists(st.lists(st.integers(0, ITEMS - 1), max_size=8), min_size=1, max_size=4),
    top=st.integers(1, ITEMS),
)
def test_ranking_equals_sorting_by_hand(
    counts: list[int], allowed: list[bool], seen: list[list[int]], top: int
) -> None:
    model = Popularity(np.array(counts, dtype=np.int64))
    histories = Sequences.of(seen)
    for excluded in (None, histories):
        ranked, scores, _ = model.rank(Query(histories, top, np.array(allowed), excluded))
        assert ranked.shape == scores.shape == (len(seen), top)
        for row, row_scores, user in zip(ranked.tolist(), scores.tolist(), seen, strict=True):
            best = sorted(range(ITEMS), key=lambda i: (-counts[i], i))
            barred = user if excluded is not None else []
            expected = [i for i in best if allowed[i] and i not in barred][:top]
            assert row == expected + [-1] * (top - len(expected))
            assert row_scores[: len(expected)] == sorted(row_scores[: len(expected)], reverse=True)
            assert all(s == -np.inf for s in row_scores[len(expected) :])


def test_ranking_does_not_depend_on_the_size_of_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    model, seen = Popularity(np.array([3, 1, 2])), Sequences.of([[0], [1, 2], [], [0, 1, 2], [2]])
    whole = model.rank(Query(seen, 2, excluded=seen)).items
    monkeypatch.setattr(popularity, "CHUNK", 2)
    assert np.array_equal(model.rank(Query(seen, 2, excluded=seen)).items, whole)


def test_scores_are_log_probabilities() -> None:
    model = Popularity(np.array([3, 0, 1]))
    scores = model.rank(Query(Sequences.of([[]]), 3)).scores
    assert np.exp(scores.astype(np.float64)).sum() == pytest.approx(1)


def test_new_items_rank_last() -> None:
    model = Popularity(np.array([0, 2])).with_items(pl.DataFrame({"item_id": ["x"]}), None)
    assert model.rank(Query(Sequences.of([[]]), 3)).items.tolist() == [[1, 0, 2]]


def test_counts_training_events_and_keeps_them(tmp_path: Path) -> None:
    data = shop()
    split, config = leave_out(data.histories), train_config(model="popularity")
    model = Popularity.learn(Training(data, split, config, workspace(tmp_path)))
    assert model.counts.tolist() == [(split.train.values == n).sum() for n in range(14)]
    model.save(tmp_path)
    assert np.array_equal(Popularity.load(tmp_path, config).counts, model.counts)


def test_counts_weights_and_keeps_them(tmp_path: Path) -> None:
    data, config = shop(), train_config(model="popularity")
    weights = np.resize([0, 1, 0.25], len(data.histories.values)).astype(np.float32)
    split = leave_out(replace(data.histories, weights=weights))
    model = Popularity.learn(Training(data, split, config, workspace(tmp_path)))
    train = zip(split.train.values.tolist(), split.train.weights.tolist(), strict=True)  # type: ignore[union-attr]
    by_hand = np.zeros(14)
    for item, weight in train:
        by_hand[item] += weight
    assert model.counts.tolist() == by_hand.tolist()
    model.save(tmp_path)
    assert np.array_equal(Popularity.load(tmp_path, config).counts, model.counts)
