"""Sessions and digits that are taken back are compared with enumeration of every session."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from maskgr.decoding import joint, matching
from maskgr.decoding.config import Order
from maskgr.decoding.joint import beam_search, require_remask
from maskgr.decoding.matching import CodeIndex, Filters
from maskgr.decoding.orders import ORDERS
from maskgr.decoding.posterior import joined
from maskgr.decoding.schedule import schedule
from maskgr.errors import RequestError
from maskgr.nn.softmax import Bonus
from tests.decoding.energy_toy import FILTERS as ITEM_FILTERS
from tests.decoding.energy_toy import (
    USERS,
    Toy,
    assert_equals_enumeration,
    best_of,
    enumerated,
    paths_of,
    priorities_of,
    revealed_anew,
    search,
    searched,
    toy,
)

SCHEDULES = [(4,), (2, 2), (3, 1), (1, 2, 1), (1, 1, 1, 1)]  # two items of two digits


ALLOWED = torch.arange(8) % 4 != 1
BANNED = (torch.tensor([0, 0, 1]), torch.tensor([4, 2, 0]))
FILTERS = {
    "no filter": Filters(),
    "allowed": Filters(ALLOWED),
    "banned": Filters(banned=BANNED),
    "both": Filters(ALLOWED, BANNED),
}


def pairs(seed: int, *, shared: int = 0, ignores_revealed: bool = False) -> Toy:
    """Sessions of two of eight items, for two users."""
    whole = toy((3, 3), 8, seed=seed, k=2, shared=shared, ignores_revealed=ignores_revealed)
    return whole.select([0, 3])


@pytest.mark.parametrize(("name", "repeats"), [("no filter", True), ("both", False)])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("counts", SCHEDULES)
def test_all_beams_give_the_scores_of_enumeration(
    counts: tuple[int, ...], order: Order, name: str, repeats: bool
) -> None:
    model, filters = pairs(1), FILTERS[name]
    expected = enumerated(model, filters, counts, priorities_of(model, order), repeats=repeats)
    assert_equals_enumeration(search(model, counts, order, filters, repeats=repeats), expected)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("counts", SCHEDULES)
def test_items_that_share_all_digits_are_told_apart(counts: tuple[int, ...], order: Order) -> None:
    model, filters = pairs(2, shared=4), FILTERS["both"]
    expected = enumerated(model, filters, counts, priorities_of(model, order))
    assert any((2, 6) in own for own in expected)
    assert_equals_enumeration(search(model, counts, order, filters), expected)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("steps", [2, 9])
def test_three_items_give_the_scores_of_enumeration(steps: int, order: Order) -> None:
    model = toy((2, 2, 2), 6, seed=3, k=3).select([0, 3])
    counts, filters = schedule(9, steps), Filters(banned=(torch.tensor([0]), torch.tensor([3])))
    expected = enumerated(model, filters, counts, priorities_of(model, order))
    assert_equals_enumeration(search(model, counts, order, filters), expected)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("counts", SCHEDULES)
def test_every_order_and_schedule_equals_one_step_where_digits_tell_nothing(
    counts: tuple[int, ...], order: Order
) -> None:
    model = pairs(4, shared=4, ignores_revealed=True)
    for filters in FILTERS.values():
        one = search(model, (4,), order, filters)
        found = search(model, counts, order, filters)
        torch.testing.assert_close(found.scores, one.scores, atol=2e-5, rtol=0)
        for user in range(model.users):
            own = log_probabilities(model, user)
            values = [float(own[0, a] + own[1, b]) for a, b in one.items[user].tolist() if a >= 0]
            assert one.scores[user, : len(values)].tolist() == pytest.approx(values, abs=2e-5)
            assert {*map(tuple, found.items[user].tolist())} == {
                *map(tuple, one.items[user].tolist())
            }


def log_probabilities(model: Toy, user: int) -> Tensor:
    """(k, items) over the whole catalogue, with nothing revealed."""
    energies = [model.energies(user, model.blank, place) for place in range(model.items)]
    return torch.stack([torch.from_numpy(own).log_softmax(0) for own in energies])


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("counts", SCHEDULES)
@pytest.mark.parametrize("beams", [1, 5])
def test_few_beams_keep_the_best_of_the_products(
    beams: int, counts: tuple[int, ...], order: Order
) -> None:
    for model, repeats in ((pairs(5), False), (pairs(6, shared=4), False), (pairs(7), True)):
        expected = by_search(model, FILTERS["both"], counts, order, beams, repeats=repeats)
        found = search(model, counts, order, FILTERS["both"], beams, repeats=repeats)
        assert_equals_enumeration(found, expected)


def by_search(
    model: Toy,
    filters: Filters,
    counts: Sequence[int],
    order: Order,
    beams: int,
    *,
    repeats: bool = False,
    remask: int = 0,
) -> list[dict[tuple[int, ...], float]]:
    """User by user, the results of a search that looks at every session."""
    expected = []
    for user in range(model.users):
        paths = paths_of(model, filters, user, counts, priorities_of(model, order))
        own = searched(model, paths, beams, repeats=repeats)
        if remask:
            own = revealed_anew(model, filters, user, own, paths, remask, repeats=repeats)
        expected.append(best_of(own, beams))
    return expected


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("beams", [1, 6])
def test_one_likely_item_does_not_end_the_search_for_sessions(
    beams: int, steps: int, order: Order
) -> None:
    # Every item of a session is most likely the same one.
    model = toy((2, 3), 5, seed=8, k=3).select([0, 1])
    bonus = Bonus(torch.tensor([0, 1]), torch.tensor([2, 4]), torch.tensor([12.0, 9.0]))
    model, counts = replace(model, bonus=bonus), schedule(6, steps)
    found = search(model, counts, order, beams=beams)
    assert (found.items >= 0).all()
    assert_equals_enumeration(found, by_search(model, Filters(), counts, order, beams))


def test_users_with_too_few_items_for_a_session_get_none() -> None:
    model = pairs(9)
    for left in (0, 1, 2):
        banned = (torch.ones(8 - left, dtype=torch.int64), torch.arange(8 - left))
        found = search(model, (1, 1, 1, 1), filters=Filters(banned=banned), beams=5)
        expected = {(6, 7), (7, 6)} if left == 2 else set()
        assert {*map(tuple, found.items[1].tolist())} - {(-1, -1)} == expected
        assert (found.items[0] >= 0).all()
        twice = search(model, (2, 2), filters=Filters(banned=banned), beams=5, repeats=True)
        assert (twice.items[1, :, 0] >= 0).sum() == left**2


@pytest.mark.parametrize("order", ORDERS)
def test_results_do_not_depend_on_the_batch(order: Order) -> None:
    model, priorities = pairs(10), priorities_of(pairs(10), order)
    whole = search(model, (1, 2, 1), order, Filters(ALLOWED), beams=3)
    for users in ([0], [1], [1, 0]):
        found = beam_search(
            model.select(users),
            CodeIndex(model.codes, model.sizes),
            (1, 2, 1),
            3,
            priorities=None if priorities is None else priorities[users],
            filters=Filters(ALLOWED),
        )
        assert torch.equal(found.items, whole.items[users])
        torch.testing.assert_close(found.scores, whole.scores[users])


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("cells", "gathered"), [(1, 2**22), (2**23, 1), (50, 12), (300, 12)])
def test_results_do_not_depend_on_the_size_of_blocks(
    cells: int, gathered: int, order: Order, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, filters = pairs(11, shared=3), FILTERS["both"]
    whole = search(model, (1, 1, 1, 1), order, filters, beams=4, remask=3)
    monkeypatch.setattr(joint, "CELLS", cells)
    monkeypatch.setattr(matching, "GATHERED", gathered)
    found = search(model, (1, 1, 1, 1), order, filters, beams=4, remask=3)
    assert torch.equal(found.items, whole.items)
    torch.testing.assert_close(found.scores, whole.scores)


def test_joined_meets_all_equal_numbers() -> None:
    left, right = torch.tensor([3, 0, 1, 3]), torch.tensor([0, 0, 2, 3, 3, 3])
    expected = [(i, j) for i in range(4) for j in range(6) if left[i] == right[j]]
    assert [*zip(*(part.tolist() for part in joined(left, right)), strict=True)] == expected
    found = joined(left, right, torch.tensor([1, 9, 9, 2]))
    assert [*zip(*(part.tolist() for part in found), strict=True)] == [
        (0, 3), (1, 0), (1, 1), (3, 3), (3, 4)
    ]  # fmt: skip


# Digits that are taken back


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("counts", "remask"), [((1, 1, 1), 1), ((2, 1), 2), ((3,), 2)])
@pytest.mark.parametrize("beams", [2, 15])
def test_least_certain_digits_are_revealed_anew(
    beams: int, counts: tuple[int, ...], remask: int, order: Order
) -> None:
    for seed, shared, name in ((12, 0, "no filter"), (13, 4, "both")):
        model, filters = toy((3, 3, 2), seed=seed, shared=shared), ITEM_FILTERS[name]
        expected = by_search(model, filters, counts, order, beams, remask=remask)
        found = search(model, counts, order, filters, beams, remask=remask)
        assert_equals_enumeration(found, expected)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("remask", [1, 2, 3])
def test_digits_of_sessions_are_revealed_anew(remask: int, order: Order) -> None:
    for model, repeats in ((pairs(14), False), (pairs(15, shared=4), True)):
        expected = by_search(
            model, FILTERS["both"], (1, 2, 1), order, 5, repeats=repeats, remask=remask
        )
        found = search(model, (1, 2, 1), order, FILTERS["both"], 5, repeats=repeats, remask=remask)
        assert_equals_enumeration(found, expected)


@pytest.mark.parametrize("k", [1, 2])
def test_digits_revealed_anew_change_nothing_where_digits_tell_nothing(k: int) -> None:
    model = toy((3, 3), 8, seed=16, k=k, shared=4, ignores_revealed=True).select([0, 3])
    for counts in ((2 * k,), (1,) * 2 * k):
        plain = search(model, counts, filters=FILTERS["both"])
        for remask in range(1, 2 * k):
            found = search(model, counts, filters=FILTERS["both"], remask=remask)
            assert torch.equal(found.items, plain.items)
            torch.testing.assert_close(found.scores, plain.scores, atol=2e-5, rtol=0)


def test_traces_tell_what_was_revealed_anew() -> None:
    model, counts = toy((3, 3, 2), seed=18), (2, 1)
    plain = search(model, counts, beams=4, trace=True)
    found = search(model, counts, beams=4, remask=2, trace=True)
    for user in range(USERS):
        *steps, last = found.steps[user]
        assert len(steps) == 2
        assert torch.equal(steps[-1].scores, plain.steps[user][-1].scores)
        assert torch.equal(last.scores, found.scores[user])
        assert (last.remaining == 1).all()
        assert last.positions.shape == (4, 2)
        before = model.codes[plain.items[user, last.parents, 0]]
        after = before.scatter(1, last.positions, last.codes)
        assert torch.equal(after, model.codes[found.items[user, :, 0]])


@pytest.mark.parametrize("remask", [-1, 3, 9])
def test_raises_when_all_digits_are_taken_back(remask: int) -> None:
    with pytest.raises(RequestError, match=f"decoding.remask is {remask}.*give 0 to 2"):
        require_remask(remask, 3)
    with pytest.raises(RequestError, match="give 0 to 2"):
        search(toy(), (1, 1, 1), remask=remask)
