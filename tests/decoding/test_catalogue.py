"""The catalogue index against plain enumeration of the items."""

from __future__ import annotations

import math
from itertools import chain, combinations, pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from maskgr.decoding import catalogue as module
from maskgr.decoding.catalogue import Catalogue, Exclusions
from maskgr.errors import DataError, RequestError

JUNK = -7  # the value of unrevealed digits in queries


def subsets(levels: int) -> list[tuple[int, ...]]:
    return list(chain.from_iterable(combinations(range(levels), k) for k in range(levels + 1)))


def reveal(levels: int, subset: tuple[int, ...], rows: int) -> Tensor:
    return torch.tensor([[level in subset for level in range(levels)]] * rows)


def remaining(digits: Tensor, row: Tensor, known: Tensor, without: set[int]) -> list[int]:
    """The items that have the known digits of the row, by enumeration."""
    return [
        item
        for item, own in enumerate(digits.tolist())
        if item not in without
        and all(a == b for a, b, k in zip(own, row.tolist(), known.tolist(), strict=True) if k)
    ]


def check(
    index: Catalogue,
    digits: Tensor,
    query: Tensor,
    revealed: Tensor,
    without: list[set[int]] | None = None,
    excluded: Exclusions | None = None,
) -> None:
    """All batched queries of `index` equal enumeration over `digits`, less `without` by row."""
    without = without or [set()] * len(query)
    expected = [
        remaining(digits, row, known, gone)
        for row, known, gone in zip(query, revealed, without, strict=True)
    ]
    values, offsets = index.items(query, revealed, excluded)
    assert [values[a:b].tolist() for a, b in pairwise(offsets)] == expected
    assert index.counts(query, revealed, excluded).tolist() == [len(items) for items in expected]
    for level, size in enumerate(index.codebook_sizes):
        counts = torch.stack([digits[e, level].bincount(minlength=size) for e in expected])
        assert index.allowed(level, query, revealed, excluded).tolist() == (counts > 0).tolist()


