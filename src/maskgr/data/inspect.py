"""Statistics of a dataset, with every problem found."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import polars as pl

from maskgr.data.bursts import BURST, Times, bursts, duplicates
from maskgr.data.dataset import Dataset
from maskgr.data.problems import Problem, count


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
    targets: int | None = None  # events to predict; the others are context
    duplicates: int | None = None  # events with the user, item and time of another
    bursts: int | None = None  # times at which a user has several events in one second
    columns: dict[str, float] | None = None  # of the items: column -> share of items with a value
    text: dict[str, float] | None = None  # the same for the columns that are text
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
    problems = list(dataset.notes)
    doubles, hasty = None, None
    if dataset.timestamps is not None:
        doubles = _report_duplicates(dataset, dataset.timestamps, problems)
        hasty = _report_bursts(dataset, dataset.timestamps, problems)
    columns = {column: _coverage(items[column]) for column in items.columns[1:]}
    return Inspection(
        users=len(dataset.users),
        items=len(items),
        interactions=len(histories.values),
        lengths=_lengths(histories.lengths),
        density=float((~repeated).sum() / (len(dataset.users) * len(items))),
        repeats=float(repeated.mean()),
        time_span=_time_span(dataset),
        targets=int(histories.is_target.sum()),
        duplicates=doubles,
        bursts=hasty,
        columns=columns,
        text={column: columns[column] for column in dataset.text},
        embeddings=_embeddings(dataset),
        problems=tuple(problems),
    )


def _report_duplicates(dataset: Dataset, times: Times, problems: list[Problem]) -> int:
    found = duplicates(dataset.histories, times)
    number = int(found.sum())
    if number:
        message = (
            f"{count(number, 'event')} {'has' if number == 1 else 'have'} the user, item and time "
            f"of an earlier one (first: {_event(dataset, times, int(found.argmax()))})"
        )
        fix = "the log may have been written twice; --repeats dedupe drops them"
        problems.append(Problem("warning", message, fix))
    return number


def _report_bursts(dataset: Dataset, times: Times, problems: list[Problem]) -> int:
    found = bursts(dataset.histories, times)
    number = len(found.starts)
    if number:
        most = int(found.lengths.argmax())
        message = (
            f"users have {BURST} events or more in one second {count(number, 'time')}, "
            f"{int(found.lengths.sum()):,} events in all (most: {found.lengths[most]}, "
            f"{_event(dataset, times, int(found.starts[most]))})"
        )
        fix = (
            "their order is that of the file; remove events of robots and imports, or order them "
            "by a column position"
        )
        problems.append(Problem("warning", message, fix))
    return number


def _event(dataset: Dataset, times: Times, number: int) -> str:
    user = int(np.searchsorted(dataset.histories.offsets, number, side="right")) - 1
    item = dataset.item_ids[int(dataset.histories.values[number])]
    return f"user {dataset.users[user]!r}, item {item!r}, {_iso(times[number])}"


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
