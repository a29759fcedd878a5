"""The forward process that masks tokens, and the posterior of its reverse (paper, section 3.1)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from maskgr.config import ObjectiveConfig
from maskgr.errors import RequestError


def stratified_levels(count: int, generator: torch.Generator) -> Tensor:
    """(count,) noise levels t in (0, 1], one from each of `count` equal strata, in random order.

    Each is uniform on (0, 1] by itself; together they cover it evenly, which lowers the variance.
    """
    device = generator.device
    strata = torch.randperm(count, generator=generator, device=device)
    within = 1 - torch.rand(count, generator=generator, device=device)  # in (0, 1]: t is never 0
    return (strata + within) / count


def mask_tokens(levels: Tensor, sequences: Tensor, generator: torch.Generator) -> Tensor:
    """(tokens,) the forward process: each token masked by itself with its sequence's level.

    `levels`: (sequences,); `sequences`: (tokens,) the sequence that each token belongs to.
    """
    draws = torch.rand(len(sequences), generator=generator, device=generator.device)
    return draws < levels[sequences]


def mask_items(
    levels: Tensor, sequences: Tensor, digits: int, generator: torch.Generator
) -> Tensor:
    """(tokens,) the forward process on items: all digits of one are masked together, or none."""
    return mask_tokens(levels, sequences[::digits], generator).repeat_interleave(digits)


def mask_last_item(
    levels: Tensor, sequences: Tensor, digits: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """(tokens,) only digits of the last items masked, and (sequences,) the noise that this is.

    Of the m digits a sequence's level t masks k = ceil(t * m), chosen at random, never none: a
    sequence with nothing masked teaches nothing. This is noise k / m: a set of k digits has
    probability 1 / (m * binomial(m, k)) and weight m / k, and their product is that of t ~ U(0, 1],
    independent masks and weight 1 / t, namely the integral of t^k (1 - t)^(m - k) / t.
    """
    counts = (levels * digits).ceil().clamp(1, digits)  # (sequences,)
    draws = torch.rand(len(levels), digits, generator=generator, device=generator.device)
    ranks = draws.argsort(dim=1).argsort(dim=1)
    masked = last_items(sequences, digits)
    masked[masked.clone()] = (ranks < counts[:, None]).flatten()
    return masked, counts / digits


def last_items(sequences: Tensor, digits: int) -> Tensor:
    """(tokens,) whether a token belongs to the last item of its sequence."""
    ends = torch.ones_like(sequences, dtype=torch.bool)
    ends[:-digits] = sequences[digits:] != sequences[:-digits]
    return ends


def posterior(s: float, t: float) -> tuple[float, float]:
    """For a token masked at noise t: the probability that it is still masked at the lower noise s,
    and that it is revealed. A token that is not masked at t is not masked at s either."""
    if not 0 <= s <= t <= 1 or t == 0:
        raise ValueError(f"noise goes from t in (0, 1] down to s in [0, t], not from {t} to {s}")
    return s / t, 1 - s / t


def reverse_step(masked: Tensor, s: float, t: float, generator: torch.Generator) -> Tensor:
    """(...) which of the tokens `masked` at noise t are still masked at noise s; none at s = 0."""
    stays, _ = posterior(s, t)
    draws = torch.rand(masked.shape, generator=generator, device=generator.device)
    return masked & (draws < stays)


@dataclass(frozen=True, eq=False)
class Noise:
    """Which tokens of a batch are masked, and what that says about all that could have been."""

    masked: Tensor  # (tokens,)
    levels: Tensor  # (tokens,) the noise that a token was masked with: its weight is 1 / level
    tokens: Tensor  # () how many tokens could have been masked

    def to(self, device: torch.device) -> Noise:
        return Noise(self.masked.to(device), self.levels.to(device), self.tokens.to(device))

    def part(self, tokens: Tensor) -> Noise:
        """That of some `tokens`; what all of the batch is divided by stays."""
        return Noise(self.masked[tokens], self.levels[tokens], self.tokens)


def draw_noise(
    sequences: Tensor, digits: int, config: ObjectiveConfig, generator: torch.Generator
) -> Noise:
    """The noise of one batch. `sequences`: (tokens,) the sequence of each token, in order.

    What the sum over masked tokens of -log p / level estimates, without bias, for a sequence:
    - `diffusion`: the negative ELBO of the sequence (equation 3);
    - `fixed`: the cross-entropy of its tokens at that one noise level, which bounds nothing;
    - whole items: the negative ELBO of a model that reveals item by item, digits independently;
    - last item: the negative ELBO of the last item given the clean history.
    """
    count = int(sequences[-1]) + 1
    levels = stratified_levels(count, generator)
    if not 0 < config.fixed_ratio <= 1:
        raise RequestError(f"fixed_ratio={config.fixed_ratio} must be above 0, and 1 at most")
    noise = levels if config.masking == "diffusion" else torch.full_like(levels, config.fixed_ratio)
    masked = mask_tokens(noise, sequences, generator)
    at_stake = torch.ones_like(masked)
    if config.whole_item:
        chosen = _share(config.whole_item, count, generator)[sequences]
        masked = torch.where(chosen, mask_items(noise, sequences, digits, generator), masked)
    if config.last_item_share:
        chosen = _share(config.last_item_share, count, generator)
        last, last_noise = mask_last_item(levels, sequences, digits, generator)
        masked = torch.where(chosen[sequences], last, masked)
        noise = torch.where(chosen, last_noise, noise)
        at_stake = ~chosen[sequences] | last_items(sequences, digits)
    return Noise(masked, noise[sequences], at_stake.sum())


def draw_item_noise(
    items: int, digits: int, config: ObjectiveConfig, generator: torch.Generator
) -> Noise:
    """The noise of a batch in which every item is predicted from the clean items before it.

    Each item is masked by itself as `mask_last_item` says, so the sum over an item's masked digits
    of -log p / level estimates the negative ELBO of the item given its history, and the sum over
    a sequence that of the whole sequence, by the chain rule. A share of `whole_item` is masked
    whole: the negative ELBO of a model that reveals an item's digits at once, independently.
    """
    levels = stratified_levels(items, generator)
    if config.whole_item:
        levels = levels.masked_fill(_share(config.whole_item, items, generator), 1.0)
    owners = torch.arange(items, device=generator.device).repeat_interleave(digits)
    masked, noise = mask_last_item(levels, owners, digits, generator)
    return Noise(masked, noise[owners], torch.tensor(items * digits, device=generator.device))


def _share(share: float, count: int, generator: torch.Generator) -> Tensor:
    """(count,) true with probability `share`, each by itself."""
    return torch.rand(count, generator=generator, device=generator.device) < share
