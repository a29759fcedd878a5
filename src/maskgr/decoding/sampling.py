"""Ancestral sampling: the reverse process of masked diffusion (paper, Sections 3.1 and 3.2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from maskgr.decoding.denoiser import (
    Denoiser,
    Rules,
    Targets,
    blank,
    first_log_probs,
    next_log_probs,
)
from maskgr.decoding.matching import CodeIndex, Filters, Remaining
from maskgr.errors import RequestError

CELLS = 2**23  # (rows × positions × codes) of one pass: bounds memory


@dataclass(frozen=True, eq=False)
class Samples:
    """Draws for each user."""

    digits: Tensor  # (users, count, k, m) int64
    items: Tensor  # (users, count, k) int64; -1 where no item has the digits
    """A random one of the items with the digits."""


def posterior(s: float, t: float) -> tuple[float, float]:
    """For a token masked at noise t: the probability that it is still masked at the lower noise s,
    and that it is revealed. A token that is not masked at t is not masked at s either."""
    assert 0 <= s <= t <= 1
    assert t > 0
    return s / t, 1 - s / t


def reverse_step(masked: Tensor, s: float, t: float, generator: torch.Generator) -> Tensor:
    """(...) which of the tokens `masked` at noise t are still masked at noise s; none at s = 0."""
    stays, _ = posterior(s, t)
    draws = torch.rand(masked.shape, generator=generator, device=generator.device)
    return masked & (draws < stays)


def sample(
    denoiser: Denoiser,
    index: CodeIndex,
    *,
    count: int,
    steps: int,
    temperature: float,
    generator: torch.Generator,
    constrained: bool = True,
    filters: Filters | None = None,
) -> Samples:
    """`count` independent draws per user; the noise falls from 1 to 0 in `steps` equal steps.

    From noise t to s each masked digit is revealed with probability 1 - s/t, with a code drawn
    from p^(1/temperature). The items of a session are drawn independently and may repeat.
    """
    if count < 1 or steps < 1:
        raise RequestError(f"{count} samples in {steps} steps; give at least 1 of each")
    if not temperature > 0:
        raise RequestError(f"temperature {temperature} is not positive; give one above 0")
    user = torch.arange(denoiser.users, device=index.device).repeat_interleave(count)
    target = blank(user, denoiser.items, index.levels)
    drawing = _Drawing(
        denoiser, denoiser.first(), index, constrained, filters or Filters(), temperature
    )
    possible = drawing.possible(target).view(-1, 1, 1)
    for number in range(steps):
        t, s = (steps - number) / steps, (steps - number - 1) / steps
        masked = ~target.revealed
        now = masked & ~reverse_step(masked, s, t, generator) & possible
        drawing.reveal(target, now, generator)
    shape = (denoiser.users, count, denoiser.items)
    items = drawing.items(target, generator).view(shape)
    return Samples(target.digits.view(*shape, -1), items)


@dataclass(frozen=True, eq=False)
class _Drawing:
    denoiser: Denoiser
    first: Sequence[Tensor]
    index: CodeIndex
    constrained: bool
    filters: Filters
    temperature: float

    def possible(self, target: Targets) -> Tensor:
        """(rows,) bool: whether a draw exists; with the constraint, whether an item is left."""
        if not self.constrained:
            return torch.ones_like(target.user, dtype=torch.bool)
        return self._remaining(target.user, target.digits[:, 0], target.revealed[:, 0]).counts() > 0

    def _remaining(self, user: Tensor, codes: Tensor, revealed: Tensor) -> Remaining:
        return Remaining(self.index, self.filters, user, codes, revealed)

    def reveal(self, target: Targets, now: Tensor, generator: torch.Generator) -> None:
        """Draws the digits `now` (rows, items, m) of the targets, in place."""
        raw = Rules(self.index, constrained=False, renormalise=False, filters=Filters())
        wanted = now.flatten(1).any(dim=1)
        fresh = ~target.revealed.flatten(1).any(dim=1)
        size = max(1, CELLS // (now[0].numel() * max(self.index.sizes)))
        for some in ((wanted & fresh).nonzero(), (wanted & ~fresh).nonzero()):
            for rows in torch.split(some.squeeze(1), size):
                part = Targets(target.user[rows], target.digits[rows], target.revealed[rows])
                if not len(rows):
                    continue
                if fresh[rows[0]]:
                    log_probs = first_log_probs(self.first, raw, part)
                else:
                    log_probs = next_log_probs(self.denoiser, raw, part, now[rows])
                self._draw(log_probs, part, now[rows], generator)
                target.digits[rows], target.revealed[rows] = part.digits, part.revealed

    def _draw(
        self, log_probs: Tensor, target: Targets, now: Tensor, generator: torch.Generator
    ) -> None:
        """Draws one digit after the other, each from the codes that fit those before it.

        The model gives the digits of one step independently; drawn that way, their combination
        might belong to no item.
        """
        for place, level in now.any(dim=0).nonzero().tolist():
            rows = now[:, place, level].nonzero().squeeze(1)
            size = self.index.sizes[level]
            logits = log_probs[rows, place, level, :size]
            if self.constrained:
                item = (target.user[rows], target.digits[rows, place], target.revealed[rows, place])
                codes = self._remaining(*item).allowed(level)
                logits = logits.masked_fill(~codes, -torch.inf)
            # Subtract the largest first, so that a low temperature does not overflow.
            logits = (logits - logits.amax(dim=1, keepdim=True)) / self.temperature
            drawn = torch.multinomial(logits.softmax(dim=1), 1, generator=generator)
            target.digits[rows, place, level] = drawn.squeeze(1)
            target.revealed[rows, place, level] = True

    def items(self, target: Targets, generator: torch.Generator) -> Tensor:
        """(rows × items of a target,) a random one of the items with the digits; -1 if none."""
        digits = target.digits.flatten(0, 1)
        user = target.user.repeat_interleave(target.digits.shape[1])
        remaining = self._remaining(user, digits, torch.ones_like(digits).bool())
        counts = remaining.counts()
        chance = torch.rand(len(digits), generator=generator, device=generator.device)
        place = counts.cumsum(0) - counts + (chance * counts).long().clamp(max=counts - 1)
        found = torch.cat([remaining.matches.items, counts.new_full((1,), -1)])
        return torch.where(counts > 0, found[place.clamp(min=0)], -1)
