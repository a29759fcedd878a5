"""Packed batches: sequences of different lengths without padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Layout:
    """Sequences laid end to end in one flat tensor of tokens.

    Operations on single tokens (norms, projections, logits) run on all of them as one matrix;
    attention runs on one group of neighbouring sequences of equal length at a time.
    """

    groups: tuple[tuple[int, int], ...]  # (sequences, tokens of each) of runs of equal length
    positions: Tensor  # (tokens,) place in the sequence, from 0
    sequences: Tensor  # (tokens,) which sequence a token belongs to, from 0

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device | str = "cpu") -> Layout:
        """Sequences of `lengths` tokens, in this order; sorted lengths make the fewest groups."""
        sizes = torch.tensor(list(lengths), dtype=torch.int64, device=device)
        sequences = torch.repeat_interleave(sizes)
        starts = sizes.cumsum(0) - sizes
        positions = torch.arange(len(sequences), device=device) - starts[sequences]
        groups = tuple((len(list(run)), length) for length, run in groupby(lengths))
        return cls(groups, positions, sequences)

    @property
    def sizes(self) -> list[int]:
        """The tokens of each group."""
        return [count * length for count, length in self.groups]
