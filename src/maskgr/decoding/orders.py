"""Which masked digits a step reveals (paper, Section 3.2 and 'Role of inference strategy')."""

from __future__ import annotations

import torch
from torch import Tensor

from maskgr.errors import RequestError

ORDERS = ("random", "greedy", "left-to-right")


def fixed_priorities(
    order: str,
    users: int,
    positions: int,
    device: torch.device,
    generator: torch.Generator | None = None,
) -> Tensor | None:
    """(users, positions) the higher, the earlier revealed; None if probabilities decide (greedy).

    `random` draws one order a user, which all its beams follow: the product that Section 3.2
    maximises is along one order (k_1, …, k_m), and only then do beams compare like with like.
    """
    if order not in ORDERS:
        raise RequestError(f"there is no order {order!r}; choose one of {', '.join(ORDERS)}")
    if order == "greedy":
        return None
    if order == "left-to-right":
        return -torch.arange(positions, device=device, dtype=torch.float32).expand(users, -1)
    if generator is None:
        raise RequestError("the random order needs a generator; give one with a seed")
    return torch.rand(users, positions, generator=generator, device=generator.device).to(device)


def gaps(log_probs: Tensor, normalise: bool) -> Tensor:
    """(...) the probability of the most likely code less that of the second, for the greedy order.

    `log_probs` (..., codes) has -inf where a code cannot be. With `normalise` the others share
    all the probability, so that a digit with one possible code is certain: its gap is 1.
    """
    first, place = log_probs.max(dim=-1)
    second = log_probs.scatter(-1, place.unsqueeze(-1), -torch.inf).amax(dim=-1)
    if not normalise:
        return first.exp() - second.exp()
    rest = (log_probs - first.unsqueeze(-1)).exp_().sum(dim=-1)  # all codes, relative to the first
    return (1 - (second - first).exp()) / rest


def choose(priorities: Tensor, masked: Tensor, count: int) -> Tensor:
    """(rows, positions) bool: the `count` masked positions of highest priority, first among equals.

    Both arguments are (rows, positions), with at least `count` masked in each row.
    """
    ranked = priorities.masked_fill(~masked, -torch.inf).sort(dim=1, descending=True, stable=True)
    return torch.zeros_like(masked).scatter_(1, ranked.indices[:, :count], True)
