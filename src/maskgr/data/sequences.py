"""Sequences of different lengths, stored as two flat arrays."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.integer]
Counts = npt.NDArray[np.int64] | npt.NDArray[np.float64]  # of events, or sums of their weights


@dataclass(frozen=True, eq=False)
class Sequences:
    """Sequence `i` is `values[offsets[i]:offsets[i + 1]]`; an interaction takes 4 bytes.

    A value of weight 0 is context: models see it in histories, and it is never to be predicted.
    """

    values: npt.NDArray[np.int32]  # (interactions,) item indices
    offsets: npt.NDArray[np.int64]  # (sequences + 1,)
    weights: npt.NDArray[np.float32] | None = None  # (interactions,) as a target; None: all 1

    @classmethod
    def of(cls, lists: Iterable[Sequence[int] | Ints]) -> Sequences:
        rows = [np.asarray(row, dtype=np.int32) for row in lists]
        values = np.concatenate(rows) if rows else np.empty(0, np.int32)
        return cls.from_lengths(values, np.array([len(row) for row in rows], dtype=np.int64))

    @classmethod
    def from_lengths(cls, values: npt.NDArray[np.int32], lengths: Ints) -> Sequences:
        return cls(values, np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> npt.NDArray[np.int32]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"sequence {index} of {len(self)}")
        index %= len(self)
        return self.values[self.offsets[index] : self.offsets[index + 1]]

    def __iter__(self) -> Iterator[npt.NDArray[np.int32]]:
        return (self[i] for i in range(len(self)))

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Sequences)
            and np.array_equal(self.values, other.values)
            and np.array_equal(self.offsets, other.offsets)
            and _same(self.weights, other.weights)
        )

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        return np.diff(self.offsets)

    @property
    def owners(self) -> npt.NDArray[np.int64]:
        """(interactions,) the sequence that each value belongs to."""
        return np.repeat(np.arange(len(self)), self.lengths)

    @property
    def places(self) -> npt.NDArray[np.int64]:
        """(interactions,) the position of each value in its sequence, from 0."""
        return np.arange(len(self.values)) - np.repeat(self.offsets[:-1], self.lengths)

    @property
    def is_target(self) -> npt.NDArray[np.bool_]:
        """(interactions,) whether the value is to be predicted."""
        if self.weights is None:
            return np.ones(len(self.values), dtype=bool)
        return self.weights > 0

    @property
    def target_counts(self) -> npt.NDArray[np.int64]:
        """(sequences,) how many values of each are to be predicted."""
        if self.weights is None:
            return self.lengths
        return np.diff(np.concatenate([[0], np.cumsum(self.is_target)])[self.offsets])

    @property
    def total_weight(self) -> float:
        """The sum of the weights; without weights, the number of values."""
        if self.weights is None:
            return float(len(self.values))
        return float(self.weights.sum(dtype=np.float64))

    def counts(self, n_items: int) -> Counts:
        """(items,) how often each item occurs as a target, by weight."""
        return np.bincount(self.values, self.weights, minlength=n_items)

    def keep(self, mask: npt.NDArray[np.bool_]) -> Sequences:
        """The values where `mask` (interactions,) is true; a sequence may become empty."""
        kept = np.concatenate([[0], np.cumsum(mask)])[self.offsets]
        return self._gathered(mask, kept.astype(np.int64))

    def select(self, rows: Ints) -> Sequences:
        """The sequences `rows`, in that order."""
        lengths = self.lengths[rows]
        starts = np.repeat(self.offsets[:-1][rows], lengths)
        within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        return self._gathered(starts + within, offsets)

    def _gathered(self, places: npt.NDArray[Any], offsets: npt.NDArray[np.int64]) -> Sequences:
        """The interactions at `places` (a mask or indices), divided anew."""
        weights = None if self.weights is None else self.weights[places]
        return Sequences(self.values[places], offsets, weights)

    def last(self, limit: int) -> Sequences:
        """At most the `limit` most recent values of each sequence."""
        if (self.lengths <= limit).all():
            return self
        return self.keep(self.places >= np.repeat(self.lengths - limit, self.lengths))

    def without_last(self) -> Sequences:
        """The sequences less their last values."""
        return self.keep(self.places < np.repeat(self.lengths - 1, self.lengths))

    def repeats(self) -> npt.NDArray[np.bool_]:
        """(interactions,) whether the value occurs earlier in the same sequence."""
        pairs = self.owners * (int(self.values.max(initial=0)) + 1) + self.values
        first = np.unique(pairs, return_index=True)[1]
        repeated = np.ones(len(self.values), dtype=bool)
        repeated[first] = False
        return repeated


def _same(ours: npt.NDArray[Any] | None, theirs: npt.NDArray[Any] | None) -> bool:
    if ours is None or theirs is None:
        return ours is theirs
    return np.array_equal(ours, theirs)
