"""Optimiser of all models: AdamW, linear warm-up and cosine decay, gradient clipping."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


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
        if isinstance(module, nn.Embedding)
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


def schedule(step: int, total: int, warmup: int) -> float:
    """Factor on the peak learning rate at `step` (from 0): linear warm-up, then cosine decay.

    The first step has 1 / warmup rather than 0, the last is close to 0.
    """
    if step < warmup:
        return (step + 1) / warmup
    done = min((step - warmup) / max(total - warmup, 1), 1.0)
    return 0.5 * (1 + math.cos(math.pi * done))


def clip_gradients(model: nn.Module, limit: float) -> Tensor:
    """Scales all gradients so that their total norm is at most `limit`; returns the norm before."""
    return nn.utils.clip_grad_norm_(model.parameters(), limit)
