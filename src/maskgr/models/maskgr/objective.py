"""Equation 3 of the paper: the negative ELBO that training minimises and validation reports."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from maskgr.config import ObjectiveConfig
from maskgr.models.maskgr.noise import Noise
from maskgr.nn.layout import Layout


class Network(Protocol):
    """What the objective asks of a network (see `maskgr.models.network`)."""

    training: bool

    @property
    def digits(self) -> int: ...
    def draw_noise(
        self, layout: Layout, config: ObjectiveConfig, generator: torch.Generator
    ) -> Noise: ...
    def denoise(
        self,
        digits: Tensor,
        masked: Tensor,
        layout: Layout,
        rows: Tensor,
        numbers: Tensor | None = None,
    ) -> States: ...
    def log_probs(self, hidden: Tensor, level: int, allowed: Tensor | None = None) -> Tensor: ...
    def train(self, mode: bool = True) -> object: ...


class States(NamedTuple):
    """What a network makes of a noisy batch."""

    digits: Tensor  # (rows, width) of the masked digits that were asked for
    queries: Tensor | None  # (predicted, width of an item's vector) where there is a dense head
    predicted: Tensor | None  # (predicted,) the items of the batch that the queries are for


class AllowedCodes(Protocol):
    """What the objective asks of a catalogue."""

    def allowed(self, level: int, digits: Tensor, revealed: Tensor) -> Tensor:
        """(rows, codes) the codes at `level` of the items that agree with `digits` (rows, digits)
        wherever `revealed` (rows, digits) holds. `level` itself is not revealed."""
        ...


class Lesson(NamedTuple):
    """What is known of masked digits beside what they are (see `maskgr.models.distillation`)."""

    expected: list[Tensor]  # for each level (items, codes) its probabilities, given what is shown
    weight: Tensor  # (items,) of these in the target; the rest is the digit itself


@dataclass(frozen=True, eq=False)
class Loss:
    """Kept as a sum and a count, so that parts of a batch, on one machine or on many, add up."""

    total: Tensor  # () nats
    tokens: Tensor  # () how many tokens it speaks for

    @property
    def mean(self) -> Tensor:
        """Nats a token: equation 3 divided by the number of tokens."""
        return self.total / self.tokens


def masked_rows(masked: Tensor, digits: int) -> tuple[Tensor, list[int]]:
    """(rows,) the masked tokens, level after level, and how many each level has.

    In this order the logits of a level are one product with that level's codebook.
    """
    by_level = masked.view(-1, digits).t()  # (digits, items)
    level, item = by_level.nonzero(as_tuple=True)
    return item * digits + level, by_level.sum(1).tolist()


def negative_elbo(
    network: Network,
    digits: Tensor,
    layout: Layout,
    noise: Noise,
    catalogue: AllowedCodes | None = None,
    numbers: Tensor | None = None,
) -> tuple[Loss, States]:
    """Sum over masked tokens of -log p(token | masked sequence) / noise level (equation 3), and
    the states that it was computed from.

    `digits`: (items, digits) of all sequences, in the layout's order, and `numbers` (items,) in
    the catalogue, for a network that asks for more than digits. With a `catalogue` a digit's
    probabilities run only over codes that some item with the revealed digits has.
    """
    rows, _ = masked_rows(noise.masked, network.digits)
    states = network.denoise(digits, noise.masked, layout, rows, numbers)
    return masked_loss(network, states.digits, digits, noise, catalogue), states


def masked_loss(
    network: Network,
    states: Tensor,
    digits: Tensor,
    noise: Noise,
    catalogue: AllowedCodes | None = None,
    lesson: Lesson | None = None,
) -> Loss:
    """The sum of equation 3, from the `states` (rows, width) of the masked tokens, in the order of
    `masked_rows`. With a `lesson` some targets are probabilities, in place of `digits`."""
    rows, counts = masked_rows(noise.masked, network.digits)
    revealed = ~noise.masked.view_as(digits)
    parts = zip(
        torch.split(states, counts), torch.split(rows // network.digits, counts), strict=True
    )
    scores = []
    for level, (hidden, items) in enumerate(parts):
        true = digits[items]  # (rows of the level, digits)
        allowed = catalogue.allowed(level, true, revealed[items]) if catalogue else None
        log_probs = network.log_probs(hidden, level, allowed)  # (rows of the level, codes)
        score = log_probs.gather(1, true[:, level, None].long()).squeeze(1)
        if lesson is not None:
            wanted = lesson.expected[level].index_select(0, items)  # (rows of the level, codes)
            taught = (wanted * log_probs.masked_fill(wanted == 0, 0.0)).sum(1)
            score = torch.lerp(score, taught, lesson.weight[items])
        scores.append(score)
    weights = 1 / noise.levels[rows]
    return Loss(-(weights * torch.cat(scores)).sum(), noise.tokens)


@torch.no_grad()
def validation_bound(
    network: Network,
    batches: Iterable[tuple[Tensor, Tensor, Layout]],
    seed: int,
    catalogue: AllowedCodes | None = None,
) -> float:
    """Nats an item: what equation 3 says about held-out sequences, each (digits, numbers, layout).

    An upper bound on their negative log-likelihood in expectation over masks. Always the plain
    masking of the network's layout, in evaluation mode, and the same masks for the same seed:
    values of one run can be compared with each other, and with those of other options of training.
    """
    was_training = network.training
    network.train(False)
    generator = None
    nats = items = 0.0
    try:
        for digits, numbers, layout in batches:
            if generator is None:
                generator = torch.Generator(digits.device).manual_seed(seed)
            noise = network.draw_noise(layout, ObjectiveConfig(), generator)
            loss, _ = negative_elbo(network, digits, layout, noise, catalogue, numbers)
            nats += float(loss.total)
            items += len(digits)
    finally:
        network.train(was_training)
    return nats / items
