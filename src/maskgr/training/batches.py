"""Training sequences under a token budget: no padding, a fixed order, a place to resume from.

A history longer than a window is cut into windows, at another place each epoch, so that every item
is seen and none always starts a window. A batch holds as many windows as its budget has room for,
sorted by length, because the network works on runs of equal length.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from maskgr.data.sequences import Sequences
from maskgr.errors import DataError, RequestError


@dataclass(frozen=True)
class Place:
    """Where training stands: the next batch is number `batch` of epoch `epoch`."""

    epoch: int = 0
    batch: int = 0


@dataclass(frozen=True)
class Batches:
    """The same batches, in the same order, for the same seed."""

    sequences: Sequences  # item numbers
    window: int  # items, the longest sequence that the network sees
    items: int  # budget of a batch
    seed: int = 0

    def __post_init__(self) -> None:
        if self.window < 2:
            raise RequestError(f"a window of {self.window} items has no history; use 2 or more")
        if self.items < self.window:
            raise RequestError(
                f"a batch of {self.items} items has no room for a window of {self.window}; raise "
                "the token budget or lower the history limit"
            )
        if not len(self.sequences.values):
            raise DataError("there is nothing to train on; every training sequence is empty")
        if not self.sequences.is_target.any():
            raise DataError(
                "there is nothing to train on; no event before the held-out ones is a target, so "
                "give more --targets or longer histories"
            )

    def epoch(self, epoch: int) -> list[npt.NDArray[np.int64]]:
        """For each batch, rows of `windows(epoch)`."""
        windows = self.windows(epoch)
        rng = np.random.default_rng((self.seed, epoch, 1))
        # Windows of context alone have nothing to predict.
        order = rng.permutation(np.flatnonzero(windows.target_counts > 0))
        batches, start, room = [], 0, self.items
        for place, length in enumerate(windows.lengths[order].tolist()):
            if length > room:
                batches.append(order[start:place])
                start, room = place, self.items
            room -= length
        return [*batches, order[start:]]

    def windows(self, epoch: int) -> Sequences:
        """All sequences, those longer than a window cut at this epoch's places."""
        lengths = self.sequences.lengths
        rng = np.random.default_rng((self.seed, epoch, 0))
        # A cut falls at `first`, `first + window`, …: the first piece may be short.
        first = rng.integers(1, self.window + 1, size=len(lengths))
        first = np.where(lengths <= self.window, lengths, first)
        places, owners = self.sequences.places, self.sequences.owners
        cuts = (places == 0) | (
            (places >= first[owners]) & ((places - first[owners]) % self.window == 0)
        )
        starts = np.flatnonzero(cuts)
        offsets = np.append(starts, len(self.sequences.values)).astype(np.int64)
        return replace(self.sequences, offsets=offsets)

    def from_place(self, place: Place) -> Iterator[tuple[Place, Sequences]]:
        """Batches without end, from `place` on; each with the place after it."""
        epoch, skip = place.epoch, place.batch
        while True:
            windows, batches = self.windows(epoch), self.epoch(epoch)
            for number in range(skip, len(batches)):
                last = number + 1 == len(batches)
                after = Place(epoch + 1, 0) if last else Place(epoch, number + 1)
                yield after, by_length(windows.select(batches[number]))
            epoch, skip = epoch + 1, 0


def by_length(sequences: Sequences) -> Sequences:
    """The same sequences, shortest first."""
    return sequences.select(np.argsort(sequences.lengths, kind="stable"))
