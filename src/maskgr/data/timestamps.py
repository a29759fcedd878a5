"""Parses positions and timestamps of common forms into values that sort."""

from __future__ import annotations

from collections.abc import Callable

import polars as pl

from maskgr.data.problems import Problems, count

Report = Callable[[str, str], None]  # a problem and its fix

# Dates with the year first, as texts are brought into that form; a time without a zone is UTC.
FORMATS = (
    "%Y-%m-%dT%H:%M:%S%.f%#z",
    "%Y-%m-%dT%H:%M:%S%.f",
    "%Y-%m-%dT%H:%M%#z",
    "%Y-%m-%dT%H:%M",
    "%Y-%m-%dT%I:%M:%S %p",
    "%Y-%m-%dT%I:%M %p",
    "%Y-%m-%d",
)
YEAR_LAST = r"^(\d{1,2})([-/.])(\d{1,2})[-/.](\d{4})"  # 31.12.2024, 12/31/2024
CALENDAR = ((10**7, "%Y%m%d"), (10**13, "%Y%m%d%H%M%S"))  # numbers such as 20241231

# Epoch numbers: (name, lower bound, upper bound, factor to milliseconds). Seconds stay below 10^11
# until the year 5138, and smaller numbers than these may be of any unit.
EPOCH_UNITS = (
    ("seconds", 1e8, 1e11, 1e3),
    ("milliseconds", 1e11, 1e14, 1.0),
    ("microseconds", 1e14, 1e17, 1e-3),
    ("nanoseconds", 1e17, 1e20, 1e-6),
)
EARLIEST, LATEST = -2_208_988_800_000, 7_258_118_400_000  # milliseconds: the years 1900 to 2199
EARLIEST_SHOWN, LATEST_SHOWN = -62_135_000_000_000, 253_402_000_000_000  # the years 1 to 9999
MILLISECONDS_A_YEAR = 31_556_952_000
FIX = "give epoch numbers or ISO 8601 times such as 2024-05-01T12:30:00Z"


def read_positions(column: pl.Series, name: str, problems: Problems) -> pl.Series:
    """Column `order`: numbers; null, with an error reported, where unreadable."""
    order = _numbers(column)
    if order is None:
        order = pl.Series(column.name, [None] * len(column), dtype=pl.Int64)
    _report_unreadable(column, order, name, problems.error, "number each user's events from 0")
    return order.alias("order")


def read_timestamps(column: pl.Series, name: str, report: Report) -> tuple[pl.Series, pl.Series]:
    """Columns `order`, which sorts, and `time`, in milliseconds; null, with a problem reported,
    where a timestamp is unreadable, of another unit than most, or in an absurd year."""
    order = _numbers(column)
    if order is None:
        order = _datetimes(column, name, report)
    _report_unreadable(column, order, name, report, FIX)
    factor = 1.0
    if order.dtype.is_numeric():
        calendar = _calendar_dates(order)
        order, factor = _in_one_unit(order, name, report) if calendar is None else (calendar, 1.0)
    time = _milliseconds(order, factor)
    absurd = order.is_not_null() & ~time.to_physical().is_between(EARLIEST, LATEST).fill_null(False)
    if absurd.any():
        row = int(absurd.arg_max() or 0)
        report(
            f"{name} has {count(int(absurd.sum()), 'row')} whose {column.name} is not between the "
            f"years 1900 and 2199 (first: row {row + 1}, {_shown(column, time, row)})",
            "correct or remove the rows",
        )
        order, time = _without(order, absurd), _without(time, absurd)
    return order.alias("order"), time.alias("time")


def _shown(column: pl.Series, time: pl.Series, row: int) -> str:
    """A timestamp for people. Python has no dates before the year 1 and after 9999: their year is
    told from the `time` in milliseconds."""
    milliseconds = time.to_physical()[row]
    if column.dtype.is_temporal() and not EARLIEST_SHOWN < milliseconds < LATEST_SHOWN:
        return f"about the year {1970 + milliseconds / MILLISECONDS_A_YEAR:.0f}"
    return repr(column[row])


def _report_unreadable(
    column: pl.Series, order: pl.Series, name: str, report: Report, fix: str
) -> None:
    bad = order.is_null()
    if bad.any():
        row = int(bad.arg_max() or 0)
        # Long durations are beyond Python's.
        shown = "a duration" if isinstance(column.dtype, pl.Duration) else repr(column[row])
        report(
            f"{name} has {count(int(bad.sum()), 'row')} whose {column.name} cannot be read "
            f"(first: row {row + 1}, {shown})",
            fix,
        )


def _numbers(column: pl.Series) -> pl.Series | None:
    """Numbers, null where a value is not finite; None where the column holds no numbers."""
    if column.dtype.is_decimal():
        column = column.cast(pl.Float64)
    if column.dtype == pl.String:
        column = column.str.strip_chars().cast(pl.Float64, strict=False)
        return _numbers(column) if column.count() else None
    if column.dtype.is_float():
        return _without(column, ~column.is_finite().fill_null(False))
    return column if column.dtype.is_integer() else None


