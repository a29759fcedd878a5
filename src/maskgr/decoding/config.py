"""How the next item is decoded: the settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class DecodingConfig:
    """How the next item is found."""

    retrieval: Literal["auto", "generative", "dense", "unified", "fused"] = "auto"
    """By unmasking its digits, by the dense head, by the dense head among the beams, by the sum of
    both scores; auto is fused, or the one of the two that there is or that has all the weight."""
    order: Literal["greedy", "left-to-right", "random"] = "greedy"
    """Which digits come first: the surest (paper), from the left, any."""
    steps: int = 0
    """Evaluations of the network; 0 is one for every digit, 1 scores the whole catalogue."""
    beams: int = 20
    """Partly unmasked items kept after each step; at least as many as are asked for."""
    cache: Literal["auto", "off", "frozen"] = "auto"
    """Whether the history is encoded once (frozen) or for every beam and step (off); auto is
    frozen where that is exact."""
    constrained: bool = True
    """Only digits that some item of the catalogue has."""
    seed: int = 0
    """Of the random order."""
