"""Event types and weights: which events are kept, which are to be predicted, how much each counts.

The result is one weight an event: 0 is context, which models see in histories and never predict.
"""

from __future__ import annotations

import polars as pl

from maskgr.data.config import MAX_WEIGHT, DataConfig
from maskgr.data.problems import Problems, count
from maskgr.data.tables import Table
from maskgr.errors import DataError

LISTED = 8  # event types that a message names, at most


def read_weights(table: Table, config: DataConfig, problems: Problems) -> pl.Series | None:
    """Column `weight`, null where an event is left out; None where every event counts alike."""
    given = _column_weights(table, problems)
    by_type = _type_weights(table, config, problems)
    if given is None or by_type is None:
        found = given if by_type is None else by_type
    else:
        found = given * by_type
    if found is None or (found == 1).all():
        return None
    if not (found > 0).any():
        raise DataError(
            f"no event of {table.name} has a weight above 0, so there is nothing to predict; "
            "correct the column weight, or choose other --events and --targets"
        )
    return found.cast(pl.Float32).alias("weight")


def _column_weights(table: Table, problems: Problems) -> pl.Series | None:
    if "weight" not in table.frame.columns:
        return None
    column = table.frame["weight"]
    if not (column.dtype.is_numeric() or isinstance(column.dtype, pl.String | pl.Null)):
        raise DataError(f"{table.name}: weight holds {column.dtype}; give numbers from 0 up")
    weights = column.cast(pl.Float64, strict=False)
    good = weights.is_between(0, MAX_WEIGHT).fill_null(False)
    if not good.all():
        row = int((~good).arg_max() or 0)
        problems.error(
            f"{table.name} has {count(int((~good).sum()), 'row')} whose weight is no number from "
            f"0 to {MAX_WEIGHT:,.0f} (first: row {row + 1}, {column[row]!r})",
            "correct or remove the rows",
        )
    return pl.select(pl.when(good).then(weights)).to_series()


def _type_weights(table: Table, config: DataConfig, problems: Problems) -> pl.Series | None:
    """(events,) the weight of each event's type, null where the type is dropped."""
    asked = [*(config.events or ()), *(config.targets or ())]
    if "event_type" not in table.frame.columns:
        if asked:
            raise DataError(
                f"{table.name} has no column event_type, which --events and --targets need; add "
                "it, or name yours with --columns event_type=…"
            )
        return None
    types = table.frame["event_type"]
    if types.dtype.is_nested() or types.dtype in (pl.Binary, pl.Duration, pl.Object):
        raise DataError(f"{table.name}: event_type holds {types.dtype}; give one text per row")
    types = types.cast(pl.String)
    counted = types.value_counts().sort("count", "event_type", descending=[True, False])
    sizes = dict(counted.iter_rows())
    if not asked:
        if len(sizes) > 1:
            problems.warn(
                f"{table.name} has the event types {_listed(sizes)}, which all count alike",
                "--events gives each its weight, --targets says which are to be predicted",
            )
        return None
    unknown = [name for name in asked if name not in sizes]
    if unknown:
        raise DataError(
            f"{table.name} has no event of the type {unknown[0]!r}; its types are {_listed(sizes)}"
        )
    weights = dict(config.events) if config.events else {k: 1.0 for k in sizes if k is not None}
    _report_dropped(sizes, weights, table.name, problems)
    if config.targets is not None:
        _report_idle(weights, config, problems)
        weights = {k: float(w) if k in config.targets else 0.0 for k, w in weights.items()}
    return types.replace_strict(weights, default=None, return_dtype=pl.Float64)


def _report_dropped(
    sizes: dict[str | None, int], weights: dict[str, float], name: str, problems: Problems
) -> None:
    dropped = {kind: size for kind, size in sizes.items() if kind not in weights}
    if dropped:
        problems.warn(
            f"{count(sum(dropped.values()), 'event')} of {name} are dropped, since --events does "
            f"not name their types: {_listed(dropped)}",
            "name a type with the weight 0 to keep its events in the histories",
        )


def _report_idle(weights: dict[str, float], config: DataConfig, problems: Problems) -> None:
    idle = [k for k, w in weights.items() if k not in (config.targets or ()) and w not in (0, 1)]
    if idle:
        problems.warn(
            f"the weight of {' and '.join(idle)} counts nowhere, since only "
            f"{' and '.join(config.targets or ())} is to be predicted",
            "their events remain in the histories",
        )


def _listed(sizes: dict[str | None, int]) -> str:
    """Types and how many events each has, the most frequent first."""
    words = [f"{'(none)' if k is None else k} ({size:,})" for k, size in sizes.items()]
    more = [f"and {len(words) - LISTED} more"] if len(words) > LISTED else []
    return ", ".join([*words[:LISTED], *more])
