"""The causal layout: every item of a history predicted at once, each by a masked copy of its own.

A sequence is a start, the units of all its items but the last (m digits or one vector an item), and
a copy of every item, some of whose digits are masked. The history sees only what is before; a copy
sees the history before its item, and itself. So one pass trains on what inference meets, a clean
history and a masked next item, as many times as there are items.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from maskgr.config import TrainConfig
from maskgr.errors import RequestError
from maskgr.nn.layout import Layout
from maskgr.nn.transformer import causal_mask


def check_copies(config: TrainConfig) -> None:
    copies = config.objective.copies
    if copies < 1 or (copies > 1 and config.network.attention != "causal"):
        raise RequestError(
            f"objective.copies is {copies}; it is 1, or more with network.attention=causal, where "
            "a history can have several next items"
        )


@dataclass(frozen=True, eq=False)
class Past:
    """Where the starts and units of a batch lie, sequence after sequence."""

    items: Tensor  # (items,) bool: those that are history to another
    layout: Layout
    masks: list[Tensor | None]
    units: Tensor  # (tokens,) row of `cat([start, units])`
    before: Tensor  # (items,) place of the last unit before each item

    @classmethod
    def of(cls, layout: Layout, digits: int, unit: int) -> Past:
        """`layout`: of the items' digits; `unit`: tokens of an item that is history."""
        device = layout.positions.device
        counts = [length // digits for count, length in layout.groups for _ in range(count)]
        items = torch.tensor(counts, device=device)  # (sequences,)
        owner, place = layout.sequences[::digits], layout.positions[::digits] // digits
        lengths = 1 + (items - 1) * unit
        own = history_layout(lengths, digits, unit)
        real = own.positions > 0
        return cls(
            items=place < items[owner] - 1,
            layout=own,
            masks=[causal_mask(length // digits, unit, 0, device) for _, length in layout.groups],
            units=torch.where(real, real.cumsum(0), 0),
            before=(lengths.cumsum(0) - lengths)[owner] + place * unit,
        )


class Remembered(NamedTuple):
    """Histories after the layers that they pass alone."""

    past: Past
    states: Tensor  # (tokens, width)
    before: Tensor  # (items, width) that of the history before each item

    def repeated(self, times: int, layout: Layout, digits: int, unit: int) -> Remembered:
        """Each sequence so many times in a row; `layout` is that of their items' digits."""
        if times == 1:
            return self
        past = Past.of(layout, digits, unit)
        lengths = torch.bincount(self.past.layout.sequences)
        states = self.states.index_select(0, repeat_runs(lengths, times))
        return Remembered(past, states, states.index_select(0, past.before))


@dataclass(frozen=True, eq=False)
class Copies:
    """Where units and copies lie together, the copies of a sequence behind its units."""

    layout: Layout
    masks: list[Tensor | None]
    order: Tensor  # (tokens,) row of `cat([history, copies])`
    copies: Tensor  # (digits of the items,) place of each digit's copy

    @classmethod
    def of(cls, past: Past, layout: Layout, digits: int, unit: int) -> Copies:
        """The arguments are those of `Past.of`, and what it gave."""
        device = layout.positions.device
        lengths = torch.bincount(past.layout.sequences)  # (sequences,) of starts and units
        joint = Layout.of((lengths + torch.bincount(layout.sequences)).tolist(), device)
        beyond = joint.positions - lengths[joint.sequences]  # place among the copies, if not < 0
        is_copy = beyond >= 0
        units, copies = (~is_copy).nonzero().squeeze(1), is_copy.nonzero().squeeze(1)
        order, positions = torch.empty_like(beyond), torch.empty_like(beyond)
        order[units] = torch.arange(len(units), device=device)
        order[copies] = torch.arange(len(copies), device=device) + len(units)
        positions[units] = past.layout.positions
        positions[copies] = digits + beyond[copies]
        masks: list[Tensor | None] = [
            causal_mask(length // digits, unit, digits, device) for _, length in layout.groups
        ]
        return cls(
            layout=Layout(joint.groups, positions, joint.sequences),
            masks=masks,
            order=order,
            copies=copies,
        )


def repeat_runs(lengths: Tensor, times: int) -> Tensor:
    """(entries,) where to find what is there if each of the runs of such `lengths` (runs,), one
    after the other, stands so many times in a row."""
    starts = (lengths.cumsum(0) - lengths).repeat_interleave(times)
    repeated = lengths.repeat_interleave(times)
    moved = repeated.cumsum(0) - repeated - starts  # by how much each run
    total = torch.arange(int(repeated.sum()), device=lengths.device)
    return total - moved.repeat_interleave(repeated)


def history_layout(lengths: Tensor, digits: int, unit: int) -> Layout:
    """Starts and units of sequences with `lengths` of them. Item i is at position (i + 1) × digits
    whatever its unit, its digits from there on; the start is at 0."""
    layout = Layout.of(lengths.tolist(), lengths.device)
    behind = (layout.positions - 1).clamp(min=0)
    positions = torch.where(layout.positions > 0, (behind // unit + 1) * digits + behind % unit, 0)
    return Layout(layout.groups, positions, layout.sequences)
