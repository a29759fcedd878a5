"""Beam search against enumeration by the definitions, on models that are tables."""

from __future__ import annotations

import math
from itertools import combinations, permutations, product

import pytest
import torch

from maskgr.decoding import candidates as candidates_module
from maskgr.decoding import decoder as decoder_module
from maskgr.decoding.candidates import Found, best_sums
from maskgr.decoding.config import Order
from maskgr.decoding.decoder import Decoder, Ranking, Search
from maskgr.decoding.matching import Filters, distinct
from maskgr.decoding.orders import ORDERS, fixed_priorities
from maskgr.decoding.schedule import schedule
from maskgr.errors import RequestError
from tests.decoding.toy import Definition, Toy, excluding, index, shop

SHOPS = [((3,), 4), ((2, 3), 1), ((2, 3), 6), ((4, 4), 12), ((3, 2, 4), 12), ((2, 3, 2, 3), 12)]


def compositions(total: int) -> list[tuple[int, ...]]:
    """All schedules."""
    cuts = [c for size in range(total) for c in combinations(range(1, total), size)]
    return [tuple(b - a for a, b in zip((0, *cut), (*cut, total), strict=True)) for cut in cuts]


def seeds(toy: Toy) -> torch.Tensor:
    return torch.arange(100, 100 + toy.users)


def drawn_orders(toy: Toy) -> list[list[int]]:
    """The users' orders that `random` draws from `seeds(toy)`."""
    positions = toy.items * len(toy.codebook_sizes)
    priorities = fixed_priorities("random", seeds(toy), positions)
    assert priorities is not None
    return priorities.argsort(dim=1, descending=True).tolist()


def check(ranking: Ranking, user: int, expected: list[tuple[tuple[int, ...], float]]) -> None:
    """The user's results are the best of these items (or sessions) and scores, in this order."""
    top = ranking.scores.shape[1]
    expected = sorted(expected, key=lambda own: (-round(own[1], 4), own[0]))[:top]
    items = ranking.items[user].view(top, -1)
    assert [tuple(own) for own in items[: len(expected)].tolist()] == [i for i, _ in expected]
    scores = torch.tensor([score for _, score in expected])
    torch.testing.assert_close(ranking.scores[user, : len(expected)], scores)
    assert (items[len(expected) :] == -1).all()
    assert (ranking.scores[user, len(expected) :] == -math.inf).all()


@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("sizes", "count"), SHOPS)
def test_wide_beams_enumerate_the_catalogue(
    sizes: tuple[int, ...], count: int, order: Order, renormalise: bool
) -> None:
    toy, digits = Toy(sizes), shop(sizes, count, seed=count)
    catalogue = index(digits, sizes)
    decoder = Decoder(catalogue, renormalise=renormalise)
    for counts in compositions(len(sizes)):
        found = decoder.next_items(toy, count, Search(count, order, counts), seeds=seeds(toy))
        assert found.invalid_share is None
        model = digits if renormalise else None
        definition = Definition(
            toy, digits, order, counts, renormalise=model, orders=drawn_orders(toy)
        )
        for user in range(toy.users):
            check(
                found,
                user,
                [((i,), definition.score(user, own)) for i, own in enumerate(digits)],
            )


@pytest.mark.parametrize("constrained", [True, False])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("width", [1, 2, 3, 5])
def test_narrow_beams_keep_the_best_of_the_whole_product(
    width: int, order: Order, constrained: bool
) -> None:
    sizes = (3, 4, 2, 3)
    toy, digits = Toy(sizes, users=3), shop(sizes, 12, seed=1)
    decoder = Decoder(index(digits, sizes), constrained=constrained)
    for counts in compositions(4):
        found = decoder.next_items(toy, width, Search(width, order, counts), seeds=seeds(toy))
        definition = Definition(
            toy, digits, order, counts, constrained=constrained, orders=drawn_orders(toy)
        )
        invalid = 0
        for user in range(toy.users):
            beams = definition.search(user, width)
            owners = [[i for i, own in enumerate(digits) if tuple(own) == s] for s, _ in beams]
            invalid += sum(not items for items in owners)
            check(
                found,
                user,
                [
                    ((item,), score)
                    for (_, score), items in zip(beams, owners, strict=True)
                    for item in items
                ],
            )
        if constrained:
            assert found.invalid_share is None
            assert invalid == 0
        else:
            assert found.invalid_share == pytest.approx(invalid / (3 * width))


