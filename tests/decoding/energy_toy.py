"""A tiny catalogue-normalised denoiser, and joint decoding with it by enumeration of every session
by the definition of its score."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

from maskgr.decoding.config import Order
from maskgr.decoding.joint import Decoded, beam_search
from maskgr.decoding.matching import CodeIndex, Filters
from maskgr.decoding.orders import fixed_priorities
from maskgr.nn.softmax import Bonus

WIDTH, USERS = 5, 4
Digits = tuple[int | None, ...]  # of an item; None is masked
State = tuple[Digits, ...]  # of the items of a session
Session = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Toy:
    """Queries that are random functions of the user and of the revealed digits alone."""

    sizes: tuple[int, ...]
    codes: Tensor  # (items, levels)
    table: Tensor  # (items, width)
    queries: Tensor  # (users, k, width)
    parts: Tensor  # (tokens, width) what each revealed digit changes
    bonus: Bonus | None = None

    @property
    def users(self) -> int:
        return len(self.queries)

    @property
    def items(self) -> int:
        return self.queries.shape[1]

    @property
    def blank(self) -> State:
        return ((None,) * len(self.sizes),) * self.items

    def first(self) -> Tensor:
        return self.queries

    def __call__(self, user: Tensor, codes: Tensor, revealed: Tensor) -> Tensor:
        assert codes.shape == revealed.shape == (len(user), self.items, len(self.sizes))
        assert (user.diff() >= 0).all()
        assert revealed.flatten(1).any(1).all()
        starts = torch.tensor([0, *self.sizes[:-1]]).cumsum(0)
        shown = (self.parts[codes + starts] * revealed.unsqueeze(3)).sum(2)  # (rows, k, width)
        places = range(self.items)
        seen = [torch.stack([shown[:, i].roll(i - j, 1) for i in places]).sum(0) for j in places]
        own = self.queries[user]
        return own + 3 * torch.sin(torch.stack(seen, 1) * own.roll(1, 2))

    def query(self, user: int, state: State, place: int) -> Tensor:
        """(width,) of one item of one session."""
        if state == self.blank:
            return self.queries[user, place]
        codes = torch.tensor([[[code or 0 for code in digits] for digits in state]])
        revealed = torch.tensor([[[code is not None for code in digits] for digits in state]])
        return self(torch.tensor([user]), codes, revealed)[0, place]

    def energies(self, user: int, state: State, place: int = 0) -> np.ndarray:
        """(items,) in double precision."""
        found = (self.table.double() @ self.query(user, state, place).double()).numpy()
        if self.bonus is not None:
            own = self.bonus.rows == user
            found[self.bonus.items[own].numpy()] += self.bonus.values[own].double().numpy()
        return found

    def select(self, users: Sequence[int]) -> Toy:
        """The same for some of the users."""
        bonus = None
        if self.bonus is not None:
            own = [(self.bonus.rows == user).nonzero().flatten() for user in users]
            rows = torch.arange(len(users)).repeat_interleave(torch.tensor([*map(len, own)]))
            kept = torch.cat(own)
            bonus = Bonus(rows, self.bonus.items[kept], self.bonus.values[kept])
        return replace(self, queries=self.queries[list(users)], bonus=bonus)


def toy(
    sizes: Sequence[int] = (3, 3, 3),
    items: int = 12,
    *,
    seed: int = 0,
    k: int = 1,
    shared: int = 0,
    ignores_revealed: bool = False,
) -> Toy:
    """`shared`: so many last items have all digits of an earlier one."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.stack([torch.randint(n, (items,), generator=generator) for n in sizes], 1)
    if not shared:
        codes = torch.tensor(list(product(*map(range, sizes))))
        codes = codes[torch.randperm(len(codes), generator=generator)[:items]]
    elif shared < items:
        codes[items - shared :] = codes[:shared]
    draw = torch.randn
    rows, numbers = torch.tensor([0, 0, 1, 3]), torch.tensor([2, 7, 0, 5]) % items
    parts = draw(sum(sizes), WIDTH, generator=generator)
    return Toy(
        tuple(sizes),
        codes,
        draw(items, WIDTH, generator=generator),
        draw(USERS, k, WIDTH, generator=generator),
        0 * parts if ignores_revealed else parts,
        Bonus(rows, numbers, torch.tensor([1.5, -2.0, 2.0, -1.0])),
    )


ALLOWED = torch.arange(12) % 4 != 1
BANNED = (torch.tensor([0, 0, 2, 3, 3]), torch.tensor([4, 2, 0, 11, 5]))
FILTERS = {
    "no filter": Filters(),
    "allowed": Filters(allowed=ALLOWED),
    "banned": Filters(banned=BANNED),
    "both": Filters(ALLOWED, BANNED),
}


