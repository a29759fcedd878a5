from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maskgr.data.sequences import Sequences
from maskgr.errors import RequestError
from maskgr.nn import nearest
from maskgr.nn.nearest import Found, Index, Lifted, Nearest

Floats = npt.NDArray[np.float32]
INDEXES: tuple[Index, ...] = ("exact", "hnsw")


def normal(seed: int, *shape: int) -> Floats:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def ragged(rng: np.random.Generator, rows: int, items: int, longest: int) -> Sequences:
    """Rows with duplicates, some of them empty."""
    return Sequences.of([rng.integers(0, items, rng.integers(0, longest + 1)) for _ in range(rows)])


def lift(rows: Sequences | None, bonus: float) -> Lifted | None:
    """Each item once; those with odd numbers get twice the bonus the other way."""
    if rows is None:
        return None
    once = rows.keep(~rows.repeats())
    return Lifted(once, np.float32(bonus) * (1 - 3 * (once.values % 2)))


def by_hand(
    vectors: Floats,
    query: Floats,
    allowed: npt.NDArray[np.bool_] | None,
    excluded: npt.NDArray[np.int32],
    seen: npt.NDArray[np.int32],
    bonus: float,
) -> list[tuple[float, int]]:
    """(score, item) of everything that may be found, best first, ties by number."""
    scores = vectors.astype(np.float64) @ query
    scores[np.unique(seen)] += bonus * (1 - 3 * (np.unique(seen) % 2))
    left = np.ones(len(vectors), dtype=bool) if allowed is None else allowed.copy()
    left[excluded] = False
    return sorted(
        ((float(scores[i]), int(i)) for i in np.flatnonzero(left)), key=lambda p: (-p[0], p[1])
    )


def rows_of(sequences: Sequences | None, rows: int) -> list[npt.NDArray[np.int32]]:
    return [np.empty(0, np.int32)] * rows if sequences is None else list(sequences)


def check_promises(found: Found, expected: list[list[tuple[float, int]]], top: int) -> None:
    """Nothing twice, nothing barred, none too few, true scores, ties by number."""
    assert found.items.dtype == np.int32
    assert found.scores.dtype == np.float32
    assert found.items.shape == found.scores.shape == (len(expected), top)
    for items, scores, best in zip(
        found.items.tolist(), found.scores.tolist(), expected, strict=True
    ):
        count = min(top, len(best))
        assert items[count:] == [-1] * (top - count)
        assert scores[count:] == [-np.inf] * (top - count)
        items, scores = items[:count], scores[:count]
        assert len(set(items)) == count
        true = {item: score for score, item in best}
        assert scores == pytest.approx([true[item] for item in items], abs=1e-4)
        pairs = list(zip(scores, items, strict=True))
        assert pairs == sorted(pairs, key=lambda p: (-p[0], p[1]))


COMBINATIONS = list(
    itertools.product((None, 0.6, 0.05), (False, True), (False, True), (0.0, 1.5, -1.5))
)


@pytest.mark.parametrize("index", INDEXES)
@pytest.mark.parametrize(("share", "excludes", "sees", "bonus"), COMBINATIONS)
@pytest.mark.parametrize("queries", [3, 20])  # both sides of FEW
def test_against_sorting_by_hand(
    share: float | None, excludes: bool, sees: bool, bonus: float, queries: int, index: Index
) -> None:
    rng = np.random.default_rng(3)
    items, top = 90, 7
    vectors, asked = normal(1, items, 5), normal(2, queries, 5)
    allowed = None if share is None else rng.random(items) < share
    excluded = ragged(rng, queries, items, 30) if excludes else None
    seen = ragged(rng, queries, items, 30) if sees else None
    found = Nearest(vectors, index).search(
        asked, top, allowed=allowed, excluded=excluded, lifted=lift(seen, bonus)
    )
    expected = [
        by_hand(vectors, query, allowed, out, had, bonus)
        for query, out, had in zip(
            asked, rows_of(excluded, queries), rows_of(seen, queries), strict=True
        )
    ]
    check_promises(found, expected, top)
    if index == "exact":
        best = [[item for _, item in row[:top]] for row in expected]
        assert found.items.tolist() == [row + [-1] * (top - len(row)) for row in best]


ITEMS = 6
some_rows = st.lists(st.lists(st.integers(0, ITEMS - 1), max_size=8), min_size=2, max_size=2)


