"""Which masked digits a step reveals (paper, Section 3.2 and 'Role of inference strategy')."""

from __future__ import annotations

from typing import get_args

import torch
from torch import Tensor

from maskgr.data.sequences import Sequences
from maskgr.decoding.config import Order

ORDERS: tuple[Order, ...] = get_args(Order)
GOLDEN = -0x61C8864680B583EB  # splitmix64's increment, 2^64 / golden ratio, as a signed number


def fixed_priorities(order: Order, seeds: Tensor, positions: int) -> Tensor | None:
    """(users, positions) the higher, the earlier revealed; None if probabilities decide (greedy).

    `random` draws one order per user from its entry of `seeds` (users,) int64. All beams of the
    user follow it: the product that Section 3.2 maximises is along one order (k_1, …, k_m), so
    only beams with the same order have comparable scores.
    """
    assert order in ORDERS
    assert seeds.ndim == 1
    if order == "greedy":
        return None
    places = torch.arange(positions, device=seeds.device)
    if order == "left-to-right":
        return -places.float().expand(len(seeds), -1)
    bits = _hash(_hash(seeds).unsqueeze(1) + places * GOLDEN)  # (users, positions)
    return _shift(bits, 40).float()  # 24 bits: what float32 holds exactly


def history_seeds(histories: Sequences, seed: int) -> Tensor:
    """(users,) int64: a hash of each history's items in their order, and of `seed`.

    A user's seed does not depend on the other histories, so neither does its random order.
    """
    items, places = torch.from_numpy(histories.values), torch.from_numpy(histories.places)
    parts = _hash((items.long() << 32) + places)  # (interactions,)
    sums = torch.zeros(len(histories), dtype=torch.int64)
    sums.index_add_(0, torch.from_numpy(histories.owners), parts)
    return _hash(sums + _hash(torch.tensor(seed)))


def _hash(values: Tensor) -> Tensor:
    """One step of splitmix64 from each int64 value; products and sums wrap around at 2^64."""
    values = values + GOLDEN
    values = (values ^ _shift(values, 30)) * -0x40A7B892E31B1A47  # 0xBF58476D1CE4E5B9, signed
    values = (values ^ _shift(values, 27)) * -0x6B2FB644ECCEEE15  # 0x94D049BB133111EB, signed
    return values ^ _shift(values, 31)


def _shift(values: Tensor, bits: int) -> Tensor:
    """Shifts right and fills with zeros, where `>>` would repeat the sign bit."""
    return torch.bitwise_and(values >> bits, 2 ** (64 - bits) - 1)


def gaps(log_probs: Tensor, normalise: bool) -> Tensor:
    """(...) the probability of the most likely code less that of the second, for the greedy order.

    `log_probs` (..., codes) is -inf for impossible codes. With `normalise` the possible codes share
    all the probability, so that a digit with one possible code is certain: its gap is 1.
    """
    first, place = log_probs.max(dim=-1)
    second = log_probs.scatter(-1, place.unsqueeze(-1), -torch.inf).amax(dim=-1)
    if not normalise:
        return first.exp() - second.exp()
    total = (log_probs - first.unsqueeze(-1)).exp_().sum(dim=-1)  # relative to the first code
    return (1 - (second - first).exp()) / total


def choose(priorities: Tensor, masked: Tensor, count: int) -> Tensor:
    """(rows, positions) bool: the `count` masked positions of highest priority, first among equals.

    Both arguments are (rows, positions), with at least `count` masked in each row.
    """
    ranked = priorities.masked_fill(~masked, -torch.inf).sort(dim=1, descending=True, stable=True)
    return torch.zeros_like(masked).scatter_(1, ranked.indices[:, :count], True)
