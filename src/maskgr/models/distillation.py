"""Digits taught by the dense head (distillation).

One item came next, but the dense head knows of others that might have. The item whose digits are
masked is the one that came or, for a share of them, one drawn from what the dense head expects: so
the network meets the partly revealed items that beams are, not only those of the one that came.
Where the item was drawn, the dense head's probabilities, summed over the items that have the
revealed digits and a code, say how likely that code is: in expectation the same as the digits of
the item itself, and it tells far more. It is the negative ELBO of another item than the one that
came, no more: which digits are masked and in which order they are revealed stays what it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from maskgr.config import TrainConfig
from maskgr.diffusion.objective import Lesson
from maskgr.errors import RequestError
from maskgr.items.catalogue import Catalogue
from maskgr.models.softmax import FEW, Bonus

CELLS = 2**22  # scores, or entries of vectors, that exist at a time


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
    """For a batch in which every item has a query."""

    share: float
    queries: Tensor  # (rows, width)
    table: Tensor  # (items of the catalogue, width)
    bonus: Bonus | None
    catalogue: Catalogue

    @torch.no_grad()
    def teach(self, came: Tensor, uniform: Tensor, revealed: Tensor) -> tuple[Tensor, Lesson]:
        """(rows, m) digits of the items to be filled in, and what is known of them; `came` (rows,)
        are the items that came, `revealed` (rows, m) says which digits are not masked, `uniform`
        (rows,) from 0 to 1 decides who is drawn.

        Where nothing is revealed the network is shown the same whatever is drawn: so nothing is,
        and the target is mixed instead.
        """
        known = revealed.any(1)
        drawn = known & (uniform < self.share)
        rows = drawn.nonzero().squeeze(1)
        items = came.clone()
        items[rows] = self._draw(rows, uniform[rows] / self.share)
        digits = self.catalogue.digits.T[items].long()
        weight = torch.where(known, drawn.float(), self.share)
        return digits, Lesson(self.expect(digits, revealed, weight > 0), weight)

    def _draw(self, rows: Tensor, uniform: Tensor) -> Tensor:
        """(rows,) items, each drawn from what is expected in its row."""
        drawn = torch.empty_like(rows)
        for part in torch.split(torch.arange(len(rows)), self._height):
            scores = self._scores(rows[part])  # (some rows, items)
            below = scores.sub_(scores.amax(1, keepdim=True)).exp_().cumsum(1)
            wanted = uniform[part, None] * below[:, -1:]
            found = torch.searchsorted(below, wanted, right=True).squeeze(1)
            drawn[part] = found.clamp(max=len(self.table) - 1)
        return drawn

    @torch.no_grad()
    def expect(self, digits: Tensor, revealed: Tensor, wanted: Tensor) -> list[Tensor]:
        """For each level, (rows, codes) the dense head's probabilities of its codes, given the
        digits that are `revealed` of `digits`, both (rows, m); zero in rows without a masked one
        and where not `wanted` (rows,).
        """
        codes = self.catalogue.digits  # (m, items)
        result = [
            torch.zeros(len(digits), size, device=digits.device)
            for size in self.catalogue.codebook_sizes
        ]
        known = revealed.any(1)
        for rows, chances in self._of_all((wanted & ~known).nonzero().squeeze(1)):
            for level, found in enumerate(result):
                summed = chances.new_zeros(found.shape[1], len(rows))
                found[rows] = summed.index_add_(0, codes[level].long(), chances).T
        partly = (wanted & known & ~revealed.all(1)).nonzero().squeeze(1)
        if len(partly):
            alike = self.catalogue.items(digits[partly], revealed[partly])
            owners = partly.repeat_interleave(alike.offsets.diff())
            chances = self._of_some(owners, alike.values)
            for level, found in enumerate(result):
                places = owners * found.shape[1] + codes[level][alike.values]
                found.view(-1).index_add_(0, places, chances)
        return result

    def _of_all(self, rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Some of `rows` at a time, and (items, rows) the probabilities of every item."""
        for part in torch.split(rows, self._height):
            yield part, self._scores(part).softmax(1).T.contiguous()

    @property
    def _height(self) -> int:
        """Rows of which all items are scored at a time."""
        return max(FEW, CELLS // len(self.table))

    def _scores(self, rows: Tensor) -> Tensor:
        """(rows, items) of every item, in float32 even where other products are not."""
        with torch.autocast(rows.device.type, enabled=False):
            scores, bonus = self.queries[rows].float() @ self.table.float().T, self.bonus
        if bonus is not None:
            place = torch.full((len(self.queries),), -1, device=rows.device)
            place[rows] = torch.arange(len(rows), device=rows.device)
            here = place[bonus.rows] >= 0
            cells = (place[bonus.rows[here]], bonus.items[here])
            scores.index_put_(cells, bonus.values.detach()[here].float(), accumulate=True)
        return scores

    def _of_some(self, rows: Tensor, items: Tensor) -> Tensor:
        """(entries,) the probability of each item among those that stand with the same row."""
        size = max(1, CELLS // self.queries.shape[1])
        pairs = zip(torch.split(rows, size), torch.split(items, size), strict=True)
        products = [(self.queries[r].float() * self.table[i].float()).sum(1) for r, i in pairs]
        scores = torch.cat(products)
        if self.bonus is not None:
            scores += self.bonus.at(rows, items)
        top = scores.new_full((len(self.queries),), -torch.inf).scatter_reduce(
            0, rows, scores, "amax"
        )
        weights = (scores - top[rows]).exp_()
        totals = torch.zeros_like(top).index_add_(0, rows, weights)
        return weights / totals[rows]
