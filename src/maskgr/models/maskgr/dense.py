"""Dense retrieval beside the digits (paper, Section 3.3): text as an input, and the dense head."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from maskgr.models.maskgr.config import DenseConfig
from maskgr.nn.item_vectors import principal_components


class LowRank(nn.Module):
    """A linear map kept as two factors: fewer parameters and operations than their product."""

    def __init__(self, inputs: int, outputs: int, rank: int) -> None:
        super().__init__()
        self.down = nn.Linear(inputs, rank, bias=False)
        self.up = nn.Linear(rank, outputs)
        nn.init.normal_(self.down.weight, std=inputs**-0.5)
        nn.init.normal_(self.up.weight, std=rank**-0.5)
        nn.init.zeros_(self.up.bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.up(self.down(x))
        return out


def linear(inputs: int, outputs: int, rank: int) -> nn.Module:
    """A map of this rank, as factors where these are smaller than the full matrix."""
    if rank and rank * (inputs + outputs) < inputs * outputs:
        return LowRank(inputs, outputs, rank)
    full = nn.Linear(inputs, outputs)
    nn.init.normal_(full.weight, std=inputs**-0.5)
    nn.init.zeros_(full.bias)
    return full


class TextInput(nn.Module):
    """A_j . text embedding, one map a digit, added to the tokens of a wholly visible item."""

    embeddings: Tensor  # (items, any)
    mean: Tensor
    basis: Tensor
    text: Tensor  # (items, text width) centred principal components

    def __init__(self, width: int, n_levels: int, embeddings: Tensor) -> None:
        super().__init__()
        self.register_buffer("embeddings", embeddings.float(), persistent=False)
        mean, basis = principal_components(embeddings.float(), width)
        self.register_buffer("mean", mean)
        self.register_buffer("basis", basis)
        self.register_buffer("text", torch.empty(0), persistent=False)
        self.width = width
        self.maps = nn.Linear(basis.shape[1], n_levels * width)
        nn.init.normal_(self.maps.weight, std=basis.shape[1] ** -0.5)
        nn.init.zeros_(self.maps.bias)
        self._project()
        self.register_load_state_dict_post_hook(lambda module, _: module._project())  # type: ignore[no-untyped-call]

    def _project(self) -> None:
        self.text = (self.embeddings - self.mean) @ self.basis

    def forward(self, numbers: Tensor) -> Tensor:
        """(items × levels, width) for the items `numbers` (items,)."""
        out: Tensor = self.maps(self.text.index_select(0, numbers))
        return out.view(-1, self.width)


class DenseHead(nn.Module):
    """Projects the hidden states of an item's masked digits into the space of text embeddings."""

    table: Tensor  # (items, text width): what the queries are multiplied with

    def __init__(self, config: DenseConfig, inputs: int, embeddings: Tensor) -> None:
        super().__init__()
        self.register_buffer("table", embeddings.float(), persistent=False)
        self.norm = nn.LayerNorm(inputs)
        outputs = embeddings.shape[1]
        self.maps = nn.Sequential(
            linear(inputs, config.hidden, config.rank),
            nn.GELU(),
            linear(config.hidden, outputs, config.rank),
        )

    def forward(self, hidden: Tensor) -> Tensor:
        """(items, text width) queries, from the joined hidden states of an item's digits."""
        queries: Tensor = self.maps(self.norm(hidden))
        return queries
