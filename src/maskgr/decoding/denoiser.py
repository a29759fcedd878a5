"""The interface of a network to decoding, and its probabilities under the catalogue's rules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from maskgr.decoding.matching import CodeIndex, Filters, Remaining
from maskgr.errors import RequestError

FLOOR = -1e30  # finite log-probability of real items that the model gives probability 0


class Denoiser(Protocol):
    """p(digit | history, revealed digits of the target) for a batch of users' histories.

    The target is the next `items` items, each with one digit per level.
    """

    @property
    def codebook_sizes(self) -> tuple[int, ...]: ...

    @property
    def users(self) -> int: ...

    @property
    def items(self) -> int: ...

    def first(self) -> Sequence[Tensor]:
        """For each level (users, items, codes) log-probabilities with the whole target masked.

        All beams of a user share this first step.
        """
        ...

    def __call__(
        self, user: Tensor, digits: Tensor, revealed: Tensor, wanted: Tensor
    ) -> Sequence[Tensor]:
        """For each level (wanted at the level, codes) log-probabilities, in float32.

        `user` (rows,) ascending; `digits`, `revealed` and `wanted` (rows, items, m); digits that
        are not revealed are arbitrary. The answer has a row for each masked digit that is
        `wanted`, in the order of `wanted[:, :, level].nonzero()`.
        """
        ...


@dataclass(frozen=True, eq=False)
class Targets:
    """Partly revealed targets."""

    user: Tensor  # (rows,) ascending: a row of the denoiser and of the exclusions
    digits: Tensor  # (rows, items, m) int64
    revealed: Tensor  # (rows, items, m) bool

    def __len__(self) -> int:
        return len(self.user)


def blank(user: Tensor, items: int, n_levels: int) -> Targets:
    """Targets with every digit masked."""
    digits = torch.zeros((len(user), items, n_levels), dtype=torch.int64, device=user.device)
    return Targets(user, digits, torch.zeros_like(digits, dtype=torch.bool))


@dataclass(frozen=True, eq=False)
class Rules:
    """How the catalogue changes a model's probabilities."""

    index: CodeIndex
    constrained: bool
    """Set codes that no item with the revealed digits has to -inf; leave the others as they are."""
    renormalise: bool
    """Normalise over the codes that some item with the revealed digits has, filters aside: for a
    model trained so."""
    filters: Filters

    def __post_init__(self) -> None:
        if self.renormalise and not self.constrained:
            raise RequestError(
                "this model's probabilities are defined for real items only; "
                "search with the constraint"
            )


def first_log_probs(first: Sequence[Tensor], rules: Rules, target: Targets) -> Tensor:
    """(rows, items, m, codes) from `Denoiser.first`, for targets with every digit masked."""
    values = [level.index_select(0, target.user).flatten(0, 1) for level in first]
    return _spread(values, rules, target, ~target.revealed)


def next_log_probs(denoiser: Denoiser, rules: Rules, target: Targets, wanted: Tensor) -> Tensor:
    """(rows, items, m, codes) at the positions `wanted` (rows, items, m); elsewhere -inf."""
    values = denoiser(target.user, target.digits, target.revealed, wanted)
    return _spread(values, rules, target, wanted)


def _spread(values: Sequence[Tensor], rules: Rules, target: Targets, wanted: Tensor) -> Tensor:
    """All levels in one tensor, under the rules; smaller codebooks are padded with -inf."""
    rows, items, n_levels = wanted.shape
    slots = wanted.flatten(0, 1)  # (rows × items, m)
    user = target.user.repeat_interleave(items)
    shown = (user, target.digits.flatten(0, 1), target.revealed.flatten(0, 1))
    whole = Remaining(rules.index, Filters(), *shown) if rules.renormalise else None
    left = Remaining(rules.index, rules.filters, *shown) if rules.constrained else None
    sizes = rules.index.sizes
    result = torch.full((rows * items, n_levels, max(sizes)), -torch.inf, device=wanted.device)
    for level, log_probs in enumerate(values):
        own = slots[:, level].nonzero().squeeze(1)
        log_probs = log_probs.float()
        if whole is not None:
            codes = whole.allowed(level)[own]
            log_probs = log_probs.masked_fill(~codes, -torch.inf).log_softmax(-1)
        log_probs = log_probs.clamp(min=FLOOR)
        if left is not None:
            log_probs = log_probs.masked_fill_(~left.allowed(level)[own], -torch.inf)
        result[own, level, : sizes[level]] = log_probs
    return result.view(rows, items, n_levels, -1)


def best_first(owner: Tensor, scores: Tensor) -> Tensor:
    """(rows,) ascending by owner, the highest score first, the earlier row among equals."""
    order = scores.argsort(descending=True, stable=True)
    return order[owner[order].argsort(stable=True)]


def ranks(owner: Tensor) -> Tensor:
    """(rows,) the place of each row among those of its owner, which ascend."""
    return torch.arange(len(owner), device=owner.device) - torch.searchsorted(owner, owner)