@pytest.mark.parametrize("order", ["random", "left-to-right"])
def test_constrained_is_unconstrained_without_impossible_items(order: Order) -> None:
    """True where the order does not look at probabilities: the constraint leaves them as they
    are. The greedy order looks at those of the possible codes, and may take another way."""
    sizes = (3, 2, 3)
    toy, digits = Toy(sizes), shop(sizes, 8, seed=4)
    for counts in compositions(3):
        search = Search(18, order, counts)
        free = Decoder(index(digits, sizes), constrained=False)
        tied = Decoder(index(digits, sizes))
        one = free.next_items(toy, 8, search, seeds=seeds(toy))
        other = tied.next_items(toy, 8, search, seeds=seeds(toy))
        assert torch.equal(one.items, other.items)
        torch.testing.assert_close(one.scores, other.scores)
        distinct_tuples = len({tuple(own) for own in digits})
        assert one.invalid_share == pytest.approx(1 - distinct_tuples / 18)


def test_greedy_reveals_the_widest_gap_of_each_beam() -> None:
    sizes = (4, 4, 4)
    toy, digits = Toy(sizes, users=4), shop(sizes, 30, seed=2)
    for constrained in (True, False):
        decoder = Decoder(index(digits, sizes), constrained=constrained)
        found = decoder.next_items(toy, 4, Search(4, "greedy", 3), trace=True)
        definition = Definition(toy, digits, "greedy", (1, 1, 1), constrained=constrained)
        assert found.traces is not None
        chosen = set()
        for user, steps in enumerate(found.traces):
            states: list[tuple[int | None, ...]] = [(None, None, None)]
            for step in steps:
                after = []
                for beam, parent in enumerate(step.parents.tolist()):
                    position = step.positions[beam].tolist()
                    assert position == definition.positions(user, states[parent], 1)
                    state = list(states[parent])
                    state[position[0]] = int(step.codes[beam])
                    after.append(tuple(state))
                states = after
            chosen |= {tuple(p is None for p in state) for state in states}
            chosen |= {tuple(step.positions.flatten().tolist()) for step in steps}
        assert len(chosen) > 4  # beams and users differ in what they reveal


def test_one_step_ranks_the_whole_catalogue_with_any_beams() -> None:
    sizes = (3, 4, 3)
    toy, digits = Toy(sizes), shop(sizes, 40, seed=5)
    found = Decoder(index(digits, sizes)).next_items(toy, 40, Search(1, "greedy", 1))
    assert toy.asked == []
    first = toy.first()
    for user in range(toy.users):
        scores = [sum(float(first[j][user, 0, d]) for j, d in enumerate(own)) for own in digits]
        check(found, user, [((item,), score) for item, score in enumerate(scores)])


@pytest.mark.parametrize("order", ORDERS)
def test_results_are_distinct_and_as_many_as_asked(order: Order) -> None:
    sizes = (2, 3, 4)
    for seed in range(15):
        toy, digits = Toy(sizes, seed=seed), shop(sizes, 2 + seed, seed)
        decoder = Decoder(index(digits, sizes))
        for counts, top in product(compositions(3), range(1, len(digits) + 1, 3)):
            found = decoder.next_items(toy, top, Search(1, order, counts), seeds=seeds(toy))
            for own in found.items.tolist():
                assert len(set(own) - {-1}) == top
            assert (found.scores.diff(dim=1) <= 0).all()
            assert found.scores.isfinite().all()