@settings(max_examples=200, deadline=None)
@given(
    vectors=st.lists(
        st.lists(st.integers(-1, 1), min_size=2, max_size=2), min_size=ITEMS, max_size=ITEMS
    ),
    queries=st.lists(st.lists(st.integers(-2, 2), min_size=2, max_size=2), min_size=2, max_size=2),
    allowed=st.none() | st.lists(st.booleans(), min_size=ITEMS, max_size=ITEMS),
    excluded=st.none() | some_rows,
    seen=st.none() | some_rows,
    bonus=st.integers(-2, 2),
    top=st.integers(1, ITEMS + 2),
    index=st.sampled_from(INDEXES),
)
def test_promises_with_many_ties(
    vectors: list[list[int]],
    queries: list[list[int]],
    allowed: list[bool] | None,
    excluded: list[list[int]] | None,
    seen: list[list[int]] | None,
    bonus: int,
    top: int,
    index: Index,
) -> None:
    catalogue, asked = np.array(vectors, np.float32), np.array(queries, np.float32)
    mask = None if allowed is None else np.array(allowed)
    out = None if excluded is None else Sequences.of(excluded)
    had = None if seen is None else Sequences.of(seen)
    found = Nearest(catalogue, index).search(
        asked, top, allowed=mask, excluded=out, lifted=lift(had, bonus)
    )
    expected = [
        by_hand(catalogue, query, mask, row, more, bonus)
        for query, row, more in zip(asked, rows_of(out, 2), rows_of(had, 2), strict=True)
    ]
    check_promises(found, expected, top)
    if index == "exact":  # which of the tied is open at the cut; the scores are not
        for scores, best in zip(found.scores.tolist(), expected, strict=True):
            assert scores[: len(best)] == [score for score, _ in best[:top]]


def test_equal_vectors_tie_by_number_wherever_they_lie() -> None:
    vectors = normal(0, 400, 37)
    twins = np.array([3, 50, 51, 200, 399])
    vectors[twins] = vectors[3]
    queries = np.concatenate([vectors[3:4] * 9, normal(1, 60, 37)])
    seen = Sequences.of([[399, 200]] + [[]] * 60)
    search = Nearest(vectors).search
    assert search(queries, 5).items[0].tolist() == twins.tolist()
    assert search(queries[:1], 5).items[0].tolist() == twins.tolist()
    lifted = search(queries, 5, lifted=Lifted(seen, np.ones(2, np.float32)))
    assert lifted.items[0].tolist() == [200, 399, 3, 50, 51]


def test_a_bonus_of_nothing_changes_nothing() -> None:
    rng = np.random.default_rng(0)
    nearest, queries = Nearest(normal(0, 50, 4)), normal(1, 5, 4)
    plain = nearest.search(queries, 10)
    same = nearest.search(queries, 10, lifted=lift(ragged(rng, 5, 50, 20), 0.0))
    np.testing.assert_array_equal(plain.items, same.items)
    np.testing.assert_array_equal(plain.scores, same.scores)


def test_a_bonus_lifts_from_the_bottom_and_sinks_from_the_top() -> None:
    nearest = Nearest(np.arange(10, dtype=np.float32)[:, None])
    query = np.ones((1, 1), np.float32)
    up = nearest.search(query, 3, lifted=Lifted(Sequences.of([[1, 0]]), np.array([8.5, 8.25])))
    assert up.items.tolist() == [[1, 9, 0]]
    assert up.scores.tolist() == [[9.5, 9, 8.25]]
    down = nearest.search(query, 3, lifted=Lifted(Sequences.of([[9, 8]]), np.full(2, -1.5)))
    assert down.items.tolist() == [[9, 7, 8]]
    assert down.scores.tolist() == [[7.5, 7, 6.5]]
    both = Sequences.of([[9]])
    found = nearest.search(query, 1, excluded=both, lifted=Lifted(both, np.full(1, 5.0)))
    assert found.items.tolist() == [[8]]


@pytest.mark.parametrize("index", INDEXES)
def test_nothing_left(index: Index) -> None:
    searched, queries = Nearest(normal(0, 8, 3), index), normal(1, 3, 3)
    all_but_one = Sequences.of([range(8), [], [0, 1, 2, 3, 3, 5, 6, 7]])
    found = searched.search(queries, 10, excluded=all_but_one)
    assert (found.items >= 0).sum(axis=1).tolist() == [0, 8, 1]
    assert found.items[2, 0] == 4
    lifted = lift(all_but_one, 1)
    found = searched.search(queries, 2, allowed=np.zeros(8, dtype=bool), lifted=lifted)
    assert (found.items == -1).all()
    assert (found.scores == -np.inf).all()
    assert searched.search(queries[:0], 2).items.shape == (0, 2)
    empty = Nearest(np.empty((0, 3), np.float32), index)
    assert (empty.search(queries, 2, excluded=Sequences.of([[]] * 3)).items == -1).all()


