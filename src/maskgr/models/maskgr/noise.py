"""The forward process that masks tokens (paper, section 3.1)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from maskgr.models.maskgr.config import ObjectiveConfig
from maskgr.nn.softmax import weighted_sum
from maskgr.training.fit import Batch


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
    levels: Tensor, sequences: Tensor, n_levels: int, generator: torch.Generator
) -> Tensor:
    """(tokens,) the forward process on items: all digits of one are masked together, or none."""
    return mask_tokens(levels, sequences[::n_levels], generator).repeat_interleave(n_levels)


def mask_last_item(
    levels: Tensor, sequences: Tensor, n_levels: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """(tokens,) only digits of the last items masked, and (sequences,) the noise that this is.

    Of the m digits a sequence's level t masks k = ceil(t * m), chosen at random, never none: a
    sequence with nothing masked teaches nothing. This is noise k / m: a set of k digits has
    probability 1 / (m * binomial(m, k)) and weight m / k, and their product is that of t ~ U(0, 1],
    independent masks and weight 1 / t, namely the integral of t^k (1 - t)^(m - k) / t.
    """
    counts = (levels * n_levels).ceil().clamp(1, n_levels)  # (sequences,)
    draws = torch.rand(len(levels), n_levels, generator=generator, device=generator.device)
    ranks = draws.argsort(dim=1).argsort(dim=1)
    masked = last_items(sequences, n_levels)
    masked[masked.clone()] = (ranks < counts[:, None]).flatten()
    return masked, counts / n_levels


def mask_share(share: float, sequences: Tensor, generator: torch.Generator) -> Tensor:
    """(tokens,) a fixed share of each sequence masked, as BERT4Rec does: round(share * length)
    tokens, chosen at random, and never none.

    `sequences`: (tokens,) the sequence that each token belongs to, in order.
    """
    lengths = torch.bincount(sequences)  # (sequences,)
    counts = (share * lengths.double()).round().clamp(min=1)
    order = torch.rand(len(sequences), generator=generator, device=generator.device).argsort()
    order = order[sequences[order].argsort(stable=True)]  # random within each sequence
    ranks = torch.arange(len(sequences)) - (lengths.cumsum(0) - lengths)[sequences]
    return torch.empty_like(order, dtype=torch.bool).scatter_(0, order, ranks < counts[sequences])


def last_items(sequences: Tensor, n_levels: int) -> Tensor:
    """(tokens,) whether a token belongs to the last item of its sequence."""
    ends = torch.ones_like(sequences, dtype=torch.bool)
    ends[:-n_levels] = sequences[n_levels:] != sequences[:-n_levels]
    return ends


@dataclass(frozen=True, eq=False)
class Noise:
    """Which tokens of a batch are masked, and with which weight each counts."""

    masked: Tensor  # (tokens,)
    levels: Tensor  # (tokens,) the noise level of each token: a masked one weighs 1 / level
    tokens: Tensor  # () tokens that could be masked, by weight: the loss is divided by them

    def to(self, device: torch.device) -> Noise:
        return Noise(self.masked.to(device), self.levels.to(device), self.tokens.to(device))

    def part(self, tokens: Tensor) -> Noise:
        """The noise of some `tokens`; the divisor stays that of the batch."""
        return Noise(self.masked[tokens], self.levels[tokens], self.tokens)


def draw_noise(
    sequences: Tensor,
    n_levels: int,
    config: ObjectiveConfig,
    generator: torch.Generator,
    weights: Tensor | None = None,
) -> Noise:
    """The noise of one batch. `sequences`: (tokens,) the sequence of each token, in order;
    `weights`: (items,) factors on the items' losses.

    For a sequence, the sum over masked tokens of -log p / level is an unbiased estimate of:
    - `diffusion`: the negative ELBO of the sequence (equation 3);
    - `fixed`: the cross-entropy of its tokens at that one noise level, which bounds nothing;
    - whole items: the negative ELBO of a model that reveals item by item, digits independently;
    - last item: the negative ELBO of the last item given the clean history.
    """
    count = int(sequences[-1]) + 1
    levels = stratified_levels(count, generator)
    noise = levels if config.masking == "diffusion" else torch.full_like(levels, config.fixed_ratio)
    masked = mask_tokens(noise, sequences, generator)
    at_stake = torch.ones_like(masked)
    if config.whole_item:
        chosen = _share(config.whole_item, count, generator)[sequences]
        masked = torch.where(chosen, mask_items(noise, sequences, n_levels, generator), masked)
    if config.last_item_share:
        chosen = _share(config.last_item_share, count, generator)
        last, last_noise = mask_last_item(levels, sequences, n_levels, generator)
        masked = torch.where(chosen[sequences], last, masked)
        noise = torch.where(chosen, last_noise, noise)
        at_stake = ~chosen[sequences] | last_items(sequences, n_levels)
    by_item = at_stake.view(-1, n_levels).sum(1)
    return Noise(masked, noise[sequences], weighted_sum(by_item, weights))


def _share(share: float, count: int, generator: torch.Generator) -> Tensor:
    """(count,) true with probability `share`, each by itself."""
    return torch.rand(count, generator=generator, device=generator.device) < share


@dataclass(frozen=True, eq=False)
class RevealedBatch(Batch):
    """Sequences, and for every item a session that starts with it: which digits are revealed."""

    asked: Batch  # the same sequences, with what the loss of the history draws for them
    revealed: Tensor  # (items, session, levels) bool
    place: Tensor  # (items,) the item of the session that is asked for
    # (items, count) in [0, 1): which of the items with the revealed digits a target is contrasted
    # with; None: with all of them.
    draws: Tensor | None = None

    def part(self, rows: np.ndarray) -> RevealedBatch:
        chosen = np.zeros(len(self.sequences), dtype=bool)
        chosen[rows] = True
        items = torch.from_numpy(np.repeat(chosen, self.sequences.lengths))
        return replace(
            self,
            sequences=self.sequences.select(rows),
            asked=self.asked.part(rows),
            revealed=self.revealed[items],
            place=self.place[items],
            draws=None if self.draws is None else self.draws[items],
        )


def draw_revealed(
    asked: Batch, session: int, levels: int, generator: torch.Generator
) -> RevealedBatch:
    """Masks digits of the session after each place as equation 3 does, by a noise level of its own.

    Sessions have one item or more, `session` at most; that of a masked digit, chosen at random, is
    asked for.
    """
    sequences, items = asked.sequences, len(asked.sequences.values)
    left = np.repeat(sequences.lengths, sequences.lengths) - sequences.places
    most = torch.from_numpy(left).clamp(max=session)
    count = (torch.rand(items, generator=generator) * most).long() + 1  # items of each session
    digits = count * levels
    masked_count = (stratified_levels(items, generator) * digits).ceil()
    draws = torch.rand(items, session * levels, generator=generator)
    draws[torch.arange(session * levels) >= digits[:, None]] = 2.0  # no such item
    order = draws.argsort(dim=1)
    masked = order.argsort(dim=1) < masked_count[:, None]
    revealed = (~masked & (draws < 2)).view(items, session, levels)
    return RevealedBatch(sequences, asked.weight, asked, revealed, order[:, 0] // levels)
