"""The items with the highest scores under a softmax over the whole catalogue."""

from __future__ import annotations

import torch
from torch import Tensor

from maskgr.data.sequences import Sequences
from maskgr.nn.item_vectors import Table, table_scores
from maskgr.nn.softmax import Bonus

CELLS = 2**23  # scores that exist at a time
ITEMS = 65_536  # items of a block


@torch.no_grad()
def best_items(
    queries: Tensor,
    table: Table,
    top: int,
    *,
    allowed: Tensor | None = None,
    excluded: Sequences | None = None,
    bonus: Bonus | None = None,
) -> tuple[Tensor, Tensor]:
    """(rows, top) items, best first, and their log-probabilities; -1 and -inf where no more are.

    A score is `queries` (rows, width) . `table` (items, width) + `bonus`. The softmax runs over all
    items; those not `allowed` (items,) and the row's `excluded` are left out of the answer only.
    Equal scores are ordered by item number.
    """
    items = torch.full((len(queries), top), -1, device=queries.device)
    scores = torch.full((len(queries), top), -torch.inf, device=queries.device)
    size = max(1, CELLS // min(len(table), ITEMS))
    banned = None if excluded is None else pairs(excluded, queries.device)
    for start in range(0, len(queries), size):
        rows = slice(start, start + size)
        found, values = _best(
            queries[rows].float(),
            table,
            min(top, len(table)),
            allowed,
            None if banned is None else _within(*banned, start, start + size),
            None if bonus is None else _bonus_within(bonus, start, start + size),
        )
        items[rows, : found.shape[1]] = found
        scores[rows, : found.shape[1]] = values
    return items, scores


def _best(
    queries: Tensor,
    table: Table,
    top: int,
    allowed: Tensor | None,
    banned: tuple[Tensor, Tensor] | None,
    bonus: Bonus | None,
) -> tuple[Tensor, Tensor]:
    """`best_items` for rows that fit in memory, a block of items at a time."""
    device = queries.device
    items = torch.full((len(queries), 0), -1, device=device)
    scores = torch.full((len(queries), 0), -torch.inf, device=device)
    total = torch.full((len(queries),), -torch.inf, device=device)
    for first in range(0, len(table), ITEMS):
        block = table_scores(queries, table, first, first + ITEMS)  # (rows, items of the block)
        last = first + block.shape[1]
        if bonus is not None:
            here = (bonus.items >= first) & (bonus.items < last)
            place = (bonus.rows[here], bonus.items[here] - first)
            block.index_put_(place, bonus.values[here].detach().to(block), accumulate=True)
        total = torch.logaddexp(total, block.logsumexp(1))
        if allowed is not None:
            block.masked_fill_(~allowed[first:last], -torch.inf)
        if banned is not None:
            here = (banned[1] >= first) & (banned[1] < last)
            block[banned[0][here], banned[1][here] - first] = -torch.inf
        values, places = _top(block, min(top, block.shape[1]))
        items = torch.cat([items, places + first], 1)
        scores = torch.cat([scores, values], 1)
    order = items.argsort(dim=1, stable=True)  # by number first: a stable sort then breaks ties
    items, scores = items.gather(1, order), scores.gather(1, order)
    scores, order = scores.sort(dim=1, descending=True, stable=True)
    items, scores = items.gather(1, order)[:, :top], scores[:, :top]
    return items.masked_fill(scores == -torch.inf, -1), scores - total[:, None]


def _top(block: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """`topk` of each row, which keeps the first of equal scores; `topk` itself may keep any."""
    values, places = block.topk(min(count + 1, block.shape[1]))
    tied = (values[:, count - 1 : count] == values[:, count:]) & (values[:, count:] > -torch.inf)
    rows = tied.any(1).nonzero().squeeze(1)
    if len(rows):
        ordered = block[rows].sort(dim=1, descending=True, stable=True)
        values[rows, :count], places[rows, :count] = (part[:, :count] for part in ordered)
    return values[:, :count], places[:, :count]


def pairs(sequences: Sequences, device: torch.device) -> tuple[Tensor, Tensor]:
    """(values,) row and value of everything in `sequences`, rows ascending."""
    owners, values = torch.from_numpy(sequences.owners), torch.from_numpy(sequences.values)
    return owners.to(device), values.long().to(device)


def _within(rows: Tensor, items: Tensor, start: int, stop: int) -> tuple[Tensor, Tensor]:
    """The pairs of rows from `start` to `stop`, counted from there."""
    here = (rows >= start) & (rows < stop)
    return rows[here] - start, items[here]


def _bonus_within(bonus: Bonus, start: int, stop: int) -> Bonus:
    here = (bonus.rows >= start) & (bonus.rows < stop)
    return Bonus(bonus.rows[here] - start, bonus.items[here], bonus.values[here])
