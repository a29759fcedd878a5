"""Which items agree with revealed digits, for any number of levels.

One list of items a level, sorted by their code there: memory is linear in items and levels. A row
starts from the shortest of the lists that its revealed digits name, and the others narrow it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Matches(NamedTuple):
    """Items of each row, row after row."""

    items: Tensor  # (total,) int64, ascending in a row
    owners: Tensor  # (total,) int64, the row of each, ascending

    def keep(self, mask: Tensor) -> Matches:
        return Matches(self.items[mask], self.owners[mask])


class CodeIndex:
    """The codes of all items, indexed level by level."""

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

    def __len__(self) -> int:
        return len(self.codes)

    @property
    def levels(self) -> int:
        return len(self.sizes)

    def __deepcopy__(self, memo: object) -> CodeIndex:
        return self  # never changes

    def matching(self, codes: Tensor, revealed: Tensor) -> Matches:
        """The items that have the row's `codes` (rows, levels) wherever `revealed` (rows, levels).

        Every row has at least one digit revealed.
        """
        starts, lengths = [], []
        for level, offsets in enumerate(self._offsets):
            own = codes[:, level].clamp(0, self.sizes[level] - 1)
            starts.append(offsets[own])
            lengths.append(
                (offsets[own + 1] - offsets[own]).masked_fill(~revealed[:, level], 2**62)
            )
        shortest = torch.stack(lengths, 1).min(1)  # (rows,) length and level
        start = torch.stack(starts, 1).gather(1, shortest.indices[:, None]).squeeze(1)
        owners = torch.repeat_interleave(shortest.values)
        first = shortest.values.cumsum(0) - shortest.values
        within = torch.arange(len(owners), device=owners.device) - first[owners]
        items = self._orders[shortest.indices[owners], start[owners] + within].long()
        kept = torch.ones_like(items, dtype=torch.bool)
        for place in range(self.levels):
            same = self.codes[items, place] == codes[owners, place]
            kept &= same | ~revealed[owners, place]
        return Matches(items[kept], owners[kept])
