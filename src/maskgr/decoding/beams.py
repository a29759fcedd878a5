"""Beam search over semantic IDs (paper, Section 3.2: MaskGR Inference and Beam Search).

A beam is a partly revealed target; its score is the product of the conditional probabilities of
its digits along the order in which they were revealed, kept as a float32 sum of logarithms.

No two beams of a user lead to the same result, so nothing needs to be merged: a beam chooses the
positions to reveal before it branches, so two beams differ at a digit that their last common
ancestor revealed. Under the constraint each beam leads to at least one item, so a search that keeps
b beams ends with b of them, or with all items. With a single step (`steps=1`) the search is an
exact ranking of the whole catalogue by the sum of log p(digit | everything masked).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from maskgr.decoding.candidates import Candidates, Found
from maskgr.decoding.denoiser import (
    Denoiser,
    Rules,
    Targets,
    blank,
    first_log_probs,
    next_log_probs,
    ranks,
)
from maskgr.decoding.matching import Remaining
from maskgr.decoding.orders import choose, gaps


@dataclass(frozen=True, eq=False)
class Step:
    """A user's beams after one step, best first."""

    parents: Tensor  # (beams,) the beam of the previous step that each continues
    positions: Tensor  # (beams, α) item × m + level of the digits revealed
    codes: Tensor  # (beams, α)
    log_probs: Tensor  # (beams, α) of the codes, as added to the score
    scores: Tensor  # (beams,)
    remaining: Tensor  # (beams, items) how many items have the revealed digits


@dataclass(frozen=True, eq=False)
class Beams:
    """The beams of all users, ascending by user, best first for each."""

    target: Targets
    scores: Tensor  # (rows,) float32

    def ranks(self) -> Tensor:
        """(rows,) the place of each beam among those of its user."""
        return ranks(self.target.user)


class Searched(NamedTuple):
    beams: Beams
    cut: Tensor  # (users,) whether some candidates may have been dropped
    steps: list[list[Step]]


