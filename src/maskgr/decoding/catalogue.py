"""An index of the catalogue: the items and codes that remain once any subset of digits is known.

Sort the items by their digits, with the levels in some order: the items that share their first k
digits in that order are one run of the list. So one sorted list answers for m + 1 subsets of known
levels, and C(m, m/2) lists (6 for four levels, 10 for five) answer for all 2^m: the symmetric chain
decomposition of the subsets, one list per chain. A query is two binary searches for the ends of the
run. The codes in a run are counted from cumulative counts kept every `BLOCK` × codes items, plus
the few items between these and the run's ends. All counts are exact.

Memory is linear in the number of items and does not depend on how they spread over the tuples. With
codebooks of 256 codes, once every subset and level has been queried, it is about 114 bytes per item
for four levels and 201 for five; left-to-right decoding alone needs 28 and 31. A list takes 12
bytes per item (key and item number), the counts of one level in it 4 / `BLOCK`, the digits m.
Lists and counts are built by the first query that needs them, or by `prepare`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from maskgr.errors import DataError, RequestError

MAX_LEVELS = 8  # eight levels need 70 sorted lists
BLOCK = 2  # counts are kept every BLOCK × codes items: trades memory for time
CELLS = 2**20  # (rows × codes) of one pass: bounds memory, fits the processor's caches


class Ragged(NamedTuple):
    """Row r holds `values[offsets[r] : offsets[r + 1]]`."""

    values: Tensor  # (total,) int64
    offsets: Tensor  # (rows + 1,) int64


@dataclass(frozen=True, eq=False)
class Exclusions:
    """Items that each row must not count; valid for the catalogue whose `exclusions` made them."""

    items: Tensor  # (rows, width) int64, distinct in a row, all in the catalogue; -1 is none
    digits: Tensor  # (m, rows, width) of the items; arbitrary where there is none

    def __getitem__(self, rows: Tensor) -> Exclusions:
        """The exclusions of the given rows, e.g. `exclusions[user_of_beam]`."""
        return Exclusions(self.items.index_select(0, rows), self.digits.index_select(1, rows))


@dataclass(frozen=True, eq=False)
class SortedList:
    """The items sorted by their digits for one order of the levels, then by item number."""

    strides: Tensor  # (m,) int64: the key of a tuple is the sum of digit × stride
    keys: Tensor  # (n,) int64, ascending
    items: Tensor  # (n,) int32, the item of each key
    counts: dict[int, Tensor] = field(default_factory=dict)
    """Level -> (blocks + 1, codes) int32: how many items before each block have each code."""


class Catalogue:
    """The digit tuples of all items, indexed for any subset of known digits.

    `digits` (items, m) are integers below `codebook_sizes` (m,); several items may share a tuple.
    The index lives on the device of `digits`, and queries must be there too. Queries take `digits`
    (rows, m) of any integer type and `revealed` (rows, m) booleans; digits that are not revealed
    are ignored. An item's number is its row in `digits`, in a restricted catalogue too.
    """

    def __init__(
        self, digits: Tensor | npt.NDArray[np.integer[Any]], codebook_sizes: Sequence[int]
    ) -> None:
        given = digits if isinstance(digits, Tensor) else torch.tensor(digits)
        self.codebook_sizes = tuple(int(size) for size in codebook_sizes)
        _require_catalogue(given, self.codebook_sizes)
        dtype = _smallest(max(self.codebook_sizes))
        self._digits = torch.stack([column.to(dtype) for column in given.unbind(1)])  # (m, n)
        self._members = torch.arange(len(given), dtype=torch.int32, device=given.device)
        self._lists: dict[tuple[int, ...], SortedList] = {}
        self._index_subsets()

    def __len__(self) -> int:
        """The number of items, without those that `restrict` left out."""
        return len(self._members)

    @property
    def levels(self) -> int:
        return len(self.codebook_sizes)

    @property
    def digits(self) -> Tensor:
        """(m, items) of all items, with those that `restrict` left out."""
        return self._digits

    @property
    def members(self) -> Tensor:
        """(items that remain,) their numbers, ascending."""
        return self._members.long()

    @property
    def device(self) -> torch.device:
        return self._digits.device

    @property
    def nbytes(self) -> int:
        """The memory of everything built so far."""
        tensors = [self._digits, self._members]
        for known in self._lists.values():
            tensors += [known.keys, known.items, *known.counts.values()]
        return sum(tensor.nbytes for tensor in tensors)

    def to(self, device: torch.device | str) -> Catalogue:
        """The same catalogue on `device`; its lists are built again there when needed."""
        moved = copy.copy(self)
        moved._digits = self._digits.to(device)
        moved._members = self._members.to(device)
        moved._lists = {}
        moved._index_subsets()
        return moved

    def restrict(self, allowed: Tensor) -> Catalogue:
        """A catalogue of the items that are True in `allowed` (items,); item numbers do not change.

        Its lists are built anew, in time that grows with the items that remain: keep it for many
        requests. To leave out a few items, `exclusions` are much faster.
        """
        assert allowed.shape == (self._digits.shape[1],)
        assert allowed.dtype == torch.bool
        members = self._members[allowed[self._members]]
        if not len(members):
            raise RequestError("no item is left to choose from; allow more or deny fewer")
        part = copy.copy(self)
        part._members = members
        part._lists = {}
        return part

    def exclusions(self, items: Tensor) -> Exclusions:
        """Exclusions of `items` (rows, width), item numbers padded with -1, repeats allowed.

        Meant for short lists, such as the items a user has seen: every query compares with each.
        """
        total = self._digits.shape[1]
        assert items.ndim == 2
        assert not items.numel() or -1 <= int(items.min()) <= int(items.max()) < total
        ordered = items.long().sort(dim=1).values
        ordered[:, 1:][ordered[:, 1:] == ordered[:, :-1]] = -1  # exclude an item only once
        place = torch.searchsorted(self._members, ordered.int()).clamp(max=len(self) - 1)
        kept = torch.where(self._members[place] == ordered, ordered, -1)
        return Exclusions(kept, self._digits[:, kept.clamp(min=0)])

    def prepare(self, subsets: Collection[Collection[int]] | None = None) -> None:
        """Builds what queries with these subsets of levels revealed need; None is all subsets."""
        masks = range(2**self.levels) if subsets is None else map(self._mask, subsets)
        for mask in masks:
            known = self._list(self._orders[mask])
            for level in range(self.levels):
                if not mask >> level & 1:
                    self._counts(known, level)

    def groups(self, subset: Collection[int], digits: Tensor) -> Tensor:
        """(rows,) numbers that are equal where the digits at `subset` are; -1 if no item fits."""
        mask = self._mask(subset)
        revealed = torch.tensor([bool(mask >> level & 1) for level in range(self.levels)])
        revealed = revealed.to(self.device).expand(len(digits), -1)
        self._check(digits, revealed)
        low, high = self._runs(self._list(self._orders[mask]), digits, revealed)
        return torch.where(low < high, low, -1)

    def counts(
        self, digits: Tensor, revealed: Tensor, excluded: Exclusions | None = None
    ) -> Tensor:
        """(rows,) the number of items with the revealed digits."""
        self._check(digits, revealed, excluded)
        result = torch.zeros(len(digits), dtype=torch.int64, device=self.device)
        for known, rows in self._by_list(revealed):
            low, high = self._runs(known, digits[rows], revealed[rows])
            result[rows] = high - low
        if excluded is not None:
            result -= self._hits(excluded, digits, revealed).sum(dim=1)
        return result

    def allowed(
        self, level: int, digits: Tensor, revealed: Tensor, excluded: Exclusions | None = None
    ) -> Tensor:
        """(rows, codes of level) bool: the codes of the items with the revealed digits."""
        assert 0 <= level < self.levels
        self._check(digits, revealed, excluded)
        size = self.codebook_sizes[level]
        result = torch.zeros((len(digits), size), dtype=torch.bool, device=self.device)
        for rows, counts in self._passes(level, digits, revealed, excluded):
            result.index_copy_(0, rows, counts > 0)
        return result

    def items(self, digits: Tensor, revealed: Tensor, excluded: Exclusions | None = None) -> Ragged:
        """The items with each row's revealed digits, ascending.

        The answer holds all rows' items together: query when few remain.
        """
        self._check(digits, revealed, excluded)
        total = self._digits.shape[1]
        found = [torch.zeros(0, dtype=torch.int64, device=self.device)]
        for known, rows in self._by_list(revealed):
            low, high = self._runs(known, digits[rows], revealed[rows])
            owner, place = _spans(low, high - low)
            found.append(rows[owner] * total + known.items[place])
        pairs = torch.cat(found).sort().values  # (total,) row × items + item
        if excluded is not None:
            row = torch.arange(len(digits), device=self.device).unsqueeze(1) * total
            pairs = pairs[~torch.isin(pairs, (row + excluded.items)[excluded.items >= 0])]
        bounds = torch.arange(len(digits) + 1, device=self.device) * total
        return Ragged(pairs % total, torch.searchsorted(pairs, bounds))

    def find(self, digits: Tensor) -> Tensor:
        """(rows,) the first item with each full tuple (rows, m); -1 if there is none."""
        revealed = torch.ones(digits.shape, dtype=torch.bool, device=digits.device)
        self._check(digits, revealed)
        known = self._list(self._orders[-1])
        low, high = self._runs(known, digits, revealed)
        first = known.items[low.clamp(max=len(self) - 1)].long()
        return torch.where(low < high, first, -1)

    def _index_subsets(self) -> None:
        """Tables over the subsets of revealed levels, numbered by their bits."""
        m = self.levels
        subsets = [[bool(mask >> level & 1) for level in range(m)] for mask in range(2**m)]
        rest = [
            math.prod(s for s, known in zip(self.codebook_sizes, subset, strict=True) if not known)
            for subset in subsets
        ]
        self._orders = [_chain(subset) for subset in subsets]
        self._distinct_orders = sorted(set(self._orders))
        place = [self._distinct_orders.index(order) for order in self._orders]
        self._order_of = torch.tensor(place, device=self.device)  # (2^m,)
        self._rest = torch.tensor(rest, device=self.device)  # (2^m,) tuples that share its digits
        self._bits = torch.tensor([1 << level for level in range(m)], device=self.device)  # (m,)
        self._sizes = torch.tensor(self.codebook_sizes, device=self.device)  # (m,)

    def _list(self, order: tuple[int, ...]) -> SortedList:
        if order not in self._lists:
            sizes = [self.codebook_sizes[level] for level in order]
            strides = torch.zeros_like(self._sizes)
            keys = torch.zeros(len(self), dtype=torch.int64, device=self.device)
            for place, level in enumerate(order):
                stride = math.prod(sizes[place + 1 :])
                strides[level] = stride
                keys.add_(self._digits[level].index_select(0, self._members), alpha=stride)
            keys, permutation = keys.sort(stable=True)
            self._lists[order] = SortedList(
                strides, keys, self._members.index_select(0, permutation)
            )
        return self._lists[order]

    def _counts(self, known: SortedList, level: int) -> Tensor:
        """(blocks + 1, codes) int32, as `SortedList.counts` holds them."""
        if level not in known.counts:
            size = self.codebook_sizes[level]
            block = BLOCK * size
            blocks = -(-len(self) // block)
            cells = torch.arange(len(self), device=self.device).div_(block, rounding_mode="floor")
            cells.mul_(size).add_(self._digits[level].index_select(0, known.items))
            inside = torch.bincount(cells, minlength=blocks * size).view(blocks, size)
            before = torch.zeros((blocks + 1, size), dtype=torch.int32, device=self.device)
            torch.cumsum(inside, 0, dtype=torch.int32, out=before[1:])
            known.counts[level] = before
        return known.counts[level]

    def _by_list(self, revealed: Tensor) -> Iterator[tuple[SortedList, Tensor]]:
        """Each list that a query needs, with the numbers of the rows that need it."""
        wanted = self._order_of[(revealed * self._bits).sum(dim=1)]  # (rows,)
        for place in torch.bincount(wanted).nonzero().squeeze(1).tolist():
            yield self._list(self._distinct_orders[place]), (wanted == place).nonzero().squeeze(1)

    def _runs(self, known: SortedList, digits: Tensor, revealed: Tensor) -> tuple[Tensor, Tensor]:
        """(rows,) start and end in the list of the items with the revealed digits."""
        outside = (digits < 0) | (digits >= self._sizes)
        impossible = (outside & revealed).any(dim=1)
        digits = digits.long().masked_fill(outside | ~revealed, 0)
        first = (digits * known.strides).sum(dim=1)
        after = first + self._rest[(revealed * self._bits).sum(dim=1)]
        low, high = torch.searchsorted(known.keys, torch.stack([first, after])).unbind()
        return low, torch.where(impossible, low, high)

    def _passes(
        self, level: int, digits: Tensor, revealed: Tensor, excluded: Exclusions | None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Row numbers and (rows, codes of level) how many items have each code, part by part."""
        step = max(1, CELLS // self.codebook_sizes[level])
        for known, wanted in self._by_list(revealed):
            for rows in torch.split(wanted, step):
                low, high = self._runs(known, digits[rows], revealed[rows])
                counts = self._count_codes(known, level, low, high)
                if excluded is not None:
                    part = excluded[rows]
                    hits = self._hits(part, digits[rows], revealed[rows])
                    counts.scatter_add_(1, part.digits[level].long(), -hits.to(torch.int32))
                yield rows, counts

    def _count_codes(self, known: SortedList, level: int, low: Tensor, high: Tensor) -> Tensor:
        """(rows, codes of level) int32: how often each code is in each run [low, high)."""
        size = self.codebook_sizes[level]
        before = self._counts(known, level)
        from_block, from_place = self._nearest_block(low, size)
        to_block, to_place = self._nearest_block(high, size)
        detour = (low - from_place).abs() + (high - to_place).abs()
        short = high - low <= detour  # then count the run itself, from low to high
        from_place = torch.where(short, high, from_place)
        to_place = torch.where(short, high, to_place)
        from_block = torch.where(short, to_block, from_block)
        counts = before.index_select(0, to_block).sub_(before.index_select(0, from_block))
        # (2 × rows,) The items from `ends` to `goals` are to be added, or removed if backwards.
        ends, goals = torch.cat([low, to_place]), torch.cat([from_place, high])
        owner, place = _spans(torch.minimum(ends, goals), (goals - ends).abs())
        signs = (goals - ends).sign().to(torch.int32).index_select(0, owner)
        codes = self._digits[level].index_select(0, known.items.index_select(0, place))
        cells = owner.remainder_(len(low)).mul_(size).add_(codes)
        counts.view(-1).scatter_add_(0, cells, signs)
        return counts

    def _nearest_block(self, place: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """The block whose start is nearest to each place in a list, and the start itself."""
        block = BLOCK * size
        nearest = (place + block // 2).div(block, rounding_mode="floor")
        nearest.masked_fill_(place == len(self), -(-len(self) // block))  # the last may be short
        return nearest, (nearest * block).clamp(max=len(self))

    def _hits(self, excluded: Exclusions, digits: Tensor, revealed: Tensor) -> Tensor:
        """(rows, width) bool: the excluded items that have the row's revealed digits."""
        hits = excluded.items >= 0
        for level in range(self.levels):
            same = excluded.digits[level] == digits[:, level, None]
            hits &= same | ~revealed[:, level, None]
        return hits

    def _mask(self, subset: Collection[int]) -> int:
        assert all(0 <= level < self.levels for level in subset)
        return sum(1 << level for level in set(subset))

    def _check(self, digits: Tensor, revealed: Tensor, excluded: Exclusions | None = None) -> None:
        assert digits.ndim == 2
        assert digits.shape[1] == self.levels
        assert not digits.is_floating_point()
        assert revealed.shape == digits.shape
        assert revealed.dtype == torch.bool
        assert excluded is None or len(excluded.items) == len(digits)


def _chain(revealed: Sequence[bool]) -> tuple[int, ...]:
    """An order of the levels that begins with the revealed ones; all subsets of a chain share it.

    Greene and Kleitman's brackets: an unrevealed level opens, a later revealed one closes it.
    Subsets with the same pairs form a chain, in which the unpaired levels are added from left to
    right; C(m, m/2) chains hold all 2^m subsets, and the prefixes are one of them.
    """
    waiting: list[int] = []
    opening: list[int] = []
    closing: list[int] = []
    for level, known in enumerate(revealed):
        if not known:
            waiting.append(level)
        elif waiting:
            opening.append(waiting.pop())
            closing.append(level)
    unpaired = sorted(set(range(len(revealed))) - {*opening, *closing})
    return (*closing, *unpaired, *sorted(opening))


def _spans(starts: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """(total,) the row that each place belongs to, and the places start, …, start + length - 1."""
    owner = torch.repeat_interleave(lengths)
    shift = starts - lengths.cumsum(0) + lengths
    return owner, torch.arange(len(owner), device=owner.device).add_(shift.index_select(0, owner))


def _smallest(size: int) -> torch.dtype:
    if size <= 2**8:
        return torch.uint8
    if size <= 2**15:
        return torch.int16
    return torch.int32 if size <= 2**31 else torch.int64


def _require_catalogue(digits: Tensor, sizes: tuple[int, ...]) -> None:
    assert digits.ndim == 2
    assert not digits.is_floating_point()
    if digits.shape[1] != len(sizes) or not 1 <= len(sizes) <= MAX_LEVELS:
        raise DataError(
            f"items have {digits.shape[1]} digits and there are {len(sizes)} codebooks; give one "
            f"codebook for each digit, and 1 to {MAX_LEVELS} of them"
        )
    if not 1 <= len(digits) < 2**31:
        raise DataError(f"the catalogue has {len(digits)} items; give at least one, below 2^31")
    if min(sizes) < 1 or math.prod(sizes) >= 2**63:
        raise DataError(
            f"the codebooks have {' × '.join(map(str, sizes))} codes; "
            f"give at least one code per level, and fewer than 2^63 tuples in all"
        )
    for level, size in enumerate(sizes):
        least, most = (int(end) for end in digits[:, level].long().aminmax())
        if least < 0 or most >= size:
            raise DataError(
                f"digits at level {level} range from {least} to {most}; "
                f"its codebook has the codes 0 to {size - 1}"
            )
