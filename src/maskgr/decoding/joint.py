"""Decoding with a catalogue-normalised denoiser: digits have a joint distribution over real items.

p(item | history, revealed digits) is a softmax of energies q(history, revealed) . v_item + bias
over the items that agree with what is revealed; digits have its marginals. So a step that reveals
several digits scores their exact joint, no tuple can be invalid, and one step is the ranking of the
whole catalogue by q(history, nothing) . v_item.

The beams that are kept are those with the most probable completions, as far as is known, not those
of the highest probability so far: twenty codes of a first digit would often leave out the best
item, which shares its code with few others. So where queries do not depend on what is revealed, any
order and number of steps ends with the best items of one step.

The next k items are decoded together as a session. A beam has k slots, each a partly revealed item
with a query of its own, which knows the revealed digits of all slots. Given these the slots are
independent, so the candidates of a step are the products of what each slot can reveal.

A slot with nothing revealed has the whole catalogue before it. Any other carries the list of its
remaining items, which every step narrows: memory is linear in the catalogue, whatever the number of
levels. A slot whose digits are all revealed is one item: those that share all digits are told apart
by their energies when the last digit is revealed.

Filters condition the distribution on the items that a user may get; the probability of these with
nothing revealed is added back to the scores, which are log-probabilities over the whole catalogue.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from maskgr.decoding.beams import Step
from maskgr.decoding.denoiser import best_first, ranks
from maskgr.decoding.matching import CodeIndex, Filters, Matches, distinct, log_sums
from maskgr.decoding.orders import choose
from maskgr.decoding.posterior import (
    EnergyDenoiser,
    Posterior,
    catalogue_log_probs,
    joined,
    remaining_energies,
    users_with_items,
)
from maskgr.errors import RequestError

CELLS = 2**23  # energies, or probabilities of codes, that exist at a time


class Decoded(NamedTuple):
    """Results of each user, best first; -1 and -inf where there are no more."""

    items: Tensor  # (users, beams, k)
    scores: Tensor  # (users, beams)
    steps: list[list[Step]]  # user by user, where a trace was asked for


def require_remask(remask: int, positions: int) -> None:
    """Refuses to take back all `positions` digits, or fewer than none."""
    if not 0 <= remask < positions:
        raise RequestError(
            f"decoding.remask is {remask}, but an answer has {positions} digits and keeps at least "
            f"one; give 0 to {positions - 1}"
        )


@torch.no_grad()
def beam_search(
    denoiser: EnergyDenoiser,
    index: CodeIndex,
    counts: Sequence[int],
    beams: int,
    *,
    priorities: Tensor | None,
    filters: Filters,
    repeats: bool = False,
    remask: int = 0,
    trace: bool = False,
) -> Decoded:
    """The items, or sessions of k items, that a search with so many `beams` ends with.

    `counts`: digits revealed at each step, of k * levels.
    `priorities` (users, k * levels): the higher, the earlier revealed; None: greedy.
    `repeats`: whether a session may hold an item several times.
    `remask`: digits of each complete beam that are taken back and revealed anew: those with the
    lowest probability when they were revealed, the first among equals. `trace`: for k = 1.

    Beams end where an item would repeat. A user with too few results is searched again with twice
    the beams, until no candidate was dropped.
    """
    k = denoiser.items
    assert sum(counts) == k * index.levels
    assert not trace or k == 1
    require_remask(remask, k * index.levels)
    items = torch.full((denoiser.users, beams, k), -1, device=denoiser.table.device)
    scores = torch.full(items.shape[:2], -torch.inf, device=items.device)
    steps: list[list[Step]] = [[] for _ in range(denoiser.users)]
    search = _Search(
        denoiser,
        denoiser.first(),
        index,
        tuple(counts),
        priorities,
        filters,
        repeats,
        remask,
        steps if trace else None,
        results=beams,
        width=beams,
    )
    pending = users_with_items(denoiser, index, filters, 1 if repeats else k)
    while len(pending):
        again = []
        for users in torch.split(pending, search.users_at_once()):
            found, short = search.run(users)
            rank = ranks(found.user)
            best = (rank < beams).nonzero().squeeze(1)
            items[found.user[best], rank[best]] = found.items[best]
            scores[found.user[best], rank[best]] = found.scores[best]
            again.append(users[short])
        pending, search = torch.cat(again), replace(search, width=2 * search.width)
    return Decoded(items, scores, steps)


@dataclass(frozen=True, eq=False)
class _Beams:
    """Partly revealed sessions: ascending by user, a user's best first."""

    user: Tensor  # (rows,)
    items: Tensor  # (rows, k) an item with the revealed digits of each slot
    revealed: Tensor  # (rows, k, levels)
    scores: Tensor  # (rows,)
    chances: Tensor  # (rows, k, levels) of digits when they were revealed; zeros unless followed
    matches: Matches  # remaining items of slots, numbered row * k + place, that are partly revealed

    def __len__(self) -> int:
        return len(self.user)

    def per_user(self, users: Tensor) -> Tensor:
        """(users,) how many beams each has."""
        own = torch.searchsorted(self.user, users, right=True)
        return own - torch.searchsorted(self.user, users)

    def part(self, start: int, stop: int) -> _Beams:
        k = self.items.shape[1]
        ends = torch.tensor([start * k, stop * k], device=self.user.device)
        pairs = slice(*torch.searchsorted(self.matches.owners, ends).tolist())
        rows = slice(start, stop)
        return _Beams(
            self.user[rows],
            self.items[rows],
            self.revealed[rows],
            self.scores[rows],
            self.chances[rows],
            Matches(self.matches.items[pairs], self.matches.owners[pairs] - start * k),
        )


