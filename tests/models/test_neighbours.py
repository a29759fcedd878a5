from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from safetensors.numpy import save_file

from maskgr.data.sequences import Sequences
from maskgr.data.splits import leave_out
from maskgr.errors import ArtefactError, RequestError
from maskgr.evaluation.ranking import Query
from maskgr.models import neighbours
from maskgr.models.base import Training, train_config
from maskgr.models.neighbours import FLOOR, RECENT, SPAN, Neighbours, NeighboursConfig
from tests.models.tiny import shop, workspace

ITEMS = 9


def histories(seed: int, repeats: bool) -> Sequences:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 9, size=12)
    return Sequences.of(
        [rng.integers(ITEMS, size=n) if repeats else rng.permutation(ITEMS)[:n] for n in lengths]
    )


def rows(table: Neighbours) -> list[list[int]]:
    return [row.tolist() for row in table.items]


def strengths(table: Neighbours) -> list[list[float]]:
    assert table.items.weights is not None
    return [row.tolist() for row in np.split(table.items.weights, table.items.offsets[1:-1])]


def strengths_after(train: Sequences, history: list[int]) -> dict[int, float]:
    """item -> how strongly it follows, pair by pair."""
    counts = np.bincount(train.values, minlength=ITEMS) + 1
    strength: dict[int, float] = defaultdict(float)
    for age, recent in enumerate(history[::-1][:RECENT]):
        for sequence in train:
            for place, item in enumerate(sequence.tolist()):
                for before in range(max(0, place - SPAN), place):
                    if sequence[before] == recent != item:
                        share = 0.5 ** (age + place - before - 1)
                        strength[item] += share / math.sqrt(counts[recent] * counts[item])
    return {item: math.log1p(k / FLOOR) for item, k in strength.items()}


def test_strengths_of_two_sequences_by_hand() -> None:
    # 0 is followed by 1 at once in both, by 2 two places on in one. Counts: 0 and 1 twice, 2 once.
    table = Neighbours.count(Sequences.of([[0, 1, 2], [0, 1]]), 4, 3)
    assert rows(table) == [[1, 2], [2], [], []]
    assert strengths(table)[0] == pytest.approx([2 / 3, 0.5 / math.sqrt(6)])
    assert strengths(table)[1] == pytest.approx([1 / math.sqrt(6)])
    assert table.counts.tolist() == [2, 2, 1, 0]
    found, values = table.after(Sequences.of([[0, 1], [3], [1, 0]]))
    assert [row.tolist() for row in found] == [[1, 2], [], [1, 2]]
    of_one = 0.5 * 2 / 3  # 0 is the last but one
    of_two = 1 / math.sqrt(6) + 0.5 * 0.5 / math.sqrt(6)
    assert values[:2].tolist() == pytest.approx([math.log1p(k / 0.01) for k in (of_one, of_two)])


@pytest.mark.parametrize("repeats", [False, True])
def test_strengths_equal_enumeration_of_pairs(repeats: bool) -> None:
    train = histories(0, repeats)
    asked = Sequences.of([[3, 1, 4], [], [2], list(range(8)), [5, 5, 1]])
    found, strong = Neighbours.count(train, ITEMS, ITEMS).after(asked)
    for row, history in enumerate(asked):
        values = strong[found.offsets[row] : found.offsets[row + 1]]
        expected = strengths_after(train, history.tolist())
        assert found[row].tolist() == sorted(expected)
        assert values.tolist() == pytest.approx([expected[i] for i in sorted(expected)], rel=1e-4)


