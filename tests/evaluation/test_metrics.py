"""The metrics against definitions by hand and against ranx, an independent library."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ranx import Qrels, Run
from ranx import evaluate as ranx_evaluate

from maskgr.evaluation.metrics import (
    Mean,
    means,
    ndcg,
    recall,
    session_recall,
    top_items,
    user_metrics,
)


def by_ranx(
    ranked: npt.NDArray[Any], targets: npt.NDArray[Any], ks: tuple[int, ...]
) -> dict[str, npt.NDArray[Any]]:
    """ranx on the same rankings; it ranks by score, so places become falling scores."""
    qrels = Qrels({f"u{u:05}": {str(t): 1 for t in row} for u, row in enumerate(targets.tolist())})
    run = Run(
        {
            f"u{u:05}": {str(i): -float(place) for place, i in enumerate(row) if i >= 0}
            or {"-": 0.0}
            for u, row in enumerate(ranked.tolist())
        }
    )
    names = [f"{metric}@{k}" for metric in ("recall", "ndcg") for k in ks]
    found = ranx_evaluate(qrels, run, names, return_mean=False)
    return {name: np.asarray(found[name]) for name in names}


@pytest.mark.parametrize("targets_each", [1, 2, 5])
@pytest.mark.parametrize("seed", range(3))
def test_random_rankings_agree_with_ranx(seed: int, targets_each: int) -> None:
    rng = np.random.default_rng(seed)
    ranked = np.argsort(rng.random((300, 60)), axis=1)[:, :20]
    targets = np.argsort(rng.random((300, 60)), axis=1)[:, :targets_each]
    for name, values in by_ranx(ranked, targets, (1, 5, 10, 20)).items():
        metric, _, k = name.partition("@")
        ours = {"recall": recall, "ndcg": ndcg}[metric](ranked, targets, int(k))
        np.testing.assert_allclose(ours, values, rtol=0, atol=1e-9)


def test_ties_and_edge_cases_agree_with_ranx() -> None:
    ranked = np.array(
        [
            [3, 1, 2, 0],  # found first
            [1, 2, 0, 3],  # found last
            [1, 2, 0, -1],  # a short list, not found
            [-1, -1, -1, -1],  # an empty list
            [3, 5, -1, -1],  # the same target twice counts once
        ]
    )
    targets = np.array([[3, 3], [3, 3], [3, 9], [3, 4], [3, 3]])
    for name, values in by_ranx(ranked, targets, (1, 2, 4)).items():
        metric, _, k = name.partition("@")
        ours = {"recall": recall, "ndcg": ndcg}[metric](ranked, targets, int(k))
        np.testing.assert_allclose(ours, values, rtol=0, atol=1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_tied_scores_agree_with_ranx(seed: int) -> None:
    # Few different scores: nearly everything is tied, at the cut-off too. ranx is given the same
    # rule, the catalogue's order, as an offset too small to change any order but that of ties.
    rng = np.random.default_rng(seed)
    scores = rng.integers(0, 4, size=(100, 30)).astype(np.float64)
    targets = rng.integers(0, 30, size=(100, 1))
    qrels = Qrels({f"u{u:05}": {str(t): 1} for u, t in enumerate(targets[:, 0])})
    run = Run(
        {
            f"u{u:05}": {str(i): score - 1e-6 * i for i, score in enumerate(row)}
            for u, row in enumerate(scores.tolist())
        }
    )
    names = ["recall@5", "recall@10", "ndcg@5", "ndcg@10"]
    theirs = ranx_evaluate(qrels, run, names)
    ours = means(user_metrics(top_items(scores, 10), targets, (5, 10)))
    for name in names:
        assert ours[name].mean == pytest.approx(theirs[name], abs=1e-9)


def test_by_hand() -> None:
    ranked = np.array([[7, 8, 9, 4]])
    assert recall(ranked, np.array([[9]]), 2).tolist() == [0]
    assert recall(ranked, np.array([[9]]), 3).tolist() == [1]
    assert ndcg(ranked, np.array([[9]]), 3).tolist() == [1 / math.log2(4)]
    both = (1 / math.log2(2) + 1 / math.log2(4)) / (1 + 1 / math.log2(3))
    assert ndcg(ranked, np.array([[9, 7]]), 4).tolist() == pytest.approx([both])
    assert recall(ranked, np.array([[9]]), 100).tolist() == [1]  # deeper than the list


def test_session_recall_by_hand() -> None:
    sessions = np.array(
        [
            [[1, 2], [3, 4], [5, 6]],
            [[1, 2], [3, 4], [5, 6]],
            [[7, 8], [-1, -1], [-1, -1]],  # fewer sessions than asked for
        ]
    )
    # The first user: 3 is first in the second session, 6 is second in the third. The second user:
    # 2 is there, but never first. The third: both are in the only session.
    targets = np.array([[3, 6], [2, 9], [7, 8]])
    assert session_recall(sessions, targets, 1).tolist() == [0, 0, 1]
    assert session_recall(sessions, targets, 2).tolist() == [0.5, 0, 1]
    assert session_recall(sessions, targets, 3).tolist() == [1, 0, 1]
    assert session_recall(sessions, targets, 9).tolist() == [1, 0, 1]  # deeper than the list


@pytest.mark.parametrize("items", [1, 2, 3])
def test_session_recall_is_the_recall_of_each_position_averaged(items: int) -> None:
    rng = np.random.default_rng(items)
    sessions = rng.integers(0, 9, size=(40, 10, items))
    targets = rng.integers(0, 9, size=(40, items))
    for k in (1, 5, 10):
        positions = [
            [float(targets[u, p] in sessions[u, :k, p]) for p in range(items)] for u in range(40)
        ]
        expected = np.mean(positions, axis=1)
        np.testing.assert_allclose(session_recall(sessions, targets, k), expected, atol=1e-12)


def test_session_recall_of_one_item_is_recall() -> None:
    rng = np.random.default_rng(0)
    ranked, targets = np.argsort(rng.random((40, 20)), axis=1), rng.integers(0, 20, size=(40, 1))
    for k in (1, 5, 10):
        found = session_recall(ranked[:, :, None], targets, k)
        np.testing.assert_array_equal(found, recall(ranked, targets, k))


@settings(max_examples=200)
@given(
    st.lists(st.lists(st.integers(0, 3), min_size=6, max_size=6), min_size=1, max_size=5),
    st.integers(1, 8),
)
def test_top_items_is_a_stable_sort(rows: list[list[int]], top: int) -> None:
    expected = [sorted(range(6), key=lambda i, row=row: -row[i])[:top] for row in rows]
    assert top_items(np.array(rows, dtype=float), top).tolist() == expected


def test_confidence_interval_covers_the_truth_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    intervals = [Mean.of((rng.random(500) < 0.3).astype(float)) for _ in range(1000)]
    covered = np.mean([i.low <= 0.3 <= i.high for i in intervals])
    assert 0.93 < covered < 0.97
    assert Mean.of(np.array([1.0])) == Mean(1.0, 1.0, 1.0)
    assert Mean.of(np.array([0.0, 1.0])).low == 0.0
