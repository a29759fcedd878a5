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

from dataclasses import dataclass

import torch
from torch import Tensor

from maskgr.config import TrainConfig
from maskgr.decoding.catalogue import Catalogue
from maskgr.errors import RequestError
from maskgr.models.maskgr.objective import Lesson
from maskgr.nn.softmax import Bonus, Expected, expectations

CELLS = 2**22  # entries of vectors that exist at a time


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
    queries: Tensor  # (items, width)
    table: Tensor  # (items of the catalogue, width)
    bonus: Bonus | None
    catalogue: Catalogue

    @torch.no_grad()
    def teach(
        self, came: Tensor, owners: Tensor, uniform: Tensor, revealed: Tensor
    ) -> tuple[Tensor, Lesson]:
        """(copies, m) digits of what is to be filled in, and what is known of them.

        `came` (items,) are the items that came. All have equally many copies: `owners` (copies,)
        says whose each is, `revealed` (copies, m) which digits are not masked, and `uniform`
        (copies,) from 0 to 1 decides who is drawn.

        Where nothing is revealed the network is shown the same whatever is drawn: so nothing is,
        and the target is mixed instead.
        """
        known = revealed.any(1)
        drawn = known & (uniform < self.share)
        weight = torch.where(known, drawn.float(), self.share)
        items, expected = came[owners], self._nothing(len(owners))
        copies = owners.argsort(stable=True).view(len(came), -1)  # (items, copies of each)
        for rows, expects in expectations(self.queries, self.table, bonus=self.bonus):
            own = copies[rows]
            instead = expects.draw((uniform[own] / self.share).clamp(max=1))
            items[own] = torch.where(drawn[own], instead, items[own])
            whole = ~known[own]  # (rows, copies of each)
            asked = whole.any(1)
            row, copy = whole.nonzero(as_tuple=True)
            codes = self._of_whole(expects, asked.nonzero().squeeze(1))
            for level, found in zip(expected, codes, strict=True):
                level[own[row, copy]] = found[asked.cumsum(0)[row] - 1]
        digits = self.catalogue.digits.T[items].long()
        self._among_alike(expected, owners, digits, revealed, drawn & ~revealed.all(1))
        return digits, Lesson(expected, weight)

    def _nothing(self, copies: int) -> list[Tensor]:
        """For each level (copies, codes)."""
        sizes = self.catalogue.codebook_sizes
        return [torch.zeros(copies, size, device=self.queries.device) for size in sizes]

    def _of_whole(self, expects: Expected, rows: Tensor) -> list[Tensor]:
        """For each level (rows, codes) the probabilities where nothing is revealed."""
        sums = [level.T.contiguous() for level in self._nothing(len(rows))]
        for items, chances in expects.probabilities(rows):
            for summed, codes in zip(sums, self.catalogue.digits, strict=True):
                summed.index_add_(0, codes[items].long(), chances)
        return [summed.T for summed in sums]

    def _among_alike(
        self,
        expected: list[Tensor],
        owners: Tensor,
        digits: Tensor,
        revealed: Tensor,
        wanted: Tensor,
    ) -> None:
        """Adds to `expected` the probabilities of codes in the copies `wanted` (copies,), among
        items that agree with what is revealed."""
        asked = wanted.nonzero().squeeze(1)
        if not len(asked):
            return
        alike = self.catalogue.items(digits[asked], revealed[asked])
        copies = asked.repeat_interleave(alike.offsets.diff())
        chances = self._of_some(owners, copies, alike.values)
        for codes, level in zip(self.catalogue.digits, expected, strict=True):
            places = copies * level.shape[1] + codes[alike.values]
            level.view(-1).index_add_(0, places, chances)

    def _of_some(self, owners: Tensor, copies: Tensor, items: Tensor) -> Tensor:
        """(entries,) the probability of each item among those that stand with the same copy."""
        size = max(1, CELLS // self.queries.shape[1])
        rows = owners[copies]
        pairs = zip(torch.split(rows, size), torch.split(items, size), strict=True)
        products = [(self.queries[r].float() * self.table[i].float()).sum(1) for r, i in pairs]
        scores = torch.cat(products)
        if self.bonus is not None:
            scores += self.bonus.at(rows, items)
        top = scores.new_full((len(owners),), -torch.inf).scatter_reduce(0, copies, scores, "amax")
        weights = (scores - top[copies]).exp_()
        totals = torch.zeros_like(top).index_add_(0, copies, weights)
        return weights / totals[copies]
