"""Schedules and orders against their definitions."""

from __future__ import annotations

from itertools import permutations

import pytest
import torch

from maskgr.data.sequences import Sequences
from maskgr.decoding.orders import choose, fixed_priorities, gaps, history_seeds
from maskgr.decoding.schedule import schedule
from maskgr.errors import RequestError


def reveal_orders(seeds: torch.Tensor, positions: int) -> torch.Tensor:
    """(users, positions) the positions in the random order of each seed."""
    priorities = fixed_priorities("random", seeds, positions)
    assert priorities is not None
    return priorities.argsort(dim=1, descending=True)


def splitmix64(state: int) -> int:
    """The number that the published algorithm draws from a state, in plain integers."""
    state = (state + 0x9E3779B97F4A7C15) % 2**64
    state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    state = (state ^ state >> 27) * 0x94D049BB133111EB % 2**64
    return state ^ state >> 31


@pytest.mark.parametrize(
    ("steps", "counts"),
    [
        (1, (5,)),
        (2, (3, 2)),
        (3, (2, 2, 1)),
        (4, (2, 1, 1, 1)),
        (5, (1, 1, 1, 1, 1)),
        ([3, 1, 1], (3, 1, 1)),
        ((1, 4), (1, 4)),
    ],
)
def test_schedule_of_five_digits(steps: int | list[int], counts: tuple[int, ...]) -> None:
    assert schedule(5, steps) == counts


def test_schedules_are_even_and_reveal_everything() -> None:
    for positions in range(1, 21):
        for steps in range(1, positions + 1):
            counts = schedule(positions, steps)
            assert len(counts) == steps
            assert sum(counts) == positions
            assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize("steps", [0, -1, 6])
def test_raises_when_steps_do_not_fit_the_digits(steps: int) -> None:
    with pytest.raises(RequestError, match=f"{steps} steps cannot reveal 5 digits; give 1 to 5"):
        schedule(5, steps)


@pytest.mark.parametrize("steps", [[3, 1], [5, 0], [6, -1], []])
def test_raises_when_counts_do_not_sum_to_the_digits(steps: list[int]) -> None:
    with pytest.raises(RequestError, match="counts of at least 1 that sum to 5"):
        schedule(5, steps)


def test_gap_is_first_less_second_probability() -> None:
    probabilities = torch.tensor([[0.5, 0.2, 0.3], [0.1, 0.8, 0.1], [0.4, 0.4, 0.2]])
    expected = torch.tensor([0.2, 0.7, 0.0])
    torch.testing.assert_close(gaps(probabilities.log(), normalise=False), expected)
    torch.testing.assert_close(gaps(probabilities.log(), normalise=True), expected)


def test_gap_of_possible_codes_only() -> None:
    probabilities = torch.tensor([[0.2, 0.0, 0.1, 0.0], [0.0, 0.01, 0.0, 0.0]])
    torch.testing.assert_close(gaps(probabilities.log(), True), torch.tensor([1 / 3, 1.0]))
    torch.testing.assert_close(gaps(probabilities.log(), False), torch.tensor([0.1, 0.01]))


def test_gap_of_a_single_code() -> None:
    assert gaps(torch.tensor([[-70.0]]), normalise=True).tolist() == [1.0]


def test_choice_is_the_best_masked_positions_first_among_equals() -> None:
    priorities = torch.tensor([[9.0, 1.0, 3.0, 2.0], [5.0, 5.0, 5.0, 5.0]])
    masked = torch.tensor([[False, True, True, True], [True, False, True, True]])
    assert choose(priorities, masked, 1).nonzero().tolist() == [[0, 2], [1, 0]]
    assert choose(priorities, masked, 2).nonzero().tolist() == [[0, 2], [0, 3], [1, 0], [1, 2]]
    assert torch.equal(choose(priorities, masked, 3), masked)


def test_left_to_right() -> None:
    priorities = fixed_priorities("left-to-right", torch.zeros(2, dtype=torch.int64), 4)
    assert priorities is not None
    assert priorities.argsort(dim=1, descending=True).tolist() == [[0, 1, 2, 3]] * 2


def test_greedy_order_is_not_fixed() -> None:
    assert fixed_priorities("greedy", torch.zeros(2, dtype=torch.int64), 4) is None


def test_random_priorities_are_those_of_splitmix64() -> None:
    assert splitmix64(0) == 0xE220A8397B1DCDAF  # the published first number of seed 0
    seeds = [0, 1, 41, -1, -(2**63), 2**63 - 1]
    priorities = fixed_priorities("random", torch.tensor(seeds), 3)
    assert priorities is not None
    for seed, own in zip(seeds, priorities.tolist(), strict=True):
        state = splitmix64(seed % 2**64)
        expected = [splitmix64(state + place * 0x9E3779B97F4A7C15) >> 40 for place in range(3)]
        assert own == expected


def test_random_order_depends_on_the_users_seed_alone() -> None:
    seeds = torch.arange(50)
    together = reveal_orders(seeds, 4)
    assert torch.equal(reveal_orders(seeds.flip(0), 4), together.flip(0))
    for user in range(50):
        assert torch.equal(reveal_orders(seeds[user : user + 1], 4)[0], together[user])
    assert len(torch.unique(together, dim=0)) > 12


@pytest.mark.parametrize("seeds", [torch.arange(24_000), torch.arange(24_000) << 40])
def test_all_random_orders_are_equally_frequent(seeds: torch.Tensor) -> None:
    orders, counts = torch.unique(reveal_orders(seeds, 4), dim=0, return_counts=True)
    assert [tuple(own) for own in orders.tolist()] == list(permutations(range(4)))
    assert ((counts - 1000).abs() < 4 * (1000 * 23 / 24) ** 0.5).all()


def test_history_seeds_do_not_depend_on_the_other_histories() -> None:
    lists = [[3, 1, 2], [], [0], [3, 2, 1], [0, 0], [7, 3, 1, 2], [3, 1, 2]]
    seeds = history_seeds(Sequences.of(lists), 5)
    assert seeds.dtype == torch.int64
    for row, own in enumerate(lists):
        assert history_seeds(Sequences.of([own]), 5).tolist() == [int(seeds[row])]
    assert len(set(seeds.tolist())) == 6  # the first and the last are the same history
    assert not set(seeds.tolist()) & set(history_seeds(Sequences.of(lists), 6).tolist())


def test_history_seeds_make_all_orders_equally_frequent() -> None:
    histories = Sequences.of([[a, b] for a in range(100) for b in range(60)])
    _, counts = torch.unique(
        reveal_orders(history_seeds(histories, 0), 3), dim=0, return_counts=True
    )
    assert len(counts) == 6
    assert ((counts - 1000).abs() < 4 * (1000 * 5 / 6) ** 0.5).all()