@pytest.mark.parametrize("order", ORDERS)
def test_excluded_items_equal_enumeration_without_them(order: Order) -> None:
    sizes = (2, 3, 2)
    digits = shop(sizes, 10, seed=6)
    digits[9] = digits[0]  # a tuple of which one item is seen and one is not
    seen = [[0, 3], [], list(range(10)), [1, 2, 4, 5, 6, 7, 8]]
    toy, catalogue = Toy(sizes, users=4), index(digits, sizes)
    for counts in compositions(3):
        found = Decoder(catalogue).next_items(
            toy,
            10,
            Search(10, order, counts),
            filters=excluding(seen),
            seeds=seeds(toy),
        )
        for user, own in enumerate(seen):
            left = [item for item in range(10) if item not in own]
            definition = Definition(
                toy, [digits[i] for i in left], order, counts, orders=drawn_orders(toy)
            )
            check(found, user, [((i,), definition.score(user, digits[i])) for i in left])


@pytest.mark.parametrize("constrained", [True, False])
def test_filters_keep_the_models_scores(constrained: bool) -> None:
    sizes = (2, 3, 2)
    toy, digits = Toy(sizes), shop(sizes, 10, seed=7)
    allowed = torch.tensor([i % 3 != 0 for i in range(10)])
    search = Search(12, "left-to-right", 2)
    decoder = Decoder(index(digits, sizes), constrained=constrained, renormalise=constrained)
    whole = decoder.next_items(toy, 10, search)
    part = decoder.next_items(toy, 6, search, filters=Filters(allowed))
    for user in range(toy.users):
        kept = allowed[whole.items[user]]
        assert torch.equal(whole.items[user][kept], part.items[user])
        torch.testing.assert_close(whole.scores[user][kept], part.scores[user])


def test_unconstrained_search_drops_excluded_items() -> None:
    sizes = (2, 2)
    digits = [[0, 0], [0, 1], [1, 1]]
    catalogue = index(digits, sizes)
    found = Decoder(catalogue, constrained=False).next_items(
        Toy(sizes),
        3,
        Search(4, "left-to-right", 2),
        filters=excluding([[1], []]),
    )
    assert sorted(found.items[0].tolist()) == [-1, 0, 2]
    assert sorted(found.items[1].tolist()) == [0, 1, 2]
    assert found.invalid_share == 0.25


class Part(Toy):
    """Some users of a toy, in another order."""

    def __init__(self, toy: Toy, users: list[int]) -> None:
        super().__init__(toy.codebook_sizes, len(users), toy.items, toy.seed)
        self.rows = users

    def at(self, user: int, state: tuple[int | None, ...]) -> list[torch.Tensor]:
        return super().at(self.rows[user], state)


def test_random_order_of_a_user_does_not_depend_on_the_batch() -> None:
    sizes = (3, 2, 3)
    toy, digits = Toy(sizes, users=6), shop(sizes, 12, seed=3)
    decoder, search = Decoder(index(digits, sizes)), Search(2, "random", 3)
    whole = decoder.next_items(toy, 2, search, seeds=seeds(toy))
    assert len({tuple(order) for order in drawn_orders(toy)}) > 2
    for users in ([0], [5], [3, 1], [4, 2, 0, 5]):
        part = decoder.next_items(Part(toy, users), 2, search, seeds=seeds(toy)[users])
        assert torch.equal(part.items, whole.items[users])
        assert torch.equal(part.scores, whole.scores[users])


@pytest.mark.parametrize("order", ORDERS)
def test_allowed_items_equal_enumeration(order: Order) -> None:
    sizes = (2, 3, 2)
    digits = shop(sizes, 10, seed=6)
    digits[9] = digits[0]  # share their digits: the one is denied, the other is not
    allowed = torch.tensor([item not in (0, 3, 7) for item in range(10)])
    seen = [[1, 3], [], [1, 2, 4, 5, 6, 8, 9], [9]]  # the first has seen a denied item too
    toy, catalogue = Toy(sizes, users=4), index(digits, sizes)
    decoder = Decoder(catalogue)
    for counts, seen_out in product(compositions(3), (True, False)):
        found = decoder.next_items(
            toy,
            7,
            Search(7, order, counts),
            filters=excluding(seen, allowed) if seen_out else Filters(allowed),
            seeds=seeds(toy),
        )
        for user, own in enumerate(seen):
            gone = {0, 3, 7, *own} if seen_out else {0, 3, 7}
            left = [item for item in range(10) if item not in gone]
            definition = Definition(
                toy, [digits[i] for i in left], order, counts, orders=drawn_orders(toy)
            )
            check(found, user, [((i,), definition.score(user, digits[i])) for i in left])