class _Children(NamedTuple):
    """Continuations of beams, the most promising of each user."""

    parent: Tensor  # (children,) row of the beam
    items: Tensor  # (children, k)
    revealed: Tensor  # (children, k, levels)
    scores: Tensor  # (children,)
    chances: Tensor  # (children, k, levels)
    promise: Tensor  # (children,) by which they are kept: the score of the best completion


class _Options(NamedTuple):
    """What some slots of beams can become."""

    row: Tensor  # (options,) the beam
    items: Tensor  # (options, slots) an item with the digits of each slot
    values: Tensor  # (options,) log-probabilities
    peaks: Tensor  # (options,) log-probabilities of the best items with these digits

    def keep(self, chosen: Tensor) -> _Options:
        return _Options(*(part[chosen] for part in self))

    def best(self, most: int) -> _Options:
        """Those of each beam with the highest peaks: ascending by beam, best first."""
        order = best_first(self.row, self.peaks)
        return self.keep(order[ranks(self.row[order]) < most])

    def times(self, other: _Options, most: int) -> _Options:
        """The best `most` products of each beam; both are sorted as by `best`.

        The product of places i and j, from 1, is no better than the i * j products of places up to
        these: only i * j <= most can be among the best.
        """
        limit = most // (ranks(self.row) + 1)
        left, right = joined(self.row, other.row, limit)
        items = torch.cat([self.items[left], other.items[right]], 1)
        values = self.values[left] + other.values[right]
        peaks = self.peaks[left] + other.peaks[right]
        return _Options(self.row[left], items, values, peaks).best(most)


