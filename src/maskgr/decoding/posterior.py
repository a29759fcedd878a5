"""p(item | history, revealed digits) of a catalogue-normalised denoiser.

It is a softmax of energies q(history, revealed) . v_item + bias over the items that agree with what
is revealed and that the user may get; digits have its marginals.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from maskgr.decoding.matching import (
    CodeIndex,
    Filters,
    Matches,
    Remaining,
    distinct,
    log_sums,
    pair_energies,
)
from maskgr.nn.item_vectors import Table, table_scores
from maskgr.nn.softmax import Bonus


class EnergyDenoiser(Protocol):
    """q(history, revealed) of the next items of a batch of users, and the items' vectors."""

    @property
    def users(self) -> int: ...

    @property
    def items(self) -> int:
        """How many next items are decoded together: k."""
        ...

    @property
    def table(self) -> Table:
        """(items, width)."""
        ...

    @property
    def bonus(self) -> Bonus | None:
        """Biases of some (user, item) pairs, for every item of a session."""
        ...

    def first(self) -> Tensor:
        """(users, k, width) the queries with nothing revealed."""
        ...

    def __call__(self, user: Tensor, codes: Tensor, revealed: Tensor) -> Tensor:
        """(rows, k, width) the queries of partly revealed sessions.

        `user` (rows,) ascending; `codes`, `revealed` (rows, k, levels), at least one digit of each
        row revealed; codes that are not revealed are arbitrary.
        """
        ...


class Groups(NamedTuple):
    """Items of slots that share some digits."""

    slots: Tensor  # (groups,)
    items: Tensor  # (groups,) one of the items
    values: Tensor  # (groups,) log-probability of all of them
    peaks: Tensor  # (groups,) log-probability of the most probable one


@dataclass(frozen=True, eq=False)
class Posterior:
    """log p(item | history, revealed digits) of slots."""

    index: CodeIndex
    slots: int
    fresh: Tensor  # (fresh,) the slots with nothing revealed
    dense: Tensor  # (fresh, items) their log-probabilities
    allowed: Tensor  # (fresh,) log-probability of what the filters leave, in the whole catalogue
    matches: Matches  # the remaining items of other slots
    logs: Tensor  # (pairs,) their log-probabilities

    @cached_property
    def _probs(self) -> Tensor:
        return self.dense.exp()

    def at(self, items: Tensor) -> Tensor:
        """(slots,) log-probabilities of `items` (slots,); 0 for slots that are not among these."""
        found = torch.zeros(self.slots, device=items.device)
        found[self.fresh] = self.dense.gather(1, items[self.fresh, None]).squeeze(1)
        own = (self.matches.items == items[self.matches.owners]).nonzero().squeeze(1)
        return found.index_copy_(0, self.matches.owners[own], self.logs[own])

    def marginal(self, level: int) -> Tensor:
        """(slots, codes) probabilities.

        Those of the same items are the same number, and of all of a slot's items exactly 1: where
        they are compared, rounding decides nothing.
        """
        return self._sums(self.index.codes[:, level], self.index.sizes[level]) / self._totals

    @cached_property
    def _totals(self) -> Tensor:
        return self._sums(torch.zeros_like(self.index.codes[:, 0]), 1)  # (slots, 1)

    def _sums(self, groups: Tensor, count: int) -> Tensor:
        """(slots, count) the probabilities of the items of each of the `groups` (items,)."""
        sums = torch.zeros(self.slots, count, device=groups.device)
        cells = self.matches.owners * count + groups[self.matches.items]
        sums.view(-1).index_add_(0, cells, self.logs.exp())
        if len(self.fresh):
            empty = torch.zeros(len(self.fresh), count, device=groups.device)
            sums[self.fresh] = empty.index_add_(1, groups, self._probs)
        return sums

    def gaps(self) -> Tensor:
        """(slots, levels) the probability of the most likely code less that of the second."""
        found = []
        for level in range(self.index.levels):
            top = functional.pad(self.marginal(level), (0, 1)).topk(2).values
            found.append(top[:, 0] - top[:, 1])
        return torch.stack(found, 1)

    def digit_chances(self, slots: Tensor, items: Tensor) -> Tensor:
        """(..., levels) marginal probabilities of the digits of `items` (...) in `slots` (...)."""
        codes = self.index.codes[items]
        levels = range(self.index.levels)
        return torch.stack([self.marginal(level)[slots, codes[..., level]] for level in levels], -1)

    def peaks(self) -> Tensor:
        """(slots,) log-probability of the most probable item; 0 for slots that are not among
        these."""
        found = torch.zeros(self.slots, device=self.logs.device)
        found = found.scatter_reduce(0, self.matches.owners, self.logs, "amax", include_self=False)
        if len(self.fresh):
            found[self.fresh] = self.dense.amax(1)
        return found

    def groups(self, chosen: Tensor, complete: Tensor, most: int) -> Groups:
        """The remaining items that share the `chosen` (slots, levels) digits, for slots where some
        are chosen; an item is by itself where the slot is then `complete` (slots,).

        Of fresh slots the `most` groups with the highest peaks, of others all.
        """
        parts = [*self._fresh_groups(chosen, most), self._known_groups(chosen, complete)]
        return Groups(*(torch.cat(part) for part in zip(*parts, strict=True)))

    def _fresh_groups(self, chosen: Tensor, most: int) -> list[Groups]:
        found = []
        sets, owner = torch.unique(chosen[self.fresh], dim=0, return_inverse=True)
        for number, levels in enumerate(sets):
            if not levels.any():
                continue
            own = (owner == number).nonzero().squeeze(1)
            if levels.all():
                peaks, item = self.dense[own].topk(min(most, len(self.index)))
                values = peaks
            else:
                group, example = self.index.groups(tuple(levels.nonzero().flatten().tolist()))
                sums = torch.zeros(len(own), len(example), device=own.device)
                sums.index_add_(1, group, self._probs[own])
                best = torch.full_like(sums, -torch.inf).scatter_reduce(
                    1, group.expand(len(own), -1), self.dense[own], "amax"
                )
                peaks, groups = best.topk(min(most, len(example)))
                values, item = sums.gather(1, groups).log(), example[groups]
            live = values > -torch.inf
            slot = self.fresh[own][:, None].expand_as(live)
            found.append(Groups(slot[live], item[live], values[live], peaks[live]))
        return found

    def _known_groups(self, chosen: Tensor, complete: Tensor) -> Groups:
        pairs = chosen.any(1)[self.matches.owners].nonzero().squeeze(1)
        items, owners = self.matches.items[pairs], self.matches.owners[pairs]
        logs, alone = self.logs[pairs], complete[owners]
        if alone.all():
            return Groups(owners, items, logs, logs)
        shown = torch.where(chosen[owners], self.index.codes[items] + 1, 0)
        columns = [owners, *shown.unbind(1)]
        sizes = [self.slots, *(size + 1 for size in self.index.sizes)]
        if alone.any():
            columns.append(torch.where(alone, items + 1, 0))
            sizes.append(len(self.index) + 1)
        group, example = distinct(columns, sizes)
        values = log_sums(group, logs, len(example))
        peaks = torch.full_like(values, -torch.inf).scatter_reduce(0, group, logs, "amax")
        return Groups(owners[example], items[example], values, peaks)