def test_raises_when_allowed_items_are_too_few() -> None:
    sizes, search = (2, 3), Search(3, "greedy", 1)
    decoder = Decoder(index(shop(sizes, 5, seed=0), sizes))
    with pytest.raises(RequestError, match="a catalogue of 0"):
        decoder.next_items(Toy(sizes), 1, search, filters=Filters(torch.zeros(5, dtype=torch.bool)))
    with pytest.raises(RequestError, match="top 4 of a catalogue with 3 items"):
        decoder.next_items(Toy(sizes), 4, search, filters=Filters(torch.arange(5) < 3))


def test_items_with_the_same_digits_are_ranked_by_priority() -> None:
    digits = [[0, 0], [1, 1], [0, 0], [0, 0], [1, 1], [0, 0]]
    priority = torch.tensor([0.5, 1.0, 2.0, 0.5, 3.0, 7.0])
    toy, catalogue = Toy((2, 2)), index(digits, (2, 2))
    ranked = {(0, 0): [5, 2, 0, 3], (1, 1): [4, 1]}  # 0 and 3 have equal priorities
    plain = {(0, 0): [0, 2, 3, 5], (1, 1): [1, 4]}
    for given, expected in ((priority, ranked), (None, plain)):
        decoder = Decoder(catalogue, priority=given)
        for steps, top in product((1, 2), (1, 3, 6)):
            found = decoder.next_items(toy, top, Search(2, "left-to-right", steps))
            definition = Definition(toy, digits, "left-to-right", schedule(2, steps))
            for user in range(toy.users):
                best = sorted(expected, key=lambda own: -definition.score(user, own))
                items = [item for own in best for item in expected[own]]
                assert found.items[user].tolist() == items[:top]


def test_sessions_of_items_with_the_same_digits_are_ranked_by_priority() -> None:
    catalogue = index([[0], [0], [0], [1]], (2,))
    decoder = Decoder(catalogue, priority=torch.tensor([1.0, 2.0, 3.0, 0.0]))
    toy = Toy((2,), items=2)
    found = decoder.sessions(toy, 12, Search(4, "greedy", 1))
    orders = {(0, 0): [(2, 1), (2, 0), (1, 2), (1, 0), (0, 2), (0, 1)]}
    orders |= {(0, 1): [(2, 3), (1, 3), (0, 3)], (1, 0): [(3, 2), (3, 1), (3, 0)]}
    definition = Definition(toy, [[0], [1]], "greedy", (2,))
    for user in range(toy.users):
        best = sorted(orders, key=lambda own: -definition.score(user, own))
        expected = [pair for own in best for pair in orders[own]]
        assert [tuple(pair) for pair in found.items[user].tolist()] == expected
        first = decoder.sessions(toy, 2, Search(4, "greedy", 1)).items[user].tolist()
        assert [tuple(pair) for pair in first] == expected[:2]


