"""IDs that say nothing about the item, for the ablations: random tuples and the plain item ID.

They belong to rows, not to vectors: the i-th item has the i-th ID. So they can be given only to
the items that they were fitted to, all of them in the same order, and a new item has none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from maskgr.errors import DataError
from maskgr.sids.config import QuantizerConfig
from maskgr.sids.vectors import Digits, Floats, normalise


@dataclass(frozen=True, eq=False)
class _RowIds:
    table: Digits  # (n, levels) the ID of each row
    sizes: tuple[int, ...]
    mean: Floats  # (d,) the best guess at a vector of which nothing is known

    name: ClassVar[str]

    @property
    def codebook_sizes(self) -> tuple[int, ...]:
        return self.sizes

    def encode(self, vectors: npt.ArrayLike) -> Digits:
        rows = normalise(vectors)
        if len(rows) != len(self.table):
            raise DataError(
                f"{self.name} IDs belong to the {len(self.table)} items that they were made for, "
                f"and {len(rows)} were given; make the IDs again for all items together, or use a "
                "quantiser that reads the embeddings"
            )
        return self.table.copy()

    def decode(self, digits: Digits, levels: int | None = None) -> Floats:
        return np.tile(self.mean, (len(digits), 1))

    def state(self) -> tuple[dict[str, npt.NDArray[Any]], dict[str, Any]]:
        return {"table": self.table, "mean": self.mean}, {"sizes": list(self.sizes)}

    @classmethod
    def from_state(cls, tensors: dict[str, npt.NDArray[Any]], settings: dict[str, Any]) -> Self:
        return cls(tensors["table"], tuple(settings["sizes"]), tensors["mean"])


@dataclass(frozen=True, eq=False)
class RandomIds(_RowIds):
    """Tuples drawn without replacement, so that no two items share one."""

    name: ClassVar[str] = "random"

    @classmethod
    def fit(
        cls, vectors: npt.ArrayLike, config: QuantizerConfig, *, progress: bool = False
    ) -> Self:
        rows = normalise(vectors)
        if config.codes**config.levels < len(rows):
            raise DataError(
                f"{config.levels} levels of {config.codes} codes make fewer tuples than there are "
                f"items ({len(rows)}); raise --codes or --levels"
            )
        table = _distinct_tuples(len(rows), config)
        return cls(table, (config.codes,) * config.levels, rows.mean(axis=0))


@dataclass(frozen=True, eq=False)
class ItemIds(_RowIds):
    """One level with as many codes as items: the row number."""

    name: ClassVar[str] = "item-id"

    @classmethod
    def fit(
        cls, vectors: npt.ArrayLike, config: QuantizerConfig, *, progress: bool = False
    ) -> Self:
        rows = normalise(vectors)
        table = np.arange(len(rows), dtype=np.int32)[:, None]
        return cls(table, (len(rows),), rows.mean(axis=0))


def _distinct_tuples(count: int, config: QuantizerConfig) -> Digits:
    generator = np.random.default_rng(config.seed)
    sizes = (config.codes,) * config.levels
    capacity = config.codes**config.levels
    if capacity <= 4 * count:  # few are left over: drawing again and again would take long
        numbers = generator.permutation(capacity)[:count]
        return np.stack(np.unravel_index(numbers, sizes), axis=1).astype(np.int32)
    table = generator.integers(config.codes, size=(count, config.levels), dtype=np.int32)
    while len(again := _repeats(table)):
        size = (len(again), config.levels)
        table[again] = generator.integers(config.codes, size=size, dtype=np.int32)
    return table


def _repeats(table: Digits) -> npt.NDArray[np.int64]:
    """The rows that equal an earlier one."""
    _, first = np.unique(table, axis=0, return_index=True)
    return np.setdiff1d(np.arange(len(table)), first)
