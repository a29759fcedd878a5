"""What followed what: a memory of single items beside the network.

A network of few numbers generalises, and forgets which single item came after which. That is kept
in a table, as recommenders by neighbours do: each item with those that came soon after it in the
training histories. What followed a history's last items scores higher in dense retrieval, by a
weight that is chosen on validation. The network is trained without: one that has the memory at hand
learns less of its own, and both together are then worse.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from maskgr.data.sequences import Sequences
from maskgr.errors import ArtefactError

SPAN = 3  # places after an item that count as following it, each half as much as the one before
RECENT = 5  # items at a history's end that are asked, each half as much as the one after it
FEW = 0.01  # strength at which a follower starts to matter


@dataclass(frozen=True, eq=False)
class Followers:
    """The strongest followers of every item, best first, with strengths: their count over the
    square root of both items' own counts."""

    items: npt.NDArray[np.int32]  # (items, most) -1 fills up
    strengths: npt.NDArray[np.float32]  # (items, most) 0 fills up

    @classmethod
    def of(cls, histories: Sequences, items: int, most: int) -> Followers:
        """`items`: of the catalogue; `most`: kept of an item's followers."""
        counts = np.bincount(histories.values, minlength=items) + 1.0
        pairs, shares = [], []
        for gap in range(1, SPAN + 1):
            first, then = histories.values[:-gap], histories.values[gap:]
            together = (histories.places[gap:] >= gap) & (first != then)
            pairs.append(first[together] * np.int64(items) + then[together])
            shares.append(np.full(len(pairs[-1]), 0.5 ** (gap - 1)))
        found, which = np.unique(np.concatenate(pairs), return_inverse=True)
        owners, others = np.divmod(found, items)
        strengths = np.bincount(which, np.concatenate(shares)) / np.sqrt(
            counts[owners] * counts[others]
        )
        order = np.lexsort((others, -strengths, owners))
        owners, others, strengths = owners[order], others[order], strengths[order]
        rank = np.arange(len(owners)) - np.searchsorted(owners, owners)
        kept = rank < most
        table = cls.none(items, most)
        table.items[owners[kept], rank[kept]] = others[kept]
        table.strengths[owners[kept], rank[kept]] = strengths[kept]
        return table

    @classmethod
    def none(cls, items: int, most: int) -> Followers:
        shape = (items, most)
        return cls(np.full(shape, -1, dtype=np.int32), np.zeros(shape, dtype=np.float32))

    def save(self, file: Path) -> None:
        save_file({"items": self.items, "strengths": self.strengths}, file)

    @classmethod
    def load(cls, file: Path, items: int) -> Followers:
        """`items`: of the catalogue."""
        try:
            found = load_file(file)
            table = cls(found["items"], found["strengths"])
            wrong = len(table.items) != items or table.items.shape != table.strengths.shape
            if wrong or table.items.max(initial=-1) >= items or table.items.min(initial=0) < -1:
                raise ValueError(f"it is of other items than the {items} of the catalogue")
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise ArtefactError(f"{file} cannot be used ({error}); train again") from error
        return table

    def more(self, items: int) -> Followers:
        """With as many new items behind its own, which nothing is known to have followed."""
        new = self.none(items, self.items.shape[1])
        return Followers(
            np.concatenate([self.items, new.items]), np.concatenate([self.strengths, new.strengths])
        )

    def after(self, histories: Sequences) -> tuple[Sequences, npt.NDArray[np.float32]]:
        """A row a history: the items that followed its last ones, none twice, ascending; and (of
        all rows) how much, from 0 on."""
        ages = np.arange(RECENT)
        there = histories.lengths[:, None] > ages
        row, age = there.nonzero()
        source = histories.values[histories.offsets[1:][row] - 1 - age]
        strengths = self.strengths[source] * (0.5**age)[:, None]  # (recent items, most)
        pair, rank = (strengths > 0).nonzero()
        keys = row[pair] * np.int64(len(self.items)) + self.items[source[pair], rank]
        found, which = np.unique(keys, return_inverse=True)
        totals = np.bincount(which, strengths[pair, rank], minlength=len(found))
        owners, others = np.divmod(found, len(self.items))
        rows = np.bincount(owners, minlength=len(histories))
        return (
            Sequences.from_lengths(others.astype(np.int32), rows),
            np.log1p(totals / FEW).astype(np.float32),
        )