@pytest.mark.parametrize("index", INDEXES)
def test_small_batches_find_the_same(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(5)
    searched, queries = Nearest(normal(0, 600, 6), index), normal(1, 40, 6)
    filters: dict[str, Any] = {
        "allowed": rng.random(600) < 0.5,
        "excluded": ragged(rng, 40, 600, 12),
        "lifted": lift(ragged(rng, 40, 600, 12), 1.0),
    }
    whole = searched.search(queries, 5, **filters)
    monkeypatch.setattr(nearest, "PAIRS", 60)
    monkeypatch.setattr(nearest, "GATHERED", 20)
    parts = searched.search(queries, 5, **filters)
    if index == "exact":
        np.testing.assert_array_equal(whole.items, parts.items)
        np.testing.assert_array_equal(whole.scores, parts.scores)
    assert (parts.items >= 0).all()


def test_batches_hold_every_row_once_within_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nearest, "PAIRS", 100)
    widths = np.random.default_rng(0).integers(0, 130, 200)
    batches = list(nearest._batches(widths))
    assert sorted(np.concatenate(batches).tolist()) == list(range(200))
    assert all(len(rows) == 1 or len(rows) * widths[rows].max() <= 100 for rows in batches)
    assert len(batches) < 190


def test_scores_of_given_items() -> None:
    vectors, queries = normal(0, 9, 4), normal(1, 2, 4)
    items = np.array([[0, -1, 8], [3, 3, -1]])
    scores = Nearest(vectors).scores(queries, items)
    assert scores.dtype == np.float32
    for row, column in np.ndindex(2, 3):
        item = items[row, column]
        true = -np.inf if item < 0 else float(vectors[item] @ queries[row])
        assert scores[row, column] == pytest.approx(true, rel=1e-5)
    assert Nearest(vectors).scores(queries, items[:, :0]).shape == (2, 0)


@pytest.mark.parametrize("index", INDEXES)
def test_search_and_scores_agree(index: Index) -> None:
    searched, queries = Nearest(normal(0, 300, 33), index), normal(1, 25, 33)
    found = searched.search(queries, 9)
    np.testing.assert_array_equal(found.scores, searched.scores(queries, found.items))


def test_keeps_its_own_copy_of_any_layout() -> None:
    vectors = normal(0, 4, 30).T.astype(np.float64)  # (30, 4), neither contiguous nor float32
    queries = normal(1, 2, 4)
    searched = Nearest(vectors)  # type: ignore[arg-type]
    before = searched.search(queries, 3)
    best = np.argsort(-(queries @ vectors.T), axis=1)[:, :3]
    vectors[:] = 0
    after = searched.search(queries, 3)
    assert before.items.tolist() == after.items.tolist() == best.tolist()


@pytest.fixture(scope="module")
def large() -> tuple[Nearest, Nearest, Floats]:
    """The graph and the truth, on vectors of very different norms, and queries."""
    norms = np.random.default_rng(1).lognormal(0, 0.5, (5000, 1))
    vectors = (normal(0, 5000, 32) * norms).astype(np.float32)
    return Nearest(vectors, "hnsw"), Nearest(vectors), normal(2, 100, 32)


def recall(found: Found, true: Found) -> float:
    hits = [len(set(a) & set(b)) for a, b in zip(found.items, true.items, strict=True)]
    return sum(hits) / true.items.size


def test_recall_of_the_graph(large: tuple[Nearest, Nearest, Floats]) -> None:
    graph, exact, queries = large
    assert recall(graph.search(queries, 10), exact.search(queries, 10)) >= 0.95


@pytest.mark.parametrize("share", [0.5, 0.12, 0.01])
def test_recall_of_the_graph_under_filters(
    share: float, large: tuple[Nearest, Nearest, Floats]
) -> None:
    graph, exact, queries = large
    rng = np.random.default_rng(7)
    filters: dict[str, Any] = {
        "allowed": rng.random(5000) < share,
        "excluded": ragged(rng, len(queries), 5000, 20),
        "lifted": lift(ragged(rng, len(queries), 5000, 20), 3.0),
    }
    found, true = graph.search(queries, 10, **filters), exact.search(queries, 10, **filters)
    assert recall(found, true) >= (1 if share < 0.1 else 0.95)


