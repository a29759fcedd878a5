"""Which items agree with revealed digits, for any number of levels.

One list of items a level, sorted by their code there: memory is linear in items and levels. A row
starts from the shortest of the lists that its revealed digits name, and the others narrow it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from maskgr.nn.item_vectors import Table

GATHERED = 2**22  # numbers of item vectors that are gathered at once
KEPT_GROUPS = 8  # sets of levels whose groups of items are kept


class Matches(NamedTuple):
    """Items of each row, row after row."""

    items: Tensor  # (total,) int64, ascending in a row
    owners: Tensor  # (total,) int64, the row of each, ascending

    def keep(self, mask: Tensor) -> Matches:
        return Matches(self.items[mask], self.owners[mask])


class CodeIndex:
    """The codes of all items, indexed level by level. Items may share all of their codes."""

    def __init__(self, codes: Tensor, sizes: Sequence[int]) -> None:
        """`codes` (items, levels), below `sizes` (levels,)."""
        self.codes = codes
        self.sizes = tuple(sizes)
        orders, offsets = [], []
        for level, size in enumerate(self.sizes):
            column = codes[:, level]
            orders.append(column.argsort(stable=True).to(torch.int32))
            counts = torch.bincount(column, minlength=size)
            offsets.append(torch.cat([counts.new_zeros(1), counts.cumsum(0)]))
        self._orders = torch.stack(orders)  # (levels, items) items by code, by number among equals
        self._offsets = offsets  # level by level (codes + 1,) where a code's items start
        self._groups: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}

    def __len__(self) -> int:
        return len(self.codes)

    @property
    def levels(self) -> int:
        return len(self.sizes)

    @property
    def device(self) -> torch.device:
        return self.codes.device

    def __deepcopy__(self, memo: object) -> CodeIndex:
        return self  # never changes

    def groups(self, levels: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """(items,) numbers that are equal where items share the digits at these levels, and
        (groups,) an item of each. The last few are kept: many users reveal the same levels first,
        and to sort a million items takes as long as to score them."""
        found = self._groups.get(levels)
        if found is None:
            columns = [self.codes[:, level] for level in levels]
            found = distinct(columns, [self.sizes[level] for level in levels])
            kept = list(self._groups.items())[1 - KEPT_GROUPS :]
            self._groups = dict([*kept, (levels, found)])  # made anew: threads may be reading
        return found

    def matching(self, codes: Tensor, revealed: Tensor) -> Matches:
        """The items that have the row's `codes` (rows, levels) wherever `revealed` (rows, levels).

        Every row has at least one digit revealed.
        """
        level, start, length = self._shortest(codes, revealed)
        owners = torch.repeat_interleave(length)
        first = length.cumsum(0) - length
        within = torch.arange(len(owners), device=owners.device) - first[owners]
        items = self._orders[level[owners], start[owners] + within].long()
        return self._agreeing(Matches(items, owners), codes, revealed)

    def sampled(self, codes: Tensor, revealed: Tensor, draws: Tensor) -> tuple[Matches, Tensor]:
        """`matching` among so many items of each row's shortest list as `draws` (rows, count) has
        numbers, uniform in [0, 1), and (rows,) the logarithm of how many items each stands for.

        An item may be drawn twice. A list that is no longer than `count` is taken whole.
        """
        level, start, length = self._shortest(codes, revealed)
        count = draws.shape[1]
        every = torch.arange(count, device=draws.device).expand_as(draws)
        places = torch.where(length[:, None] <= count, every, (draws * length[:, None]).long())
        owners, column = (places < length[:, None]).nonzero().unbind(1)
        items = self._orders[level[owners], start[owners] + places[owners, column]].long()
        found = self._agreeing(Matches(items, owners), codes, revealed)
        return found, (length / count).clamp(min=1).log()

    def _shortest(self, codes: Tensor, revealed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(rows,) the level whose list is the shortest that the revealed digits name, where that
        list starts, and its length."""
        starts, lengths = [], []
        for level, offsets in enumerate(self._offsets):
            own = codes[:, level].clamp(0, self.sizes[level] - 1)
            count = offsets[own + 1] - offsets[own]
            starts.append(offsets[own])
            lengths.append(count.masked_fill(~revealed[:, level], len(self) + 1))
        shortest = torch.stack(lengths, 1).min(1)
        start = torch.stack(starts, 1).gather(1, shortest.indices[:, None]).squeeze(1)
        return shortest.indices, start, shortest.values

    def _agreeing(self, found: Matches, codes: Tensor, revealed: Tensor) -> Matches:
        items, owners = found
        kept = torch.ones_like(items, dtype=torch.bool)
        for place in range(self.levels):
            same = self.codes[items, place] == codes[owners, place]
            kept &= same | ~revealed[owners, place]
        return found.keep(kept)


