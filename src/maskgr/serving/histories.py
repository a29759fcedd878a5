"""Files of histories: JSONL, gzipped or not, a line per user, {"user_id": ..., "history": [item,
...]}, oldest item first; or Parquet with these two columns."""

from __future__ import annotations

import contextlib
import gzip
import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import polars as pl

from maskgr.errors import DataError

READ = 65_536  # rows of a Parquet file in memory at once
TYPES: dict[type, pl.DataType] = {
    str: pl.String(),
    int: pl.Int64(),
    float: pl.Float64(),
    bool: pl.Boolean(),
}


class Row(NamedTuple):
    """A user of a file."""

    place: str  # where in the file, for messages
    user: Any
    history: list[Any]


def read_histories(source: Path, done: int = 0) -> Iterator[Row]:
    """The users after the first `done`, read as they are asked for."""
    if source.suffix == ".parquet":
        return _parquet_rows(source, done)
    return islice(_lines(source), done, None)


def user_type(source: Path) -> pl.DataType:
    """The type of the user IDs."""
    if source.suffix == ".parquet":
        return _scan(source)[1]["user_id"]
    users = (row.user for row in _lines(source) if row.user is not None)
    return TYPES.get(type(next(users, "")), pl.String())


def _scan(source: Path) -> tuple[pl.LazyFrame, pl.Schema]:
    with _readable(source):
        frame = pl.scan_parquet(source, glob=False, hive_partitioning=False)
        schema = frame.collect_schema()
    for column in ("user_id", "history"):
        if column not in schema:
            raise DataError(
                f"{source} has no column {column} (it has: {', '.join(schema)}); write user_id and "
                "history, a list of item IDs"
            )
    if not isinstance(schema["history"], pl.List | pl.Array):
        raise DataError(
            f"{source}: the column history is {schema['history']}; write lists of item IDs"
        )
    return frame.select("user_id", "history"), schema


def _parquet_rows(source: Path, done: int) -> Iterator[Row]:
    frame, _ = _scan(source)
    with _readable(source):
        total = int(frame.select(pl.len()).collect().item())
    for start in range(done, total, READ):
        with _readable(source):
            part = frame.slice(start, READ).collect()
        for number, (user, history) in enumerate(part.iter_rows(), start + 1):
            if history is None:
                raise DataError(f"{source}, row {number}: history is not a list of items; mend it")
            yield Row(f"row {number}", user, history)


def _lines(source: Path) -> Iterator[Row]:
    opener = gzip.open if source.suffix == ".gz" else open
    kind: type | None = None  # of the user IDs: they become one column
    with _readable(source), opener(source, "rt", encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            row = _row(line, source, number)
            kind = kind or (None if row.user is None else type(row.user))
            if row.user is not None and type(row.user) is not kind:
                raise DataError(
                    f"{source}, line {number}: user_id is {row.user!r:.60} where earlier lines "
                    "have another type; write all of them the same way"
                )
            yield row


def _row(line: str, source: Path, number: int) -> Row:
    try:
        row = json.loads(line)
        user, history = row["user_id"], row["history"]
        str(user).encode()  # JSON may write half a character, which no file can hold
    except (ValueError, KeyError, TypeError, RecursionError):
        raise DataError(
            f'{source}, line {number} is not {{"user_id": ..., "history": [...]}}; mend it'
        ) from None
    if not isinstance(history, list):
        raise DataError(f"{source}, line {number}: history is not a list of items; mend it")
    large = isinstance(user, int) and not -(2**63) <= user < 2**63
    if large or (user is not None and type(user) not in TYPES):
        raise DataError(
            f"{source}, line {number}: user_id is no text and no number of 64 bits; mend it"
        )
    return Row(f"line {number}", user, history)


@contextlib.contextmanager
def _readable(source: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError, UnicodeDecodeError, pl.exceptions.PolarsError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise DataError(f"cannot read {source}: {reason}; write it again") from error
