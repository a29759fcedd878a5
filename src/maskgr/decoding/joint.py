"""Decoding with a catalogue-normalised denoiser: digits have a joint distribution over real items.

p(item | history, revealed digits) is a softmax of energies q(history, revealed) . v_item + bias
over the items that agree with what is revealed; digits have its marginals. So a step that reveals
several digits scores their exact joint, no tuple can be invalid, and one step is the ranking of the
whole catalogue by q(history, nothing) . v_item.

Only the first step looks at the whole catalogue. A beam then carries the list of its remaining
items, which every step narrows: memory is linear in the catalogue, whatever the number of levels.
Filters condition the distribution on the items that a user may get; the probability of these is
added back to the scores, which are log-probabilities over the whole catalogue.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from maskgr.decoding.beams import Step
from maskgr.decoding.denoiser import best_first, distinct, ranks
from maskgr.decoding.matching import CodeIndex, Filters, Matches, log_sums, pair_energies
from maskgr.decoding.orders import choose
from maskgr.nn.softmax import Bonus

CELLS = 2**23  # energies, or probabilities of codes, that exist at a time


class EnergyDenoiser(Protocol):
    """q(history, revealed) for a batch of users, and the items' vectors."""

    @property
    def users(self) -> int: ...

    @property
    def table(self) -> Tensor:
        """(items, width)."""
        ...

    @property
    def bonus(self) -> Bonus | None:
        """Biases of some (user, item) pairs."""
        ...

    def first(self) -> Tensor:
        """(users, width) the queries with nothing revealed."""
        ...

    def __call__(self, user: Tensor, codes: Tensor, revealed: Tensor) -> Tensor:
        """(rows, width) the queries of partly revealed items (rows, levels); users ascend."""
        ...


@dataclass(frozen=True, eq=False)
class _Beams:
    """Partly revealed items: ascending by user, a user's best first."""

    user: Tensor  # (rows,)
    codes: Tensor  # (rows, levels)
    revealed: Tensor  # (rows, levels)
    scores: Tensor  # (rows,)
    matches: Matches  # the remaining items of each row


class Decoded(NamedTuple):
    """Results of each user, best first; -1 and -inf where there are no more."""

    items: Tensor  # (users, beams)
    scores: Tensor  # (users, beams)
    steps: list[list[Step]]  # user by user, where a trace was asked for


