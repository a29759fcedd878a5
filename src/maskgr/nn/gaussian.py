"""Gaussian diffusion of vectors: noise schedules, the forward process, and sampling.

A step `t` counts from 0, the least noise, to `steps - 1`, nearly or wholly noise. `alpha_bar[t]` is
the share of the clean vector's variance that is left. The network predicts the clean vector x_0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Literal

import torch
from torch import Tensor, nn

Schedule = Literal["linear", "cosine", "exponential", "sqrt"]
Predict = Callable[[Tensor, Tensor], Tensor]
"""(rows, width) clean vectors from noisy ones (rows, width) and their steps (rows,)."""

NOISE_CHUNK = 32  # draws at once: calling a generator takes longer than drawing a vector


def alpha_bars(schedule: Schedule, steps: int) -> Tensor:
    """(steps,) float64, falling from nearly 1 to nearly 0.

    - `linear` (Ho et al., 2020): beta rises from 1e-4 to 0.02, whatever the number of steps; with
      fewer than a few hundred, noise stays far from pure.
    - `cosine` (Nichol and Dhariwal, 2021): cos^2 of the time.
    - `exponential` (variance-preserving SDE, as DreamRec has it): exp of minus a parabola.
    - `sqrt` (Li et al., 2022, Diffusion-LM): 1 - sqrt(time); much noise from the start.
    """
    count = torch.arange(1, steps + 1, dtype=torch.float64)
    if schedule == "linear":
        return (1 - torch.linspace(1e-4, 0.02, steps, dtype=torch.float64)).cumprod(0)
    if schedule == "cosine":
        offset = 0.008
        edges = torch.arange(steps + 1, dtype=torch.float64) / steps
        curve = (((edges + offset) / (1 + offset)) * math.pi / 2).cos() ** 2
        return (curve[1:] / curve[:-1]).clamp(1 - 0.9999, 1 - 0.0001).cumprod(0)
    if schedule == "exponential":
        least, most = 0.1, 10.0
        places = torch.linspace(1, 2 * steps + 1, steps, dtype=torch.float64)
        return (-(least / steps + places * 0.5 * (most - least) / steps**2)).cumsum(0).exp()
    assert schedule == "sqrt"
    return 1 - (count / steps).sqrt()


class GaussianDiffusion(nn.Module):
    """The forward process q, its posterior, and two ways back. It has no parameters."""

    alpha_bar: Tensor  # (steps,)
    of_clean: Tensor  # (steps,) factors of x_0 and x_t in the mean of q(x_{t-1} | x_t, x_0)
    of_noisy: Tensor
    variance: Tensor  # (steps,) of q(x_{t-1} | x_t, x_0)

    def __init__(self, schedule: Schedule, steps: int) -> None:
        super().__init__()
        self.steps = steps
        bars = alpha_bars(schedule, steps)
        before = torch.cat([bars.new_ones(1), bars[:-1]])
        kept = bars / before  # alpha_t = 1 - beta_t
        # Ho et al. (2020), equation 7; in float64, as 1 - alpha_bar is small at the first steps.
        for name, values in {
            "alpha_bar": bars,
            "of_clean": before.sqrt() * (1 - kept) / (1 - bars),
            "of_noisy": kept.sqrt() * (1 - before) / (1 - bars),
            "variance": (1 - kept) * (1 - before) / (1 - bars),
        }.items():
            self.register_buffer(name, values.float(), persistent=False)

    def noised(self, clean: Tensor, times: Tensor, noise: Tensor) -> Tensor:
        """(rows, width) x_t ~ q(x_t | x_0) of `clean`, at `times` (rows,), by standard `noise`."""
        left = self.alpha_bar[times, None]
        return left.sqrt() * clean + (1 - left).sqrt() * noise

    def posterior(self, noisy: Tensor, clean: Tensor, times: Tensor) -> tuple[Tensor, Tensor]:
        """(rows, width) mean and (rows, 1) variance of q(x_{t-1} | x_t, x_0)."""
        mean = self.of_clean[times, None] * clean + self.of_noisy[times, None] * noisy
        return mean, self.variance[times, None]

    def ancestral(self, predict: Predict, start: Tensor, noises: Iterator[Tensor]) -> Tensor:
        """(rows, width) x_0 from pure noise `start`, by every step (DDPM); each step but the last
        takes standard noise (rows, width) from `noises`."""
        noisy = start
        for t in range(self.steps - 1, -1, -1):
            times = torch.full((len(start),), t, device=start.device)
            noisy, variance = self.posterior(noisy, predict(noisy, times), times)
            if t:
                noisy = noisy + variance.sqrt() * next(noises)
        return noisy

    def ddim(self, predict: Predict, start: Tensor, steps: int) -> Tensor:
        """(rows, width) x_0 from pure noise `start`, in `steps` steps without further noise (Song
        et al., 2021, equation 12, eta = 0)."""
        noisy, clean = start, start
        visited = self.visited(steps)
        for t, following in zip(visited, [*visited[1:], None], strict=True):
            clean = predict(noisy, torch.full((len(start),), t, device=start.device))
            if following is None:
                break
            left, next_left = self.alpha_bar[t], self.alpha_bar[following]
            noise = (noisy - left.sqrt() * clean) / (1 - left).sqrt()
            noisy = next_left.sqrt() * clean + (1 - next_left).sqrt() * noise
        return clean

    def visited(self, steps: int) -> list[int]:
        """The steps that `ddim` visits, evenly from the last to the first; one step: the last."""
        assert 1 <= steps <= self.steps
        places = torch.linspace(self.steps - 1, 0, steps, dtype=torch.float64)
        return [int(place) for place in places.round().tolist()]


def guided(conditional: Tensor, unconditional: Tensor, weight: float) -> Tensor:
    """Classifier-free guidance (Ho and Salimans, 2021): away from the unconditional prediction."""
    return (1 + weight) * conditional - weight * unconditional


def time_embedding(times: Tensor, width: int) -> Tensor:
    """(rows, width) sines and cosines of the steps `times` (rows,) at rates from 1 to 1 / 10000."""
    assert width % 2 == 0
    half = width // 2
    rates = 10000.0 ** (-torch.arange(half, device=times.device).float() / max(half - 1, 1))
    angles = times.float()[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], dim=1)


def seeded_noise(seeds: Tensor, width: int, device: torch.device) -> Iterator[Tensor]:
    """(rows, width) standard normal numbers, without end; a row's follow from its own entry of
    `seeds` (rows,) int64 alone."""
    generators = [torch.Generator().manual_seed(seed) for seed in seeds.tolist()]
    count = 1  # many need no more than a start
    while True:
        drawn = torch.empty(len(generators), count, width)
        for own, generator in zip(drawn, generators, strict=True):
            own.normal_(generator=generator)
        yield from drawn.transpose(0, 1).to(device)
        count = NOISE_CHUNK
