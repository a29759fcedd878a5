"""The users of a recommender and their whole histories, so that it can be asked by user ID."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from maskgr.artefact import sha256
from maskgr.data.ingest import codes
from maskgr.data.sequences import Sequences
from maskgr.data.tables import read_table
from maskgr.errors import ArtefactError, RequestError

FILE = "users.parquet"


class Users:
    """Row `i` of `ids` has the history `i` of `histories`: item numbers, oldest first.

    Histories are whole: models look at their last items, but everything in them counts as seen,
    and an update trains on them again. A file of them is read when it is first needed.
    """

    def __init__(self, read: Callable[[], tuple[pl.Series, Sequences]]) -> None:
        self._read = read

    @classmethod
    def of(cls, ids: pl.Series, histories: Sequences) -> Users:
        return cls(lambda: (ids, histories))

    @classmethod
    def none(cls) -> Users:
        return cls.of(pl.Series("user_id", [], dtype=pl.String), Sequences.of([]))

    @classmethod
    def load(cls, file: Path, checksum: str) -> Users:
        """`checksum`: of the file now; a recommender that replaces it has other item numbers."""
        return cls(lambda: _read(file, checksum))

    @cached_property
    def _table(self) -> tuple[pl.Series, Sequences]:
        return self._read()

    @property
    def ids(self) -> pl.Series:
        return self._table[0]

    @property
    def histories(self) -> Sequences:
        return self._table[1]

    @cached_property
    def _sorted(self) -> tuple[pl.Series, npt.NDArray[np.uint32]]:
        """The IDs in ascending order, for a search of logarithmic time, and their rows."""
        order = self.ids.arg_sort()
        return self.ids.gather(order), order.to_numpy()

    def row(self, user_id: Any) -> int:
        """The row of one user, found without going through all of them."""
        wanted = self._cast([user_id])[0]
        ids, rows = self._sorted
        place = int(ids.search_sorted(wanted)) if wanted is not None else len(ids)
        if place == len(ids) or ids[place] != wanted:
            raise _unknown(user_id)
        return int(rows[place])

    def rows(self, user_ids: list[Any]) -> npt.NDArray[np.int64]:
        """(users,) the rows of several users."""
        found = codes(self._cast(user_ids), self.ids).to_numpy().astype(np.int64)
        if (found < 0).any():
            raise _unknown(user_ids[int(np.argmax(found < 0))])
        return found

    def _cast(self, user_ids: list[Any]) -> pl.Series:
        try:
            given = pl.Series("user_id", user_ids, strict=False)
            known = given.cast(self.ids.dtype, strict=False)
        except (pl.exceptions.PolarsError, TypeError, ValueError, OverflowError):
            raise _unknown(user_ids[0]) from None
        if known.dtype != self.ids.dtype:  # polars leaves some as they are
            raise _unknown(user_ids[0])
        return known

    def save(self, folder: Path) -> None:
        """Writes user_id, the history as row numbers of items.parquet, and its events' weights if
        they have some."""
        histories = self.histories
        events: dict[str, npt.NDArray[Any]] = {"history": histories.values}
        if histories.weights is not None:
            events["weights"] = histories.weights
        lists = (
            pl.DataFrame({"row": histories.owners, **events})
            .group_by("row", maintain_order=True)
            .agg(list(events))
        )
        table = pl.DataFrame({"row": np.arange(len(histories)), "user_id": self.ids})
        table = table.join(lists, on="row", how="left", maintain_order="left")
        filled = [pl.col(name).fill_null(pl.lit([], dtype=lists[name].dtype)) for name in events]
        table.select("user_id", *filled).write_parquet(folder / FILE)


def _read(file: Path, checksum: str) -> tuple[pl.Series, Sequences]:
    if not file.is_file() or sha256(file) != checksum:
        raise ArtefactError(f"{file} has changed since the recommender was loaded; load it again")
    table = read_table(file)
    try:
        lists = table["history"]
        values = lists.explode(empty_as_null=False).to_numpy().astype(np.int32)
        histories = Sequences.from_lengths(values, lists.list.len().to_numpy())
        if "weights" in table.columns:
            weights = table["weights"].explode(empty_as_null=False).to_numpy().astype(np.float32)
            histories = replace(histories, weights=weights)
        return table["user_id"], histories
    except (pl.exceptions.PolarsError, AttributeError) as error:
        raise ArtefactError(f"{file} is damaged ({error}); train again") from error


def _unknown(user_id: Any) -> RequestError:
    return RequestError(
        f"user {user_id!r} has no history here; check the ID, or give the history itself"
    )
