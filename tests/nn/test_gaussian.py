"""Gaussian diffusion against closed formulas, computed here in another way."""

from __future__ import annotations

import math
from itertools import repeat
from typing import get_args

import numpy as np
import pytest
import torch
from torch import Tensor

from maskgr.nn.gaussian import (
    GaussianDiffusion,
    Schedule,
    alpha_bars,
    guided,
    seeded_noise,
    time_embedding,
)

SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)


def oracle(clean: Tensor):  # type: ignore[no-untyped-def]
    """A network that knows the answer."""
    return lambda noisy, times: clean


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# Schedules


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("steps", [500, 1000, 2000])
def test_schedules_fall_from_almost_one_to_almost_zero(schedule: Schedule, steps: int) -> None:
    bars = alpha_bars(schedule, steps)
    assert bars.shape == (steps,)
    assert (bars.diff() < 0).all()
    assert 0.95 < bars[0] < 1
    assert 0 <= bars[-1] < 0.01


def test_schedules_at_a_few_steps_by_hand() -> None:
    betas = np.linspace(1e-4, 0.02, 300)
    assert alpha_bars("linear", 300)[7].item() == pytest.approx(np.prod(1 - betas[:8]))
    curve = [math.cos((t / 300 + 0.008) / 1.008 * math.pi / 2) ** 2 for t in (0, 8)]
    assert alpha_bars("cosine", 300)[7].item() == pytest.approx(curve[1] / curve[0], rel=1e-3)
    # Of DreamRec: beta = 1 - exp(-0.1 / T - x (10 - 0.1) / (2 T^2)), x evenly from 1 to 2 T + 1.
    betas = 1 - np.exp(-0.1 / 300 - np.linspace(1, 601, 300) * 0.5 * 9.9 / 300**2)
    assert alpha_bars("exponential", 300)[7].item() == pytest.approx(np.prod(1 - betas[:8]))
    assert alpha_bars("sqrt", 300)[7].item() == pytest.approx(1 - math.sqrt(8 / 300))


# The forward process and its posterior


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_forward_process_has_the_mean_and_the_variance_of_the_formula(schedule: Schedule) -> None:
    own, t = GaussianDiffusion(schedule, 200), 60
    clean = torch.tensor([[0.5, -2.0]]).expand(40_000, -1)
    noisy = own.noised(clean, torch.full((40_000,), t), normal(40_000, 2))
    left = alpha_bars(schedule, 200)[t].item()
    assert noisy.mean(0).tolist() == pytest.approx(
        [math.sqrt(left) * 0.5, -math.sqrt(left) * 2], abs=0.02
    )
    assert noisy.var(0).tolist() == pytest.approx([1 - left] * 2, rel=0.03)


def test_each_row_is_noised_at_its_own_time() -> None:
    own, clean, noise = GaussianDiffusion("linear", 50), normal(3, 4), normal(3, 4, seed=1)
    times = torch.tensor([0, 49, 20])
    together = own.noised(clean, times, noise)
    for row in range(3):
        alone = own.noised(clean[[row]], times[[row]], noise[[row]])
        torch.testing.assert_close(together[[row]], alone)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("t", [1, 30, 98])
def test_posterior_is_that_of_two_gaussians(schedule: Schedule, t: int) -> None:
    """q(x_{t-1} | x_t, x_0) is proportional to q(x_t | x_{t-1}) q(x_{t-1} | x_0): two Gaussians in
    x_{t-1}, whose precisions add up."""
    bars = alpha_bars(schedule, 100).numpy()
    clean, noisy, kept = 0.7, -1.1, bars[t] / bars[t - 1]
    prior = 1 / (1 - bars[t - 1]), math.sqrt(bars[t - 1]) * clean  # precision and mean
    likelihood = kept / (1 - kept), noisy / math.sqrt(kept)
    precision = prior[0] + likelihood[0]
    expected = (prior[0] * prior[1] + likelihood[0] * likelihood[1]) / precision
    mean, variance = GaussianDiffusion(schedule, 100).posterior(
        torch.tensor([[noisy]]), torch.tensor([[clean]]), torch.tensor([t])
    )
    assert mean.item() == pytest.approx(expected, rel=1e-4)
    assert variance.item() == pytest.approx(1 / precision, rel=1e-4)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_posterior_of_the_first_step_is_the_clean_vector(schedule: Schedule) -> None:
    own = GaussianDiffusion(schedule, 100)
    mean, variance = own.posterior(normal(2, 3), normal(2, 3, seed=1), torch.zeros(2).long())
    torch.testing.assert_close(mean, normal(2, 3, seed=1))
    assert variance.tolist() == [[0], [0]]


# Sampling


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_both_ways_end_at_what_an_oracle_predicts(schedule: Schedule) -> None:
    own, clean, start = GaussianDiffusion(schedule, 60), normal(5, 4), normal(5, 4, seed=1)
    found = own.ancestral(oracle(clean), start, repeat(normal(5, 4, seed=2)))
    torch.testing.assert_close(found, clean)
    for steps in (1, 2, 7, 60):
        torch.testing.assert_close(own.ddim(oracle(clean), start, steps), clean)