def users_with_items(
    denoiser: EnergyDenoiser, index: CodeIndex, filters: Filters, least: int
) -> Tensor:
    """(some,) the users who may get at least so many items."""
    users = torch.arange(denoiser.users, device=denoiser.table.device)
    nothing = torch.zeros(len(users), index.levels, dtype=torch.int64, device=users.device)
    counts = Remaining(index, filters, users, nothing, nothing.bool()).counts()
    return (counts >= least).nonzero().squeeze(1)


def catalogue_log_probs(
    denoiser: EnergyDenoiser, filters: Filters, user: Tensor, queries: Tensor
) -> tuple[Tensor, Tensor]:
    """(rows, items) log-probabilities among the items that each user may get, and (rows,) the
    log-probability of these in the whole catalogue.

    `user` (rows,) ascends; `queries` (rows, width).
    """
    if not len(user):
        return queries.new_zeros(0, len(denoiser.table)), queries.new_zeros(0)
    energies = table_scores(queries, denoiser.table)
    if (bonus := denoiser.bonus) is not None:
        entry, row = joined(bonus.rows, user)
        place = (row, bonus.items[entry])
        energies.index_put_(place, bonus.values[entry].to(energies), accumulate=True)
    total = energies.logsumexp(1)
    if filters.allowed is None and filters.banned is None:
        return energies.sub_(total[:, None]), torch.zeros_like(total)
    if filters.allowed is not None:
        energies.masked_fill_(~filters.allowed, -torch.inf)
    if filters.banned is not None:
        entry, row = joined(filters.banned[0], user)
        energies[row, filters.banned[1][entry]] = -torch.inf
    left = energies.logsumexp(1)
    return energies.sub_(left[:, None]), left - total


def remaining_energies(
    denoiser: EnergyDenoiser, user: Tensor, queries: Tensor, found: Matches
) -> Tensor:
    """(pairs,) of the owners with such `user` (owners,) and `queries` (owners, width)."""
    energies = pair_energies(queries, denoiser.table, found.owners, found.items)
    if denoiser.bonus is not None:
        energies += denoiser.bonus.at(user[found.owners], found.items)
    return energies


def joined(left: Tensor, right: Tensor, limit: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(pairs,) twice: places in `left` and in `right` of equal numbers; `right` ascends.

    `limit` (left,): each place in `left` meets so many at most, the first.
    """
    start = torch.searchsorted(right, left)
    count = torch.searchsorted(right, left, right=True) - start
    if limit is not None:
        count = torch.minimum(count, limit)
    place = torch.repeat_interleave(count)
    within = torch.arange(len(place), device=place.device) - (count.cumsum(0) - count)[place]
    return place, start[place] + within
