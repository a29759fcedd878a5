"""Which codes and which items remain once some digits are known, whichever digits these are.

Items sorted by their digits, taken in some order of the levels, form one run for each setting of
the first k digits in that order. So one sorted list answers for m + 1 subsets of known levels,
and C(m, m/2) lists (6 for four levels, 10 for five) answer for all 2^m: the symmetric chain
decomposition of the subsets, one list a chain. A query is two binary searches for the ends of the
run. The codes in a run are counted from cumulative counts at every `BLOCK` × codes items, the
nearest to each end, and the few items between. All counts are exact.

Memory is linear in the items n and does not depend on how they spread over the tuples. With
codebooks of 256 codes, when every subset and level has been asked for: about 114 bytes an item for
four levels, 201 for five; left-to-right decoding alone asks for 28 and 31. A list takes 12 bytes
an item (key and item number), the counts of one level in it 4 / `BLOCK`, the digits themselves m.
Lists and counts are built when first asked for, or by `prepare`.
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

MAX_LEVELS = 8  # all 2^m subsets are tabled, and eight levels need 70 sorted lists
BLOCK = 2  # counts are kept every BLOCK × codes items: memory against time
CELLS = 2**20  # (rows × codes) that one pass works on: bounds memory, stays near the caches


class Ragged(NamedTuple):
    """Row r holds `values[offsets[r] : offsets[r + 1]]`."""

    values: Tensor  # (total,) int64
    offsets: Tensor  # (rows + 1,) int64


@dataclass(frozen=True, eq=False)
class Exclusions:
    """Items that do not count, row by row; made by `Catalogue.exclusions` for that catalogue."""

    items: Tensor  # (rows, width) int64, distinct in a row, all in the catalogue; -1 is none
    digits: Tensor  # (m, rows, width), those of the items; anything where there is none

    def __getitem__(self, rows: Tensor) -> Exclusions:
        """One list a beam from one list a user: `exclusions[user_of_beam]`."""
        return Exclusions(self.items.index_select(0, rows), self.digits.index_select(1, rows))


@dataclass(frozen=True, eq=False)
class SortedList:
    """The items sorted by their digits in one order of the levels; catalogue order among equals."""

    strides: Tensor  # (m,) int64: a tuple's key is the sum of digit × stride
    keys: Tensor  # (n,) int64, ascending
    items: Tensor  # (n,) int32, the item of each key
    counts: dict[int, Tensor] = field(default_factory=dict)
    """Level -> (blocks + 1, codes) int32: the items before each block's start that have a code."""


