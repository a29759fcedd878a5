"""Joint decoding of the next item is compared with enumeration of every item."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import product

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from maskgr.decoding import joint, matching
from maskgr.decoding.beams import Step
from maskgr.decoding.config import Order
from maskgr.decoding.joint import beam_search, sample_items
from maskgr.decoding.matching import CodeIndex, Filters
from maskgr.decoding.orders import ORDERS
from maskgr.decoding.schedule import schedule
from maskgr.nn.softmax import Bonus
from tests.decoding.energy_toy import (
    ALLOWED,
    BANNED,
    FILTERS,
    USERS,
    Digits,
    Toy,
    agreeing,
    assert_equals_enumeration,
    enumerated,
    marginal,
    path,
    paths_of,
    possible,
    priorities_of,
    probabilities,
    search,
    searched,
    toy,
)

# Beam search


@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("counts", [(1, 1, 1), (2, 1), (1, 2), (3,)])
def test_all_beams_give_the_scores_of_enumeration(
    counts: tuple[int, ...], order: Order, name: str
) -> None:
    model, filters = toy(seed=1), FILTERS[name]
    expected = enumerated(model, filters, counts, priorities_of(model, order))
    assert_equals_enumeration(search(model, counts, order, filters), expected)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("counts", [(1, 1, 1), (2, 1)])
def test_items_that_share_all_digits_are_ranked_by_energy(
    counts: tuple[int, ...], order: Order
) -> None:
    model, filters = toy((3, 3, 2), shared=5, seed=2), FILTERS["both"]
    priorities = priorities_of(model, order)
    expected = enumerated(model, filters, counts, priorities)
    found = search(model, counts, order, filters)
    assert_equals_enumeration(found, expected)
    compared = 0
    for user, own in enumerate(expected):
        for one, other in ((n, n + 7) for n in range(5) if {(n,), (n + 7,)} <= own.keys()):
            last = path(model, filters, user, (one,), counts, priorities).states[-2]
            energies, items = model.energies(user, last), found.items[user, :, 0].tolist()
            assert (items.index(one) < items.index(other)) == (energies[one] > energies[other])
            compared += 1
    assert compared > 5


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("steps", [2, 5, 16])
def test_sixteen_levels_give_the_scores_of_enumeration(steps: int, order: Order) -> None:
    model = toy((2, 3) * 8, 12, shared=3, seed=3)
    counts, filters = schedule(16, steps), FILTERS["both"]
    expected = enumerated(model, filters, counts, priorities_of(model, order))
    assert_equals_enumeration(search(model, counts, order, filters), expected)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("counts", [(1, 1, 1), (2, 1), (1, 2), (3,)])
def test_every_order_and_schedule_equals_one_step_where_digits_tell_nothing(
    counts: tuple[int, ...], order: Order
) -> None:
    model = toy((3, 3, 2), shared=4, seed=4, ignores_revealed=True)
    for filters in FILTERS.values():
        found = search(model, counts, order, filters)
        for user, (items, scores) in enumerate(zip(found.items, found.scores, strict=True)):
            energies = torch.from_numpy(model.energies(user, model.blank))
            log_probs = energies.log_softmax(0)
            log_probs[torch.from_numpy(~possible(model, filters, user))] = -torch.inf
            best = log_probs.sort(descending=True)
            count = int((best.values > -torch.inf).sum())
            assert items[:count, 0].tolist() == best.indices[:count].tolist()
            assert scores[:count].tolist() == pytest.approx(best.values[:count].tolist(), abs=2e-5)


def test_scores_are_log_probabilities_over_the_whole_catalogue() -> None:
    model = toy(seed=5)
    scores = search(model, (1, 1, 1)).scores[:, :12]
    torch.testing.assert_close(scores.exp().sum(1), torch.ones(USERS))
    # Filters condition on what is left, and the probability of what is left is added back.
    for user, left in enumerate(search(model, (1, 1, 1), filters=FILTERS["both"]).scores):
        log_probs = torch.from_numpy(model.energies(user, model.blank)).log_softmax(0)
        mass = log_probs[torch.from_numpy(possible(model, FILTERS["both"], user))].exp().sum()
        assert left.exp().sum().item() == pytest.approx(mass.item(), abs=1e-5)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("counts", [(1, 1, 1), (1, 2)])
def test_few_beams_lose_nothing_where_digits_tell_nothing(
    counts: tuple[int, ...], order: Order
) -> None:
    model = toy((3, 3, 2), shared=4, seed=4, ignores_revealed=True)
    for filters in FILTERS.values():
        one_step, found = (
            search(model, (3,), filters=filters),
            search(model, counts, order, filters, beams=2),
        )
        assert torch.equal(found.items, one_step.items[:, :2])


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("counts", [(1, 1, 1), (1, 2)])
def test_few_beams_keep_the_most_promising_prefixes(counts: tuple[int, ...], order: Order) -> None:
    model, priorities = toy(seed=6, shared=3), priorities_of(toy(), order)
    expected = [
        searched(model, paths_of(model, FILTERS["both"], user, counts, priorities), 2)
        for user in range(USERS)
    ]
    found = search(model, counts, order, FILTERS["both"], beams=2)
    assert found.items.shape == (USERS, 2, 1)
    assert_equals_enumeration(found, expected)


def test_very_unlikely_items_have_finite_scores() -> None:
    # exp(-200) is zero in float32: such digits must not be lost behind the first step.
    model = toy(seed=7, ignores_revealed=True)
    first = int((model.codes[:, 0] == model.codes[0, 0]).nonzero()[1])
    bonus = Bonus(torch.zeros(1, dtype=torch.int64), torch.tensor([first]), torch.tensor([-200.0]))
    found = search(replace(model, bonus=bonus), (1, 1, 1), "left-to-right")
    place = found.items[0, :, 0].tolist().index(first)
    assert -230 < found.scores[0, place].item() < -180


def test_users_without_any_item_get_none() -> None:
    model = toy(seed=8)
    everything = (torch.zeros(12, dtype=torch.int64), torch.arange(12))
    found = search(model, (1, 1, 1), filters=Filters(banned=everything), trace=True)
    assert (found.items[0] == -1).all()
    assert (found.scores[0] == -torch.inf).all()
    assert found.steps[0] == []
    whole = search(model, (1, 1, 1))
    assert torch.equal(found.items[1:], whole.items[1:])
    nothing = Filters(allowed=torch.zeros(12, dtype=torch.bool))
    assert (search(model, (2, 1), filters=nothing, trace=True).items == -1).all()


@pytest.mark.parametrize("order", ORDERS)
def test_results_do_not_depend_on_the_batch(order: Order) -> None:
    model = toy(seed=9)
    whole = search(model, (1, 1, 1), order, FILTERS["both"], beams=3)
    for users in ([0], [1, 3], [3, 2, 1, 0]):
        rows, items = zip(
            *[
                (row, item)
                for row, user in enumerate(users)
                for item in BANNED[1][BANNED[0] == user]
            ]
            or [(0, -1)],
            strict=True,
        )
        banned = (torch.tensor(rows), torch.tensor(items))
        filters = Filters(ALLOWED, banned if items[0] >= 0 else None)
        priorities = priorities_of(model, order)
        found = beam_search(
            model.select(users),
            CodeIndex(model.codes, model.sizes),
            (1, 1, 1),
            3,
            priorities=None if priorities is None else priorities[users],
            filters=filters,
        )
        assert torch.equal(found.items, whole.items[users])
        torch.testing.assert_close(found.scores, whole.scores[users])


@pytest.mark.parametrize(("cells", "gathered"), [(1, 2**22), (2**23, 1), (40, 12)])
def test_results_do_not_depend_on_the_size_of_blocks(
    cells: int, gathered: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, filters = toy(seed=10, shared=3), FILTERS["both"]
    whole = search(model, (1, 1, 1), filters=filters, beams=4, trace=True)
    monkeypatch.setattr(joint, "CELLS", cells)
    monkeypatch.setattr(matching, "GATHERED", gathered)
    found = search(model, (1, 1, 1), filters=filters, beams=4, trace=True)
    assert torch.equal(found.items, whole.items)
    torch.testing.assert_close(found.scores, whole.scores)
    assert [len(steps) for steps in found.steps] == [3] * USERS


# Traces


def replayed(steps: Sequence[Step], levels: int) -> list[list[Digits]]:
    """The digits of each beam after each step, from parents, positions and codes."""
    before: list[Digits] = [(None,) * levels]
    found = []
    for step in steps:
        beams = []
        for parent, positions, codes in zip(
            step.parents.tolist(), step.positions.tolist(), step.codes.tolist(), strict=True
        ):
            digits = list(before[parent])
            for position, code in zip(positions, codes, strict=True):
                assert digits[position] is None
                digits[position] = code
            beams.append(tuple(digits))
        found.append(beams)
        before = beams
    return found


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("counts", [(1, 1, 1), (2, 1)])
def test_traces_tell_what_each_step_revealed(counts: tuple[int, ...], order: Order) -> None:
    model, filters = toy((3, 3, 2), shared=4, seed=11), FILTERS["both"]
    priorities = priorities_of(model, order)
    found = search(model, counts, order, filters, trace=True)
    for user in range(USERS):
        steps, states = found.steps[user], replayed(found.steps[user], 3)
        assert len(steps) == len(counts)
        paths = paths_of(model, filters, user, counts, priorities)
        mass = sum(math.exp(own.scores[-1]) for own in paths.values())
        for number, (step, own) in enumerate(zip(steps, states, strict=True)):
            last = number + 1 == len(counts)
            assert step.positions.shape == (len(own), counts[number])
            assert step.scores.tolist() == sorted(step.scores.tolist(), reverse=True)
            # Beams share out the probability of what the user may get.
            assert step.scores.exp().sum().item() == pytest.approx(mass, abs=1e-5)
            if not last:
                expected = {p.states[number][0]: p.scores[number] for p in paths.values()}
                assert set(own) == set(expected)
                assert step.scores.tolist() == pytest.approx([expected[s] for s in own], abs=2e-5)
            for row, state in enumerate(own):
                left = (agreeing(model, state) & possible(model, filters, user)).sum()
                assert step.remaining[row].item() == (1 if last else left)
                parent = states[number - 1][step.parents[row]] if number else (None,) * 3
                chances = probabilities(model, filters, user, (parent,))
                marginals = [
                    marginal(model, chances, level)[state[level]]
                    for level in step.positions[row].tolist()
                ]
                assert step.log_probs[row].exp().tolist() == pytest.approx(marginals, abs=1e-5)
        items = found.items[user, : len(paths), 0]
        assert states[-1] == [tuple(row) for row in model.codes[items].tolist()]
        assert torch.equal(steps[-1].scores, found.scores[user][: len(paths)])


def test_traces_change_no_result_and_are_kept_only_if_asked_for() -> None:
    model = toy(seed=12)
    plain, traced = search(model, (1, 1, 1), beams=3), search(model, (1, 1, 1), beams=3, trace=True)
    assert torch.equal(plain.items, traced.items)
    assert torch.equal(plain.scores, traced.scores)
    assert plain.steps == [[]] * USERS


# Sampling

DRAWS = 20_000


def sampled(
    model: Toy, steps: int, filters: Filters, temperature: float = 1.0, count: int = DRAWS
) -> Tensor:
    return sample_items(
        model,
        CodeIndex(model.codes, model.sizes),
        count,
        steps=steps,
        temperature=temperature,
        filters=filters,
        generator=torch.Generator().manual_seed(0),
    )


def assert_drawn_from(drawn: Tensor, chances: np.ndarray) -> None:
    assert (drawn >= 0).all()
    observed = np.bincount(drawn.numpy(), minlength=len(chances))
    assert (observed[chances == 0] == 0).all()
    likely = chances > 0
    assert chisquare(observed[likely], chances[likely] * len(drawn)).pvalue > 0.001


@pytest.mark.parametrize("steps", [1, 3])
def test_samples_follow_the_softmax_where_digits_tell_nothing(steps: int) -> None:
    model = toy((3, 3, 2), shared=4, seed=13, ignores_revealed=True)
    for filters, temperature in ((FILTERS["no filter"], 1.0), (FILTERS["both"], 2.0)):
        drawn = sampled(model, steps, filters, temperature)
        for user in range(USERS):
            energies = model.energies(user, model.blank) / temperature
            energies[~possible(model, filters, user)] = -np.inf
            chances = np.exp(energies - energies.max())
            assert_drawn_from(drawn[user], chances / chances.sum())


@pytest.mark.parametrize("steps", [2, 3])
def test_samples_follow_the_ancestral_process(steps: int) -> None:
    model, filters = toy((3, 2), 6, seed=14), Filters(banned=(BANNED[0][:3], BANNED[1][:3]))

    @cache
    def ended(user: int, state: Digits, step: int) -> tuple[float, ...]:
        """(items,) the chances of where the process ends that comes to `step` with `state`."""
        chances = probabilities(model, filters, user, (state,))
        if step == steps - 1:
            return tuple(chances)
        share = 1 / (steps - step)  # 1 - s / t with equal steps of noise
        total = np.zeros(len(chances))
        for item, shown in product(range(len(chances)), product((False, True), repeat=2)):
            masked = [code is None for code in state]
            new = [s for s, hidden in zip(shown, masked, strict=True) if hidden]
            if any(s and not hidden for s, hidden in zip(shown, masked, strict=True)):
                continue
            weight = chances[item] * share ** sum(new) * (1 - share) ** (len(new) - sum(new))
            own = model.codes[item].tolist()
            after = tuple(own[at] if s else state[at] for at, s in enumerate(shown))
            if weight:
                total += weight * np.array(ended(user, after, step + 1))
        return tuple(total)

    drawn = sampled(model, steps, filters)
    for user in range(USERS):
        assert_drawn_from(drawn[user], np.array(ended(user, (None, None), 0)))


def test_no_sample_where_no_item_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    model = toy(seed=15)
    everything = (torch.full((12,), 2), torch.arange(12))
    for cells in (2**23, 1):  # all users at once, and one after the other
        monkeypatch.setattr(joint, "CELLS", cells)
        drawn = sampled(model, 3, Filters(banned=everything), count=5)
        assert (drawn[2] == -1).all()
        assert (drawn[[0, 1, 3]] >= 0).all()


def test_samples_repeat_with_the_same_seed() -> None:
    model = toy(seed=16)
    draws = [sampled(model, 3, FILTERS["both"], count=50) for _ in range(2)]
    assert torch.equal(*draws)
    for user, row in enumerate(draws[0]):
        assert possible(model, FILTERS["both"], user)[row.numpy()].all()
