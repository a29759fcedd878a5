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
from maskgr.decoding.catalogue import Catalogue, Exclusions
from maskgr.decoding.denoiser import FLOOR, Denoiser, Rules, require_fit
from maskgr.decoding.orders import fixed_priorities
from maskgr.decoding.schedule import schedule
from maskgr.errors import RequestError

CELLS = 2**23  # what the users that are searched together may fill: bounds memory


@dataclass(frozen=True)
class Search:
    """How to search."""

    beams: int
    """Targets kept after each step of a user; at least as many as results are asked for."""
    order: str
    """One of `orders.ORDERS`."""
    steps: int | Sequence[int]
    """Evaluations of the network, or how many digits each of them reveals."""


@dataclass(frozen=True, eq=False)
class Ranking:
    """The most probable items of each user, or sessions of items; best first."""

    items: Tensor  # (users, top), sessions (users, top, k): item numbers, -1 where no more are
    scores: Tensor  # (users, top) float32 log-probabilities, -inf where no more are
    invalid_share: float  # of the beams at the end, those that are no item of the catalogue
    traces: list[list[Step]] | None  # user by user, step by step


class Decoder:
    """Searches one catalogue; keeps what it learns about it from one request to the next."""

    def __init__(
        self,
        catalogue: Catalogue,
        *,
        constrained: bool = True,
        renormalise: Catalogue | None = None,
    ) -> None:
        """`catalogue`: what may be recommended; `constrained`: only its digits are searched.

        `renormalise`: the catalogue that the model's likelihood was restricted to in training.
        """
        self.catalogue = catalogue
        self._constrained = constrained
        self._renormalise = renormalise
        self._candidates: Candidates = FreeCandidates()
        if constrained:
            self._candidates = CatalogueCandidates(catalogue)

    def next_items(
        self,
        denoiser: Denoiser,
        top: int,
        search: Search,
        *,
        excluded: Exclusions | None = None,
        generator: torch.Generator | None = None,
        trace: bool = False,
    ) -> Ranking:
        """The `top` next items of each user; items that share their digits in catalogue order.

        `excluded`: what each user must not get; `generator`: for the random order.
        """
        if denoiser.items != 1:
            raise RequestError(f"a session of {denoiser.items} items is no next item; use sessions")
        found = self.sessions(
            denoiser, top, search, excluded=excluded, generator=generator, trace=trace
        )
        return replace(found, items=found.items.squeeze(2))

    def sessions(
        self,
        denoiser: Denoiser,
        top: int,
        search: Search,
        *,
        excluded: Exclusions | None = None,
        repeats: bool = False,
        generator: torch.Generator | None = None,
        trace: bool = False,
    ) -> Ranking:
        """The `top` sessions of each user: tuples of the next items, decoded together.

        An item is in a session once, unless `repeats`. Left to right is item after item.
        """
        self._require(denoiser, top, search, excluded, repeats)
        beam_search = self._beam_search(denoiser, search, excluded, repeats, generator)
        return _rank(beam_search, max(search.beams, top), top, trace)

    def score(
        self,
        denoiser: Denoiser,
        items: Tensor,
        digits: Tensor,
        search: Search,
        *,
        excluded: Exclusions | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """(users, width) log-probabilities of given next `items` (users, width), as the search
        would score them if it kept them; -inf where an item is -1.

        `digits` (users, width, m): those of the items.
        """
        require_fit(denoiser, self.catalogue, excluded)
        beam_search = self._beam_search(denoiser, search, excluded, False, generator)
        user, place = (items >= 0).nonzero(as_tuple=True)
        scores = torch.full(items.shape, -torch.inf, device=items.device)
        at_once = max(1, CELLS // (self.catalogue.levels * max(self.catalogue.codebook_sizes)))
        for start in range(0, len(user), at_once):
            own, where = user[start : start + at_once], place[start : start + at_once]
            scores[own, where] = beam_search.follow(own, digits[own, where].unsqueeze(1))
        return scores

    def _beam_search(
        self,
        denoiser: Denoiser,
        search: Search,
        excluded: Exclusions | None,
        repeats: bool,
        generator: torch.Generator | None,
    ) -> BeamSearch:
        positions = denoiser.items * self.catalogue.levels
        return BeamSearch(
            denoiser,
            denoiser.first(),
            Rules(self.catalogue, self._constrained, self._renormalise, excluded),
            self._candidates,
            schedule(positions, search.steps),
            fixed_priorities(
                search.order, denoiser.users, positions, self.catalogue.device, generator
            ),
            repeats,
        )

    def _require(
        self,
        denoiser: Denoiser,
        top: int,
        search: Search,
        excluded: Exclusions | None,
        repeats: bool,
    ) -> None:
        require_fit(denoiser, self.catalogue, excluded)
        if search.beams < 1:
            raise RequestError(f"{search.beams} beams find nothing; give at least 1")
        items, k = len(self.catalogue), denoiser.items
        most = items**k if repeats else math.perm(items, k)
        if not 1 <= top <= most:
            what = "items" if k == 1 else f"sessions of {k} of its {items} items"
            raise RequestError(
                f"top {top} of a catalogue with {most} {what} to choose from; give 1 to {most}"
                if most
                else f"a session of {k} items from a catalogue of {items}; ask for fewer"
            )


def _rank(search: BeamSearch, width: int, top: int, trace: bool) -> Ranking:
    """Searches for all users, and again with twice the beams for those left with too few.

    Only sessions can need that, where beams end because an item would repeat. It ends when
    nothing is left behind.
    """
    users, k = search.denoiser.users, search.denoiser.items
    items = torch.full((users, top, k), -1, device=search.rules.catalogue.device)
    scores = torch.full((users, top), -torch.inf, device=items.device)
    traces: list[list[Step]] = [[] for _ in range(users)]
    invalid, ends = 0, 0
    pending = _users_with_items(search)
    while len(pending):
        again = []
        for part in torch.split(pending, _users_at_once(search, width)):
            beams, cut, steps = search.run(part, width, trace)
            results = _results(search, beams, top)
            items[part], scores[part] = _best(results, part, top)
            for user, own in zip(part.tolist(), steps, strict=trace):
                traces[user] = own
            invalid, ends = invalid + _invalid(search, beams), ends + len(beams.scores)
            again.append(part[(items[part, -1, 0] < 0) & cut & search.rules.constrained])
        pending, width = torch.cat(again), 2 * width
    return Ranking(items, scores, invalid / max(ends, 1), traces if trace else None)


def _users_with_items(search: BeamSearch) -> Tensor:
    """(some,) the users to whom enough items are left for one session."""
    rules, users = search.rules, search.denoiser.users
    digits = torch.zeros((users, rules.catalogue.levels), dtype=torch.int64)
    digits = digits.to(rules.catalogue.device)
    left = rules.catalogue.counts(digits, torch.zeros_like(digits).bool(), rules.excluded)
    return (left >= (1 if search.repeats else search.denoiser.items)).nonzero().squeeze(1)


def _users_at_once(search: BeamSearch, width: int) -> int:
    """So many that neither their beams' probabilities nor their candidates exceed CELLS."""
    k, sizes = search.denoiser.items, search.rules.catalogue.codebook_sizes
    each = k * len(sizes) * max(sizes)  # probabilities of a beam
    if k > 1:
        each = max(each, 2 * width * k * len(sizes))  # digits of a beam's candidates
    return max(1, CELLS // (width * each))


def _invalid(search: BeamSearch, beams: Beams) -> int:
    """How many beams end with digits that no item has."""
    digits = beams.target.digits
    found = search.rules.catalogue.find(digits.flatten(0, 1)).view(digits.shape[:2])
    return int((found < 0).any(dim=1).sum())


class _Results(NamedTuple):
    user: Tensor  # (results,)
    scores: Tensor  # (results,)
    items: Tensor  # (results, k)


def _results(search: BeamSearch, beams: Beams, top: int) -> _Results:
    """The items behind the beams' digits, all that share them; none where digits are no item's."""
    (rows, k, m), device = beams.target.digits.shape, beams.scores.device
    digits = beams.target.digits.view(rows * k, m)
    excluded = search.rules.excluded
    if excluded is not None:
        excluded = excluded[beams.target.user.repeat_interleave(k)]
    items, offsets = search.rules.catalogue.items(digits, torch.ones_like(digits).bool(), excluded)
    if k == 1:
        owner = torch.repeat_interleave(offsets.diff())
        return _Results(beams.target.user[owner], beams.scores[owner], items.unsqueeze(1))
    sets = [part.tolist() for part in torch.split(items, offsets.diff().tolist())]
    owners, tuples = [], []
    for row in range(rows):
        every = product(*sets[row * k : row * k + k])
        kept = (own for own in every if search.repeats or len(set(own)) == k)
        for own in islice(kept, top):
            owners.append(row)
            tuples.append(own)
    owner = torch.tensor(owners, dtype=torch.int64, device=device)
    found = torch.tensor(tuples, dtype=torch.int64, device=device).view(-1, k)
    return _Results(beams.target.user[owner], beams.scores[owner], found)


def _best(results: _Results, users: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """(users, top, k) items and (users, top) scores; catalogue order among equal scores."""
    user, scores, found = results
    order = torch.arange(len(user), device=user.device)
    for column in reversed(found.unbind(1)):
        order = order[column[order].argsort(stable=True)]
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
