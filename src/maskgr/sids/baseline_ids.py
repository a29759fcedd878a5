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
from maskgr.sids.config import FitOptions, QuantizerConfig
from maskgr.sids.vectors import Digits, Floats, prepare

_Ids = tuple[Digits, tuple[int, ...]]  # distinct IDs (n, levels), the codes of each level


@dataclass(frozen=True, eq=False)
class _RowIds:
    table: Digits  # (n, levels) the ID of each row
    sizes: tuple[int, ...]
    mean: Floats  # (d,) of all vectors: what every ID decodes to
    normalise: bool

    name: ClassVar[str]

    @classmethod
    def fit(cls, vectors: npt.ArrayLike, config: QuantizerConfig, options: FitOptions) -> Self:
        rows = prepare(vectors, normalise=options.normalise)
        table, sizes = cls._assign(len(rows), config, options.seed)
        return cls(table, sizes, rows.mean(axis=0), options.normalise)

    @classmethod
    def _assign(cls, count: int, config: QuantizerConfig, seed: int) -> _Ids:
        raise NotImplementedError

    @property
    def codebook_sizes(self) -> tuple[int, ...]:
        return self.sizes

    def encode(self, vectors: npt.ArrayLike) -> Digits:
        rows = prepare(vectors, normalise=self.normalise)
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
        settings = {"sizes": list(self.sizes), "normalise": self.normalise}
        return {"table": self.table, "mean": self.mean}, settings

    @classmethod
    def from_state(cls, tensors: dict[str, npt.NDArray[Any]], settings: dict[str, Any]) -> Self:
        return cls(**tensors, sizes=tuple(settings["sizes"]), normalise=settings["normalise"])


@dataclass(frozen=True, eq=False)
class RandomIds(_RowIds):
    """Tuples drawn without replacement, so that no two items share one."""

    name: ClassVar[str] = "random"

    @classmethod
    def _assign(cls, count: int, config: QuantizerConfig, seed: int) -> _Ids:
        sizes, capacity = (config.codes,) * config.levels, config.codes**config.levels
        if capacity < count:
            raise DataError(
                f"{config.levels} levels of {config.codes} codes make fewer tuples than there are "
                f"items ({count}); raise --codes or --levels"
            )
        generator = np.random.default_rng(seed)
        if capacity <= 4 * count:  # few are left over: drawing again and again would take long
            numbers = generator.permutation(capacity)[:count]
            return np.stack(np.unravel_index(numbers, sizes), axis=1).astype(np.int32), sizes
        table = generator.integers(config.codes, size=(count, config.levels), dtype=np.int32)
        while len(again := _repeats(table)):
            size = (len(again), config.levels)
            table[again] = generator.integers(config.codes, size=size, dtype=np.int32)
        return table, sizes


@dataclass(frozen=True, eq=False)
class ItemIds(_RowIds):
    """One level with as many codes as items: the row number."""

    name: ClassVar[str] = "item-id"

    @classmethod
    def _assign(cls, count: int, config: QuantizerConfig, seed: int) -> _Ids:
        return np.arange(count, dtype=np.int32)[:, None], (count,)


def _repeats(table: Digits) -> npt.NDArray[np.int64]:
    """The rows that equal an earlier one."""
    _, first = np.unique(table, axis=0, return_index=True)
    return np.setdiff1d(np.arange(len(table)), first)