def test_the_graph_is_asked_and_left_where_it_finds_too_few(
    large: tuple[Nearest, Nearest, Floats], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The allowed half points away from the first query, and the exact search steps in for it."""
    graph, exact, queries = large
    products = exact.scores(queries[:1], np.arange(5000)[None])[0]
    away = products < np.median(products)
    asked: list[int] = []
    search = Nearest._exact

    def count(self: Nearest, queries: Floats, *rest: Any) -> Any:
        asked.append(len(queries))
        return search(self, queries, *rest)

    monkeypatch.setattr(Nearest, "_exact", count)
    found = graph.search(queries, 10, allowed=away)
    assert len(asked) == 1
    assert 1 <= asked[0] < len(queries)
    true = exact.search(queries, 10, allowed=away)
    assert found.items[0].tolist() == true.items[0].tolist()
    assert away[found.items].all()
    assert (found.items >= 0).all()
    asked.clear()
    graph.search(queries, 10)
    assert asked == []


@pytest.mark.parametrize("unit", [False, True])
def test_recall_of_the_graph_where_all_vectors_share_a_direction(unit: bool) -> None:
    """Queries that point against it: by inner product alone next to nothing would be found."""
    shared = 2 * normal(3, 16)
    vectors, queries = shared + normal(0, 2000, 16), normal(1, 50, 16) - shared
    if unit:
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    found = Nearest(vectors, "hnsw").search(queries, 10)
    assert recall(found, Nearest(vectors).search(queries, 10)) >= 0.95


def test_a_graph_of_equal_vectors_still_finds_enough() -> None:
    """Links among twins may leave parts of the graph out of reach."""
    searched = Nearest(np.ones((3000, 4), np.float32), "hnsw")
    found = searched.search(np.ones((5, 4), np.float32), 50)
    assert all(len(set(row)) == 50 and min(row) >= 0 for row in found.items.tolist())


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e30])
def test_what_cannot_be_compared_is_named(bad: float) -> None:
    good = normal(0, 5, 3)
    wrong = good.copy()
    wrong[2, 1] = bad
    with pytest.raises(RequestError, match="row 2 of the vectors"):
        Nearest(wrong)
    with pytest.raises(RequestError, match="row 2 of the queries"):
        Nearest(good).search(wrong, 1)
    with pytest.raises(RequestError, match="row 2 of the queries"):
        Nearest(good).scores(wrong, np.zeros((5, 1), np.int32))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"queries": normal(0, 2, 4)}, "queries 4 wide do not fit vectors 3 wide"),
        ({"queries": normal(0, 3)}, "queries of shape"),
        ({"top": 0}, "at least 1"),
        ({"lifted": Lifted(Sequences.of([[1], []]), np.full(1, np.nan))}, "bonus of nan"),
        ({"lifted": Lifted(Sequences.of([[1], []]), np.full(1, -np.inf))}, "bonus of -inf"),
        ({"lifted": Lifted(Sequences.of([[1], []]), np.ones(2))}, "does not fit 1 lifted items"),
        ({"allowed": np.ones(4, dtype=bool)}, "each of the 5 items"),
        ({"allowed": np.array([0, 1, 2, 3, 4])}, "each of the 5 items"),
        ({"excluded": Sequences.of([[1]])}, "excluded has 1 rows for 2 queries"),
        ({"lifted": lift(Sequences.of([[]] * 3), 1)}, "lifted has 3 rows for 2 queries"),
        ({"excluded": Sequences.of([[1], [5]])}, "row 1 of excluded has item 5"),
        ({"lifted": lift(Sequences.of([[-1], []]), 1)}, "row 0 of lifted has item -1"),
    ],
)
def test_requests_that_cannot_be_answered(change: dict[str, Any], message: str) -> None:
    request: dict[str, Any] = {"queries": normal(0, 2, 3), "top": 2, **change}
    with pytest.raises(RequestError, match=message):
        Nearest(normal(0, 5, 3)).search(**request)


def test_other_requests_that_cannot_be_answered() -> None:
    vectors = normal(0, 5, 3)
    with pytest.raises(RequestError, match="vectors of shape"):
        Nearest(vectors[0])
    with pytest.raises(RequestError, match="no index 'tree'; use exact or hnsw"):
        Nearest(vectors, "tree")  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="row 1 of items has item 5"):
        Nearest(vectors).scores(vectors[:2], np.array([[0, -1], [2, 5]]))
    with pytest.raises(RequestError, match="a row of items for each query"):
        Nearest(vectors).scores(vectors[:2], np.array([[0, -1]]))
