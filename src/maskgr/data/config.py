"""How events and items become a Dataset: the settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class DataConfig:
    """How events and items become a Dataset."""

    k_core: int = 0
    """Users and items with fewer interactions are dropped, again and again until none is left."""
    unknown_items: Literal["error", "drop", "keep"] = "error"
    """Items in the log but not in the catalogue: refuse, drop their events, keep without text."""
    unused_items: Literal["keep", "drop", "error"] = "keep"
    """Items in the catalogue but not in the log: keep (recommendable), drop, refuse."""
    repeats: Literal["keep", "drop"] = "keep"
    """A user's second event with the same item: keep, or drop all but the first."""


@dataclass(frozen=True)
class SyntheticConfig:
    """The generated shop: its size and the process by which its users move."""

    users: int = 4000
    items: int = 1000
    """From 180 items on all 60 leaf categories are stocked; a smaller shop has fewer leaves."""
    min_length: int = 5
    mean_length: float = 12.0
    max_length: int = 40
    """Events of a user: short histories are the most frequent, the mean is as asked."""
    seed: int = 0
    segments: int = 16
    """Kinds of customer; a user belongs to one, which nobody sees, and it never changes."""
    focus: float = 2.5
    """How few departments and leaves a segment cares for: 0 (all alike) to 8 (hardly two)."""
    repeat: float = 0.1
    """Chance that the next item is one the user already had."""
    recency: float = 0.7
    """Which one: the last event weighs 1, each event before it this many times the one after."""
    complement: float = 0.35
    """Else: chance that the leaf is what goes with the last item's, not what the segment likes."""
    loyalty: float = 0.6
    """Chance that the item is of the last item's brand, where the leaf stocks that brand."""
    skew: float = 1.0
    """Zipf exponent of an item's popularity within its leaf: 0 (all alike) to 3."""
