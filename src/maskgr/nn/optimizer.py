"""The optimiser of all networks: AdamW."""

from __future__ import annotations

import torch
from torch import nn


def build_optimizer(
    model: nn.Module, learning_rate: float, weight_decay: float
) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices, but not on biases, gains and embedding tables.

    A table (`nn.Embedding`) gets gradients only in the rows of a batch, while decay would shrink
    all rows in every step: the embeddings of rare tokens would vanish.
    """
    tables = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag)
        for parameter in module.parameters(recurse=False)
    }
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    decayed = [p for p in trained if p.ndim >= 2 and id(p) not in tables]
    kept = {id(p) for p in decayed}
    groups = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": [p for p in trained if id(p) not in kept], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=learning_rate)
