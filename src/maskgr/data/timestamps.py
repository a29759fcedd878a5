"""Parses positions and timestamps of common forms into values that sort."""

from __future__ import annotations

import polars as pl

from maskgr.data.problems import Problems, count

# The common forms of ISO 8601; a time without a zone is UTC.
ISO_FORMATS = ("%Y-%m-%dT%H:%M:%S%.f%#z", "%Y-%m-%dT%H:%M:%S%.f", "%Y-%m-%dT%H:%M", "%Y-%m-%d")

# (upper bound, factor to milliseconds) of seconds, milliseconds, microseconds; beyond are
# nanoseconds. The ranges do not overlap: seconds stay below 10^11 until the year 5138.
EPOCH_UNITS = ((1e11, 1e3), (1e14, 1.0), (1e17, 1e-3))


def read_order(column: pl.Series, name: str, problems: Problems) -> pl.Series:
    """Column `order`: numbers or datetimes; null, with an error reported, where unreadable."""
    order = _parse(column)
    bad = order.is_null()
    if bad.any():
        row = int(bad.arg_max() or 0)
        problems.error(
            f"{name} has {count(int(bad.sum()), 'row')} whose {column.name} cannot be read "
            f"(first: row {row + 1}, {column[row]!r})",
            "number each user's events from 0"
            if column.name == "position"
            else "give epoch numbers or ISO 8601 times such as 2024-05-01T12:30:00Z",
        )
    return order.alias("order")


def read_time(column: pl.Series) -> pl.Series:
    """Column `time`: datetimes in milliseconds, null where unreadable."""
    return _to_milliseconds(_parse(column)).alias("time")


def _parse(column: pl.Series) -> pl.Series:
    """Numbers or datetimes, null where the column has neither."""
    if column.dtype.is_float():
        return column.set(~column.is_finite().fill_null(False), None)
    if column.dtype.is_integer() or isinstance(column.dtype, pl.Datetime):
        return column
    if column.dtype == pl.Date:
        return column.cast(pl.Datetime("ms"))
    if column.dtype == pl.String:
        numbers = column.str.strip_chars().cast(pl.Float64, strict=False)
        return _parse(numbers) if numbers.count() else _parse_iso(column)
    return pl.Series(column.name, [None] * len(column), dtype=pl.Int64)


def _parse_iso(column: pl.Series) -> pl.Series:
    texts = column.str.strip_chars().str.replace(" ", "T")
    forms = [
        pl.col("text").str.to_datetime(form, time_unit="us", time_zone="UTC", strict=False)
        for form in ISO_FORMATS
    ]
    return texts.to_frame("text").select(pl.coalesce(forms).alias(column.name))[column.name]


def _to_milliseconds(order: pl.Series) -> pl.Series:
    if isinstance(order.dtype, pl.Datetime):
        if order.dtype.time_zone is not None:
            order = order.dt.convert_time_zone("UTC").dt.replace_time_zone(None)
        return order.cast(pl.Datetime("ms"))
    largest = float(order.abs().max() or 0)  # type: ignore[arg-type]
    factor = next((factor for bound, factor in EPOCH_UNITS if largest < bound), 1e-6)
    milliseconds = (order.cast(pl.Float64) * factor).round().cast(pl.Int64, strict=False)
    return milliseconds.cast(pl.Datetime("ms"))  # null if out of range
