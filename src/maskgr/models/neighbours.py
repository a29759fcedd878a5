"""Item-to-item neighbours: the items that came soon after those of a history.

As a model it is a floor that costs seconds. MaskGR uses the same table as a memory beside its
network: a network of few numbers generalises, and forgets which single item followed which.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt
import polars as pl
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from maskgr.data.sequences import Counts, Sequences
from maskgr.errors import ArtefactError
from maskgr.evaluation.ranking import Query, Ranked
from maskgr.models.base import TrainConfig, Training
from maskgr.nn.weights import saved_file
from maskgr.settings import require_numbers
from maskgr.training.fit import FitConfig

SPAN = 3  # places after an item that count as following it, each half as much as the one before
RECENT = 5  # items at a history's end that are asked, each half as much as the one after it
FLOOR = 0.01  # strength at which a neighbour starts to matter
CHUNK = 1024  # users at once
FILE = "neighbours.safetensors"


@dataclass(frozen=True)
class NeighboursConfig:
    most: int = 128
    """Neighbours kept of each item."""

    def __post_init__(self) -> None:
        require_numbers(self, most=(1, 100_000))


@dataclass(frozen=True, eq=False)
class Neighbours:
    """The strongest neighbours of every item, best first.

    A strength is how often one item followed the other, over the square root of both their counts.
    An event counts by its weight where it is the one that follows, and as one where others follow.
    Only pairs that were seen take memory: 8 bytes each, of which a few events make a few.
    """

    about: ClassVar = "items that came soon after the last ones of the history"
    needs: ClassVar = "nothing"
    Config: ClassVar[type[Any]] = NeighboursConfig
    supports_ddp: ClassVar = False
    uses_sids: ClassVar = False
    presets: ClassVar[Mapping[str, TrainConfig]] = {
        "cpu": TrainConfig("neighbours", NeighboursConfig(), FitConfig())
    }
    items: Sequences  # of each item its neighbours; weights are their strengths
    counts: Counts  # (items,) training events, by weight

    @classmethod
    def count(cls, histories: Sequences, n_items: int, most: int) -> Self:
        """Counts which item followed which in the training `histories`."""
        counts = histories.counts(n_items)
        before = np.bincount(histories.values, minlength=n_items)  # (items,) context, too
        pairs, shares = [], []
        for gap in range(1, SPAN + 1):
            first, then = histories.values[:-gap], histories.values[gap:]
            together = (histories.places[gap:] >= gap) & (first != then)
            together &= histories.is_target[gap:]
            pairs.append(first[together] * np.int64(n_items) + then[together])
            weights = 1.0 if histories.weights is None else histories.weights[gap:][together]
            shares.append(np.full(len(pairs[-1]), 0.5 ** (gap - 1)) * weights)
        found, which = np.unique(np.concatenate(pairs), return_inverse=True)
        owners, others = np.divmod(found, n_items)
        strengths = np.bincount(which, np.concatenate(shares)) / np.sqrt(
            (before[owners] + 1.0) * (counts[others] + 1.0)
        )
        order = np.lexsort((-strengths, owners))  # stable: the lower number among equals
        owners, others, strengths = owners[order], others[order], strengths[order]
        sizes = np.bincount(owners, minlength=n_items)
        kept = np.arange(len(owners)) - (np.cumsum(sizes) - sizes)[owners] < most
        items = Sequences.from_lengths(others[kept].astype(np.int32), np.minimum(sizes, most))
        return cls(replace(items, weights=strengths[kept].astype(np.float32)), counts)

    def __deepcopy__(self, memo: object) -> Self:
        return self  # never changes

    def after(self, histories: Sequences) -> tuple[Sequences, npt.NDArray[np.float32]]:
        """The neighbours of each history's last items, and (values,) how strongly they follow.

        Strengths add up over the last items and count as log(1 + strength / FLOOR).
        """
        ages = np.arange(RECENT)
        row, age = (histories.lengths[:, None] > ages).nonzero()
        near = self.items.select(histories.values[histories.offsets[1:][row] - 1 - age])
        assert near.weights is not None
        recent = near.owners  # (pairs,) which of the recent items
        keys = row[recent] * np.int64(len(self.items)) + near.values
        found, which = np.unique(keys, return_inverse=True)
        totals = np.bincount(which, near.weights * 0.5 ** age[recent], minlength=len(found))
        owners, others = np.divmod(found, len(self.items))
        lengths = np.bincount(owners, minlength=len(histories))
        values = np.log1p(totals / FLOOR).astype(np.float32)
        return Sequences.from_lengths(others.astype(np.int32), lengths), values

    def rank(self, query: Query) -> Ranked:
        """Neighbours first, then the rest of the catalogue by popularity."""
        users = len(query.histories)
        items = np.full((users, query.top), -1, dtype=np.int32)
        scores = np.full((users, query.top), -np.inf, dtype=np.float32)
        # Mostly below any neighbour.
        popular = 1e-3 * np.log1p(self.counts) / np.log1p(self.counts.sum() + 1)
        order = np.argsort(-popular, kind="stable")
        if query.allowed is not None:
            order = order[query.allowed[order]]
        for start in range(0, users, CHUNK):
            rows = np.arange(start, min(start + CHUNK, users))
            found, values = self._best(query.select(rows), popular, order)
            items[rows, : found.shape[1]] = found
            scores[rows, : found.shape[1]] = values
        return Ranked(items, scores)

    def _best(
        self, query: Query, popular: npt.NDArray[np.float64], order: npt.NDArray[np.intp]
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float64]]:
        """(users, top or fewer) the best of all allowed items, -1 where no more are left, by
        looking at the neighbours and at the most `popular` (items,) in this `order` alone."""
        found, strengths = self.after(query.histories)
        rows, others = found.owners, found.values
        excluded = query.excluded
        if excluded is None:
            excluded = Sequences.of([[]] * len(query.histories))
        # However many are excluded or neighbours, the answer lies within this many first items.
        most = found.lengths.max(initial=0) + excluded.lengths.max(initial=0)
        head = order[: query.top + int(most)]
        place = np.full(len(popular), len(head))  # the last column takes the rest
        place[head] = np.arange(len(head))
        width = int(found.lengths.max(initial=0))
        scores = np.full((len(found), len(head) + 1 + width), -np.inf)
        numbers = np.full(scores.shape, -1, dtype=np.int32)
        scores[:, : len(head)], numbers[:, : len(head)] = popular[head], head
        scores[rows, place[others]] = -np.inf  # a neighbour stands among the neighbours
        mine = popular[others] + strengths
        total = np.exp(popular).sum() + np.bincount(
            rows, np.exp(mine) - np.exp(popular[others]), minlength=len(found)
        )
        keys = excluded.owners * len(popular) + excluded.values
        left = ~np.isin(rows * len(popular) + others, keys)
        if query.allowed is not None:
            left &= query.allowed[others]
        column = len(head) + 1 + found.places
        scores[rows, column], numbers[rows, column] = np.where(left, mine, -np.inf), others
        scores[excluded.owners, place[excluded.values]] = -np.inf
        scores[:, len(head)] = -np.inf
        best = np.lexsort((numbers, -scores), axis=1)[:, : query.top]
        values = np.take_along_axis(scores, best, axis=1) - np.log(total)[:, None]
        chosen = np.where(np.isfinite(values), np.take_along_axis(numbers, best, axis=1), -1)
        return chosen.astype(np.int32), values

    @classmethod
    def learn(cls, training: Training) -> Self:
        most = training.config.model.most
        return cls.count(training.split.train, len(training.data.items), most)

    def with_items(self, items: pl.DataFrame, embeddings: npt.NDArray[Any] | None) -> Neighbours:
        """New items, which followed nothing yet."""
        added, offsets = len(items), self.items.offsets
        return Neighbours(
            replace(self.items, offsets=np.append(offsets, np.repeat(offsets[-1], added))),
            np.concatenate([self.counts, np.zeros(added, dtype=self.counts.dtype)]),
        )

    def save(self, folder: Path) -> None:
        assert self.items.weights is not None
        tensors: dict[str, npt.NDArray[Any]] = {
            "offsets": self.items.offsets,
            "items": self.items.values,
            "strengths": self.items.weights,
            "counts": self.counts,
        }
        save_file(tensors, folder / FILE)

    @classmethod
    def load(cls, folder: Path, config: TrainConfig | None = None) -> Self:
        file = saved_file(folder / FILE)
        try:
            found = load_file(file)
            if "offsets" not in found:
                found = _flat(found)
            items, offsets, strengths = (found[k] for k in ("items", "offsets", "strengths"))
            fits = len(items) == len(strengths) == offsets[-1]
            size = len(counts := found["counts"])
            if not fits or len(offsets) != size + 1 or items.max(initial=-1) >= size:
                raise ValueError("its tables do not fit together")
        except (OSError, SafetensorError, KeyError, ValueError, IndexError) as error:
            raise ArtefactError(f"{file} is damaged ({error}); train again") from error
        return cls(Sequences(items, offsets, strengths), counts)


def _flat(found: dict[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
    """The tables of an earlier layout, (items, most) with -1 where there are no more."""
    known = found["items"] >= 0
    flat = {name: found[name][known] for name in ("items", "strengths")}
    return {**found, **flat, "offsets": np.append(0, np.cumsum(known.sum(axis=1)))}