@dataclass(frozen=True, eq=False)
class _Search:
    denoiser: EnergyDenoiser
    first: Tensor  # (users, k, width)
    index: CodeIndex
    counts: tuple[int, ...]
    priorities: Tensor | None
    filters: Filters
    repeats: bool
    remask: int
    traces: list[list[Step]] | None
    results: int  # beams that each user is to end with, if there are so many
    width: int  # beams of each user

    @property
    def k(self) -> int:
        return self.denoiser.items

    def users_at_once(self) -> int:
        """The number of users whose first energies and beams' probabilities fit in CELLS."""
        codes = max(self.index.sizes)
        if self.k > 1:  # `times` looks at most * (1 + 1/2 + 1/3 + ...) products of a beam
            codes = max(codes, 16 * self.width)
        return max(1, CELLS // (self.k * max(len(self.index), self.width * codes)))

    def run(self, users: Tensor) -> tuple[_Beams, Tensor]:
        """The complete beams of `users` (ascending), and (users,) whether they are too few and a
        wider search may have more."""
        shape, device = (len(users), self.k, self.index.levels), users.device
        masked = torch.zeros(shape, dtype=torch.bool, device=device)
        none = torch.zeros(0, dtype=torch.int64, device=device)
        beams = _Beams(
            users,
            torch.zeros(shape[:2], dtype=torch.int64, device=device),
            masked,
            torch.zeros(len(users), device=device),
            torch.zeros(shape, device=device),
            Matches(none, none),
        )
        cut = torch.zeros_like(users, dtype=torch.bool)
        for count in self.counts:
            if len(beams):  # all sessions may have ended in a repeated item
                beams = self._step(beams, count)
            cut |= beams.per_user(users) == self.width
        short = cut & (beams.per_user(users) < self.results)
        if self.remask and len(beams):
            beams = self._reveal_anew(beams)
        return beams, short

    def _step(self, beams: _Beams, count: int, *, anew: bool = False) -> _Beams:
        """The beams with `count` more digits; `anew`: they were revealed and taken back."""
        size = len(beams)
        if not beams.revealed.any(2).all():  # some slots have the whole catalogue before them
            size = max(1, CELLS // (self.k * len(self.index)))
        parts = []
        for start in range(0, len(beams), size):
            own = self._expand(beams.part(start, min(start + size, len(beams))), count, anew)
            parts.append(own._replace(parent=own.parent + start))
        found = _Children(*(torch.cat(part) for part in zip(*parts, strict=True)))
        if len(parts) > 1:
            picked = self._select(beams.user[found.parent], found.items, found.promise, anew)
            found = _Children(*(part[picked] for part in found))
        order = best_first(beams.user[found.parent], found.scores)
        found = _Children(*(part[order] for part in found))
        user = beams.user[found.parent]
        after = _Beams(user, *found[1:-1], self._narrowed(beams, found))
        if self.traces is not None:
            self._record(beams, after, found.parent)
        return after

    def _expand(self, beams: _Beams, count: int, anew: bool) -> _Children:
        """The most promising continuations by the next `count` digits."""
        masked, chosen = ~beams.revealed, self._fixed_choice(beams, count)
        start = not beams.revealed.any()
        followed = self.traces is not None or self.remask > 0
        every = chosen is None or start or followed or self.k > 1
        wanted = masked if every or chosen is None else chosen
        posterior = self._posterior(beams, wanted.any(2))
        if chosen is None:
            gaps = posterior.gaps().view(len(beams), -1)
            chosen = choose(gaps, masked.flatten(1), count).view_as(masked)
        options = self._options(beams, posterior, chosen)
        scores = beams.scores
        if start:
            scores = scores + posterior.allowed.view(len(beams), self.k).sum(1)
        if anew:  # p(kept digits) = p(items) / p(items | kept digits)
            scores = scores - posterior.at(beams.items.flatten()).view(len(beams), self.k).sum(1)
        promise = scores[options.row] + options.peaks
        scores = scores[options.row] + options.values
        picked = self._select(beams.user[options.row], options.items, promise, anew)
        parent, items = options.row[picked], options.items[picked]
        chances = beams.chances[parent]
        if followed:
            slots = parent[:, None] * self.k + torch.arange(self.k, device=parent.device)
            new = posterior.digit_chances(slots, items)
            chances = torch.where(chosen[parent], new, chances)
        revealed = beams.revealed[parent] | chosen[parent]
        return _Children(parent, items, revealed, scores[picked], chances, promise[picked])

    def _fixed_choice(self, beams: _Beams, count: int) -> Tensor | None:
        """(rows, k, levels) the digits to reveal; None if probabilities decide."""
        masked = ~beams.revealed
        if count == int(masked[0].sum()):
            return masked  # all that is left
        if self.priorities is None:
            return None
        return choose(self.priorities[beams.user], masked.flatten(1), count).view_as(masked)

    def _posterior(self, beams: _Beams, wanted: Tensor) -> Posterior:
        """p(item | history, revealed) of the `wanted` (rows, k) slots."""
        k, user = self.k, beams.user.repeat_interleave(self.k)
        fresh = (wanted & ~beams.revealed.any(2)).flatten()
        known = beams.matches.keep(wanted.flatten()[beams.matches.owners])
        several = torch.bincount(known.owners, minlength=len(user)) > 1
        asked = (fresh | several).view(-1, k).any(1)  # one remaining item is certain
        rows = asked.nonzero().squeeze(1)
        queries = self._queries(beams, rows).flatten(0, 1)
        place = ((asked.cumsum(0) - 1)[:, None] * k + torch.arange(k, device=rows.device)).flatten()
        logs = torch.zeros(len(known.items), device=queries.device)
        pairs = several[known.owners].nonzero().squeeze(1)
        if len(pairs):
            own = Matches(known.items[pairs], place[known.owners[pairs]])
            asking = beams.user[rows].repeat_interleave(k)
            energies = remaining_energies(self.denoiser, asking, queries, own)
            logs[pairs] = energies - log_sums(own.owners, energies, len(queries))[own.owners]
        slots = fresh.nonzero().squeeze(1)
        dense, allowed = catalogue_log_probs(
            self.denoiser, self.filters, user[slots], queries[place[slots]]
        )
        return Posterior(self.index, len(user), slots, dense, allowed, known, logs)

    def _queries(self, beams: _Beams, rows: Tensor) -> Tensor:
        """(rows, k, width)."""
        if not len(rows) or not beams.revealed.any():
            return self.first[beams.user[rows]]
        codes = self.index.codes[beams.items[rows]]
        return self.denoiser(beams.user[rows], codes, beams.revealed[rows])

    def _options(self, beams: _Beams, posterior: Posterior, chosen: Tensor) -> _Options:
        """At least the most promising `width` continuations of each beam by its `chosen` digits."""
        complete = (beams.revealed | chosen).all(2)  # (rows, k)
        once = not self.repeats and bool((complete.sum(1) > 1).any())
        # For each choice of the other slots, at most k - 1 items of a slot are among them.
        most = self.width + (self.k - 1 if once else 0)
        found = posterior.groups(chosen.flatten(0, 1), complete.flatten(), most)
        if self.k == 1:
            return _Options(found.slots, found.items[:, None], found.values, found.peaks)
        idle = (~chosen.any(2)).flatten().nonzero().squeeze(1)
        slot = torch.cat([found.slots, idle])
        item = torch.cat([found.items, beams.items.flatten()[idle]])
        value = torch.cat([found.values, found.values.new_zeros(len(idle))])
        peak = torch.cat([found.peaks, posterior.peaks()[idle]])
        every = _Options(slot // self.k, item[:, None], value, peak)
        parts = [every.keep(slot % self.k == place).best(most) for place in range(self.k)]
        return self._products(parts, complete, once)

    def _products(self, parts: list[_Options], complete: Tensor, once: bool) -> _Options:
        """The best of each beam; `once`: where no item is in two of the `complete` slots."""
        wanted, rows = (2 if once else 1) * self.width, len(complete)
        while True:
            found = parts[0]
            for part in parts[1:]:
                found = found.times(part, wanted)
            if not once:
                return found
            full = torch.bincount(found.row, minlength=rows) >= wanted
            found = found.keep(~_repeated(found.items, complete[found.row]))
            if not (full & (torch.bincount(found.row, minlength=rows) < self.width)).any():
                return found
            wanted *= 2

    def _select(self, user: Tensor, items: Tensor, promise: Tensor, anew: bool) -> Tensor:
        """(picked,) the most promising candidates of each user, ascending by user, best first.

        Only digits that are revealed `anew` lead to the same items from several beams: the best
        counts.
        """
        order = best_first(user, promise)
        if anew:
            sizes = [self.denoiser.users, *[len(self.index)] * self.k]
            session, _ = distinct([user[order], *items[order].unbind(1)], sizes)
            place = torch.arange(len(order), device=order.device)
            first = torch.full_like(place, len(place)).scatter_reduce(0, session, place, "amin")
            order = order[first[session] == place]
        return order[ranks(user[order]) < self.width]

    def _narrowed(self, beams: _Beams, found: _Children) -> Matches:
        """The remaining items of the children's slots that are partly revealed."""
        k, device = self.k, found.parent.device
        some = found.revealed.any(2) & ~found.revealed.all(2)  # (children, k)
        known = some & beams.revealed[found.parent].any(2)
        slots = known.flatten().nonzero().squeeze(1)
        before = (found.parent[:, None] * k + torch.arange(k, device=device)).flatten()[slots]
        own, pairs = joined(before, beams.matches.owners)
        items, owners = beams.matches.items[pairs], slots[own]
        codes, revealed = self.index.codes[found.items.flatten()], found.revealed.flatten(0, 1)
        same = (self.index.codes[items] == codes[owners]) | ~revealed[owners]
        kept = same.all(1).nonzero().squeeze(1)
        old = Matches(items[kept], owners[kept])
        new = self._matching(beams.user[found.parent], found.items, found.revealed, some & ~known)
        if not len(new.items):
            return old
        together = Matches(*(torch.cat(both) for both in zip(old, new, strict=True)))
        order = together.owners.argsort(stable=True)
        return Matches(together.items[order], together.owners[order])

    def _matching(self, user: Tensor, items: Tensor, revealed: Tensor, wanted: Tensor) -> Matches:
        """The remaining items of the `wanted` (rows, k) slots, by the index."""
        slots = wanted.flatten().nonzero().squeeze(1)
        codes = self.index.codes[items.flatten()[slots]]
        found = self.index.matching(codes, revealed.flatten(0, 1)[slots])
        found = self.filters.keep(user[slots // self.k], found)
        return Matches(found.items, slots[found.owners])

    def _reveal_anew(self, beams: _Beams) -> _Beams:
        """Complete beams after their least certain digits were taken back and revealed jointly."""
        everything = torch.ones_like(beams.revealed).flatten(1)
        masked = choose(-beams.chances.flatten(1), everything, self.remask)
        kept = ~masked.view_as(beams.revealed)
        some = kept.any(2) & ~kept.all(2)
        matches = self._matching(beams.user, beams.items, kept, some)
        return self._step(replace(beams, revealed=kept, matches=matches), self.remask, anew=True)

    def _record(self, before: _Beams, after: _Beams, parent: Tensor) -> None:
        """Adds a step to each user's trace (k = 1)."""
        assert self.traces is not None
        new = (after.revealed & ~before.revealed[parent]).flatten(1)
        positions = new.nonzero()[:, 1].view(len(new), -1)
        codes = self.index.codes[after.items.flatten()].gather(1, positions)
        log_probs = after.chances.flatten(1).gather(1, positions).log()
        remaining = torch.bincount(after.matches.owners, minlength=len(after))
        remaining = remaining.masked_fill(after.revealed.all(2).squeeze(1), 1)[:, None]
        parts = (ranks(before.user)[parent], positions, codes, log_probs, after.scores, remaining)
        for user in torch.unique(after.user).tolist():
            rows = (after.user == user).nonzero().squeeze(1)
            self.traces[user].append(Step(*(part[rows] for part in parts)))


def _repeated(items: Tensor, complete: Tensor) -> Tensor:
    """(rows,) whether two `complete` (rows, k) slots have the same of `items` (rows, k)."""
    same = (items.unsqueeze(2) == items.unsqueeze(1)) & complete.unsqueeze(1)
    return ((same.sum(2) > 1) & complete).any(1)


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
    assert denoiser.items == 1
    drawn = torch.full((denoiser.users, count), -1, device=denoiser.table.device)
    first = denoiser.first().squeeze(1)
    pending = users_with_items(denoiser, index, filters, 1)
    for users in torch.split(pending, max(1, CELLS // len(index))):
        log_probs, _ = catalogue_log_probs(denoiser, filters, users, first[users])
        chances = (log_probs / temperature).softmax(1)
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
            codes, shown = index.codes[items[rows]], revealed[rows]
            found = filters.keep(user[rows], index.matching(codes, shown))
            queries = denoiser(user[rows], codes[:, None], shown[:, None]).squeeze(1)
            energies = remaining_energies(denoiser, user[rows], queries, found)
            uniform = torch.rand(len(energies), generator=generator, device=device)
            noisy = energies / temperature - (-uniform.log()).log()  # the Gumbel-max trick
            order = best_first(found.owners, noisy)
            items[rows] = found.items[order[ranks(found.owners[order]) == 0]]
        revealed |= draws < 1 - s / t
    return items