def test_traces_add_up_to_scores_and_count_the_items_left() -> None:
    sizes = (3, 2, 4)
    toy, digits = Toy(sizes), shop(sizes, 12, seed=8)
    catalogue = index(digits, sizes)
    seen = [[2, 5], [7]]
    found = Decoder(catalogue).next_items(
        toy, 5, Search(5, "greedy", 2), filters=excluding(seen), trace=True
    )
    assert found.traces is not None
    for user, steps in enumerate(found.traces):
        beams: list[tuple[dict[int, int], float]] = [({}, 0.0)]
        for step in steps:
            grown = []
            for beam, parent in enumerate(step.parents.tolist()):
                known = dict(beams[parent][0])
                known |= zip(step.positions[beam].tolist(), step.codes[beam].tolist(), strict=True)
                score = beams[parent][1] + float(step.log_probs[beam].sum())
                assert score == pytest.approx(float(step.scores[beam]), abs=1e-5)
                left = [
                    item
                    for item, own in enumerate(digits)
                    if item not in seen[user] and all(own[j] == d for j, d in known.items())
                ]
                assert step.remaining[beam].tolist() == [len(left)]
                grown.append((known, score))
            beams = grown
        best = [digits.index([known[j] for j in range(3)]) for known, _ in beams]
        assert digits[int(found.items[user, 0])] == digits[best[0]]
        assert float(found.scores[user, 0]) == pytest.approx(beams[0][1], abs=1e-5)


@pytest.mark.parametrize("repeats", [False, True])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("sizes", "k", "count"), [((2, 2), 2, 4), ((3, 2), 2, 7), ((3,), 3, 4), ((2, 1, 2), 2, 5)]
)
def test_sessions_enumerate_all_tuples_of_items(
    sizes: tuple[int, ...], k: int, count: int, order: Order, repeats: bool
) -> None:
    toy, digits = Toy(sizes, items=k), shop(sizes, count, seed=count)
    decoder = Decoder(index(digits, sizes))
    every = list(product(range(count), repeat=k) if repeats else permutations(range(count), k))
    for steps in range(1, k * len(sizes) + 1):
        found = decoder.sessions(
            toy,
            len(every),
            Search(1, order, steps),
            repeats=repeats,
            seeds=seeds(toy),
        )
        counts = schedule(k * len(sizes), steps)
        definition = Definition(toy, digits, order, counts, orders=drawn_orders(toy))
        for user in range(toy.users):
            check(
                found,
                user,
                [
                    (own, definition.score(user, [d for item in own for d in digits[item]]))
                    for own in every
                ],
            )


@pytest.mark.parametrize("constrained", [True, False])
@pytest.mark.parametrize("width", [1, 3, 6])
def test_narrow_session_beams(width: int, constrained: bool) -> None:
    """With repeats the beams are exactly those of the definition."""
    sizes = (3, 2)
    digits = [[0, 0], [0, 1], [1, 0], [2, 1]]
    toy = Toy(sizes, items=2)
    decoder = Decoder(index(digits, sizes), constrained=constrained)
    for order, counts in product(("greedy", "left-to-right"), compositions(4)):
        found = decoder.sessions(toy, width, Search(width, order, counts), repeats=True)
        definition = Definition(toy, digits, order, counts, constrained=constrained)
        for user in range(toy.users):
            beams = definition.search(user, width)
            number: dict[tuple[int | None, ...], int]
            number = {tuple(own): item for item, own in enumerate(digits)}
            pairs = [((number.get(s[:2]), number.get(s[2:])), score) for s, score in beams]
            check(
                found,
                user,
                [((a, b), score) for (a, b), score in pairs if a is not None and b is not None],
            )


def test_narrow_session_beams_hold_no_repeats() -> None:
    sizes, digits = (3, 2), [[0, 0], [0, 1], [1, 0], [2, 1]]
    number = {tuple(own): item for item, own in enumerate(digits)}
    for seed, width, counts in product(range(6), (2, 4), ((2, 2), (3, 1), (4,))):
        toy = Toy(sizes, items=2, seed=seed)
        found = Decoder(index(digits, sizes)).sessions(
            toy, width, Search(width, "left-to-right", counts)
        )
        definition = Definition(toy, digits, "left-to-right", counts)
        for user in range(toy.users):
            beams = definition.search(user, width, lambda s: s[:2] != s[2:])
            if len(beams) == width:  # else the search goes on with more beams
                pairs = [(number[s[:2]], number[s[2:]]) for s, _ in beams]  # type: ignore[index]
                check(found, user, list(zip(pairs, [score for _, score in beams], strict=True)))