def priorities_of(model: Toy, order: Order) -> Tensor | None:
    return fixed_priorities(order, torch.arange(model.users), model.items * len(model.sizes))


def search(
    model: Toy,
    counts: Sequence[int],
    order: Order = "greedy",
    filters: Filters | None = None,
    beams: int = 0,
    *,
    repeats: bool = False,
    remask: int = 0,
    trace: bool = False,
) -> Decoded:
    """All beams are kept unless so many are asked for."""
    return beam_search(
        model,
        CodeIndex(model.codes, model.sizes),
        counts,
        beams or len(model.codes) ** model.items + 3,
        priorities=priorities_of(model, order),
        filters=filters or Filters(),
        repeats=repeats,
        remask=remask,
        trace=trace,
    )


# Enumeration


def possible(model: Toy, filters: Filters, user: int) -> np.ndarray:
    """(items,) whether the user may get it."""
    found = np.ones(len(model.codes), dtype=bool)
    if filters.allowed is not None:
        found &= filters.allowed.numpy()
    if filters.banned is not None:
        found[filters.banned[1][filters.banned[0] == user].numpy()] = False
    return found


def sessions_of(model: Toy, filters: Filters, user: int, *, repeats: bool) -> list[Session]:
    """Every session that the user may get."""
    items = possible(model, filters, user).nonzero()[0].tolist()
    every = product(items, repeat=model.items)
    return [session for session in every if repeats or len(set(session)) == model.items]


def agreeing(model: Toy, digits: Digits) -> np.ndarray:
    """(items,) whether an item has the revealed digits."""
    found = np.ones(len(model.codes), dtype=bool)
    for level, code in enumerate(digits):
        if code is not None:
            found &= model.codes[:, level].numpy() == code
    return found


@cache
def probabilities(
    model: Toy, filters: Filters, user: int, state: State, place: int = 0
) -> np.ndarray:
    """(items,) p(item | history, revealed digits) among the items that the user may get."""
    energies = model.energies(user, state, place)
    energies[~(possible(model, filters, user) & agreeing(model, state[place]))] = -np.inf
    chances = np.exp(energies - energies.max())
    return chances / chances.sum()


@cache
def allowed_log_prob(model: Toy, filters: Filters, user: int) -> float:
    """Log-probability that all items are such as the user may get, with nothing revealed."""
    total = 0.0
    for place in range(model.items):
        energies = model.energies(user, model.blank, place)
        weights = np.exp(energies - energies.max())
        total += math.log(weights[possible(model, filters, user)].sum() / weights.sum())
    return total


def marginal(model: Toy, chances: np.ndarray, level: int) -> np.ndarray:
    """(codes,) added up in the order of items, so that equal sums are equal numbers."""
    sums = np.bincount(model.codes[:, level].numpy(), chances, minlength=model.sizes[level])
    return sums / np.bincount(np.zeros(len(chances), dtype=int), chances)


def gap(chances: np.ndarray) -> float:
    second, first = np.sort(np.append(chances, 0))[-2:]
    return first - second


@cache
def masked_marginals(
    model: Toy, filters: Filters, user: int, state: State
) -> dict[tuple[int, int], np.ndarray]:
    """(codes,) at each place and level that is masked."""
    return {
        (place, level): marginal(model, probabilities(model, filters, user, state, place), level)
        for place, level in product(range(model.items), range(len(model.sizes)))
        if state[place][level] is None
    }


@dataclass(frozen=True)
class Path:
    """One session's way through the steps."""

    states: list[State]  # after each step
    scores: list[float]  # after each step
    promises: list[
        float
    ]  # after each step: the score if the best items complete it, as known before
    chances: list[float]  # of each digit when it was revealed, item by item

    def beam(self, model: Toy, session: Session, step: int) -> tuple[Digits | int, ...]:
        """What makes the beam after a step: the digits of each item, or the item if complete."""
        state = self.states[step]
        return tuple(
            digits if None in digits else item for digits, item in zip(state, session, strict=True)
        )