@torch.no_grad()
def beam_search(
    denoiser: EnergyDenoiser,
    index: CodeIndex,
    counts: Sequence[int],
    beams: int,
    *,
    priorities: Tensor | None,
    filters: Filters,
    trace: bool = False,
) -> Decoded:
    """The items that a search with so many `beams` ends with.

    `counts`: digits revealed at each step, two steps or more; one step needs no search.
    `priorities` (users, levels): the higher, the earlier revealed; None: greedy.
    """
    items = torch.full((denoiser.users, beams), -1, device=denoiser.table.device)
    scores = torch.full(items.shape, -torch.inf, device=items.device)
    steps: list[list[Step]] = [[] for _ in range(denoiser.users)]
    first = denoiser.first()
    at_once = max(1, CELLS // max(len(index), beams * max(index.sizes)))
    for users in torch.split(torch.arange(denoiser.users, device=items.device), at_once):
        search = _Search(denoiser, index, priorities, filters, beams)
        found = search.start(users, first[users], counts[0], steps if trace else None)
        if found is None:
            continue
        for count in counts[1:-1]:
            found = search.narrow(found, count, steps if trace else None)
        user, rank, chosen, values = search.finish(found, steps if trace else None)
        items[user, rank], scores[user, rank] = chosen, values
    return Decoded(items, scores, steps)


@dataclass(frozen=True, eq=False)
class _Search:
    denoiser: EnergyDenoiser
    index: CodeIndex
    priorities: Tensor | None
    filters: Filters
    beams: int

    def start(
        self, users: Tensor, queries: Tensor, count: int, steps: list[list[Step]] | None
    ) -> _Beams | None:
        """The first step, over the whole catalogue; None if the filters leave nobody an item."""
        energies = catalogue_energies(self.denoiser, users, queries)  # (users, items)
        total = energies.logsumexp(1)
        energies = self.filters.apply(users, energies)
        mass = energies.logsumexp(1)
        possible = mass > -torch.inf
        if not possible.any():
            return None
        users, energies, mass = users[possible], energies[possible], mass[possible]
        probs = (energies - mass[:, None]).exp_()  # (users, items)
        chosen = self._choose_first(users, probs, count)
        row, codes, values = self._best_first(probs, chosen)
        scores = values + (mass - total[possible])[row]
        order = best_first(row, scores)
        row, codes, scores = row[order], codes[order], scores[order]
        revealed = chosen[row]
        matches = self.index.matching(codes, revealed)
        matches = self.filters.keep(users[row], matches)
        found = _Beams(users[row], codes, revealed, scores, matches)
        if steps is not None:
            marginals = [own[row] for own in self._first_marginals(probs)]
            self._record(steps, found, torch.zeros_like(row), revealed, marginals)
        return found

    def _choose_first(self, users: Tensor, probs: Tensor, count: int) -> Tensor:
        """(users, levels) the digits that the first step reveals."""
        masked = torch.ones(len(users), self.index.levels, dtype=torch.bool, device=users.device)
        if self.priorities is not None:
            return choose(self.priorities[users], masked, count)
        return choose(_gaps(self._first_marginals(probs)), masked, count)

    def _first_marginals(self, probs: Tensor) -> list[Tensor]:
        """Level by level (users, codes)."""
        return [
            probs.new_zeros(len(probs), size).index_add_(1, self.index.codes[:, level], probs)
            for level, size in enumerate(self.index.sizes)
        ]

    def _best_first(self, probs: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(children,) user's row, (children, levels) codes and (children,) log-probabilities of
        the best combinations of digits at each user's `chosen` levels."""
        rows, codes, values = [], [], []
        sets, owner = torch.unique(chosen, dim=0, return_inverse=True)
        for number, levels in enumerate(sets):
            own = (owner == number).nonzero().squeeze(1)
            columns = [self.index.codes[:, level] for level in levels.nonzero().squeeze(1)]
            sizes = [size for size, taken in zip(self.index.sizes, levels, strict=True) if taken]
            group, example = distinct(columns, sizes)
            sums = probs.new_zeros(len(own), len(example)).index_add_(1, group, probs[own])
            top = sums.topk(min(self.beams, sums.shape[1]))
            live = top.values > 0
            rows.append(own[:, None].expand_as(live)[live])
            codes.append(self.index.codes[example[top.indices[live]]])
            values.append(top.values[live].log())
        return torch.cat(rows), torch.cat(codes), torch.cat(values)

    def narrow(self, beams: _Beams, count: int, steps: list[list[Step]] | None) -> _Beams:
        """A step over the remaining items of each beam."""
        log_probs = self._log_probs(beams)  # (pairs,) of each remaining item
        chosen = self._choose(beams, log_probs, count)
        items, owners = beams.matches
        shown = torch.where(chosen[owners], self.index.codes[items] + 1, 0)
        sizes = [len(beams.user), *(size + 1 for size in self.index.sizes)]
        group, example = distinct([owners, *shown.unbind(1)], sizes)
        parent = owners[example]
        scores = beams.scores[parent] + log_sums(group, log_probs, len(example))
        picked = self._select(beams.user[parent], scores)
        parent, scores = parent[picked], scores[picked]
        codes = torch.where(
            chosen[parent], self.index.codes[items[example[picked]]], beams.codes[parent]
        )
        child = torch.full_like(example, -1)
        child[picked] = torch.arange(len(picked), device=child.device)
        owner = child[group]
        kept = (owner >= 0).nonzero().squeeze(1)
        kept = kept[owner[kept].argsort(stable=True)]
        found = _Beams(
            beams.user[parent],
            codes,
            beams.revealed[parent] | chosen[parent],
            scores,
            Matches(items[kept], owner[kept]),
        )
        if steps is not None:
            marginals = [own[parent] for own in self._marginals(beams, log_probs)]
            self._record(steps, found, ranks(beams.user)[parent], chosen[parent], marginals)
        return found

    def finish(
        self, beams: _Beams, steps: list[list[Step]] | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(results,) user, rank, item and score: the last step's candidates are the items.

        Items that share all digits are ranked by their energies.
        """
        log_probs = self._log_probs(beams)
        items, owners = beams.matches
        user, scores = beams.user[owners], beams.scores[owners] + log_probs
        picked = self._select(user, scores)
        if steps is not None:
            parent = owners[picked]
            chosen = ~beams.revealed[parent]
            found = _Beams(
                user[picked],
                self.index.codes[items[picked]],
                torch.ones_like(chosen),
                scores[picked],
                Matches(items[picked], torch.arange(len(picked), device=picked.device)),
            )
            marginals = [own[parent] for own in self._marginals(beams, log_probs)]
            self._record(steps, found, ranks(beams.user)[parent], chosen, marginals)
        return user[picked], ranks(user[picked]), items[picked], scores[picked]

    def _log_probs(self, beams: _Beams) -> Tensor:
        """(pairs,) log p(item | history, revealed) among the remaining items of each beam."""
        items, owners = beams.matches
        log_probs = torch.zeros(len(items), device=items.device)
        several = torch.bincount(owners, minlength=len(beams.user)) > 1
        rows, pairs = several.nonzero().squeeze(1), several[owners].nonzero().squeeze(1)
        if len(rows):  # a single remaining item is certain: nothing to ask
            user, items, place = beams.user[rows], items[pairs], several.cumsum(0) - 1
            queries = self.denoiser(user, beams.codes[rows], beams.revealed[rows])
            owners = place[owners[pairs]]
            energies = pair_energies(queries, self.denoiser.table, owners, items)
            if self.denoiser.bonus is not None:
                energies += self.denoiser.bonus.at(user[owners], items)
            log_probs[pairs] = energies - log_sums(owners, energies, len(rows))[owners]
        return log_probs

    def _choose(self, beams: _Beams, log_probs: Tensor, count: int) -> Tensor:
        """(rows, levels) the digits that this step reveals."""
        masked = ~beams.revealed
        if self.priorities is not None:
            return choose(self.priorities[beams.user], masked, count)
        return choose(_gaps(self._marginals(beams, log_probs)), masked, count)

    def _marginals(self, beams: _Beams, log_probs: Tensor) -> list[Tensor]:
        """Level by level (rows, codes)."""
        items, owners = beams.matches
        probs, rows = log_probs.exp(), len(beams.user)
        found = []
        for level, size in enumerate(self.index.sizes):
            cells = owners * size + self.index.codes[items, level]
            found.append(probs.new_zeros(rows * size).index_add_(0, cells, probs).view(rows, size))
        return found

    def _select(self, user: Tensor, scores: Tensor) -> Tensor:
        """(picked,) the best candidates of each user, ascending by user, best first."""
        order = best_first(user, scores)
        return order[ranks(user[order]) < self.beams]

    def _record(
        self,
        steps: list[list[Step]],
        beams: _Beams,
        parents: Tensor,
        chosen: Tensor,
        marginals: list[Tensor],
    ) -> None:
        """Adds a step to each user's trace. `parents` (rows,): ranks among the user's beams before;
        `marginals`: level by level (rows, codes) of the parents."""
        positions = chosen.nonzero()[:, 1].view(len(chosen), -1)
        own = [m.gather(1, beams.codes[:, level, None]) for level, m in enumerate(marginals)]
        log_probs = torch.cat(own, 1).gather(1, positions).log()
        codes = beams.codes.gather(1, positions)
        remaining = torch.bincount(beams.matches.owners, minlength=len(beams.user))[:, None]
        for user in sorted(set(beams.user.tolist())):
            rows = (beams.user == user).nonzero().squeeze(1)
            parts = (parents, positions, codes, log_probs, beams.scores, remaining)
            steps[user].append(Step(*(part[rows] for part in parts)))


def catalogue_energies(denoiser: EnergyDenoiser, users: Tensor, queries: Tensor) -> Tensor:
    """(users, items) float32, for consecutive users."""
    energies = queries.float() @ denoiser.table.float().T
    if (bonus := denoiser.bonus) is not None:
        here = _among(users, bonus.rows)
        place = (bonus.rows[here] - users[0], bonus.items[here])
        energies.index_put_(place, bonus.values[here].to(energies), accumulate=True)
    return energies


def _gaps(marginals: list[Tensor]) -> Tensor:
    """(rows, levels) the probability of the most likely code less that of the second."""
    tops = [functional.pad(own, (0, 1)).topk(2).values for own in marginals]
    return torch.stack([top[:, 0] - top[:, 1] for top in tops], 1)


def _among(users: Tensor, rows: Tensor) -> Tensor:
    """(rows,) bool: which `rows` are of these consecutive users."""
    return (rows >= users[0]) & (rows <= users[-1])


@torch.no_grad()
def sample_items(
    denoiser: EnergyDenoiser,
    index: CodeIndex,
    count: int,
    *,
    steps: int,
    temperature: float,
    filters: Filters,
    generator: torch.Generator,
) -> Tensor:
    """(users, count) items drawn by ancestral sampling: the noise falls from 1 to 0 in equal steps.

    From noise t to s each masked digit is revealed with probability 1 - s/t. The digits of a step
    are drawn jointly: those of one item drawn from p(item | history, revealed)^(1/temperature).
    -1 where the filters leave a user no item.
    """
    drawn = torch.full((denoiser.users, count), -1, device=denoiser.table.device)
    first = denoiser.first()
    for users in torch.split(
        torch.arange(denoiser.users, device=drawn.device), max(1, CELLS // len(index))
    ):
        energies = filters.apply(users, catalogue_energies(denoiser, users, first[users]))
        possible = (energies > -torch.inf).any(1)
        if not possible.any():
            continue
        users, energies = users[possible], energies[possible] / temperature
        chances = energies.softmax(1)
        items = torch.multinomial(chances, count, replacement=True, generator=generator)
        user = users.repeat_interleave(count)
        found = _redrawn(
            denoiser, index, user, items.flatten(), steps, temperature, filters, generator
        )
        drawn[users] = found.view(-1, count)
    return drawn


def _redrawn(
    denoiser: EnergyDenoiser,
    index: CodeIndex,
    user: Tensor,
    items: Tensor,
    steps: int,
    temperature: float,
    filters: Filters,
    generator: torch.Generator,
) -> Tensor:
    """(rows,) items drawn step by step, where `items` (rows,) were drawn with nothing revealed."""
    shape, device = (len(user), index.levels), user.device
    revealed = torch.zeros(shape, dtype=torch.bool, device=device)
    for number in range(steps):
        t, s = (steps - number) / steps, (steps - number - 1) / steps
        draws = torch.rand(shape, generator=generator, device=device)
        rows = revealed.any(1).nonzero().squeeze(1)
        if len(rows):  # drawn anew from what agrees with the digits revealed so far
            codes = index.codes[items[rows]]
            found = index.matching(codes, revealed[rows])
            found = filters.keep(user[rows], found)
            queries = denoiser(user[rows], codes, revealed[rows])
            energies = pair_energies(queries, denoiser.table, found.owners, found.items)
            if denoiser.bonus is not None:
                energies += denoiser.bonus.at(user[rows][found.owners], found.items)
            uniform = torch.rand(len(energies), generator=generator, device=device)
            noisy = energies / temperature - (-uniform.log()).log()  # the Gumbel-max trick
            order = best_first(found.owners, noisy)
            items[rows] = found.items[order[ranks(found.owners[order]) == 0]]
        revealed |= draws < 1 - s / t
    return items