@dataclass(frozen=True, eq=False)
class Filters:
    """Which items each user may get."""

    allowed: Tensor | None = None  # (items,) bool, for all users
    banned: tuple[Tensor, Tensor] | None = None  # (pairs,) user and item, users ascending

    def keep(self, users: Tensor, found: Matches) -> Matches:
        """The matches that the user (rows,) of each row may get."""
        if self.allowed is not None:
            found = found.keep(self.allowed[found.items])
        if len(self._keys):
            wanted = users[found.owners] * self._stride + found.items
            place = torch.searchsorted(self._keys, wanted).clamp(max=len(self._keys) - 1)
            found = found.keep((self._keys[place] != wanted) | (found.items >= self._stride))
        return found

    def without(self, users: Tensor, groups: Tensor, sizes: Tensor) -> Tensor:
        """(users, groups) how many items of each group a user may get.

        `groups` (items,): the group of each item; `sizes` (groups,): all that are allowed.
        """
        counts = sizes.expand(len(users), -1).clone()
        if len(self._keys) and len(users):
            owner, item = self._keys // self._stride, self._keys % self._stride
            place = torch.searchsorted(users, owner).clamp(max=len(users) - 1)
            here = users[place] == owner
            cells = place[here] * len(sizes) + groups[item[here]]
            counts.view(-1).index_add_(0, cells, -torch.ones_like(cells))
        return counts

    def sizes(self, groups: Tensor, count: int) -> Tensor:
        """(groups,) the allowed items of each group."""
        if self.allowed is not None:
            groups = groups[self.allowed]
        return torch.bincount(groups, minlength=count)

    @cached_property
    def _stride(self) -> int:
        return 1 + (int(self.banned[1].max()) if self.banned and len(self.banned[1]) else 0)

    @cached_property
    def _keys(self) -> Tensor:
        """(pairs,) banned pairs of allowed items as sorted numbers, each once."""
        if self.banned is None:
            return torch.zeros(0, dtype=torch.int64)
        users, items = self.banned
        if self.allowed is not None:
            kept = self.allowed[items]
            users, items = users[kept], items[kept]
        keys: Tensor = torch.unique(users * self._stride + items)
        return keys


class Remaining:
    """The items that agree with the revealed digits of each row and that its user may get."""

    def __init__(
        self, index: CodeIndex, filters: Filters, user: Tensor, codes: Tensor, revealed: Tensor
    ) -> None:
        """`user` (rows,) ascending; `codes`, `revealed` (rows, levels)."""
        self.index, self.filters, self.user = index, filters, user
        known = revealed.any(1)
        self.fresh = (~known).nonzero().squeeze(1)  # rows with the whole catalogue before them
        rows = known.nonzero().squeeze(1)
        found = filters.keep(user[rows], index.matching(codes[rows], revealed[rows]))
        self.matches = Matches(found.items, rows[found.owners])  # of the other rows

    def counts(self) -> Tensor:
        """(rows,) how many items remain."""
        counts = torch.bincount(self.matches.owners, minlength=len(self.user))
        everything = torch.zeros(len(self.index), dtype=torch.int64, device=self.user.device)
        counts[self.fresh] = self._fresh_counts(everything, 1).squeeze(1)
        return counts

    def allowed(self, level: int) -> Tensor:
        """(rows, codes) bool: the codes of the remaining items at `level`."""
        size = self.index.sizes[level]
        found = torch.zeros(len(self.user), size, dtype=torch.bool, device=self.user.device)
        found[self.matches.owners, self.index.codes[self.matches.items, level]] = True
        found[self.fresh] = self._fresh_counts(self.index.codes[:, level], size) > 0
        return found

    def _fresh_counts(self, groups: Tensor, count: int) -> Tensor:
        """(fresh rows, groups) how many items of each group remain."""
        users, place = torch.unique_consecutive(self.user[self.fresh], return_inverse=True)
        sizes = self.filters.sizes(groups, count)
        return self.filters.without(users, groups, sizes)[place]


def distinct(columns: Sequence[Tensor], sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
    """(rows,) numbers that are equal where all columns (rows,) are, and (numbers,) a row of each.

    Keys are renumbered before they could overflow, so any number of columns is exact.
    """
    key, limit = torch.zeros_like(columns[0], dtype=torch.int64), 1
    for column, size in zip(columns, sizes, strict=True):
        if limit * size >= 2**63:
            values, key = torch.unique(key, return_inverse=True)
            limit = len(values)
        key, limit = key * size + column, limit * size
    values, numbers = torch.unique(key, return_inverse=True)
    rows = torch.arange(len(key), device=key.device)
    return numbers, torch.zeros_like(values).scatter_(0, numbers, rows)


def pair_energies(queries: Tensor, table: Table, rows: Tensor, items: Tensor) -> Tensor:
    """(pairs,) the products of queries `rows` and item vectors `items`, in float32."""
    size = max(1, GATHERED // table.shape[1])
    pairs = zip(torch.split(rows, size), torch.split(items, size), strict=True)
    parts = [(queries[r].float() * table[i].float()).sum(1) for r, i in pairs]
    return torch.cat(parts) if parts else queries.new_empty(0)


def log_sums(owners: Tensor, logs: Tensor, count: int) -> Tensor:
    """(count,) log of the sum of exp(logs) over the pairs of each owner; -inf where it has none."""
    fixed = logs.detach()
    top = fixed.new_full((count,), -torch.inf).scatter_reduce(0, owners, fixed, "amax")
    sums = torch.zeros_like(top).index_add(0, owners, (logs - top[owners]).exp())
    return top + sums.log()
