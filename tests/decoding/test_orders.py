"""Schedules and orders against their definitions."""

from __future__ import annotations

import pytest
import torch

from maskgr.decoding.orders import choose, fixed_priorities, gaps
from maskgr.decoding.schedule import schedule
from maskgr.errors import RequestError

CPU = torch.device("cpu")


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


def test_schedules_reveal_everything() -> None:
    for digits in range(1, 21):
        for steps in range(1, digits + 1):
            counts = schedule(digits, steps)
            assert len(counts) == steps
            assert sum(counts) == digits
            assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize("steps", [0, -1, 6])
def test_schedule_with_impossible_steps(steps: int) -> None:
    with pytest.raises(RequestError, match=f"{steps} steps cannot reveal 5 digits; give 1 to 5"):
        schedule(5, steps)


@pytest.mark.parametrize("steps", [[3, 1], [5, 0], [6, -1], []])
def test_schedule_with_impossible_counts(steps: list[int]) -> None:
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
    priorities = fixed_priorities("left-to-right", 2, 4, CPU)
    assert priorities is not None
    assert priorities.argsort(dim=1, descending=True).tolist() == [[0, 1, 2, 3]] * 2


def test_random_order_is_seeded_and_uniform() -> None:
    def draw(seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        priorities = fixed_priorities("random", 6000, 3, CPU, generator)
        assert priorities is not None
        return priorities.argsort(dim=1, descending=True)

    assert torch.equal(draw(0), draw(0))
    assert not torch.equal(draw(0), draw(1))
    _, counts = torch.unique(draw(0), dim=0, return_counts=True)
    assert len(counts) == 6
    assert ((counts - 1000).abs() < 4 * (1000 * 5 / 6) ** 0.5).all()


def test_greedy_looks_first() -> None:
    assert fixed_priorities("greedy", 2, 4, CPU) is None


def test_unknown_order_and_missing_generator() -> None:
    with pytest.raises(RequestError, match="'best'; choose one of random, greedy, left-to-right"):
        fixed_priorities("best", 2, 4, CPU)
    with pytest.raises(RequestError, match="needs a generator"):
        fixed_priorities("random", 2, 4, CPU)
