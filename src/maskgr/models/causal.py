"""The causal layout: every item of a history predicted at once, each by a masked copy of its own.

A sequence is a start, the units of all its items but the last (m digits or one vector an item), and
a copy of every item, some of whose digits are masked. The history sees only what is before; a copy
sees the history before its item, and itself. So one pass trains on what inference meets, a clean
history and a masked next item, as many times as there are items.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from maskgr.diffusion.layout import Layout
from maskgr.models.transformer import causal_mask


@dataclass(frozen=True, eq=False)
class Copies:
    """Where the units and copies of a batch lie; sequences one after the other everywhere."""

    past: Tensor  # (items,) bool: the items that are history to another
    history: Layout  # starts and units
    history_masks: list[Tensor | None]
    units: Tensor  # (history tokens,) row of `cat([start, units])`
    joint: Layout  # starts, units and copies
    joint_masks: list[Tensor | None]
    order: Tensor  # (joint tokens,) row of `cat([history, copies])`
    copies: Tensor  # (tokens,) place in `joint` of each digit's copy
    before: Tensor  # (items,) place in `joint` of the last unit before each item

    @classmethod
    def of(cls, layout: Layout, digits: int, unit: int) -> Copies:
        """`layout`: of the items' digits; `unit`: tokens of an item that is history."""
        device = layout.positions.device
        counts = [(count, length // digits) for count, length in layout.groups]
        items = torch.tensor([n for count, n in counts for _ in range(count)], device=device)
        owner, place = layout.sequences[::digits], layout.positions[::digits] // digits

        lengths = 1 + (items - 1) * unit  # (sequences,)
        history = history_layout(lengths, digits, unit)
        real = history.positions > 0

        whole = lengths + items * digits
        joint = Layout.of(whole.tolist(), device)
        beyond = joint.positions - lengths[joint.sequences]  # place among the copies, if not < 0
        is_copy = beyond >= 0
        order = torch.empty_like(joint.positions)
        order[~is_copy] = torch.arange(len(history.positions), device=device)
        copies = is_copy.nonzero().squeeze(1)
        order[copies] = torch.arange(len(copies), device=device) + len(history.positions)
        positions = torch.empty_like(joint.positions)
        positions[~is_copy] = history.positions
        positions[copies] = digits + beyond[copies]
        starts = whole.cumsum(0) - whole
        return cls(
            past=place < items[owner] - 1,
            history=history,
            history_masks=[causal_mask(n, unit, 0, device) for _, n in counts],
            units=torch.where(real, real.cumsum(0), 0),
            joint=Layout(joint.groups, positions, joint.sequences),
            joint_masks=[causal_mask(n, unit, digits, device) for _, n in counts],
            order=order,
            copies=copies,
            before=starts[owner] + place * unit,
        )


def history_layout(lengths: Tensor, digits: int, unit: int) -> Layout:
    """Starts and units of sequences with `lengths` of them. Item i is at position (i + 1) × digits
    whatever its unit, its digits from there on; the start is at 0."""
    layout = Layout.of(lengths.tolist(), lengths.device)
    behind = (layout.positions - 1).clamp(min=0)
    positions = torch.where(layout.positions > 0, (behind // unit + 1) * digits + behind % unit, 0)
    return Layout(layout.groups, positions, layout.sequences)