def path(
    model: Toy,
    filters: Filters,
    user: int,
    session: Session,
    counts: Sequence[int],
    priorities: Tensor | None,
) -> Path:
    """The score by its definition: the sum over steps of log p(digits of the step | before)."""
    score, state = allowed_log_prob(model, filters, user), model.blank
    levels = len(model.sizes)
    states: list[State] = []
    scores: list[float] = []
    promises: list[float] = []
    revealed: dict[tuple[int, int], float] = {}
    for count in counts:
        chances = [probabilities(model, filters, user, state, j) for j in range(model.items)]
        digit = masked_marginals(model, filters, user, state)
        if priorities is None:
            order = sorted(digit, key=lambda at: -np.float32(gap(digit[at])))
        else:
            order = sorted(digit, key=lambda at: -float(priorities[user, at[0] * levels + at[1]]))
        own = [model.codes[item].tolist() for item in session]
        before = state
        revealed |= {at: digit[at][own[at[0]][at[1]]] for at in order[:count]}
        state = tuple(
            tuple(own[j][at] if (j, at) in revealed else None for at in range(levels))
            for j in range(model.items)
        )
        promise = score
        for place, item in enumerate(session):
            if None not in before[place]:
                continue
            whole = None not in state[place]
            same = chances[place][agreeing(model, state[place])]
            promise += math.log(chances[place][item] if whole else same.max())
            if before[place] != state[place]:
                score += math.log(chances[place][item] if whole else same.sum())
        states.append(state)
        scores.append(score)
        promises.append(promise)
    return Path(states, scores, promises, [revealed[at] for at in sorted(revealed)])


def paths_of(
    model: Toy,
    filters: Filters,
    user: int,
    counts: Sequence[int],
    priorities: Tensor | None,
    *,
    repeats: bool = True,
) -> dict[Session, Path]:
    return {
        session: path(model, filters, user, session, counts, priorities)
        for session in sessions_of(model, filters, user, repeats=repeats)
    }


def enumerated(
    model: Toy,
    filters: Filters,
    counts: Sequence[int],
    priorities: Tensor | None,
    *,
    repeats: bool = False,
) -> list[dict[Session, float]]:
    """User by user, session -> score of every session that the user may get."""
    found = []
    for user in range(model.users):
        paths = paths_of(model, filters, user, counts, priorities, repeats=repeats)
        found.append({session: own.scores[-1] for session, own in paths.items()})
    return found


def searched(
    model: Toy, paths: dict[Session, Path], beams: int, *, repeats: bool = False
) -> dict[Session, float]:
    """What a search ends with that keeps so many beams, and twice as many if it ends with too few:
    then perhaps more than `beams`.

    `paths`: of all sessions of a user, also those that repeat an item.
    """
    width, cut = beams, True
    alive: set[Session] = set()
    while cut and len(alive) < beams:
        alive, cut = set(paths), False
        for step in range(len(next(iter(paths.values())).scores)):
            promises = {paths[s].beam(model, s, step): paths[s].promises[step] for s in alive}
            live = [beam for beam in promises if repeats or not repeated(beam)]
            kept = set(sorted(live, key=lambda beam: -promises[beam])[:width])
            cut |= len(kept) == width
            alive = {s for s in alive if paths[s].beam(model, s, step) in kept}
        width *= 2
    return {session: paths[session].scores[-1] for session in alive}


def best_of(found: dict[Session, float], count: int) -> dict[Session, float]:
    return {s: found[s] for s in sorted(found, key=lambda s: -found[s])[:count]}


def repeated(beam: tuple[Digits | int, ...]) -> bool:
    items = [part for part in beam if isinstance(part, int)]
    return len(set(items)) < len(items)


def revealed_anew(
    model: Toy,
    filters: Filters,
    user: int,
    results: dict[Session, float],
    paths: dict[Session, Path],
    remask: int,
    *,
    repeats: bool = False,
) -> dict[Session, float]:
    """All sessions that agree with one of `results` but for its least certain digits."""
    found: dict[Session, float] = {}
    levels, every = len(model.sizes), sessions_of(model, filters, user, repeats=repeats)
    for session, score in results.items():
        chances = paths[session].chances
        taken = sorted(range(len(chances)), key=lambda at: np.float32(chances[at]))[:remask]
        kept = tuple(
            tuple(None if j * levels + at in taken else code for at, code in enumerate(digits))
            for j, digits in enumerate(model.codes[list(session)].tolist())
        )
        masked = [place for place, digits in enumerate(kept) if None in digits]
        given = {j: np.log(probabilities(model, filters, user, kept, j) + 1e-300) for j in masked}
        score -= sum(given[j][session[j]] for j in masked)
        for other in every:
            if all(
                agreeing(model, kept[j])[other[j]] if j in masked else other[j] == session[j]
                for j in range(model.items)
            ):
                value = score + sum(given[j][other[j]] for j in masked)
                found[other] = max(value, found.get(other, -math.inf))
    return found


def assert_equals_enumeration(found: Decoded, expected: list[dict[Session, float]]) -> None:
    for items, scores, own in zip(found.items, found.scores, expected, strict=True):
        count = len(own)
        assert (items[count:] == -1).all()
        assert (scores[count:] == -torch.inf).all()
        best = sorted(own, key=lambda session: -own[session])
        assert [tuple(session) for session in items[:count].tolist()] == best
        assert scores[:count].tolist() == pytest.approx(
            sorted(own.values(), reverse=True), abs=2e-5
        )
