"""Settings of reading a dataset and of generating one, and the names of its parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from maskgr.errors import RequestError
from maskgr.settings import require_choice, require_numbers

UnknownItems = Literal["error", "drop", "keep"]
UnusedItems = Literal["keep", "drop", "error"]
Repeats = Literal["keep", "drop", "dedupe"]
Unknown = Literal["raise", "skip"]  # for item IDs of a request that the catalogue does not have
SplitName = Literal["validation", "test"]

COLUMNS = ("user_id", "item_id", "timestamp", "position", "event_type", "weight")
MAX_SEED = 2**31 - 1  # what every library takes
MAX_WEIGHT = 1e6


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
    """Several events of a user with the same item: keep all, drop all but the first, or drop those
    of the same time (dedupe)."""
    columns: Mapping[str, str] | None = None
    """The names of your columns by ours: {"user_id": "customer", "item_id": "sku"}."""
    events: Mapping[str, float] | None = None
    """The event types to keep, each with its weight: {"purchase": 1, "view": 0.2}; None: all."""
    targets: tuple[str, ...] | None = None
    """The event types to predict; the others are context in the histories. None: all."""
    text: tuple[str, ...] | None = None
    """The columns of the items that are text; None: those that hold strings or lists of strings,
    without identifiers, addresses, flags and numbers."""

    def __post_init__(self) -> None:
        require_numbers(self, k_core=(0, 1_000_000))
        require_choice("unknown_items", self.unknown_items, UnknownItems)
        require_choice("unused_items", self.unused_items, UnusedItems)
        require_choice("repeats", self.repeats, Repeats)
        _require_columns(self.columns)
        for name in ("targets", "text"):
            object.__setattr__(self, name, _names(name, getattr(self, name)))
        _require_weights(self.events)
        absent = [t for t in self.targets or () if self.events is not None and t not in self.events]
        if absent:
            raise RequestError(
                f"the target {absent[0]!r} is not among the events {', '.join(self.events or ())}; "
                "name it there, too"
            )
        if self.events and not any(self.events[t] for t in self.targets or self.events):
            raise RequestError("every target has the weight 0; give one of them more")

    def words(self) -> list[str]:
        """The same as options of a command."""
        words = []
        for name, value in asdict(self).items():
            if value is not None:
                words += [f"--{name.replace('_', '-')}", _written(value)]
        return words


def _written(value: Any) -> str:
    if isinstance(value, Mapping):
        return ",".join(f"{key}={item}" for key, item in value.items())
    return ",".join(value) if isinstance(value, tuple) else str(value)


def _require_columns(columns: Mapping[str, str] | None) -> None:
    if columns is None:
        return
    if not isinstance(columns, Mapping) or not columns:
        raise RequestError(
            f"columns is {columns!r}; give your names by ours, such as user_id=customer"
        )
    for ours, theirs in columns.items():
        if ours not in COLUMNS:
            raise RequestError(
                f"columns maps {ours!r}, which is no column of ours; map {', '.join(COLUMNS)}"
            )
        if not isinstance(theirs, str) or not theirs:
            raise RequestError(f"columns maps {ours} to {theirs!r}; give the name of a column")
    if len(set(columns.values())) < len(columns):
        raise RequestError("columns maps one column twice; map each to a name of its own")


def _names(what: str, names: Any) -> tuple[str, ...] | None:
    if names is None:
        return None
    listed = not isinstance(names, str) and all(isinstance(name, str) and name for name in names)
    if not listed or not len(names) or len(set(names)) < len(names):
        raise RequestError(f"{what} is {names!r}; give a list of names, each once")
    return tuple(names)


def _require_weights(events: Mapping[str, float] | None) -> None:
    if events is None:
        return
    if not isinstance(events, Mapping) or not events:
        raise RequestError(f"events is {events!r}; give weights by event type: purchase=1,view=0.2")
    for kind, weight in events.items():
        number = isinstance(weight, (int, float)) and not isinstance(weight, bool)
        if not number or not 0 <= weight <= MAX_WEIGHT:
            raise RequestError(
                f"the event type {kind!r} has the weight {weight!r}; give a number from 0 to "
                f"{MAX_WEIGHT:,.0f}"
            )


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

    def __post_init__(self) -> None:
        require_numbers(
            self,
            users=(1, 10**8),
            items=(1, 10**7),
            min_length=(1, 10_000),
            max_length=(self.min_length, 10_000),
            mean_length=(self.min_length, self.max_length),
            seed=(0, MAX_SEED),
            segments=(1, 10_000),
            focus=(0, 8),
            repeat=(0, 1),
            recency=(0, 1),
            complement=(0, 1),
            loyalty=(0, 1),
            skew=(0, 3),
        )
