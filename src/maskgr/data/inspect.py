"""Statistics of a dataset, with every problem found."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import polars as pl

from maskgr.data.dataset import Dataset
from maskgr.data.problems import Problem


@dataclass(frozen=True)
class Inspection:
    """Statistics; None where there are no such data or the problems prevent counting."""

    users: int | None
    items: int | None
    interactions: int | None
    lengths: dict[str, float] | None = None  # history lengths: min, median, mean, p90, max
    density: float | None = None  # share of all user-item pairs that occur
    repeats: float | None = None  # share of events with an item that the user had already
    time_span: dict[str, str] | None = None
    text: dict[str, float] | None = None  # column -> share of items with a value
    embeddings: dict[str, Any] | None = None
    problems: tuple[Problem, ...] = ()

    @property
    def usable(self) -> bool:
        return not any(problem.severity == "error" for problem in self.problems)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "usable": self.usable}


def inspect_dataset(dataset: Dataset) -> Inspection:
    """Computes the statistics and adds the warnings from reading."""
    histories, items = dataset.histories, dataset.items
    repeated = histories.repeats()
    return Inspection(
        users=len(dataset.users),
        items=len(items),
        interactions=len(histories.values),
        lengths=_lengths(histories.lengths),
        density=float((~repeated).sum() / (len(dataset.users) * len(items))),
        repeats=float(repeated.mean()),
        time_span=_time_span(dataset),
        text={column: _coverage(items[column]) for column in items.columns[1:]},
        embeddings=_embeddings(dataset),
        problems=dataset.notes,
    )


def _coverage(column: pl.Series) -> float:
    """Share of items with a value: not null, NaN, blank text or an empty list."""
    filled = column.is_not_null()
    if column.dtype == pl.String:
        filled &= (column.str.strip_chars() != "").fill_null(False)
    elif isinstance(column.dtype, pl.List):
        filled &= (column.list.len() > 0).fill_null(False)
    elif column.dtype.is_float():
        filled &= column.is_not_nan().fill_null(False)
    return float(filled.mean() or 0)  # type: ignore[arg-type]


def _lengths(lengths: np.ndarray[Any, np.dtype[np.int64]]) -> dict[str, float]:
    return {
        "min": int(lengths.min()),
        "median": float(np.median(lengths)),
        "mean": float(lengths.mean()),
        "p90": float(np.percentile(lengths, 90)),
        "max": int(lengths.max()),
    }


def _time_span(dataset: Dataset) -> dict[str, str] | None:
    if dataset.timestamps is None or np.isnat(dataset.timestamps).all():
        return None
    known = dataset.timestamps[~np.isnat(dataset.timestamps)]
    return {"first": _iso(known.min()), "last": _iso(known.max())}


def _iso(instant: np.datetime64) -> str:
    return f"{np.datetime_as_string(instant, unit='s')}Z"


def _embeddings(dataset: Dataset) -> dict[str, Any] | None:
    if dataset.embeddings is None:
        return None
    rows, dimensions = dataset.embeddings.shape
    return {"rows": rows, "dimensions": dimensions, "type": str(dataset.embeddings.dtype)}