@pytest.mark.parametrize("order", ORDERS)
def test_sessions_are_never_fewer_than_asked(order: Order) -> None:
    """Even where most beams end because their item is taken, as with two or three items."""
    sizes = (2, 2)
    for seed, count in product(range(6), (2, 3)):
        toy = Toy(sizes, items=2, seed=seed)
        digits = [[0, 0], [0, 1], [1, 1]][:count]
        decoder = Decoder(index(digits, sizes))
        for steps, top in product(range(1, 5), range(1, math.perm(count, 2) + 1)):
            found = decoder.sessions(toy, top, Search(1, order, steps), seeds=seeds(toy))
            for own in found.items.tolist():
                assert len({tuple(pair) for pair in own}) == top
                assert all(0 <= a != b >= 0 for a, b in own)


@pytest.mark.parametrize("order", ORDERS)
def test_sessions_are_found_when_beams_end_midway(order: Order) -> None:
    """Two items of three are complete, and the same, before the third begins."""
    for seed in range(8):
        toy = Toy((3,), items=3, seed=seed)
        decoder = Decoder(index([[0], [1], [2]], (3,)))
        found = decoder.sessions(toy, 1, Search(1, order, 3), seeds=seeds(toy), trace=seed == 0)
        assert sorted(found.items[0, 0].tolist()) == [0, 1, 2]


def test_sessions_hold_no_excluded_item() -> None:
    sizes, digits = (2, 2), [[0, 0], [0, 1], [1, 1], [1, 1]]
    toy, catalogue = Toy(sizes, users=3, items=2), index(digits, sizes)
    found = Decoder(catalogue).sessions(
        toy, 6, Search(6, "greedy", 2), filters=excluding([[1], [0, 1], [0, 1, 2]])
    )
    pairs = [{tuple(pair) for pair in own if pair[0] >= 0} for own in found.items.tolist()]
    assert pairs == [set(permutations([0, 2, 3], 2)), {(2, 3), (3, 2)}, set()]


def test_small_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = (3, 4, 3)
    toy, digits = Toy(sizes, users=5), shop(sizes, 20, seed=9)
    catalogue = index(digits, sizes)
    seen = excluding([[1], [2, 3], [], [4], [0, 1, 2, 3, 4, 5]])

    def find(steps: int) -> Ranking:
        return Decoder(catalogue).next_items(toy, 6, Search(6, "greedy", steps), filters=seen)

    whole = [find(steps) for steps in (1, 2, 3)]
    monkeypatch.setattr(decoder_module, "CELLS", 1)
    monkeypatch.setattr(candidates_module, "CELLS", 1)
    for steps, other in enumerate(whole, start=1):
        found = find(steps)
        assert torch.equal(found.items, other.items)
        torch.testing.assert_close(found.scores, other.scores)


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_very_small_probabilities_do_not_underflow(steps: int) -> None:
    sizes = (2, 3, 2, 2)
    low = math.log(1e-30)
    digits = shop(sizes, 10, seed=10)
    search = Search(10, "left-to-right", steps)
    decoder = Decoder(index(digits, sizes))
    found = decoder.next_items(Toy(sizes, low=low), 10, search)
    usual = decoder.next_items(Toy(sizes), 10, search)
    assert torch.equal(found.items, usual.items)
    torch.testing.assert_close(found.scores, usual.scores + 4 * low)
    assert found.scores.dtype == torch.float32


def test_items_with_probability_zero_come_last() -> None:

    class Certain(Toy):
        def at(self, user: int, state: tuple[int | None, ...]) -> list[torch.Tensor]:
            return [torch.tensor([0.0, -math.inf])] * 2

    digits = [[1, 1], [0, 0], [0, 1]]
    for steps in (1, 2):
        found = Decoder(index(digits, (2, 2))).next_items(
            Certain((2, 2)), 3, Search(3, "greedy", steps)
        )
        assert found.items[0, 0] == 1
        assert sorted(found.items[0].tolist()) == [0, 1, 2]
        assert found.scores[0].tolist() == [0.0, -math.inf, -math.inf]


