"""Checks the tables of a dataset, replaces IDs by indices, sorts and filters the events.

Loading and inspecting share this code: `Problems` either raises the first error, or collects all
of them while the bad rows are left out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import polars as pl

from maskgr.data.bursts import duplicates
from maskgr.data.config import DataConfig
from maskgr.data.embeddings import align_embeddings
from maskgr.data.events import read_weights
from maskgr.data.problems import Problems, count
from maskgr.data.sequences import Sequences
from maskgr.data.splits import has_holdout
from maskgr.data.tables import Table, Tables
from maskgr.data.text_columns import text_columns
from maskgr.data.timestamps import read_positions, read_timestamps
from maskgr.errors import DataError

FEW = 16  # times fewer IDs than there are to look among: a scan is then the quickest
ID_TYPES = (pl.String, pl.Categorical, pl.Enum, pl.Boolean, pl.Date, pl.Datetime, pl.Null)
SHORTEST = 3  # leave-one-out needs an item each for training, validation and test


@dataclass(frozen=True)
class Events:
    """The log as arrays of user and item indices, sorted by user, then by time."""

    user: npt.NDArray[np.int32]  # (events,)
    item: npt.NDArray[np.int32]  # (events,)
    time: npt.NDArray[np.datetime64] | None  # (events,) milliseconds, NaT where unknown
    weight: npt.NDArray[np.float32] | None  # (events,) as a target, 0 where context; None: all 1

    def keep(self, mask: npt.NDArray[np.bool_]) -> Events:
        time = None if self.time is None else self.time[mask]
        weight = None if self.weight is None else self.weight[mask]
        return Events(self.user[mask], self.item[mask], time, weight)

    def histories(self, users: int) -> Sequences:
        histories = Sequences.from_lengths(self.item, np.bincount(self.user, minlength=users))
        return replace(histories, weights=self.weight)


@dataclass(frozen=True)
class Ingested:
    """The result of `ingest`."""

    users: pl.Series
    items: pl.DataFrame
    events: Events
    embeddings: npt.NDArray[np.floating] | None
    text: tuple[str, ...] = ()  # columns of the items


def ingest(tables: Tables, config: DataConfig, problems: Problems) -> Ingested:
    """Users, items, events and embeddings, checked and filtered as `config` says."""
    log = _usable_log(tables.interactions, config, problems)
    if log.is_empty():
        raise DataError(_nothing_left(tables.interactions.name, 0))
    catalogue = _usable_catalogue(tables.items, log, problems)
    text = _text(catalogue, config.text, tables.items)
    log = _same_id_type(log, catalogue, tables)
    catalogue = _add_unknown(log, catalogue, config, tables, problems)

    users = log["user_id"].unique(maintain_order=True)
    events = _sorted_events(log, users, catalogue["item_id"])
    del log  # frees the largest table
    events = _drop_unknown(events)
    if config.repeats == "drop":
        events = events.keep(~events.histories(len(users)).repeats())
    elif config.repeats == "dedupe":
        if events.time is None:
            raise DataError(
                f"{tables.interactions.name} has no timestamps, so --repeats dedupe cannot tell "
                "duplicates from repeats; choose keep or drop"
            )
        events = events.keep(~duplicates(events.histories(len(users)), events.time))
    events = k_core(events, config.k_core)
    if not len(events.item):
        raise DataError(_nothing_left(tables.interactions.name, config.k_core))

    embeddings = None
    if tables.embeddings is not None:
        embeddings = align_embeddings(tables.embeddings, catalogue["item_id"], problems)
    used = np.bincount(events.item, minlength=len(catalogue)) > 0
    kept = _kept_items(used, catalogue, config, tables, problems)
    result = _compact(users, catalogue, events, embeddings, kept)
    _warn_of_short_histories(result, tables.interactions.name, problems)
    return replace(result, text=text)


def k_core(events: Events, k: int) -> Events:
    """Drops users and items with fewer than `k` events until all that remain have `k`."""
    while k > 1 and len(events.item):
        keep = (np.bincount(events.user) >= k)[events.user]
        keep &= (np.bincount(events.item) >= k)[events.item]
        if keep.all():
            break
        events = events.keep(keep)
    return events


def _usable_log(table: Table, config: DataConfig, problems: Problems) -> pl.DataFrame:
    """Columns user_id, item_id, order and, where the log has them, time and weight; bad rows and
    event types that are not asked for are left out."""
    frame = table.frame
    _require_columns(table, ("user_id", "item_id"))
    if frame.is_empty():
        raise DataError(f"{table.name} has no rows; give at least one event")
    require_scalar_ids(frame, table.name, ("user_id", "item_id"))
    columns = [c for c in ("position", "timestamp") if c in frame.columns]
    if not columns:
        raise DataError(
            f"{table.name} has neither a position nor a timestamp column, so events have no order; "
            "add one of them"
        )
    log = frame.select("user_id", "item_id").with_columns(_order(table, problems))
    good = log["order"].is_not_null()
    weights = read_weights(table, config, problems)
    if weights is not None:
        log = log.with_columns(weights)
        good &= weights.is_not_null()
    for column in ("user_id", "item_id"):
        good &= _present(log[column], table.name, column, problems)
    return log if good.all() else log.filter(good)


def _order(table: Table, problems: Problems) -> list[pl.Series]:
    """Columns order and, where there are timestamps, time.

    Position takes precedence; timestamps that are not needed for the order may be missing.
    """
    frame, name = table.frame, table.name
    if "position" not in frame.columns:
        return [*read_timestamps(frame["timestamp"], name, problems.error)]
    order = read_positions(frame["position"], name, problems)
    if "timestamp" not in frame.columns:
        return [order]
    time = read_timestamps(frame["timestamp"], name, lambda message, fix: None)[1]
    missing = time.null_count()
    if missing:
        problems.warn(
            f"{name} has {count(missing, 'row')} without a readable timestamp",
            "they are ordered by position anyway",
        )
    return [order, time]


def _text(
    catalogue: pl.DataFrame, asked: tuple[str, ...] | None, table: Table | None
) -> tuple[str, ...]:
    """The columns that are text: those that were asked for, else those that look like it."""
    if asked is None:
        return text_columns(catalogue)
    for column in asked:
        if column == "item_id" or column not in catalogue.columns:
            if table is None:
                raise DataError(f"--text names {column!r}, but there is no items file; add one")
            others = ", ".join(catalogue.columns[1:]) or "none but item_id"
            raise DataError(
                f"--text names {column!r}, which is no column of {table.name} to take text from; "
                f"it has {others}"
            )
    return asked


def _usable_catalogue(table: Table | None, log: pl.DataFrame, problems: Problems) -> pl.DataFrame:
    """The items table with item_id first and unique; without a table, the items of the log."""
    if table is None:
        problems.warn(
            "there is no items file, so items have no text",
            "add items.parquet, .csv or .jsonl with item_id and text columns to use their text",
        )
        return pl.DataFrame({"item_id": log["item_id"].unique(maintain_order=True)})
    _require_columns(table, ("item_id",))
    require_scalar_ids(table.frame, table.name, ("item_id",))
    frame = table.frame.select("item_id", pl.exclude("item_id"))
    frame = frame.filter(_present(frame["item_id"], table.name, "item_id", problems))
    if frame.is_empty():
        raise DataError(f"{table.name} has no rows; give at least one item, or remove the file")
    first = frame["item_id"].is_first_distinct()
    if not first.all():
        row = int((~first).arg_max() or 0)
        problems.error(
            f"{table.name} lists {count(int((~first).sum()), 'item')} more than once "
            f"(first: {frame['item_id'][row]!r}, row {row + 1})",
            "keep one row per item",
        )
        frame = frame.filter(first)
    return frame


def _require_columns(table: Table, columns: tuple[str, ...]) -> None:
    missing = [c for c in columns if c not in table.frame.columns]
    if missing:
        raise DataError(
            f"{table.name} has no column {' or '.join(missing)} (it has: "
            f"{', '.join(table.frame.columns)}); rename or add it"
        )


def require_scalar_ids(frame: pl.DataFrame, name: str, columns: tuple[str, ...]) -> None:
    """Raises where a column of IDs holds what is no text, number or date."""
    for column in columns:
        dtype = frame.schema[column]
        if not (dtype.is_numeric() or isinstance(dtype, ID_TYPES)):
            raise DataError(
                f"{name}: {column} holds {dtype}, and an ID is one text, number or date; write one "
                "of these per row"
            )


def _present(ids: pl.Series, name: str, column: str, problems: Problems) -> pl.Series:
    """(rows,) whether the row has an ID: null, NaN and empty text are not IDs."""
    if ids.dtype == pl.String:
        present = ids.is_not_null() & (ids != "").fill_null(False)
    elif ids.dtype.is_float():
        present = ids.is_not_null() & ids.is_not_nan().fill_null(False)
    else:
        present = ids.is_not_null()
    if not present.all():
        row = int((~present).arg_max() or 0) + 1
        problems.error(
            f"{name} has {count(int((~present).sum()), 'row')} without {column} (first: row {row})",
            "fill it in or remove the rows",
        )
    return present


def _same_id_type(log: pl.DataFrame, catalogue: pl.DataFrame, tables: Tables) -> pl.DataFrame:
    """Casts the log's item_id to the catalogue's type; raises if that would change an ID."""
    ours, theirs = log.schema["item_id"], catalogue.schema["item_id"]
    if ours == theirs:
        return log
    cast = cast_ids(log["item_id"], theirs)
    # The text 7 of a CSV file can match the number 7 of a Parquet file, but 007 cannot.
    if (cast_ids(cast, ours) == log["item_id"]).fill_null(False).all():
        return log.with_columns(cast)
    assert tables.items is not None  # otherwise the catalogue has the log's own type
    raise DataError(
        f"item_id is {ours} in {tables.interactions.name} and {theirs} in "
        f"{tables.items.name}, and they cannot be matched; write them the same way"
    )


def _add_unknown(
    log: pl.DataFrame,
    catalogue: pl.DataFrame,
    config: DataConfig,
    tables: Tables,
    problems: Problems,
) -> pl.DataFrame:
    """Appends the log's unknown items to the catalogue if they are to be kept."""
    seen = log["item_id"].unique(maintain_order=True)
    unknown = seen.filter(~seen.is_in(catalogue["item_id"].implode()))
    if unknown.is_empty() or tables.items is None:
        return catalogue
    found = (
        f"{count(len(unknown), 'item')} of {tables.interactions.name} "
        f"{'is' if len(unknown) == 1 else 'are'} not in {tables.items.name} "
        f"(first: {unknown[0]!r})"
    )
    if config.unknown_items == "error":
        problems.error(
            found, "add them, or choose --unknown-items drop, or keep (they have no text)"
        )
        return catalogue
    problems.warn(
        found,
        "their events are dropped, as asked"
        if config.unknown_items == "drop"
        else "they are kept without text, as asked",
    )
    if config.unknown_items == "drop":
        return catalogue
    return pl.concat([catalogue, unknown.to_frame("item_id")], how="diagonal")