@dataclass(frozen=True, eq=False)
class BeamSearch:
    """The constants of one request, and the search over its steps."""

    denoiser: Denoiser
    first: Sequence[Tensor]
    rules: Rules
    candidates: Candidates
    counts: tuple[int, ...]  # digits revealed at each step
    priorities: Tensor | None  # (users, positions); None for the greedy order
    repeats: bool  # whether a session may hold an item several times

    def run(self, users: Tensor, width: int, trace: bool) -> Searched:
        """Runs all steps for `users` (ascending), with `width` beams each."""
        start = blank(users, self.denoiser.items, self.rules.index.levels)
        beams = Beams(start, torch.zeros(len(users), device=users.device))
        cut = torch.zeros_like(users, dtype=torch.bool)
        steps: list[list[Step]] = [[] for _ in users] if trace else []
        for count in self.counts:
            if not len(beams.target):  # all sessions may have ended in a repeated item
                break
            chosen, log_probs = self._evaluate(beams.target, count)
            found = self._expand(beams.target, chosen, log_probs, width)
            picked = _select(beams, found, users, width)
            cut |= picked.kept == width
            after = self._advance(beams, chosen, found, picked)
            if trace:
                explained = self._explain(beams, after, picked.row, log_probs, users, count)
                for own, step in zip(steps, explained, strict=True):
                    own.append(step)
            beams = after
        return Searched(beams, cut, steps)

    def _evaluate(self, target: Targets, count: int) -> tuple[Tensor, Tensor]:
        """(rows, items, m) the digits to reveal, and (rows, items, m, codes) log-probabilities."""
        masked = ~target.revealed
        chosen = None
        if count == int(masked[0].sum()):
            chosen = masked  # the last step reveals all that is left
        elif self.priorities is not None:
            ranking = self.priorities.index_select(0, target.user)
            chosen = choose(ranking, masked.flatten(1), count).view_as(masked)
        if masked.all():
            log_probs = first_log_probs(self.first, self.rules, target)
        else:
            wanted = masked if chosen is None else chosen
            log_probs = next_log_probs(self.denoiser, self.rules, target, wanted)
        if chosen is None:
            # The gaps are those of the searched distribution: of allowed codes if constrained.
            ranking = torch.zeros(masked.shape, device=masked.device)
            ranking[masked] = gaps(log_probs[masked], normalise=self.rules.constrained)
            chosen = choose(ranking.flatten(1), masked.flatten(1), count).view_as(masked)
        return chosen, log_probs

    def _expand(self, target: Targets, chosen: Tensor, log_probs: Tensor, width: int) -> Found:
        """The best `width` candidates of each beam that repeat no item, or all, perhaps more."""
        filters = self.rules.filters
        complete = (target.revealed | chosen).all(dim=2)  # (rows, items)
        ends = (complete.sum(dim=1) > 1).nonzero().squeeze(1)
        if self.repeats or not len(ends):
            return self.candidates.best(log_probs, chosen, target, filters, width)
        wanted = 2 * width
        while True:
            found = self.candidates.best(log_probs, chosen, target, filters, wanted)
            short = (found.scores > -torch.inf).sum(dim=1) < wanted  # then there are no more
            repeated = self._repeated(target, chosen, complete, found, ends)
            found.scores[ends] = found.scores[ends].masked_fill(repeated, -torch.inf)
            if (short | ((found.scores > -torch.inf).sum(dim=1) >= width)).all():
                return found
            wanted *= 2

    def _repeated(
        self, target: Targets, chosen: Tensor, complete: Tensor, found: Found, rows: Tensor
    ) -> Tensor:
        """(rows, width) bool: candidates with more items of the same digits than really exist."""
        width, items = found.scores.shape[1], chosen.shape[1]
        row = rows.repeat_interleave(width)  # (candidates,)
        digits = self._fill(target, chosen, row, found.choices[rows].flatten(0, 1))
        whole = complete[row]
        same = (digits.unsqueeze(2) == digits.unsqueeze(1)).all(dim=3)  # (candidates, items, items)
        used = (same & whole.unsqueeze(1)).sum(dim=2).masked_fill_(~whole, 0)
        suspects = (used > 1).any(dim=1).nonzero().squeeze(1)
        tuples = digits[suspects].flatten(0, 1)
        user = target.user[row[suspects]].repeat_interleave(items)
        there = self._remaining(user, tuples, torch.ones_like(tuples).bool()).counts()
        repeated = torch.zeros(len(row), dtype=torch.bool, device=row.device)
        # Without the constraint, digits that no item has may occur once.
        repeated[suspects] = (used[suspects] > there.view(-1, items).clamp(min=1)).any(dim=1)
        return repeated.view(-1, width)

    def _remaining(self, user: Tensor, codes: Tensor, revealed: Tensor) -> Remaining:
        return Remaining(self.rules.index, self.rules.filters, user, codes, revealed)

    def _fill(self, target: Targets, chosen: Tensor, row: Tensor, choices: Tensor) -> Tensor:
        """(children, items, m) the digits of beams `row` with their `choices` filled in."""
        new = chosen[row]
        return torch.where(new, self.candidates.fill(choices, new), target.digits[row])

    def _advance(self, beams: Beams, chosen: Tensor, found: Found, picked: _Picked) -> Beams:
        target, row = beams.target, picked.row
        digits = self._fill(target, chosen, row, found.choices[row, picked.column])
        revealed = target.revealed[row] | chosen[row]
        return Beams(Targets(target.user[row], digits, revealed), picked.scores)

    def _explain(
        self,
        before: Beams,
        after: Beams,
        row: Tensor,
        log_probs: Tensor,
        users: Tensor,
        count: int,
    ) -> Iterator[Step]:
        """The step of each user; beam i of `after` continues beam `row[i]` of `before`."""
        new = (after.target.revealed & ~before.target.revealed[row]).flatten(1)
        positions = new.nonzero()[:, 1].view(-1, count)
        codes = after.target.digits.flatten(1).gather(1, positions)
        values = log_probs.flatten(1, 2)[row.unsqueeze(1), positions, codes]
        digits, revealed = after.target.digits.flatten(0, 1), after.target.revealed.flatten(0, 1)
        user = after.target.user.repeat_interleave(self.denoiser.items)
        remaining = self._remaining(user, digits, revealed).counts()
        remaining = remaining.view(after.target.digits.shape[:2])
        parents = before.ranks()[row]
        for user in users:
            own = after.target.user == user
            yield Step(
                parents[own],
                positions[own],
                codes[own],
                values[own],
                after.scores[own],
                remaining[own],
            )


class _Picked(NamedTuple):
    row: Tensor  # (children,) the beam that a child continues
    column: Tensor  # (children,) the candidate of that beam
    scores: Tensor  # (children,)
    kept: Tensor  # (users,) the number of children


def _select(beams: Beams, found: Found, users: Tensor, width: int) -> _Picked:
    """The best `width` candidates of each user, over all of its beams."""
    place, rank = torch.searchsorted(users, beams.target.user), beams.ranks()
    most, each = int(rank.max()) + 1, found.scores.shape[1]
    totals = found.scores.new_full((len(users), most, each), -torch.inf)
    totals[place, rank] = beams.scores.unsqueeze(1) + found.scores
    rows = torch.zeros((len(users), most), dtype=torch.int64, device=users.device)
    rows[place, rank] = torch.arange(len(place), device=users.device)
    top = totals.flatten(1).topk(min(width, most * each))
    live = top.values > -torch.inf
    row = rows.gather(1, top.indices.div(each, rounding_mode="floor"))
    return _Picked(row[live], (top.indices % each)[live], top.values[live], live.sum(dim=1))
