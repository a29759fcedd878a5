from __future__ import annotations

import math
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

from maskgr.data.sequences import Sequences
from maskgr.errors import ArtefactError
from maskgr.models.followers import FEW, RECENT, SPAN, Followers

ITEMS = 9


def histories(seed: int, repeats: bool) -> Sequences:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 9, size=12)
    return Sequences.of(
        [rng.integers(ITEMS, size=n) if repeats else rng.permutation(ITEMS)[:n] for n in lengths]
    )


def by_hand(train: Sequences, history: list[int]) -> dict[int, float]:
    """item -> how much it followed, pair by pair."""
    counts = np.bincount(train.values, minlength=ITEMS) + 1
    strength: dict[int, float] = defaultdict(float)
    for age, recent in enumerate(history[::-1][:RECENT]):
        for sequence in train:
            for place, item in enumerate(sequence.tolist()):
                for before in range(max(0, place - SPAN), place):
                    if sequence[before] == recent != item:
                        share = 0.5 ** (age + place - before - 1)
                        strength[item] += share / math.sqrt(counts[recent] * counts[item])
    return {item: math.log1p(k / FEW) for item, k in strength.items()}


@pytest.mark.parametrize("repeats", [False, True])
def test_by_enumeration(repeats: bool) -> None:
    train = histories(0, repeats)
    asked = Sequences.of([[3, 1, 4], [], [2], list(range(8)), [5, 5, 1]])
    found, strengths = Followers.of(train, ITEMS, ITEMS).after(asked)
    for row, history in enumerate(asked):
        values = strengths[found.offsets[row] : found.offsets[row + 1]]
        expected = by_hand(train, history.tolist())
        assert found[row].tolist() == sorted(expected)
        assert values.tolist() == pytest.approx([expected[i] for i in sorted(expected)], rel=1e-4)


def test_the_strongest_are_kept() -> None:
    train = histories(3, False)
    whole, few = Followers.of(train, ITEMS, ITEMS), Followers.of(train, ITEMS, 2)
    assert np.array_equal(whole.strengths, -np.sort(-whole.strengths, axis=1))
    assert np.array_equal(few.items, whole.items[:, :2])
    assert np.array_equal(few.strengths, whole.strengths[:, :2])


def test_nothing_to_learn_from() -> None:
    none = Followers.of(Sequences.of([[1], [2], []]), ITEMS, 4)
    assert (none.items == -1).all()
    assert not len(none.after(Sequences.of([[1], []]))[1])


def test_new_items_have_none_and_follow_none() -> None:
    table = Followers.of(histories(1, True), ITEMS, 4).more(2)
    assert table.items.shape == (ITEMS + 2, 4)
    assert table.items.max() < ITEMS
    assert not len(table.after(Sequences.of([[ITEMS, ITEMS + 1]]))[1])


def test_kept_in_a_file(tmp_path: Path) -> None:
    table, file = Followers.of(histories(1, True), ITEMS, 4), tmp_path / "followers.safetensors"
    table.save(file)
    again = Followers.load(file, ITEMS)
    assert np.array_equal(again.items, table.items)
    assert np.array_equal(again.strengths, table.strengths)
    with pytest.raises(ArtefactError, match="other items than the 8"):
        Followers.load(file, 8)
    file.write_bytes(file.read_bytes()[:50])
    with pytest.raises(ArtefactError, match="cannot be used"):
        Followers.load(file, ITEMS)