def _sorted_events(log: pl.DataFrame, users: pl.Series, items: pl.Series) -> Events:
    """IDs replaced by indices (-1: unknown), sorted by user, then order; ties keep file order."""
    user = codes(log["user_id"], users)
    columns = {"key": _sort_key(user, log["order"]), "user": user}
    columns["item"] = codes(log["item_id"], items)
    columns |= {name: log[name] for name in ("time", "weight") if name in log.columns}
    rows = pl.DataFrame(columns).sort("key", maintain_order=True)
    return Events(
        rows["user"].to_numpy(),
        rows["item"].to_numpy(),
        rows["time"].to_numpy() if "time" in rows.columns else None,
        rows["weight"].to_numpy() if "weight" in rows.columns else None,
    )


def _sort_key(user: pl.Series, order: pl.Series) -> pl.Series:
    """User and order as one integer: sorting one column is several times faster than two."""
    place = order.to_physical()
    if not place.dtype.is_integer():
        place = place.rank("dense")
    low, high = int(place.min()), int(place.max())  # type: ignore[arg-type]
    if (high - low + 1) * (len(user) + 1) >= 2**63:
        place = place.rank("dense")
        low, high = 1, int(place.max())  # type: ignore[arg-type]
    return user.cast(pl.Int64) * (high - low + 1) + (place.cast(pl.Int64) - low)


