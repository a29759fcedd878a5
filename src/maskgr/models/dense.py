"""Dense retrieval (paper, section 3.3): items' vectors, and the head that predicts the next."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from maskgr.config import DenseConfig, NetworkConfig
from maskgr.errors import RequestError


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
    """A map of this rank, as factors where they are the smaller."""
    if rank and rank * (inputs + outputs) < inputs * outputs:
        return LowRank(inputs, outputs, rank)
    full = nn.Linear(inputs, outputs)
    nn.init.normal_(full.weight, std=inputs**-0.5)
    nn.init.zeros_(full.bias)
    return full


class ItemVectors(nn.Module):
    """One vector an item: LayerNorm(its digits + its text + a part of its own).

    The own part starts at zero, and new items keep it there: they are what their digits and text
    say, as every item was before training.
    """

    def __init__(self, width: int, text: int, items: int) -> None:
        """`text`: entries of a text embedding, 0 for none; `items`: with a part of their own."""
        super().__init__()
        self.text = nn.Linear(text, width, bias=False) if text else None
        self.own = nn.Embedding(items, width) if items else None
        self.norm = nn.LayerNorm(width)
        if self.text is not None:
            nn.init.normal_(self.text.weight, std=text**-0.5)
        if self.own is not None:
            nn.init.zeros_(self.own.weight)

    def forward(self, digits: Tensor, text: Tensor | None, numbers: Tensor | None) -> Tensor:
        """(items, width) from sums of digits' embeddings (items, width), of unit variance, text
        embeddings (items, text) and item numbers (items,), or None for all in order."""
        x = digits
        if self.text is not None:
            x = x + self.text(text)
        if self.own is not None:
            x = x + (self.own.weight if numbers is None else self.own(numbers))
        out: Tensor = self.norm(x)
        return out


class DenseHead(nn.Module):
    """From states to queries, whose products with the items' vectors are scores."""

    def __init__(self, config: DenseConfig, inputs: int, outputs: int) -> None:
        super().__init__()
        self.config = config
        self.norm = nn.LayerNorm(inputs)
        if config.hidden:
            self.maps = nn.Sequential(
                linear(inputs, config.hidden, config.rank),
                nn.GELU(),
                linear(config.hidden, outputs, config.rank),
            )
        else:
            plain = linear(inputs, outputs, config.rank)
            if isinstance(plain, nn.Linear) and inputs == outputs:
                # Before anything is learned, a history asks for what is like its last item.
                nn.init.eye_(plain.weight)
            self.maps = nn.Sequential(plain)
        start = math.log(config.temperature or outputs**0.5)
        self.temperature = nn.Parameter(torch.tensor(start)) if config.learn_temperature else start
        self.repeat = nn.Parameter(torch.zeros(())) if config.repeat_bias else None
        self._repeat_scale = outputs**0.5

    @property
    def repeat_bias(self) -> Tensor | None:
        """() what the scores of the history's items get beside the product.

        The parameter is scaled up: a step of the optimiser moves a product by all entries of two
        vectors, and this by one number, which has far to go where nobody takes an item twice.
        """
        return None if self.repeat is None else self.repeat * self._repeat_scale

    @property
    def repeats(self) -> float:
        """The same as a number."""
        bias = self.repeat_bias
        return 0.0 if bias is None else float(bias.detach())

    @property
    def outputs(self) -> int:
        """Entries of a query."""
        return int(next(reversed(list(self.maps.parameters()))).shape[0])

    @property
    def flops(self) -> int:
        """Operations of a forward pass, in products of matrices, for one prediction."""
        return sum(2 * p.numel() for p in self.maps.parameters() if p.ndim == 2)

    def forward(self, states: Tensor) -> Tensor:
        """(rows, outputs) queries, the temperature included."""
        queries: Tensor = self.maps(self.norm(states))
        if self.config.similarity == "cosine":
            queries = functional.normalize(queries, dim=-1)
        temperature = self.temperature
        scale = (
            torch.exp(-temperature) if isinstance(temperature, Tensor) else math.exp(-temperature)
        )
        return queries * scale

    def targets(self, vectors: Tensor) -> Tensor:
        """(items, outputs) what the queries are multiplied with."""
        return (
            functional.normalize(vectors, dim=-1) if self.config.similarity == "cosine" else vectors
        )


def check_dense(config: DenseConfig, network: NetworkConfig) -> None:
    """That the settings make sense together."""
    for name in ("hidden", "rank", "temperature", "negatives", "weight", "followers"):
        if not getattr(config, name) >= 0:
            raise RequestError(f"dense.{name} is {getattr(config, name)}; it must be 0 or more")
    causal = network.attention == "causal"
    if config.table != "off" and causal and (config.layer or not network.history_layers):
        raise RequestError(
            "the dense head of a causal network reads the history after its own layers; set "
            "network.history_layers to 1 or more and leave dense.layer out"
        )
    if not 0 <= config.layer <= network.layers:
        raise RequestError(
            f"dense.layer is {config.layer} in a network of {network.layers} layers; use 0 to "
            f"{network.layers}"
        )
    if config.repeat_bias and (network.attention != "causal" or config.negatives):
        raise RequestError(
            "dense.repeat_bias goes with network.attention=causal and the whole catalogue; leave "
            "it or dense.negatives out"
        )
