"""Leave-k-out splits, and sparsified training sets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

import numpy as np
import numpy.typing as npt

from maskgr.data.config import SplitName
from maskgr.data.sequences import Sequences
from maskgr.errors import DataError, RequestError

MIN_KEPT = 3  # items that sparsification keeps in every sequence, if there are as many


@dataclass(frozen=True)
class Holdout:
    """Evaluation cases: after `histories[i]`, user `users[i]` went on with `targets[i]`."""

    users: npt.NDArray[np.int64]  # (cases,) user indices
    histories: Sequences  # (cases,) all items before the targets
    targets: npt.NDArray[np.int32]  # (cases, k)

    def select(self, rows: npt.NDArray[np.int64]) -> Holdout:
        """The cases `rows`, in that order."""
        return Holdout(self.users[rows], self.histories.select(rows), self.targets[rows])

    def sample(self, count: int, seed: int = 0) -> Holdout:
        """A random sample of at most `count` cases."""
        return self.select(
            np.sort(np.random.default_rng(seed).permutation(len(self.users))[:count])
        )


@dataclass(frozen=True)
class Split:
    """Training sequences, one per user, and the validation and test cases after them."""

    train: Sequences
    validation: Holdout
    test: Holdout

    def holdout(self, name: SplitName) -> Holdout:
        if name not in get_args(SplitName):
            raise RequestError(f"there is no split {name!r}; choose validation or test")
        return self.validation if name == "validation" else self.test


def leave_out(histories: Sequences, k: int = 1) -> Split:
    """Splits each history: its last `k` items are test, the `k` before validation, the rest train.

    The history of a test case includes the validation items. A user with fewer than 2k + 1 items
    is used for training only. Where events have weights, targets alone are held out: a history
    reaches up to the first of its case's targets, and what comes after the test is left out.
    """
    if k < 1:
        raise RequestError(f"leave-{k}-out is impossible; hold out at least one item")
    users, held = _held_out(histories, 2 * k)
    if not len(users):
        what = "items" if histories.weights is None else "events that are targets"
        longest = int(histories.lengths.max(initial=0))
        raise DataError(
            f"no user has the {2 * k + 1} {what} that leave-{k}-out needs (the longest history has "
            f"{longest}); give longer histories"
        )
    train_lengths = histories.lengths.copy()
    train_lengths[users] = held[:, 0]
    return Split(
        _up_to(histories, train_lengths),
        _holdout(histories, users, held[:, :k]),
        _holdout(histories, users, held[:, k:]),
    )


def has_holdout(histories: Sequences, k: int = 1) -> npt.NDArray[np.bool_]:
    """(sequences,) whether leave-k-out holds out items of the history."""
    found = np.zeros(len(histories), dtype=bool)
    found[_held_out(histories, 2 * k)[0]] = True
    return found


def last_targets(histories: Sequences) -> Holdout:
    """Every history's last target as a case; those that nothing comes before only if all are so."""
    users, held = _held_out(histories, 1)
    if not len(users):
        users, held = _held_out(histories, 1, least=0)
    return _holdout(histories, users, held)


def _held_out(
    histories: Sequences, count: int, least: int = 1
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The sequences whose last `count` targets come after `least` values or more, and (sequences,
    count) the places of these targets."""
    if histories.weights is None:
        rows = np.flatnonzero(histories.lengths >= count + least)
        return rows, histories.lengths[rows][:, None] + np.arange(-count, 0)
    places, counts = histories.places[histories.is_target], histories.target_counts
    rows = np.flatnonzero(counts >= count)
    held = places[np.cumsum(counts)[rows][:, None] + np.arange(-count, 0)]
    late = held[:, 0] >= least
    return rows[late], held[late]


def _holdout(
    histories: Sequences, users: npt.NDArray[np.int64], held: npt.NDArray[np.int64]
) -> Holdout:
    """Cases whose targets are at the places `held` (users, k) of the users' histories."""
    chosen = histories.select(users)
    targets = chosen.values[chosen.offsets[:-1][:, None] + held]
    return Holdout(users, _up_to(chosen, held[:, 0]), targets)


def _up_to(histories: Sequences, lengths: npt.NDArray[np.int64]) -> Sequences:
    """The first `lengths` (sequences,) values of each sequence."""
    return histories.keep(histories.places < np.repeat(lengths, histories.lengths))


def sparsify(train: Sequences, drop: float, seed: int = 0) -> Sequences:
    """Drops a random share of the items of each sequence, but keeps at least `MIN_KEPT`.

    With one seed the results are nested: a lower `drop` keeps all that a higher one keeps.
    """
    if not 0 <= drop < 1:
        raise RequestError(f"cannot drop a share of {drop} of the items; choose from 0 up to 1")
    if not drop:
        return train
    lengths = train.lengths
    n_kept = np.maximum(np.ceil(lengths * (1 - drop)), np.minimum(lengths, MIN_KEPT))
    draw = np.random.default_rng(seed).random(len(train.values))
    by_draw = np.lexsort((draw, train.owners))
    rank = np.empty(len(draw), dtype=np.int64)  # rank of each item's draw within its sequence
    rank[by_draw] = train.places
    return train.keep(rank < np.repeat(n_kept, lengths))
