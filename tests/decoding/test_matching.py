"""Matching items are compared with a scan of the whole catalogue."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from maskgr.decoding import matching
from maskgr.decoding.matching import CodeIndex, Matches


@st.composite
def cases(draw: st.DrawFn) -> tuple[torch.Tensor, list[int], torch.Tensor, torch.Tensor]:
    """The codes of a catalogue, its codebook sizes, and rows with some digits revealed."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    digits = st.tuples(*(st.integers(0, size - 1) for size in sizes))
    items = draw(st.lists(digits, min_size=1, max_size=12))
    rows = draw(st.lists(digits, max_size=5))  # not always digits of an item
    shown = st.lists(st.booleans(), min_size=len(sizes), max_size=len(sizes)).filter(any)
    revealed = [draw(shown) for _ in rows]
    shape = (len(rows), len(sizes))
    return (
        torch.tensor(items),
        sizes,
        torch.tensor(rows, dtype=torch.int64).view(shape),
        torch.tensor(revealed, dtype=torch.bool).view(shape),
    )


def scanned(codes: torch.Tensor, rows: torch.Tensor, revealed: torch.Tensor) -> list[list[int]]:
    """The items of each row, by comparing every item with it."""
    agrees = ((codes == rows[:, None]) | ~revealed[:, None]).all(2)  # (rows, items)
    return [own.nonzero().flatten().tolist() for own in agrees]


def listed(found: Matches, rows: int) -> list[list[int]]:
    assert (found.owners.diff() >= 0).all()
    return [found.items[found.owners == row].tolist() for row in range(rows)]


@given(cases())
def test_matching_equals_a_scan_of_the_catalogue(
    case: tuple[torch.Tensor, list[int], torch.Tensor, torch.Tensor],
) -> None:
    codes, sizes, rows, revealed = case
    found = CodeIndex(codes, sizes).matching(rows, revealed)
    assert listed(found, len(rows)) == scanned(codes, rows, revealed)


def test_matching_with_sixteen_levels() -> None:
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(2, (40, 16), generator=generator)
    codes[20:30] = codes[:10]  # items that share all digits
    revealed = torch.rand(60, 16, generator=generator) < 0.3
    revealed[:, 5] |= ~revealed.any(1)
    rows = codes[torch.randint(40, (60,), generator=generator)]
    found = CodeIndex(codes, [2] * 16).matching(rows, revealed)
    assert listed(found, 60) == scanned(codes, rows, revealed)
    assert len(found.items) > 60  # some rows have several


@given(cases())
def test_samples_of_short_lists_are_all_that_match(
    case: tuple[torch.Tensor, list[int], torch.Tensor, torch.Tensor],
) -> None:
    codes, sizes, rows, revealed = case
    found, stands = CodeIndex(codes, sizes).sampled(rows, revealed, torch.rand(len(rows), 12))
    assert listed(found, len(rows)) == scanned(codes, rows, revealed)
    assert (stands == 0).all()


def test_samples_of_long_lists_stand_for_all_that_match() -> None:
    codes = torch.randint(3, (50, 2), generator=torch.Generator().manual_seed(0))
    rows, revealed = codes[:2], torch.tensor([[True, True], [True, False]])
    generator = torch.Generator().manual_seed(1)
    index, counts = CodeIndex(codes, [3, 3]), torch.zeros(2, 50)
    for _ in range(2000):
        draws = torch.rand(2, 4, generator=generator)
        found, stands = index.sampled(rows, revealed, draws)
        counts.index_put_((found.owners, found.items), stands[found.owners].exp(), accumulate=True)
    expected = scanned(codes, rows, revealed)
    for own, count in zip(expected, counts / 2000, strict=True):
        assert count.nonzero().flatten().tolist() == own
        assert (count[own] - 1).abs().max() < 0.2  # each is expected once


def test_groups_of_items_are_kept_for_few_sets_of_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matching, "KEPT_GROUPS", 2)
    index = CodeIndex(torch.tensor([[0, 1, 0], [0, 1, 1], [1, 0, 1], [0, 0, 1]]), [2, 2, 2])
    first = index.groups((0, 1))
    assert first[0].tolist() == [1, 1, 2, 0]
    assert index.groups((0, 1)) is first
    for levels, expected in (((2,), [0, 1, 1, 1]), ((0,), [0, 0, 1, 0])):
        group, example = index.groups(levels)
        assert group.tolist() == expected
        assert group[example].tolist() == [0, 1]
    assert index.groups((0, 1)) is not first


def test_masked_digits_do_not_matter() -> None:
    codes = torch.tensor([[0, 1], [0, 0], [1, 1]])
    index = CodeIndex(codes, [2, 2])
    revealed = torch.tensor([[True, False]])
    for masked in (0, 1, -1, 99):
        assert index.matching(torch.tensor([[0, masked]]), revealed).items.tolist() == [0, 1]


def test_keep_filters_items_with_their_owners() -> None:
    found = Matches(torch.tensor([4, 5, 4]), torch.tensor([0, 0, 1]))
    kept = found.keep(found.items == 4)
    assert (kept.items.tolist(), kept.owners.tolist()) == ([4, 4], [0, 1])


def test_copies_of_a_network_share_the_index() -> None:
    index = CodeIndex(torch.tensor([[0, 1], [1, 0]]), [2, 2])
    assert copy.deepcopy(index) is index
    assert (len(index), index.levels) == (2, 2)
