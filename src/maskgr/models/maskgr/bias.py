"""Biases on single items beside the network's energies: repeats, and neighbours of the last items.

The learned repeat bias saturates before seen items leave the top 10, so a multiplier is chosen on
validation. The network is trained without neighbours: one that has them at hand learns less by
itself, and both together are then worse. So their weight is chosen on validation, too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from maskgr.data.sequences import Sequences
from maskgr.data.splits import Holdout
from maskgr.decoding.denoiser import best_first, ranks
from maskgr.decoding.matching import pair_energies
from maskgr.evaluation.metrics import ndcg
from maskgr.evaluation.ranking import Query, Ranked
from maskgr.models.neighbours import Neighbours
from maskgr.models.sasrec import SASRec, distinct_pairs
from maskgr.nn.scoring import best_items
from maskgr.nn.softmax import Bonus

USERS = 8000  # validation users that weights are chosen on, at most
REPEAT = (1.0, 2.0, 4.0)
FOLLOW = (0.0, 0.3, 0.6, 0.8, 1.0, 1.2, 1.5)


@dataclass(frozen=True)
class Bias:
    """How much the biases count."""

    repeat: float = 1.0
    """Multiplier of the learned repeat bias."""
    follow: float = 0.0
    """Weight of the neighbours' strengths."""

    def bonus(
        self, history: SASRec, neighbours: Neighbours | None, histories: Sequences
    ) -> Bonus | None:
        """The biases of users with these whole `histories`: each item has one, the repeat bias if
        the user had it, else its strength as a neighbour."""
        repeat = self.repeat * history.repeat_value
        follow = self.follow if neighbours is not None else 0.0
        if not repeat and not follow:
            return None
        n_items, device = len(history.counts), history.device
        owners, items = distinct_pairs(histories)
        keys = owners * n_items + items
        values = np.full(len(keys), repeat, dtype=np.float32)
        if follow and neighbours is not None:
            found, strengths = neighbours.after(histories)
            others = found.owners * n_items + found.values
            new = ~np.isin(others, keys)
            keys = np.concatenate([keys, others[new]])
            values = np.concatenate([values, np.float32(follow) * strengths[new]])
        order = np.argsort(keys)
        rows, numbers = np.divmod(keys[order], n_items)
        return Bonus(
            torch.from_numpy(rows).to(device),
            torch.from_numpy(numbers).to(device),
            torch.from_numpy(values[order]).to(device),
        )


@dataclass(frozen=True, eq=False)
class Shortlist:
    """The items of some users that can be among the best, whatever the weights of the biases: the
    best of those without a bias, and all that have one. The catalogue is scored once for all
    weights."""

    history: SASRec
    neighbours: Neighbours | None
    histories: Sequences
    rows: Tensor  # (pairs,) users, ascending
    items: Tensor  # (pairs,) ascending among those of a user
    energies: Tensor  # (pairs,)
    top: int

    @classmethod
    def of(
        cls,
        history: SASRec,
        neighbours: Neighbours | None,
        histories: Sequences,
        queries: Tensor,
        top: int,
    ) -> Shortlist:
        """`queries` (users, width): of the whole `histories`."""
        table, n_items = history.table(), len(history.counts)
        owners, seen = distinct_pairs(histories)
        near = Sequences.of([]) if neighbours is None else neighbours.after(histories)[0]
        keys = np.unique(
            np.concatenate([owners * n_items + seen, near.owners * n_items + near.values])
        )
        rows, items = np.divmod(keys, n_items)
        biased = Sequences.from_lengths(
            items.astype(np.int32), np.bincount(rows, minlength=len(histories))
        )
        others = best_items(queries, table, top, excluded=biased)[0].cpu().numpy()
        row, place = (others >= 0).nonzero()
        keys = np.sort(np.concatenate([keys, row * n_items + others[row, place]]))
        owner, item = (torch.from_numpy(own).to(queries.device) for own in np.divmod(keys, n_items))
        energies = pair_energies(queries, table, owner, item)
        return cls(history, neighbours, histories, owner, item, energies, top)

    def rank(self, bias: Bias) -> Ranked:
        """The users' best items with these biases, equal ones by number; scores are energies."""
        bonus = bias.bonus(self.history, self.neighbours, self.histories)
        scores = self.energies
        if bonus is not None:
            scores = scores + bonus.at(self.rows, self.items)
        order = best_first(self.rows, scores)
        order = order[ranks(self.rows[order]) < self.top]
        rows, shape = self.rows[order], (len(self.histories), self.top)
        found = np.full(shape, -1, dtype=np.int32)
        values = np.full(shape, -np.inf, dtype=np.float32)
        place = (rows.cpu().numpy(), ranks(rows).cpu().numpy())
        found[place], values[place] = self.items[order].cpu().numpy(), scores[order].cpu().numpy()
        return Ranked(found, values)


def choose_bias(
    rank: Callable[[Query, Bias], Ranked],
    holdout: Holdout,
    *,
    repeats: bool,
    neighbours: bool,
    top: int = 10,
) -> Bias:
    """The weights with the best ndcg@10 on validation users, one after the other.

    ndcg@10 moves with every place that an item gains, and takes many users to tell weights apart.
    """
    bias = Bias()
    if repeats:
        bias = _best(rank, holdout, bias, "repeat", REPEAT, top)
    if neighbours:
        bias = _best(rank, holdout, bias, "follow", FOLLOW, top)
    return bias


def _best(
    rank: Callable[[Query, Bias], Ranked],
    holdout: Holdout,
    bias: Bias,
    name: str,
    values: Sequence[float],
    top: int,
) -> Bias:
    options = [replace(bias, **{name: value}) for value in values]
    query = Query(holdout.histories, top)
    found = [float(ndcg(rank(query, own).items, holdout.targets, 10).mean()) for own in options]
    best = int(np.argmax(found))
    print(
        f"bias: weight of {name} {values[best]}, ndcg@10 {found[best]:.2%}; with {values[0]} it is "
        f"{found[0]:.2%}, on {len(holdout.users):,} validation users",
        file=sys.stderr,
    )
    return options[best]
