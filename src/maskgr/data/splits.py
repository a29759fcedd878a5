"""Who is trained on and who is asked: leave-k-out, and the sparsified training sets."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from maskgr.data.sequences import Sequences
from maskgr.errors import DataError, RequestError

DROP_RATES = (0.25, 0.375, 0.5, 0.625, 0.75)  # the paper's data-constrained study
FEWEST = 3  # items that stay in every sparsified sequence


@dataclass(frozen=True)
class Holdout:
    """Questions with known answers: after `histories[i]`, user `users[i]` took `targets[i]`."""

    users: npt.NDArray[np.int64]  # (questions,) user numbers
    histories: Sequences  # (questions,) everything before the targets
    targets: npt.NDArray[np.int32]  # (questions, k)

    def sample(self, count: int, seed: int = 0) -> Holdout:
        """`count` of the questions, chosen by the seed; all where there are no more."""
        rows = np.sort(np.random.default_rng(seed).permutation(len(self.users))[:count])
        return Holdout(self.users[rows], self.histories.select(rows), self.targets[rows])


@dataclass(frozen=True)
class Split:
    """Training sequences, one a user, and the two questions that follow each."""

    train: Sequences
    validation: Holdout
    test: Holdout

    def holdout(self, name: str) -> Holdout:
        if name not in ("validation", "test"):
            raise RequestError(f"there is no split {name!r}; choose validation or test")
        return self.validation if name == "validation" else self.test


def leave_out(histories: Sequences, k: int = 1) -> Split:
    """The last `k` items are the test, the `k` before them the validation, the rest is trained on.

    The history of a test question includes the validation items. A user with fewer than 2k + 1
    items is trained on and not asked.
    """
    if k < 1:
        raise RequestError(f"leave-{k}-out is impossible; hold out at least one item")
    users = np.flatnonzero(histories.lengths > 2 * k)
    if not len(users):
        longest = int(histories.lengths.max(initial=0))
        raise DataError(
            f"no user has the {2 * k + 1} items that leave-{k}-out needs (the longest history has "
            f"{longest}); give longer histories"
        )
    asked = np.zeros(len(histories), dtype=bool)
    asked[users] = True
    train_lengths = histories.lengths - 2 * k * asked
    train = histories.keep(histories.places < np.repeat(train_lengths, histories.lengths))
    return Split(train, _ask(histories, users, k, k), _ask(histories, users, k, 0))


def _ask(histories: Sequences, users: npt.NDArray[np.int64], k: int, after: int) -> Holdout:
    """The `k` items with `after` more behind them are the targets."""
    chosen = histories.select(users)
    first = chosen.offsets[1:] - k - after  # (questions,)
    targets = chosen.values[first[:, None] + np.arange(k)]
    places = np.repeat(chosen.lengths - k - after, chosen.lengths)
    return Holdout(users, chosen.keep(chosen.places < places), targets)


def sparsify(train: Sequences, drop: float, seed: int = 0) -> Sequences:
    """Drops a share of the items of each sequence at random; at least three stay.

    Under one seed the sets are nested: what a rate keeps, every lower rate keeps too.
    """
    if not 0 <= drop < 1:
        raise RequestError(f"cannot drop a share of {drop} of the items; choose from 0 up to 1")
    lengths = train.lengths
    stay = np.maximum(np.ceil(lengths * (1 - drop)), np.minimum(lengths, FEWEST))
    draw = np.random.default_rng(seed).random(len(train.values))
    by_draw = np.lexsort((draw, train.owners))
    rank = np.empty(len(draw), dtype=np.int64)  # of each item's draw within its sequence
    rank[by_draw] = train.places
    return train.keep(rank < np.repeat(stay, lengths))
