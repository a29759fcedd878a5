"""Settings of decoding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from maskgr.settings import require_choice, require_numbers

Retrieval = Literal["auto", "generative", "dense", "unified"]
Order = Literal["random", "greedy", "left-to-right"]
Cache = Literal["auto", "off", "frozen"]


@dataclass(frozen=True)
class DecodingConfig:
    """How the next item is found; wrong values are refused with a RequestError."""

    retrieval: Retrieval = "auto"
    """`generative`: beam search over the digits; `dense`: nearest items to a predicted vector;
    `unified`: beams ranked by their dense score; `auto`: the best that the model can do."""
    order: Order = "greedy"
    """Which digits are revealed first: the surest (paper), from the left, a random choice."""
    steps: int = 0
    """Evaluations of the network; 0 means one for each digit, 1 scores the whole catalogue."""
    beams: int = 20
    """Partly revealed items kept after each step; results beyond them need no more beams."""
    cache: Cache = "auto"
    """Whether the history is encoded once (`frozen`) or for every beam and step (`off`); `auto` is
    `frozen` where that is exact."""
    guidance: float = 0.0
    """Classifier-free guidance: how much further queries go away from those of an empty history."""
    remask: int = 0
    """Digits of each result that are taken back and revealed anew, in one more evaluation: those
    that were the least probable when they were revealed."""
    constrained: bool = True
    """Search only digits that some item of the catalogue has."""

    def __post_init__(self) -> None:
        require_choice("decoding.retrieval", self.retrieval, Retrieval)
        require_choice("decoding.order", self.order, Order)
        require_choice("decoding.cache", self.cache, Cache)
        require_numbers(
            self,
            "decoding.",
            steps=(0, 10_000),
            beams=(1, 100_000),
            guidance=(0, 1000),
            remask=(0, 10_000),
        )