def _datetimes(column: pl.Series, name: str, report: Report) -> pl.Series:
    """Datetimes, null where the column has none."""
    if isinstance(column.dtype, pl.Datetime):
        return column
    if column.dtype == pl.Date:
        return column.cast(pl.Datetime("ms"))
    if isinstance(column.dtype, (pl.Categorical, pl.Enum)):
        column = column.cast(pl.String)
    if column.dtype != pl.String:
        return pl.Series(column.name, [None] * len(column), dtype=pl.Datetime("ms"))
    texts = _year_first(column.str.strip_chars(), name, report)
    texts = texts.str.replace(r" ?(?:UTC|GMT)$", "Z").str.replace(r"^([\d-]+)[T, ]+", "${1}T")
    texts = texts.str.replace(r" ([+-]\d{2}:?\d{2})$", "$1")
    forms = [
        pl.col("text").str.to_datetime(form, time_unit="us", time_zone="UTC", strict=False)
        for form in FORMATS
    ]
    return texts.to_frame("text").select(pl.coalesce(forms).alias(column.name))[column.name]


def _year_first(texts: pl.Series, name: str, report: Report) -> pl.Series:
    """Dates as 2024-12-31, whatever their separators; the data say whether day or month is first.

    A date with dots starts with the day, as everywhere where dots are written.
    """
    texts = texts.str.replace(r"^(\d{4})[/.](\d{1,2})[/.](\d{1,2})", "$1-$2-$3")
    parts = texts.str.extract_groups(YEAR_LAST).struct
    first, second = (parts.field(n).cast(pl.Int32) for n in ("1", "3"))
    if not first.count():
        return texts
    day_first, month_first = (first > 12).fill_null(False), (second > 12).fill_null(False)
    if day_first.any() and month_first.any():
        rows = [int(own.arg_max() or 0) for own in (day_first, month_first)]
        where = " and ".join(f"row {row + 1}, {texts[row]!r}" for row in rows)
        report(f"{name} has dates of both day and month first ({where})", FIX)
    unclear = not (day_first.any() or month_first.any()) and parts.field("2").drop_nulls()[0] != "."
    if unclear:
        row = int(first.is_not_null().arg_max() or 0)
        report(
            f"{name} has dates whose day and month cannot be told apart (first: row {row + 1}, "
            f"{texts[row]!r})",
            "write the year first, as in 2024-12-31",
        )
    order = "$4-$1-$3" if month_first.sum() > day_first.sum() else "$4-$3-$1"
    return texts.str.replace(YEAR_LAST, order)


def _calendar_dates(numbers: pl.Series) -> pl.Series | None:
    """Datetimes where every number is a date such as 20241231 or 20241231100000, else None."""
    low, high = _range(numbers)
    for least, form in CALENDAR:
        if 1.9 * least <= low <= high <= 2.2 * least:
            if numbers.dtype.is_float() and (numbers != numbers.floor()).any():
                return None
            texts = numbers.cast(pl.Int64).cast(pl.String)
            found = texts.str.to_datetime(form, time_unit="ms", strict=False)
            return found if found.null_count() == numbers.null_count() else None
    return None


def _range(numbers: pl.Series) -> tuple[float, float]:
    """The lowest and the highest number; zeros where there is none."""
    low, high = numbers.min(), numbers.max()
    return (0.0, 0.0) if low is None else (float(low), float(high))  # type: ignore[arg-type]


def _in_one_unit(order: pl.Series, name: str, report: Report) -> tuple[pl.Series, float]:
    """The numbers of the unit that most have, and its factor to milliseconds."""
    least, most = _range(order)
    for _, low, high, factor in EPOCH_UNITS:  # the usual case, without further columns
        if low <= least <= most < high:
            return order, factor
    sizes = order.cast(pl.Float64).abs()
    members = [
        ((sizes >= low) & (sizes < high)).fill_null(False) for _, low, high, _ in EPOCH_UNITS
    ]
    counts = [int(own.sum()) for own in members]
    unit = counts.index(max(counts))  # seconds where all are smaller
    if sum(number > 0 for number in counts) > 1:
        found = [
            f"{label} (row {int(own.arg_max() or 0) + 1}, {order[int(own.arg_max() or 0)]})"
            for (label, *_), own in zip(EPOCH_UNITS, members, strict=True)
            if own.any()
        ]
        report(f"{name} mixes timestamps in {' and '.join(found)}", "write all in one unit")
        for other, own in enumerate(members):
            order = order if other == unit else _without(order, own)
    return order, EPOCH_UNITS[unit][3]


def _milliseconds(order: pl.Series, factor: float) -> pl.Series:
    if isinstance(order.dtype, pl.Datetime):
        if order.dtype.time_zone is not None:
            order = order.dt.convert_time_zone("UTC").dt.replace_time_zone(None)
        return order.cast(pl.Datetime("ms"))
    milliseconds = (order.cast(pl.Float64) * factor).round().cast(pl.Int64, strict=False)
    return milliseconds.cast(pl.Datetime("ms"))  # null if out of range


def _without(values: pl.Series, bad: pl.Series) -> pl.Series:
    """The same with null where `bad` (rows,) is true."""
    return pl.select(pl.when(~bad).then(values).alias(values.name)).to_series()
