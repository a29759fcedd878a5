"""Digits taught by the dense head (distillation).

One item came next, but the dense head knows of others that might have. Its probabilities, summed
over the items that have the revealed digits and a code, say how likely that code is: a target for
the digits that tells far more than the one code that was seen. The order in which digits are masked
and revealed stays what it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from maskgr.config import TrainConfig
from maskgr.diffusion.objective import States
from maskgr.errors import RequestError
from maskgr.items.catalogue import Catalogue
from maskgr.models.softmax import Bonus

CELLS = 2**22  # probabilities that exist at a time


def check_distillation(config: TrainConfig) -> None:
    share, dense = config.objective.distil, config.dense
    if not 0 <= share <= 1:
        raise RequestError(f"objective.distil is {share}; it is a share, from 0 to 1")
    whole = dense.table != "off" and not dense.negatives
    if share and not (whole and config.network.attention == "causal"):
        raise RequestError(
            "objective.distil has the dense head teach the digits of every item; set "
            "network.attention=causal, dense.table=learned and dense.negatives=0, or leave it out"
        )


@dataclass(frozen=True, eq=False)
class DenseTeacher:
    """For `maskgr.diffusion.objective.negative_elbo`, where every item of a batch has a query."""

    share: float
    table: Tensor  # (items of the catalogue, width)
    bonus: Bonus | None
    catalogue: Catalogue

    def expect(self, states: States, digits: Tensor, revealed: Tensor) -> list[Tensor]:
        assert states.queries is not None
        return expected_digits(
            states.queries, self.table, self.bonus, self.catalogue, digits, revealed
        )


@torch.no_grad()
def expected_digits(
    queries: Tensor,
    table: Tensor,
    bonus: Bonus | None,
    catalogue: Catalogue,
    true: Tensor,
    revealed: Tensor,
) -> list[Tensor]:
    """For each level, (rows, codes) the dense head's probabilities of its codes, given the digits
    that are `revealed` (rows, m) of `true` (rows, m); zero in rows without a masked digit.

    `queries` (rows, width), `table` (items, width), `bonus` as in the dense loss.
    """
    queries, table = queries.float(), table.float()
    codes = catalogue.digits.long()  # (m, items)
    result = [queries.new_zeros(len(queries), size) for size in catalogue.codebook_sizes]
    known = revealed.any(1)
    for rows, chances in _whole(queries, table, bonus, (~known).nonzero().squeeze(1)):
        for level, found in enumerate(result):
            summed = chances.new_zeros(found.shape[1], len(rows))
            found[rows] = summed.index_add_(0, codes[level], chances).T
    partly = (known & ~revealed.all(1)).nonzero().squeeze(1)
    if len(partly):
        rows, items, chances = _partly(queries, table, bonus, catalogue, true, revealed, partly)
        for level, found in enumerate(result):
            found.view(-1).index_add_(0, rows * found.shape[1] + codes[level][items], chances)
    return result


def _whole(
    queries: Tensor, table: Tensor, bonus: Bonus | None, rows: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Some of `rows` at a time, and (items, rows) the probabilities of every item."""
    for part in torch.split(rows, max(1, CELLS // len(table))):
        scores = table @ queries[part].T
        if bonus is not None:
            column = torch.full((len(queries),), -1, device=rows.device)
            column[part] = torch.arange(len(part), device=rows.device)
            here = column[bonus.rows] >= 0
            place = (bonus.items[here], column[bonus.rows[here]])
            scores.index_put_(place, bonus.values[here].float(), accumulate=True)
        yield part, scores.softmax(0)


def _partly(
    queries: Tensor,
    table: Tensor,
    bonus: Bonus | None,
    catalogue: Catalogue,
    true: Tensor,
    revealed: Tensor,
    rows: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """(entries,) thrice: a row, an item with its revealed digits, its probability among these."""
    found = catalogue.items(true[rows], revealed[rows])
    owners = rows.repeat_interleave(found.offsets.diff())
    scores = (queries[owners] * table[found.values]).sum(1)
    if bonus is not None:
        keys, order = (bonus.rows * len(table) + bonus.items).sort()
        wanted = owners * len(table) + found.values
        place = torch.searchsorted(keys, wanted).clamp(max=max(len(keys) - 1, 0))
        if len(keys):
            again = keys[place] == wanted
            scores += torch.where(again, bonus.values.float()[order][place], 0.0)
    empty = scores.new_full((len(queries),), -torch.inf)
    top = empty.scatter_reduce(0, owners, scores, "amax")
    weights = (scores - top[owners]).exp_()
    totals = torch.zeros_like(top).index_add_(0, owners, weights)
    return owners, found.values, weights / totals[owners]