@pytest.mark.parametrize("chunk", [1024, 2])
def test_ranks_neighbours_first_and_the_rest_by_popularity(
    chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(neighbours, "CHUNK", chunk)
    train, asked = histories(2, False), Sequences.of([[3, 1], [], [8], [0, 4, 7]])
    table = Neighbours.count(train, ITEMS, ITEMS)
    allowed = np.arange(ITEMS) != 2
    for query in (
        Query(asked, ITEMS),
        Query(asked, 3),
        Query(asked, ITEMS + 2, allowed),
        Query(asked, ITEMS, excluded=asked),
        Query(asked, 4, allowed, asked),
    ):
        found = table.rank(query)
        assert found.items.shape == found.scores.shape == (len(asked), query.top)
        for row, history in enumerate(asked):
            strength = strengths_after(train, history.tolist())
            left = [item for item in range(ITEMS) if query.allowed is None or allowed[item]]
            if query.excluded is not None:
                left = [item for item in left if item not in history]
            best = sorted(left, key=lambda i: (-strength.get(i, 0), -table.counts[i], i))
            best = best[: query.top]
            assert found.items[row].tolist() == best + [-1] * (query.top - len(best))
            assert (found.scores[row, len(best) :] == -np.inf).all()


def test_scores_are_log_probabilities() -> None:
    table = Neighbours.count(histories(2, False), ITEMS, ITEMS)
    scores = table.rank(Query(Sequences.of([[3, 1], []]), ITEMS)).scores
    assert np.exp(scores.astype(np.float64)).sum(1) == pytest.approx(1)


def test_only_the_strongest_neighbours_are_kept() -> None:
    train = histories(3, False)
    whole, few = Neighbours.count(train, ITEMS, ITEMS), Neighbours.count(train, ITEMS, 2)
    assert strengths(whole) == [sorted(row, reverse=True) for row in strengths(whole)]
    assert rows(few) == [row[:2] for row in rows(whole)]
    assert strengths(few) == [row[:2] for row in strengths(whole)]


def test_items_that_nothing_follows_have_no_neighbours() -> None:
    none = Neighbours.count(Sequences.of([[1], [2], []]), ITEMS, 4)
    assert rows(none) == [[]] * ITEMS
    assert not len(none.after(Sequences.of([[1], []]))[1])
    assert none.rank(Query(Sequences.of([[1]]), 3)).items.tolist() == [[1, 2, 0]]


def test_new_items_have_no_neighbours_and_are_none() -> None:
    new = pl.DataFrame({"item_id": ["x", "y"]})
    table = Neighbours.count(histories(1, True), ITEMS, 4).with_items(new, None)
    assert len(table.items) == ITEMS + 2
    assert table.items.values.max() < ITEMS
    assert not len(table.after(Sequences.of([[ITEMS, ITEMS + 1]]))[1])
    assert set(table.rank(Query(Sequences.of([[0]]), ITEMS + 2)).items[0]) == set(range(ITEMS + 2))


def test_learns_from_training_sequences(tmp_path: Path) -> None:
    data = shop()
    split, config = leave_out(data.histories), train_config(model="neighbours")
    table = Neighbours.learn(Training(data, split, config, workspace(tmp_path)))
    expected = Neighbours.count(split.train, len(data.items), config.model.most)
    assert table.items == expected.items
    with pytest.raises(RequestError, match="most is 0; give a whole number from 1"):
        NeighboursConfig(most=0)


def test_saved_and_loaded_table_is_the_same(tmp_path: Path) -> None:
    table = Neighbours.count(histories(1, True), ITEMS, 4)
    table.save(tmp_path)
    again = Neighbours.load(tmp_path)
    assert again.items == table.items
    assert np.array_equal(again.counts, table.counts)


def test_loads_the_dense_tables_of_an_earlier_version(tmp_path: Path) -> None:
    table = Neighbours.count(histories(1, True), ITEMS, 4)
    shape = (ITEMS, 4)
    items, values = np.full(shape, -1, dtype=np.int32), np.zeros(shape, dtype=np.float32)
    place = (table.items.owners, table.items.places)
    items[place], values[place] = table.items.values, table.items.weights
    old = {"items": items, "strengths": values, "counts": table.counts}
    save_file(old, tmp_path / neighbours.FILE)
    assert Neighbours.load(tmp_path).items == table.items


def test_raises_when_the_file_is_damaged(tmp_path: Path) -> None:
    with pytest.raises(ArtefactError, match="is damaged"):
        Neighbours.load(tmp_path)
    table, file = Neighbours.count(histories(1, True), ITEMS, 4), tmp_path / neighbours.FILE
    replace(table, counts=table.counts[:5]).save(tmp_path)
    with pytest.raises(ArtefactError, match=r"is damaged \(its tables do not fit together\)"):
        Neighbours.load(tmp_path)
    file.write_bytes(file.read_bytes()[:50])
    with pytest.raises(ArtefactError, match="is damaged"):
        Neighbours.load(tmp_path)


def test_weights_count_for_what_follows_and_not_for_what_comes_before() -> None:
    # 0 is seen twice as context; 1 follows it with the weights 2 and 0.5, 2 with 0.
    weights = np.array([0, 2, 0, 0, 0.5], dtype=np.float32)
    train = replace(Sequences.of([[0, 1, 2], [0, 1]]), weights=weights)
    table = Neighbours.count(train, 4, 3)
    assert rows(table) == [[1], [], [], []]
    assert strengths(table)[0][0] == pytest.approx(2.5 / math.sqrt((2 + 1) * (2.5 + 1)))
    assert table.counts.tolist() == [0, 2.5, 0, 0]