def cast_ids(ids: pl.Series, dtype: pl.DataType) -> pl.Series:
    """IDs in another type, null where it has no such ID."""
    try:
        return ids.cast(dtype, strict=False)
    except pl.exceptions.PolarsError:
        return pl.Series(ids.name, [None] * len(ids), dtype=dtype)


def codes(ids: pl.Series, index: pl.Series) -> pl.Series:
    """(rows,) the position of each ID in `index`, -1 if it is not there."""
    positions = index.to_frame("id").with_columns(position=pl.int_range(pl.len(), dtype=pl.Int32))
    if FEW * len(ids) < len(index):  # one request: no hash table of a million items
        positions = positions.filter(pl.col("id").is_in(ids.implode()))
    joined = ids.to_frame("id").join(positions, on="id", how="left", maintain_order="left")
    return joined["position"].fill_null(-1)


def _drop_unknown(events: Events) -> Events:
    known = events.item >= 0
    return events if known.all() else events.keep(known)


def _kept_items(
    used: npt.NDArray[np.bool_],
    catalogue: pl.DataFrame,
    config: DataConfig,
    tables: Tables,
    problems: Problems,
) -> npt.NDArray[np.bool_]:
    """(items,) whether the item stays in the dataset; a k-core always drops unused items."""
    if used.all() or tables.items is None or config.k_core > 1:
        return used
    found = (
        f"{count(int((~used).sum()), 'item')} of {tables.items.name} "
        f"{'is' if (~used).sum() == 1 else 'are'} in no event "
        f"(first: {catalogue['item_id'][int(np.argmin(used))]!r})"
    )
    if config.unused_items == "error":
        problems.error(found, "remove them, or choose --unused-items keep or drop")
    elif config.unused_items == "keep":
        problems.warn(found, "they can still be recommended; --unused-items drop removes them")
    return used if config.unused_items == "drop" else np.ones(len(used), dtype=bool)