class Catalogue:
    """The digit tuples of all items, indexed for any subset of known digits.

    `digits` (items, m) are integers below `codebook_sizes` (m,); several items may share a tuple.
    The index lives on the device of `digits`, and queries must be there too. Queries take
    `digits` (rows, m) of any integer type and `revealed` (rows, m) booleans; what `digits` holds
    where nothing is revealed is ignored. Items are named by their row in the catalogue, also in a
    restricted one.
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
        """How many items there are, or remain after `restrict`."""
        return len(self._members)

    @property
    def levels(self) -> int:
        return len(self.codebook_sizes)

    @property
    def digits(self) -> Tensor:
        """(m, items), those that `restrict` left out included."""
        return self._digits

    @property
    def device(self) -> torch.device:
        return self._digits.device

    @property
    def nbytes(self) -> int:
        """Bytes of what has been built so far."""
        tensors = [self._digits, self._members]
        for known in self._lists.values():
            tensors += [known.keys, known.items, *known.counts.values()]
        return sum(tensor.nbytes for tensor in tensors)

    def to(self, device: torch.device | str) -> Catalogue:
        """The same catalogue on `device`, where its lists are built anew when asked for."""
        moved = copy.copy(self)
        moved._digits = self._digits.to(device)
        moved._members = self._members.to(device)
        moved._lists = {}
        moved._index_subsets()
        return moved

    def restrict(self, allowed: Tensor) -> Catalogue:
        """Only the items that are True in `allowed` (items,); item numbers stay what they were.

        Meant for lists that serve many requests or allow few items: the time to build it grows
        with the items that remain. For a few items to leave out, see `exclusions`.
        """
        if allowed.shape != (self._digits.shape[1],) or allowed.dtype != torch.bool:
            raise RequestError(
                f"allowed items are {tuple(allowed.shape)} {allowed.dtype}; "
                f"give one boolean for each of the {self._digits.shape[1]} items"
            )
        members = self._members[allowed[self._members]]
        if not len(members):
            raise RequestError("no item is left to choose from; allow more or deny fewer")
        part = copy.copy(self)
        part._members = members
        part._lists = {}
        return part

    def exclusions(self, items: Tensor) -> Exclusions:
        """Items (rows, width) that each row must not count; -1 fills up short rows.

        Made for short lists, such as what a user has seen: each costs a comparison a query.
        """
        if items.ndim != 2 or items.is_floating_point() or items.dtype == torch.bool:
            raise RequestError(
                f"excluded items are {tuple(items.shape)} {items.dtype}; "
                f"give item numbers as (rows, width), filled up with -1"
            )
        total = self._digits.shape[1]
        if items.numel() and not -1 <= int(items.min()) <= int(items.max()) < total:
            raise RequestError(f"excluded items must be numbers from 0 to {total - 1}, or -1")
        ordered = items.long().sort(dim=1).values
        ordered[:, 1:][ordered[:, 1:] == ordered[:, :-1]] = -1  # an item counts only once
        place = torch.searchsorted(self._members, ordered.int()).clamp(max=len(self) - 1)
        kept = torch.where(self._members[place] == ordered, ordered, -1)
        return Exclusions(kept, self._digits[:, kept.clamp(min=0)])

    def prepare(self, subsets: Collection[Collection[int]] | None = None) -> None:
        """Builds now what queries with these levels revealed (all subsets if None) will need."""
        masks = range(2**self.levels) if subsets is None else map(self._mask, subsets)
        for mask in masks:
            known = self._list(self._orders[mask])
            for level in range(self.levels):
                if not mask >> level & 1:
                    self._counts(known, level)

    def groups(self, subset: Collection[int], digits: Tensor) -> Tensor:
        """(rows,) numbers, equal where the digits at `subset` are; -1 where no item has them."""
        mask = self._mask(subset)
        revealed = torch.tensor([bool(mask >> level & 1) for level in range(self.levels)])
        revealed = revealed.to(self.device).expand(len(digits), -1)
        self._require_query(digits, revealed)
        low, high = self._runs(self._list(self._orders[mask]), digits, revealed)
        return torch.where(low < high, low, -1)

    def counts(
        self, digits: Tensor, revealed: Tensor, excluded: Exclusions | None = None
    ) -> Tensor:
        """(rows,) how many items have the revealed digits."""
        self._require_query(digits, revealed, excluded)
        result = torch.zeros(len(digits), dtype=torch.int64, device=self.device)
        for known, rows in self._by_list(revealed):
            low, high = self._runs(known, digits[rows], revealed[rows])
            result[rows] = high - low
        if excluded is not None:
            result -= self._hits(excluded, digits, revealed).sum(dim=1)
        return result

    def code_counts(
        self, level: int, digits: Tensor, revealed: Tensor, excluded: Exclusions | None = None
    ) -> Tensor:
        """(rows, codes of level) int32: how many items with the revealed digits have each code."""
        self._require_query(digits, revealed, excluded, level)
        size = self.codebook_sizes[level]
        result = torch.zeros((len(digits), size), dtype=torch.int32, device=self.device)
        for rows, counts in self._passes(level, digits, revealed, excluded):
            result.index_copy_(0, rows, counts)
        return result

    def allowed(
        self, level: int, digits: Tensor, revealed: Tensor, excluded: Exclusions | None = None
    ) -> Tensor:
        """(rows, codes of level) bool: the codes that some item with the revealed digits has."""
        self._require_query(digits, revealed, excluded, level)
        size = self.codebook_sizes[level]
        result = torch.zeros((len(digits), size), dtype=torch.bool, device=self.device)
        for rows, counts in self._passes(level, digits, revealed, excluded):
            result.index_copy_(0, rows, counts > 0)
        return result

    def items(self, digits: Tensor, revealed: Tensor, excluded: Exclusions | None = None) -> Ragged:
        """The items with each row's revealed digits, in catalogue order.

        As long as all rows' items together: ask when few remain.
        """
        self._require_query(digits, revealed, excluded)
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
        """(rows,) the item of each full tuple, the first where several share it; -1 if none."""
        revealed = torch.ones(digits.shape, dtype=torch.bool, device=digits.device)
        self._require_query(digits, revealed)
        known = self._list(self._orders[-1])
        low, high = self._runs(known, digits, revealed)
        first = known.items[low.clamp(max=len(self) - 1)].long()
        return torch.where(low < high, first, -1)

    def _index_subsets(self) -> None:
        """What each subset of revealed levels needs to know, by its bits as a number."""
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
        self._rest = torch.tensor(rest, device=self.device)  # (2^m,) tuples under a subset's digits
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
        """(blocks + 1, codes) int32: the items of the list before each block that have a code."""
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
        """The rows that each list answers for."""
        wanted = self._order_of[(revealed * self._bits).sum(dim=1)]  # (rows,)
        for place in torch.bincount(wanted).nonzero().squeeze(1).tolist():
            yield self._list(self._distinct_orders[place]), (wanted == place).nonzero().squeeze(1)

    def _runs(self, known: SortedList, digits: Tensor, revealed: Tensor) -> tuple[Tensor, Tensor]:
        """(rows,) twice: where the run of items with the revealed digits starts and ends."""
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
        """Row numbers and their (rows, codes of level) counts, part by part."""
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
        short = high - low <= detour  # then the run itself is walked, from low to high
        from_place = torch.where(short, high, from_place)
        to_place = torch.where(short, high, to_place)
        from_block = torch.where(short, to_block, from_block)
        counts = before.index_select(0, to_block).sub_(before.index_select(0, from_block))
        ends = torch.cat([low, to_place])  # (2 × rows,): from each of these …
        goals = torch.cat([from_place, high])  # … to these is missing, or too much if backwards
        owner, place = _spans(torch.minimum(ends, goals), (goals - ends).abs())
        signs = (goals - ends).sign().to(torch.int32).index_select(0, owner)
        codes = self._digits[level].index_select(0, known.items.index_select(0, place))
        cells = owner.remainder_(len(low)).mul_(size).add_(codes)
        counts.view(-1).scatter_add_(0, cells, signs)
        return counts

    def _nearest_block(self, place: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """The block whose start is nearest to each place in a list, and that start."""
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
        if not all(0 <= level < self.levels for level in subset):
            raise RequestError(
                f"levels {sorted(subset)} are not all from 0 to {self.levels - 1}, "
                f"as this catalogue has them"
            )
        return sum(1 << level for level in set(subset))

    def _require_query(
        self,
        digits: Tensor,
        revealed: Tensor,
        excluded: Exclusions | None = None,
        level: int = 0,
    ) -> None:
        self._mask([level])
        if digits.ndim != 2 or digits.shape[1] != self.levels or digits.is_floating_point():
            raise RequestError(
                f"digits are {tuple(digits.shape)} {digits.dtype}; "
                f"give integers as (rows, {self.levels})"
            )
        if revealed.shape != digits.shape or revealed.dtype != torch.bool:
            raise RequestError(
                f"revealed is {tuple(revealed.shape)} {revealed.dtype}; "
                f"give booleans as {tuple(digits.shape)}, like the digits"
            )
        if excluded is not None and len(excluded.items) != len(digits):
            raise RequestError(
                f"{len(excluded.items)} rows of excluded items do not go with "
                f"{len(digits)} rows of digits; give one row for each"
            )


def _chain(revealed: Sequence[bool]) -> tuple[int, ...]:
    """An order of the levels that begins with the revealed ones; the same for a whole chain.

    Greene and Kleitman's brackets: an unrevealed level opens, a later revealed one closes it.
    Sets with the same pairs form a chain in which the unpaired levels are added from left to
    right; C(m, m/2) chains hold all 2^m sets, and the prefixes are one of them.
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
    """(total,) twice: all places start, …, start + length - 1, and whose they are."""
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
    whole = not (digits.is_floating_point() or digits.is_complex() or digits.dtype == torch.bool)
    if digits.ndim != 2 or digits.shape[1] != len(sizes) or not whole:
        raise DataError(
            f"digits are {tuple(digits.shape)} {digits.dtype} for {len(sizes)} codebooks; "
            f"give integers as (items, {len(sizes)})"
        )
    if not 1 <= len(sizes) <= MAX_LEVELS:
        raise DataError(f"an item has {len(sizes)} digits; 1 to {MAX_LEVELS} can be indexed")
    if not 1 <= len(digits) < 2**31:
        raise DataError(f"a catalogue of {len(digits)} items; give at least one, below 2^31")
    if min(sizes) < 1 or math.prod(sizes) >= 2**63:
        raise DataError(
            f"codebooks of {' × '.join(map(str, sizes))} codes; "
            f"give at least one code a level, and fewer than 2^63 tuples in all"
        )
    for level, size in enumerate(sizes):
        least, most = (int(end) for end in digits[:, level].long().aminmax())
        if least < 0 or most >= size:
            raise DataError(
                f"digits at level {level} run from {least} to {most}; "
                f"its codebook has the codes 0 to {size - 1}"
            )
