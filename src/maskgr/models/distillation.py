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

    @torch.no_grad()
    def expect(self, states: States, digits: Tensor, revealed: Tensor) -> list[Tensor]:
        """For each level, (rows, codes) the dense head's probabilities of its codes, given the
        digits that are `revealed` of `digits`, both (rows, m); zero in rows without a masked one.
        """
        assert states.queries is not None
        queries = states.queries.float()  # (rows, width)
        codes = self.catalogue.digits.long()  # (m, items)
        result = [queries.new_zeros(len(queries), size) for size in self.catalogue.codebook_sizes]
        known = revealed.any(1)
        for rows, chances in self._of_all(queries, (~known).nonzero().squeeze(1)):
            for level, found in enumerate(result):
                summed = chances.new_zeros(found.shape[1], len(rows))
                found[rows] = summed.index_add_(0, codes[level], chances).T
        partly = (known & ~revealed.all(1)).nonzero().squeeze(1)
        if len(partly):
            alike = self.catalogue.items(digits[partly], revealed[partly])
            owners = partly.repeat_interleave(alike.offsets.diff())
            chances = self._of_some(queries, owners, alike.values)
            for level, found in enumerate(result):
                places = owners * found.shape[1] + codes[level][alike.values]
                found.view(-1).index_add_(0, places, chances)
        return result

    def _of_all(self, queries: Tensor, rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Some of `rows` at a time, and (items, rows) the probabilities of every item."""
        table, bonus = self.table.float(), self.bonus
        for part in torch.split(rows, max(1, CELLS // len(table))):
            scores = table @ queries[part].T
            if bonus is not None:
                column = torch.full((len(queries),), -1, device=rows.device)
                column[part] = torch.arange(len(part), device=rows.device)
                here = column[bonus.rows] >= 0
                place = (bonus.items[here], column[bonus.rows[here]])
                scores.index_put_(place, bonus.values[here].float(), accumulate=True)
            yield part, scores.softmax(0)

    def _of_some(self, queries: Tensor, rows: Tensor, items: Tensor) -> Tensor:
        """(entries,) the probability of each item among those that stand with the same row."""
        scores = (queries[rows] * self.table.float()[items]).sum(1)
        if self.bonus is not None:
            scores += self.bonus.at(rows, items)
        top = scores.new_full((len(queries),), -torch.inf).scatter_reduce(0, rows, scores, "amax")
        weights = (scores - top[rows]).exp_()
        totals = torch.zeros_like(top).index_add_(0, rows, weights)
        return weights / totals[rows]
