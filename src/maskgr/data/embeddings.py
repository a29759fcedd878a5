"""Item embeddings that a user gives: checked, and put in catalogue order."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from maskgr.data.problems import Problems, count
from maskgr.data.tables import Matrix


def align_embeddings(
    matrix: Matrix, item_ids: pl.Series, problems: Problems
) -> npt.NDArray[np.floating[Any]] | None:
    """(items, dimensions) in the order of `item_ids`; None if problems were found."""
    found = len(problems.found)
    values = _in_order(matrix, item_ids, problems)
    if values is not None:
        check_embeddings(values, item_ids, matrix.name, problems)
    return values if len(problems.found) == found else None


def _in_order(matrix: Matrix, item_ids: pl.Series, problems: Problems) -> npt.NDArray[Any] | None:
    if matrix.ids is None:
        return matrix.values
    rows = pl.DataFrame({"id": matrix.ids}).with_row_index("row")
    if matrix.ids.dtype != item_ids.dtype:
        problems.error(
            f"item_id is {matrix.ids.dtype} in {matrix.name} and {item_ids.dtype} in the catalogue",
            "write them the same way",
        )
        return None
    if not rows["id"].is_unique().all():
        twice = rows["id"].filter(rows["id"].is_duplicated())[0]
        problems.error(f"{matrix.name} lists item {twice!r} twice", "keep one vector per item")
        return None
    wanted = pl.DataFrame({"id": item_ids}).join(rows, on="id", how="left", maintain_order="left")
    if wanted["row"].null_count():
        absent = wanted["id"].filter(wanted["row"].is_null())
        problems.error(
            f"{matrix.name} has no vector for {count(len(absent), 'item')} (first: {absent[0]!r})",
            "add them, or drop these items",
        )
        return None
    ordered: npt.NDArray[Any] = matrix.values[wanted["row"].to_numpy()]
    return ordered


def check_embeddings(
    values: npt.NDArray[Any], item_ids: pl.Series, name: str, problems: Problems
) -> None:
    """Reports a wrong shape or type, values that are not finite, and all-zero vectors."""
    if (
        values.ndim != 2
        or not np.issubdtype(values.dtype, np.floating)
        or values.dtype.itemsize > 8
    ):
        problems.error(
            f"{name} holds {values.dtype} of shape {values.shape}",
            "give floating-point numbers (float64 or less) of shape (items, dimensions)",
        )
        return
    if len(values) != len(item_ids):
        problems.error(
            f"{name} has {count(len(values), 'row')} for {count(len(item_ids), 'item')}",
            "give one row per item, in the order of the items, or Parquet with item_id",
        )
        return
    # Sums of squares by row need no copy of the matrix, and NaN and infinity carry over to them.
    squares = np.einsum("ij,ij->i", values, values, dtype=np.float64)
    for bad, what in ((~np.isfinite(squares), "NaN or infinite"), (squares == 0, "all-zero")):
        if bad.any():
            row = int(np.argmax(bad))
            problems.error(
                f"{name} has {count(int(bad.sum()), f'{what} vector')} "
                f"(first: row {row + 1}, item {item_ids[row]!r})",
                "compute them again, or drop these items",
            )