def _compact(
    users: pl.Series,
    catalogue: pl.DataFrame,
    events: Events,
    embeddings: npt.NDArray[np.floating] | None,
    kept: npt.NDArray[np.bool_],
) -> Ingested:
    """Removes users without events and items not kept; renumbers the rest in the same order."""
    active = np.bincount(events.user, minlength=len(users)) > 0
    if not active.all():
        users = users.filter(pl.Series(active))
        events = replace(events, user=(np.cumsum(active) - 1).astype(np.int32)[events.user])
    if not kept.all():
        catalogue = catalogue.filter(pl.Series(kept))
        events = replace(events, item=(np.cumsum(kept) - 1).astype(np.int32)[events.item])
        embeddings = None if embeddings is None else embeddings[kept]
    return Ingested(users.alias("user_id"), catalogue, events, embeddings)


def _warn_of_short_histories(result: Ingested, name: str, problems: Problems) -> None:
    short = ~has_holdout(result.events.histories(len(result.users)))
    if short.any():
        first = result.users[int(np.argmax(short))]
        few, fix = f"fewer than {SHORTEST} items", "; --k-core 3 or more removes them"
        if result.events.weight is not None:
            few, fix = "fewer than two targets behind another event", ""
        problems.warn(
            f"{count(int(short.sum()), 'user')} of {name} "
            f"{'has' if short.sum() == 1 else 'have'} {few} (first: {first!r})",
            f"they are trained on but not evaluated{fix}",
        )


def _nothing_left(name: str, k: int) -> str:
    if k > 1:
        return f"no user or item of {name} is left in its {k}-core; choose a smaller --k-core"
    return f"no usable event is left in {name}; fix the problems that maskgr data inspect lists"
