"""The optimiser of all networks: AdamW, in which the rows of a large table move when used."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn


class AdamW(torch.optim.AdamW):
    """AdamW whose steps cost as much as the batch where gradients are sparse.

    A table with `sparse=True` gets gradients for the rows of the batch alone. Only these rows and
    their moments move ("lazy" Adam, as in `torch.optim.SparseAdam`): a step over all rows of a
    million items takes seconds. Where every row has a gradient, it is Adam.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter.grad.is_sparse:
                    self._move_rows(parameter, group)
                    parameter.grad = None  # done; what is left is dense
        return super().step(closure)

    def _move_rows(self, parameter: Tensor, group: dict[str, Any]) -> None:
        assert parameter.grad is not None
        assert not group["weight_decay"]
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros(())
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(parameter)
        state["step"] += 1
        steps, (first, second) = float(state["step"]), group["betas"]
        gradient = parameter.grad.coalesce()
        rows, values = gradient.indices()[0], gradient.values()
        mean = state["exp_avg"][rows].lerp_(values, 1 - first)
        square = state["exp_avg_sq"][rows].mul_(second).addcmul_(values, values, value=1 - second)
        state["exp_avg"][rows], state["exp_avg_sq"][rows] = mean, square
        scale = square.sqrt_().div_(math.sqrt(1 - second**steps)).add_(group["eps"])
        rate = group["lr"] / (1 - first**steps)
        parameter.index_add_(0, rows, mean.div_(scale), alpha=-float(rate))


def build_optimizer(model: nn.Module, learning_rate: float, weight_decay: float) -> AdamW:
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
    # One pass over the parameters: a quarter of the time that several take.
    return AdamW(groups, lr=learning_rate, fused=True)


@torch.no_grad()
def clip_gradients(parameters: Iterable[Tensor], most: float) -> Tensor:
    """() the norm of all gradients, which are scaled down to the norm `most` where it is larger."""
    gradients = []
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad = parameter.grad.coalesce()
            gradients.append(parameter.grad.values())
        elif parameter.grad is not None:
            gradients.append(parameter.grad)
    norm = nn.utils.get_total_norm(gradients)
    factor = (most / (norm + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(factor)
    return norm
