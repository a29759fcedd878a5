"""Dense retrieval: every item scored by the product of its vector and the user's query."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from maskgr.data.sequences import Sequences
from maskgr.data.splits import Holdout
from maskgr.evaluation.metrics import recall
from maskgr.evaluation.ranking import Query, Ranked
from maskgr.nn.item_vectors import Table
from maskgr.nn.scoring import best_items
from maskgr.nn.softmax import Bonus

RANK_TOKENS = 16_384  # items of the histories that are encoded at once


@torch.no_grad()
def rank_items(
    query: Query,
    queries: Callable[[Sequences], Tensor],
    table: Table,
    *,
    history_limit: int,
    bonus: Callable[[Sequences], Bonus | None] = lambda histories: None,
) -> Ranked:
    """Each user's best items, scored by query . item vector + bonus.

    `queries` gives the (users, width) queries of whole histories, which come shortest first;
    `table` (items, width) has the item vectors.
    """
    users = len(query.histories)
    items = np.full((users, query.top), -1, dtype=np.int32)
    scores = np.full((users, query.top), -np.inf, dtype=np.float32)
    for rows in portions(query.histories, history_limit):
        part = query.select(rows)
        asked = queries(part.histories)
        allowed = None
        if query.allowed is not None and not query.allowed.all():
            allowed = torch.from_numpy(query.allowed).to(asked.device)
        found, values = best_items(
            asked,
            table,
            query.top,
            allowed=allowed,
            excluded=part.excluded,
            bonus=bonus(part.histories),
        )
        items[rows], scores[rows] = found.cpu().numpy(), values.cpu().numpy()
    return Ranked(items, scores)


def portions(histories: Sequences, limit: int) -> Iterator[npt.NDArray[np.int64]]:
    """Rows of similar length, shortest first, as many at once as the token budget has room for."""
    lengths = np.minimum(histories.lengths, limit) + 1
    order = np.argsort(lengths, kind="stable")
    filled = np.cumsum(lengths[order]) // RANK_TOKENS
    if len(order):
        yield from np.split(order, np.flatnonzero(np.diff(filled)) + 1)


def validation_recall(
    rank: Callable[[Query], Ranked], holdout: Holdout, n_items: int
) -> dict[str, float]:
    """What `Trainable.validate` asks of a network that ranks items."""
    ranked = rank(Query(holdout.histories, min(10, n_items))).items
    return {"recall@10": float(recall(ranked, holdout.targets, 10).mean())}