def test_ancestral_samples_follow_the_forward_process_on_the_way() -> None:
    """With an oracle every x_t on the way back has the distribution q(x_t | x_0)."""
    own, seen = GaussianDiffusion("cosine", 40), {}
    clean = torch.full((30_000, 1), 1.5)

    def predict(noisy: Tensor, times: Tensor) -> Tensor:
        seen[int(times[0])] = noisy
        return clean

    generator = torch.Generator().manual_seed(0)
    noises = (torch.randn(30_000, 1, generator=generator) for _ in range(40))
    own.ancestral(predict, normal(30_000, 1, seed=1), noises)
    assert sorted(seen) == list(range(40))
    for t in (0, 11, 30):
        left = alpha_bars("cosine", 40)[t].item()
        assert seen[t].mean().item() == pytest.approx(math.sqrt(left) * 1.5, abs=0.02)
        assert seen[t].var().item() == pytest.approx(1 - left, rel=0.05)


def test_ddim_by_hand() -> None:
    """Three steps of x' = sqrt(a') x_0 + sqrt(1 - a') (x - sqrt(a) x_0) / sqrt(1 - a)."""
    own = GaussianDiffusion("exponential", 100)
    bars = alpha_bars("exponential", 100).numpy()

    def predict(noisy: Tensor, times: Tensor) -> Tensor:
        return 0.4 * noisy.tanh() + 0.01 * times[:, None]

    x = np.array([[0.3, -1.2]])
    for t, after in ((99, 50), (50, 0), (0, None)):
        clean = 0.4 * np.tanh(x) + 0.01 * t
        if after is not None:
            noise = (x - math.sqrt(bars[t]) * clean) / math.sqrt(1 - bars[t])
            x = math.sqrt(bars[after]) * clean + math.sqrt(1 - bars[after]) * noise
    found = own.ddim(predict, torch.tensor([[0.3, -1.2]]), 3)
    assert found.numpy() == pytest.approx(clean, rel=1e-4)


def test_ddim_with_the_exact_network_turns_noise_into_the_data() -> None:
    """For data ~ N(2, 0.25) the best prediction is known, and DDIM's map from noise is nearly the
    straight one: 2 + 0.5 noise."""
    own, start = GaussianDiffusion("cosine", 1000), normal(200, 1)

    def predict(noisy: Tensor, times: Tensor) -> Tensor:
        left = own.alpha_bar[times, None]
        gain = left.sqrt() * 0.25 / (left * 0.25 + 1 - left)
        return 2 + gain * (noisy - left.sqrt() * 2)

    torch.testing.assert_close(own.ddim(predict, start, 500), 2 + 0.5 * start, atol=0.02, rtol=0)
    coarse = own.ddim(predict, start, 20)
    assert (coarse - 2 - 0.5 * start).abs().max() < 0.3


def test_ddim_visits_the_last_and_the_first_step_and_each_once() -> None:
    own = GaussianDiffusion("sqrt", 50)
    assert own.visited(1) == [49]
    assert own.visited(2) == [49, 0]
    assert own.visited(50) == list(range(49, -1, -1))
    for steps in range(2, 50):
        visited = own.visited(steps)
        assert visited[0] == 49
        assert visited[-1] == 0
        assert len(set(visited)) == steps


def test_guidance_moves_away_from_the_unconditional_prediction() -> None:
    conditional, unconditional = normal(2, 3), normal(2, 3, seed=1)
    assert torch.equal(guided(conditional, unconditional, 0.0), conditional)
    moved = guided(conditional, unconditional, 2.0)
    torch.testing.assert_close(moved - conditional, 2 * (conditional - unconditional))


# Noise and time


def test_time_embedding_by_hand() -> None:
    found = time_embedding(torch.tensor([0, 7]), 6)
    rates = [1, 10000**-0.5, 10000**-1]
    assert found[0].tolist() == [0, 0, 0, 1, 1, 1]
    expected = [math.sin(7 * r) for r in rates] + [math.cos(7 * r) for r in rates]
    assert found[1].tolist() == pytest.approx(expected, rel=1e-5)


def test_noise_of_a_user_does_not_depend_on_the_others() -> None:
    def drawn(seeds: list[int], count: int = 40) -> Tensor:
        """(count, users, width)."""
        stream = seeded_noise(torch.tensor(seeds), 20, torch.device("cpu"))
        return torch.stack([next(stream) for _ in range(count)])

    together = drawn([3, -5, 2**40])
    assert torch.equal(together[:, [1]], drawn([-5]))
    assert torch.equal(together[:, [2, 0]], drawn([2**40, 3]))
    assert len({round(value, 6) for value in together.flatten().tolist()}) > 0.99 * together.numel()
    assert together.mean().item() == pytest.approx(0, abs=0.1)
    assert together.std().item() == pytest.approx(1, abs=0.1)
