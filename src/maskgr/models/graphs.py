"""Networks as graphs of plain tensors, for runtimes other than torch.

The packed layout of `maskgr.nn.transformer` has as many attention calls as lengths in the batch,
which no graph can have. A graph takes a batch of histories padded behind their last items: under a
causal mask no item sees what is behind it, so padding changes nothing and needs no mask.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor, nn

from maskgr.nn.transformer import Encoder, Layout


@dataclass(frozen=True, eq=False)
class Graph:
    """A network that is traced once, for batches of any size."""

    network: nn.Module
    inputs: Mapping[str, Tensor]  # examples, by the name of the argument of `forward`
    axes: Mapping[str, Mapping[int, str]]  # of each input, the axes of any size and their names
    outputs: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Exported:
    """Everything that a model needs to recommend without torch."""

    graphs: Mapping[str, Graph]
    arrays: Mapping[str, npt.NDArray[Any]]
    settings: Mapping[str, Any]


class PaddedHistory(nn.Module):
    """A causal encoder over padded histories."""

    def __init__(self, start: nn.Parameter, encoder: Encoder, query: nn.Linear) -> None:
        """`start` (1, width): the token before a history."""
        super().__init__()
        self.start, self.encoder, self.query = start, encoder, query

    def forward(self, vectors: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """(users, width) queries, and (users, 1 + items, width) hidden states.

        `vectors` (users, items, width): of the histories' items, anything behind a history's end;
        `lengths` (users,): their numbers of items.
        """
        users, items, width = vectors.shape
        tokens = items + 1
        place = torch.arange(tokens, device=vectors.device)
        layout = Layout(((users, tokens),), place.repeat(users), place)
        embedded = torch.cat([self.start.expand(users, 1, width), vectors], 1)
        causal = place[:, None] >= place  # (tokens, tokens) True where a row may see a column
        hidden, _ = self.encoder(embedded.flatten(0, 1), layout, [causal])
        hidden = hidden.view(users, tokens, width)
        last = hidden[torch.arange(users, device=lengths.device), lengths]
        return self.query(last) * width**-0.5, hidden


def history_graph(network: nn.Module, width: int, outputs: tuple[str, ...]) -> Graph:
    """The graph of a network that takes what `PaddedHistory` takes."""
    device = next(network.parameters()).device
    lengths = torch.tensor([2, 5, 3], device=device)
    inputs = {"vectors": torch.zeros(3, 5, width, device=device), "lengths": lengths}
    axes = {"vectors": {0: "users", 1: "items"}, "lengths": {0: "users"}}
    return Graph(network, inputs, axes, outputs)