def test_network_is_asked_only_for_the_digits_that_a_step_needs() -> None:
    sizes = (3, 3, 3)
    digits = shop(sizes, 20, seed=11)
    for order in ORDERS:
        toy = Toy(sizes)
        Decoder(index(digits, sizes)).next_items(
            toy, 5, Search(5, order, [1, 1, 1]), seeds=seeds(toy)
        )
        assert len(toy.asked) == 2  # the first step is shared
        for revealed, wanted in toy.asked:
            masked = ~revealed
            expected = masked.sum(dim=(1, 2)) if order == "greedy" else 1
            assert (wanted.sum(dim=(1, 2)) == expected).all()


def test_best_sums_equals_the_product() -> None:
    draw = torch.Generator().manual_seed(0)
    for widths in [(4,), (3, 5), (2, 3, 4), (1, 6, 2, 3)]:
        lists = [
            Found(
                torch.randn(7, w, generator=draw).sort(dim=1, descending=True).values,
                torch.arange(w).expand(7, w).unsqueeze(-1),
            )
            for w in widths
        ]
        grids = torch.zeros(7, *[1] * len(widths))
        for axis, (scores, _) in enumerate(lists):
            shape = [7, *[1] * len(widths)]
            shape[axis + 1] = scores.shape[1]
            grids = grids + scores.view(shape)
        for width in (1, 2, 5, math.prod(widths)):
            found = best_sums(lists, width)
            expected = grids.flatten(1).topk(min(width, math.prod(widths))).values
            torch.testing.assert_close(found.scores, expected)
            rows = torch.arange(7).unsqueeze(1)
            again = sum(own.scores[rows, found.choices[..., i]] for i, own in enumerate(lists))
            torch.testing.assert_close(again, expected)


def test_distinct_rows_without_overflow() -> None:
    draw = torch.Generator().manual_seed(0)
    rows = torch.randint(2, (200, 12), generator=draw) * (2**20 - 1)
    rows[100:] = rows[:100]
    numbers, first = distinct(rows.unbind(1), [2**20] * 12)
    assert torch.equal(rows[first][numbers], rows)
    assert len(first) == len(torch.unique(rows, dim=0))


@pytest.mark.parametrize(
    ("top", "search", "message"),
    [
        (0, Search(3, "greedy", 1), "top 0 of .* give 1 to 8"),
        (9, Search(3, "greedy", 1), "top 9 of a catalogue with 8 items .* give 1 to 8"),
        (3, Search(3, "greedy", 4), "4 steps cannot reveal 3 digits; give 1 to 3"),
        (3, Search(3, "greedy", [2, 2]), "sum to 3"),
    ],
)
def test_raises_when_top_or_steps_are_out_of_range(top: int, search: Search, message: str) -> None:
    sizes = (2, 3, 2)
    with pytest.raises(RequestError, match=message):
        Decoder(index(shop(sizes, 8, seed=0), sizes)).next_items(Toy(sizes), top, search)


def test_raises_when_sessions_are_too_long_or_too_many() -> None:
    sizes, search = (2, 3), Search(3, "greedy", 1)
    decoder = Decoder(index(shop(sizes, 3, seed=0), sizes))
    with pytest.raises(RequestError, match="session of 4 items from a catalogue of 3"):
        decoder.sessions(Toy(sizes, items=4), 1, search)
    with pytest.raises(RequestError, match=r"top 7 .* 6 sessions of 2 of its 3 items"):
        decoder.sessions(Toy(sizes, items=2), 7, search)


def test_raises_when_renormalised_without_the_constraint() -> None:
    sizes, search = (2, 3), Search(3, "greedy", 1)
    catalogue = index(shop(sizes, 3, seed=0), sizes)
    with pytest.raises(RequestError, match="real items only; search with the constraint"):
        Decoder(catalogue, constrained=False, renormalise=True).next_items(Toy(sizes), 1, search)
