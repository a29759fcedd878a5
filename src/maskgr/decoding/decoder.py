"""From histories to ranked items or sessions (paper, Section 3.2: Inference and Beam Search)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice, product
from typing import NamedTuple

import torch
from torch import Tensor

from maskgr.decoding.beams import Beams, BeamSearch, Step
from maskgr.decoding.candidates import Candidates, CatalogueCandidates, FreeCandidates
from maskgr.decoding.config import Order
from maskgr.decoding.denoiser import FLOOR, Denoiser, Rules
from maskgr.decoding.matching import CodeIndex, Filters, Remaining
from maskgr.decoding.orders import fixed_priorities
from maskgr.decoding.schedule import schedule
from maskgr.errors import RequestError

CELLS = 2**23  # tensor entries for the users that are searched together: bounds memory


@dataclass(frozen=True)
class Search:
    """Settings of one search."""

    beams: int
    """Targets kept per user after each step; raised to the number of results asked for."""
    order: Order
    steps: int | Sequence[int]
    """Evaluations of the network, or how many digits each of them reveals."""


@dataclass(frozen=True, eq=False)
class Ranking:
    """The most probable items or sessions of each user, best first."""

    items: Tensor  # (users, top), sessions (users, top, k): item numbers, padded with -1
    scores: Tensor  # (users, top) float32 log-probabilities, padded with -inf
    invalid_share: float | None  # final beams that are no item; None for a constrained search
    traces: list[list[Step]] | None  # the steps of each user


class Decoder:
    """Searches the items of an index."""

    def __init__(
        self,
        index: CodeIndex,
        *,
        constrained: bool = True,
        renormalise: bool = False,
        priority: Tensor | None = None,
    ) -> None:
        """`constrained`: search only digits that some item has; `renormalise`: see `Rules`.

        `priority` (items,): ranks items with equal scores, such as those that share their digits;
        the higher first, catalogue order among equals.
        """
        self.index = index
        self._constrained = constrained
        self._renormalise = renormalise
        self._ranks = _ranks(index, priority)
        self._candidates: Candidates = FreeCandidates()
        if constrained:
            self._candidates = CatalogueCandidates(index)

    def next_items(
        self,
        denoiser: Denoiser,
        top: int,
        search: Search,
        *,
        filters: Filters | None = None,
        seeds: Tensor | None = None,
        trace: bool = False,
    ) -> Ranking:
        """The `top` next items of each user; `seeds` (users,) int64: for the random order."""
        assert denoiser.items == 1
        found = self.sessions(denoiser, top, search, filters=filters, seeds=seeds, trace=trace)
        return replace(found, items=found.items.squeeze(2))

    def sessions(
        self,
        denoiser: Denoiser,
        top: int,
        search: Search,
        *,
        filters: Filters | None = None,
        repeats: bool = False,
        seeds: Tensor | None = None,
        trace: bool = False,
    ) -> Ranking:
        """The `top` sessions of each user: tuples of the next items, decoded together.

        A session holds an item once, unless `repeats`. Left to right goes item by item. The other
        arguments are those of `next_items`.
        """
        assert tuple(denoiser.codebook_sizes) == self.index.sizes
        filters = filters or Filters()
        available = len(self.index) if filters.allowed is None else int(filters.allowed.sum())
        _require_top(top, available, denoiser.items, repeats)
        if seeds is None:
            assert search.order != "random"
            seeds = torch.zeros(denoiser.users, dtype=torch.int64)
        positions = denoiser.items * self.index.levels
        beam_search = BeamSearch(
            denoiser,
            denoiser.first(),
            Rules(self.index, self._constrained, self._renormalise, filters),
            self._candidates,
            schedule(positions, search.steps),
            fixed_priorities(search.order, seeds.to(self.index.device), positions),
            repeats,
        )
        return _rank(beam_search, self._ranks, max(search.beams, top), top, trace)


def _ranks(index: CodeIndex, priority: Tensor | None) -> Tensor:
    """(items,) the place of each item among all, by priority and then catalogue order."""
    places = torch.arange(len(index), device=index.device)
    if priority is None:
        return places
    order = priority.to(index.device).argsort(descending=True, stable=True)
    return torch.empty_like(places).scatter_(0, order, places)


def _require_top(top: int, items: int, k: int, repeats: bool) -> None:
    most = items**k if repeats else math.perm(items, k)
    if not most:
        raise RequestError(f"a session of {k} items from a catalogue of {items}; ask for fewer")
    if not 1 <= top <= most:
        what = "items" if k == 1 else f"sessions of {k} of its {items} items"
        raise RequestError(
            f"top {top} of a catalogue with {most} {what} to choose from; give 1 to {most}"
        )


def _rank(search: BeamSearch, ranks: Tensor, width: int, top: int, trace: bool) -> Ranking:
    """Searches for all users, and again with twice the beams for those with too few results.

    Only sessions can need that, where beams end because an item would repeat. The search is
    repeated until no candidate was dropped.
    """
    users, k = search.denoiser.users, search.denoiser.items
    items = torch.full((users, top, k), -1, device=search.rules.index.device)
    scores = torch.full((users, top), -torch.inf, device=items.device)
    traces: list[list[Step]] = [[] for _ in range(users)]
    constrained, invalid, ends = search.rules.constrained, 0, 0
    pending = _users_with_items(search)
    while len(pending):
        again = []
        for part in torch.split(pending, _users_at_once(search, width)):
            beams, cut, steps = search.run(part, width, trace)
            results = _results(search, ranks, beams, top)
            items[part], scores[part] = _best(results, ranks, part, top)
            for user, own in zip(part.tolist(), steps, strict=trace):
                traces[user] = own
            if not constrained:
                invalid, ends = invalid + _invalid(search, beams), ends + len(beams.scores)
            again.append(part[(items[part, -1, 0] < 0) & cut & constrained])
        pending, width = torch.cat(again), 2 * width
    invalid_share = None if constrained else invalid / max(ends, 1)
    return Ranking(items, scores, invalid_share, traces if trace else None)


def _users_with_items(search: BeamSearch) -> Tensor:
    """(some,) the users with enough items left for one session."""
    rules, users = search.rules, torch.arange(search.denoiser.users, device=search.first[0].device)
    nothing = torch.zeros(len(users), rules.index.levels, dtype=torch.int64, device=users.device)
    left = Remaining(rules.index, rules.filters, users, nothing, nothing.bool()).counts()
    return (left >= (1 if search.repeats else search.denoiser.items)).nonzero().squeeze(1)


def _users_at_once(search: BeamSearch, width: int) -> int:
    """The number of users whose beams' probabilities and candidates fit in CELLS."""
    k, sizes = search.denoiser.items, search.rules.index.sizes
    each = k * len(sizes) * max(sizes)  # probabilities of a beam
    if k > 1:
        each = max(each, 2 * width * k * len(sizes))  # digits of a beam's candidates
    return max(1, CELLS // (width * each))


def _invalid(search: BeamSearch, beams: Beams) -> int:
    """How many beams ended with digits that no item has, filtered out or not."""
    found = _items_of(search, beams, Filters()).counts().view(beams.target.digits.shape[:2])
    return int((found == 0).any(dim=1).sum())


def _items_of(search: BeamSearch, beams: Beams, filters: Filters) -> Remaining:
    """The items with the digits of complete beams, for each item of a session."""
    digits = beams.target.digits.flatten(0, 1)
    user = beams.target.user.repeat_interleave(beams.target.digits.shape[1])
    return Remaining(search.rules.index, filters, user, digits, torch.ones_like(digits).bool())


class _Results(NamedTuple):
    user: Tensor  # (results,)
    scores: Tensor  # (results,)
    items: Tensor  # (results, k)


def _results(search: BeamSearch, ranks: Tensor, beams: Beams, top: int) -> _Results:
    """All items with the beams' digits; of sessions, at least the first `top` by `ranks`."""
    (rows, k, _), device = beams.target.digits.shape, beams.scores.device
    found = _items_of(search, beams, search.rules.filters)
    items, owner = found.matches
    if k == 1:
        return _Results(beams.target.user[owner], beams.scores[owner], items.unsqueeze(1))
    parts = torch.split(items, found.counts().tolist())
    sets = [part[ranks[part].argsort()].tolist() for part in parts]
    owners, tuples = [], []
    for row in range(rows):
        every = product(*sets[row * k : row * k + k])
        kept = (own for own in every if search.repeats or len(set(own)) == k)
        for own in islice(kept, top):
            owners.append(row)
            tuples.append(own)
    owner = torch.tensor(owners, dtype=torch.int64, device=device)
    sessions = torch.tensor(tuples, dtype=torch.int64, device=device).view(-1, k)
    return _Results(beams.target.user[owner], beams.scores[owner], sessions)


def _best(results: _Results, ranks: Tensor, users: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """(users, top, k) items and (users, top) scores; by `ranks` among equal scores."""
    user, scores, found = results
    order = torch.arange(len(user), device=user.device)
    for column in reversed(found.unbind(1)):
        order = order[ranks[column[order]].argsort(stable=True)]
    order = order[scores[order].argsort(descending=True, stable=True)]
    order = order[user[order].argsort(stable=True)]
    place = torch.searchsorted(users, user[order])
    rank = torch.arange(len(place), device=user.device) - torch.searchsorted(place, place)
    order, place, rank = order[rank < top], place[rank < top], rank[rank < top]
    items = torch.full((len(users), top, found.shape[1]), -1, device=user.device)
    kept = torch.full((len(users), top), -torch.inf, device=user.device)
    items[place, rank] = found[order]
    kept[place, rank] = scores[order].masked_fill(scores[order] < FLOOR / 2, -torch.inf)
    return items, kept
