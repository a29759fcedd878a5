"""Settings of reading a dataset and of generating one, and the names of its parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

UnknownItems = Literal["error", "drop", "keep"]
UnusedItems = Literal["keep", "drop", "error"]
Repeats = Literal["keep", "drop"]
Unknown = Literal["raise", "skip"]  # for item IDs of a request that the catalogue does not have
SplitName = Literal["validation", "test"]


@dataclass(frozen=True)
class DataConfig:
    """How interactions and items become a Dataset."""

    k_core: int = 0
    """Users and items with fewer interactions are dropped until all that remain have this many."""
    unknown_items: UnknownItems = "error"
    """Items in the log but not in the catalogue: error, drop their events, or keep without text."""
    unused_items: UnusedItems = "keep"
    """Items in the catalogue but not in the log: keep (recommendable), drop, or error."""
    repeats: Repeats = "keep"
    """Several events of a user with the same item: keep all, or drop all but the first."""


@dataclass(frozen=True)
class SyntheticConfig:
    """The generated shop: its size and the process that its users follow."""

    users: int = 4000
    items: int = 1000
    """All 60 leaf categories are used from 180 items on; a smaller shop has fewer."""
    min_length: int = 5
    mean_length: float = 12.0
    max_length: int = 40
    """Length of a user's history: between min and max, skewed towards short, with this mean."""
    seed: int = 0
    segments: int = 16
    """Number of customer segments; each user belongs to one, hidden and fixed."""
    focus: float = 2.5
    """Concentration of a segment's taste on few leaves: 0 (uniform) to 8 (one or two)."""
    repeat: float = 0.1
    """Probability that the next item is one from the user's history."""
    recency: float = 0.7
    """A repeat draws past events by weight: 1 for the last, times this for each one before."""
    complement: float = 0.35
    """Otherwise: probability that the leaf complements the last item's leaf; else taste decides."""
    loyalty: float = 0.6
    """Probability that the item is of the last item's brand, if the leaf has that brand."""
    skew: float = 1.0
    """Zipf exponent of the items' popularity within a leaf: 0 (uniform) to 3."""
