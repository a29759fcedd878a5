"""A denoiser that is a table of random conditionals, and decoding by its definition."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from itertools import product

import torch
from torch import Tensor

from maskgr.decoding.config import Order
from maskgr.decoding.matching import CodeIndex, Filters

State = tuple[int | None, ...]  # the digits of a target, item after item; None is masked


class Toy:
    """Unrelated random conditionals for every user and every set of revealed digits."""

    def __init__(
        self, sizes: Sequence[int], users: int = 2, items: int = 1, seed: int = 0, low: float = 0.0
    ) -> None:
        """`low` is added to all log-probabilities, which then no longer sum to one."""
        self.codebook_sizes, self.users, self.items = tuple(sizes), users, items
        self.seed, self.low = seed, low
        self.asked: list[tuple[Tensor, Tensor]] = []
        self._known: dict[tuple[int, State], list[Tensor]] = {}

    def at(self, user: int, state: State) -> list[Tensor]:
        """For each position the (codes,) log-probabilities."""
        if (user, state) not in self._known:
            seed = zlib.crc32(repr((self.seed, user, state)).encode())
            generator = torch.Generator().manual_seed(seed)
            sizes = self.codebook_sizes * self.items
            self._known[user, state] = [
                (2 * torch.randn(size, generator=generator)).log_softmax(0) + self.low
                for size in sizes
            ]
        return self._known[user, state]

    def first(self) -> list[Tensor]:
        m = len(self.codebook_sizes)
        blank: State = (None,) * (m * self.items)
        every = [self.at(user, blank) for user in range(self.users)]
        return [torch.stack([torch.stack(own[level::m]) for own in every]) for level in range(m)]

    def __call__(
        self, user: Tensor, digits: Tensor, revealed: Tensor, wanted: Tensor
    ) -> list[Tensor]:
        assert (user.diff() >= 0).all()
        assert not (wanted & revealed).any()
        assert revealed.flatten(1).any(dim=1).all()  # the first step is shared
        self.asked.append((revealed, wanted))
        m = len(self.codebook_sizes)
        result: list[list[Tensor]] = [[] for _ in range(m)]
        for row in range(len(user)):
            known = zip(
                digits[row].flatten().tolist(), revealed[row].flatten().tolist(), strict=True
            )
            values = self.at(int(user[row]), tuple(d if r else None for d, r in known))
            for position in wanted[row].flatten().nonzero().squeeze(1).tolist():
                result[position % m].append(values[position])
        return [
            torch.stack(rows) if rows else torch.zeros(0, size)
            for rows, size in zip(result, self.codebook_sizes, strict=True)
        ]


class Definition:
    """The expected results of decoding, computed for one target at a time."""

    def __init__(
        self,
        toy: Toy,
        digits: Sequence[Sequence[int]],
        order: Order,
        counts: Sequence[int],
        *,
        constrained: bool = True,
        renormalise: Sequence[Sequence[int]] | None = None,
        orders: Sequence[Sequence[int]] = (),
    ) -> None:
        """`digits`: those of the items to find; `orders`: each user's, for the random order."""
        self.toy, self.order, self.counts, self.orders = toy, order, counts, orders
        self.digits = [tuple(own) for own in digits]
        self.constrained = constrained
        self.renormalise = None if renormalise is None else [tuple(own) for own in renormalise]
        self.m = len(toy.codebook_sizes)

    def log_probs(self, user: int, state: State) -> list[list[float]]:
        """For each position the values that scores add up; -inf for impossible codes."""
        result = []
        for position, given in enumerate(self.toy.at(user, state)):
            values = given.double().tolist()
            start, level = position - position % self.m, position % self.m
            known = state[start : start + self.m]
            if self.renormalise is not None:
                codes = {own[level] for own in consistent(self.renormalise, known)}
                total = math.log(sum(math.exp(values[code]) for code in codes))
                values = [v - total if c in codes else -math.inf for c, v in enumerate(values)]
            if self.constrained:
                codes = {own[level] for own in consistent(self.digits, known)}
                values = [v if c in codes else -math.inf for c, v in enumerate(values)]
            result.append(values)
        return result

    def positions(self, user: int, state: State, count: int) -> list[int]:
        """The positions that a beam in this state reveals next."""
        masked = [position for position, digit in enumerate(state) if digit is None]
        if self.order == "random":
            masked.sort(key=list(self.orders[user]).index)
        if self.order == "greedy":
            values = self.log_probs(user, state)
            masked.sort(key=lambda position: -gap(values[position], self.constrained))
        return sorted(masked[:count])

    def children(self, user: int, state: State, count: int) -> list[tuple[State, float]]:
        """All ways to fill in the next positions, from the product of their codebooks."""
        positions, values = self.positions(user, state, count), self.log_probs(user, state)
        result = []
        for codes in product(*(range(len(values[position])) for position in positions)):
            filled = list(state)
            score = 0.0
            for position, code in zip(positions, codes, strict=True):
                filled[position] = code
                score += values[position][code]
            slots = [filled[start : start + self.m] for start in range(0, len(filled), self.m)]
            if not self.constrained or all(consistent(self.digits, slot) for slot in slots):
                result.append((tuple(filled), score))
        return result

    def search(
        self, user: int, width: int, keep: Callable[[State], bool] = lambda state: True
    ) -> list[tuple[State, float]]:
        """Beam search as it is written in the paper, over the states to `keep`."""
        beams: list[tuple[State, float]] = [((None,) * (self.m * self.toy.items), 0.0)]
        for count in self.counts:
            grown = [
                (child, score + more)
                for state, score in beams
                for child, more in self.children(user, state, count)
                if keep(child)
            ]
            beams = sorted(grown, key=lambda beam: -beam[1])[:width]
        return beams

    def score(self, user: int, target: Sequence[int]) -> float:
        """The sum of the target's conditionals along the order in which it is revealed."""
        state: State = (None,) * len(target)
        total = 0.0
        for count in self.counts:
            positions, values = self.positions(user, state, count), self.log_probs(user, state)
            total += sum(values[position][target[position]] for position in positions)
            state = tuple(
                target[position] if position in positions else digit
                for position, digit in enumerate(state)
            )
        return total


def consistent(
    digits: Sequence[tuple[int, ...]], known: Sequence[int | None]
) -> list[tuple[int, ...]]:
    return [
        own for own in digits if all(k is None or k == d for k, d in zip(known, own, strict=True))
    ]


def gap(values: Sequence[float], normalise: bool) -> float:
    """The first probability less the second."""
    probabilities = sorted((math.exp(value) for value in values), reverse=True)
    total = sum(probabilities) if normalise else 1.0
    return (probabilities[0] - (probabilities[1:] or [0.0])[0]) / total


def shop(sizes: Sequence[int], count: int, seed: int) -> list[list[int]]:
    """Random digits of some items; several may share theirs."""
    generator = torch.Generator().manual_seed(seed)
    columns = [torch.randint(size, (count,), generator=generator) for size in sizes]
    return torch.stack(columns, dim=1).tolist()


def index(digits: Sequence[Sequence[int]], sizes: Sequence[int]) -> CodeIndex:
    return CodeIndex(torch.tensor(digits), sizes)


def excluding(users: Sequence[Sequence[int]], allowed: Tensor | None = None) -> Filters:
    """Each user must not get its own items."""
    pairs = [(user, item) for user, own in enumerate(users) for item in own]
    rows = torch.tensor(pairs, dtype=torch.int64).view(-1, 2)
    return Filters(allowed, (rows[:, 0], rows[:, 1]))