def draw_digits(sizes: list[int], items: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    columns = [torch.randint(size, (items,), generator=generator) for size in sizes]
    return torch.stack(columns, dim=1)


shapes = st.tuples(
    st.lists(st.integers(1, 4), min_size=1, max_size=5), st.integers(1, 40), st.integers(0, 999)
)


@settings(max_examples=60, deadline=None)
@given(shapes)
def test_every_subset_and_level_equals_enumeration(shape: tuple[list[int], int, int]) -> None:
    sizes, items, seed = shape
    digits = draw_digits(sizes, items, seed)  # few codes, many items: shared tuples abound
    index = Catalogue(digits, sizes)
    rows = [draw_digits(sizes, 3, seed + 1) for _ in subsets(len(sizes))]
    revealed = [reveal(len(sizes), subset, 3) for subset in subsets(len(sizes))]
    query, known = torch.cat(rows), torch.cat(revealed)
    check(index, digits, query.masked_fill(~known, JUNK), known)


@settings(max_examples=40, deadline=None)
@given(shapes, st.data())
def test_exclusions_in_a_restriction_equal_enumeration(
    shape: tuple[list[int], int, int], data: st.DataObject
) -> None:
    sizes, items, seed = shape
    digits = draw_digits(sizes, items, seed)
    numbers = st.integers(0, items - 1)
    kept = data.draw(st.sets(numbers, min_size=1))
    gone = data.draw(st.lists(st.lists(numbers, max_size=6), min_size=2, max_size=2))
    padded = torch.tensor([row + [-1] * (6 - len(row)) for row in gone])
    index = Catalogue(digits, sizes).restrict(torch.tensor([i in kept for i in range(items)]))
    user = torch.arange(8) % 2  # eight beams of two users
    query = draw_digits(sizes, 8, seed + 1)
    known = torch.rand(query.shape, generator=torch.Generator().manual_seed(seed)) < 0.5
    denied = set(range(items)) - kept
    without = [denied | set(gone[u]) for u in user.tolist()]
    check(index, digits, query, known, without, index.exclusions(padded)[user])


def test_long_runs_are_counted_from_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of few items, so that runs span many, begin and end anywhere in them."""
    sizes = [5, 3, 4]
    digits = draw_digits(sizes, 997, seed=3)
    for block in (1, 2, 7):
        monkeypatch.setattr(module, "BLOCK", block)
        monkeypatch.setattr(module, "CELLS", 50)  # several passes a query
        index = Catalogue(digits, sizes)
        known = torch.cat([reveal(3, subset, 20) for subset in subsets(3)])
        check(index, digits, digits[: len(known)].masked_fill(~known, JUNK), known)


@pytest.mark.parametrize("items", [1, 10])
def test_small_catalogues(items: int) -> None:
    digits = draw_digits([256] * 4, items, seed=1)
    index = Catalogue(digits, [256] * 4)
    assert len(index) == items
    for subset in subsets(4):
        check(index, digits, digits, reveal(4, subset, items))


def test_nothing_revealed_leaves_all_items_and_everything_revealed_one() -> None:
    digits = torch.tensor([[0, 1], [2, 0], [2, 1]])
    index = Catalogue(digits, (3, 2))
    nothing, everything = reveal(2, (), 1), reveal(2, (0, 1), 1)
    query = torch.tensor([[2, 1]])
    assert index.allowed(0, query, nothing).tolist() == [[True, False, True]]
    assert index.items(query, nothing).values.tolist() == [0, 1, 2]
    assert index.items(query, everything).values.tolist() == [2]
    assert index.allowed(1, query, everything).tolist() == [[False, True]]


def test_impossible_digits_leave_nothing() -> None:
    index = Catalogue(torch.tensor([[0, 1], [2, 0], [2, 1]]), (3, 2))
    query = torch.tensor([[0, 0], [1, 1], [-1, 1], [3, 0], [2**40, 0]])
    known = reveal(2, (0, 1), 5)
    assert not index.allowed(0, query, known).any()
    assert not index.allowed(1, query, known).any()
    assert index.counts(query, known).tolist() == [0] * 5
    assert index.items(query, known).offsets.tolist() == [0] * 6
    assert index.groups((0, 1), query).tolist() == [-1] * 5
    assert index.groups((0,), query).tolist()[1:] == [-1] * 4
    assert index.find(query).tolist() == [-1] * 5


def test_unrevealed_values_are_ignored() -> None:
    sizes = [3, 4, 2, 5]
    digits = draw_digits(sizes, 30, seed=2)
    index = Catalogue(digits, sizes)
    known = reveal(4, (1, 3), 30)
    for junk in (-1, 0, 2, 255, 2**62, -(2**63)):
        check(index, digits, digits.masked_fill(~known, junk), known)


def test_groups_are_equal_exactly_where_the_digits_are() -> None:
    sizes = [3, 2, 4]
    digits = draw_digits(sizes, 40, seed=5)
    index = Catalogue(digits, sizes)
    for subset in subsets(3):
        groups = index.groups(subset, digits).tolist()
        tuples = [tuple(row[level] for level in subset) for row in digits.tolist()]
        assert len(set(zip(groups, tuples, strict=True))) == len(set(groups)) == len(set(tuples))


def test_find_gives_the_first_item_of_a_shared_tuple() -> None:
    digits = torch.tensor([[1, 1], [0, 1], [1, 1], [0, 1]])
    index = Catalogue(digits, (2, 2))
    query = torch.tensor([[0, 1], [1, 1], [1, 0]])
    assert index.find(query).tolist() == [1, 0, -1]
    rest = index.restrict(torch.tensor([False, True, True, True]))
    assert rest.find(query).tolist() == [1, 2, -1]


def test_restriction_equals_an_index_of_the_remaining_items() -> None:
    sizes = [4, 3, 3]
    digits = draw_digits(sizes, 50, seed=4)
    kept = torch.rand(50, generator=torch.Generator().manual_seed(0)) < 0.4
    part, fresh = Catalogue(digits, sizes).restrict(kept), Catalogue(digits[kept], sizes)
    numbers = kept.nonzero().squeeze(1)
    assert len(part) == len(fresh) == int(kept.sum())
    for subset in subsets(3):
        known = reveal(3, subset, 50)
        values, offsets = part.items(digits, known)
        assert values.equal(numbers[fresh.items(digits, known).values])
        assert offsets.equal(fresh.items(digits, known).offsets)
        assert part.groups(subset, digits).equal(fresh.groups(subset, digits))
        for level in range(3):
            assert part.allowed(level, digits, known).equal(fresh.allowed(level, digits, known))


def test_restriction_of_a_restriction_keeps_the_intersection() -> None:
    digits = draw_digits([3, 3], 12, seed=6)
    even, low = torch.arange(12) % 2 == 0, torch.arange(12) < 6
    twice = Catalogue(digits, [3, 3]).restrict(even).restrict(low)
    assert twice.items(digits[:1], reveal(2, (), 1)).values.tolist() == [0, 2, 4]


def test_repeated_exclusion_counts_once() -> None:
    index = Catalogue(torch.tensor([[0], [0], [1]]), (2,))
    excluded = index.exclusions(torch.tensor([[0, 0, 0, -1]]))
    known = reveal(1, (), 1)
    assert index.counts(torch.tensor([[0]]), known, excluded).tolist() == [2]
    assert index.allowed(0, torch.tensor([[0]]), known, excluded).tolist() == [[True, True]]


def test_tuples_up_to_the_limit_of_64_bits() -> None:
    sizes = [454_279, 31_252_369, 649_657]
    assert math.prod(sizes) == 2**63 - 1
    digits = torch.cat([draw_digits(sizes, 20, seed=8), torch.tensor([[s - 1 for s in sizes]] * 2)])
    index = Catalogue(digits, sizes)
    assert index.find(digits).tolist() == [*range(21), 20]
    for subset in subsets(3):
        known = reveal(3, subset, 22)
        values, offsets = index.items(digits, known)
        for row in range(22):
            expected = remaining(digits, digits[row], known[row], set())
            assert values[offsets[row] : offsets[row + 1]].tolist() == expected


def test_codebooks_of_very_different_sizes() -> None:
    sizes = [2**31, 3, 2**30]
    digits = torch.tensor([[2**31 - 1, 2, 2**30 - 1], [0, 1, 0], [2**31 - 1, 0, 5], [9, 2, 5]])
    index = Catalogue(digits, sizes)
    allowed = index.allowed(1, digits, reveal(3, (0,), 4))
    assert allowed.int().tolist() == [[1, 0, 1], [0, 1, 0], [1, 0, 1], [0, 0, 1]]
    allowed = index.allowed(1, digits, reveal(3, (2,), 4))
    assert allowed.int().tolist() == [[0, 0, 1], [0, 1, 0], [1, 0, 1], [1, 0, 1]]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64])
def test_queries_of_any_integer_type_get_the_same_answers(dtype: torch.dtype) -> None:
    sizes = [6, 300, 40_000]
    digits = draw_digits([6, 200, 100], 25, seed=7)
    index = Catalogue(digits.to(dtype), sizes).to("cpu")
    query, known = digits.to(dtype), reveal(3, (1,), 25)
    assert index.device == digits.device
    assert index.allowed(0, query, known).dtype == torch.bool
    answers = (index.counts(query, known), index.groups((1,), query), index.find(query))
    assert {a.dtype for a in (*answers, *index.items(query, known))} == {torch.int64}
    assert index.find(query).equal(Catalogue(digits, sizes).find(digits))


def test_accepts_read_only_arrays(recwarn: pytest.WarningsRecorder) -> None:
    digits = np.array([[0, 1], [2, 0]], dtype=np.uint16)
    digits.setflags(write=False)
    index = Catalogue(digits, (3, 2))
    assert index.find(torch.tensor([[2, 0], [0, 0]])).tolist() == [1, -1]
    assert not recwarn.list


def test_no_rows_give_no_rows() -> None:
    index = Catalogue(torch.tensor([[0, 1]]), (3, 2))
    digits, known = torch.zeros((0, 2), dtype=torch.int64), torch.zeros((0, 2), dtype=torch.bool)
    assert index.allowed(0, digits, known).shape == (0, 3)
    assert index.items(digits, known).offsets.tolist() == [0]
    assert index.find(digits).shape == index.groups((0,), digits).shape == (0,)


def test_left_to_right_builds_one_list_only() -> None:
    sizes = [16] * 4
    digits = draw_digits(sizes, 4096, seed=9)
    index = Catalogue(digits, sizes)
    index.prepare([range(length) for length in range(4)])
    prefixes = index.nbytes
    for length in range(4):
        index.allowed(length, digits, reveal(4, tuple(range(length)), 4096))
    assert index.nbytes == prefixes
    index.prepare()
    everything = index.nbytes
    for subset in subsets(4):
        for level in set(range(4)) - set(subset):
            index.allowed(level, digits[:5], reveal(4, subset, 5))
    assert index.nbytes == everything
    # 4 digits, 4 for the item numbers, 6 lists of 12, 17 tables of 2; a row more in each table
    assert everything == 4096 * (8 + 6 * 12 + 17 * 2) + 17 * 16 * 4


@pytest.mark.parametrize("levels", range(1, 9))
def test_number_of_chains_is_minimal(levels: int) -> None:
    orders = set()
    for subset in subsets(levels):
        order = module._chain([level in subset for level in range(levels)])
        assert sorted(order[: len(subset)]) == list(subset)
        assert sorted(order) == list(range(levels))
        orders.add(order)
    assert len(orders) == math.comb(levels, levels // 2)


@pytest.mark.parametrize(
    ("digits", "sizes", "message"),
    [
        (torch.zeros((3, 2), dtype=torch.int64), (4,), "2 digits and there are 1 codebooks"),
        (torch.zeros((3, 0), dtype=torch.int64), (), "0 digits .* 1 to 8 of them"),
        (torch.zeros((3, 9), dtype=torch.int64), (4,) * 9, "9 digits .* 1 to 8 of them"),
        (torch.zeros((0, 2), dtype=torch.int64), (4, 4), "the catalogue has 0 items"),
        (torch.zeros((3, 2), dtype=torch.int64), (4, 0), "at least one code per level"),
        (torch.zeros((3, 8), dtype=torch.int64), (256,) * 8, r"fewer than 2\^63 tuples"),
        (torch.tensor([[0, 4], [1, 2]]), (4, 4), "level 1 range from 2 to 4; .* 0 to 3"),
        (torch.tensor([[0, 1], [-1, 2]]), (4, 4), "level 0 range from -1 to 0; .* 0 to 3"),
    ],
)
def test_raises_when_digits_cannot_be_indexed(
    digits: Tensor, sizes: tuple[int, ...], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        Catalogue(digits, sizes)


def test_raises_when_a_restriction_leaves_no_item() -> None:
    index = Catalogue(torch.tensor([[0, 1], [2, 0]]), (3, 2))
    with pytest.raises(RequestError, match="no item is left"):
        index.restrict(torch.tensor([False, False]))
