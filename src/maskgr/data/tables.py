"""Reads files and data frames into polars tables; their content is checked in `ingest`."""

from __future__ import annotations

import contextlib
import gzip
import io
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from maskgr.errors import DataError

FORMATS = ("parquet", "csv", "jsonl")
ID_COLUMNS = ("user_id", "item_id")


@dataclass(frozen=True)
class Table:
    """A data frame and its name in messages: the file, or `the given items`."""

    frame: pl.DataFrame
    name: str


@dataclass(frozen=True)
class Matrix:
    """Item vectors; `ids` has the item of each row, None means the order of the catalogue."""

    values: npt.NDArray[Any]  # (rows, dimensions)
    ids: pl.Series | None
    name: str


@dataclass(frozen=True)
class Tables:
    """A dataset as the user wrote it, before any check."""

    interactions: Table
    items: Table | None = None
    embeddings: Matrix | None = None

    @classmethod
    def of(cls, interactions: Any, items: Any, embeddings: Any, name: str) -> Tables:
        """Wraps frames in memory; `name` is the prefix of their names in messages."""
        return cls(
            from_frame(interactions, f"{name} interactions"),
            None if items is None else from_frame(items, f"{name} items"),
            None
            if embeddings is None
            else Matrix(np.asarray(embeddings), None, f"{name} embeddings"),
        )


def read_folder(folder: Path) -> Tables:
    """Reads `interactions.*` and, if present, `items.*` and `embeddings.*`."""
    if not folder.is_dir():
        raise DataError(f"there is no folder {folder}; check the path")
    interactions = _find(folder, "interactions", FORMATS)
    if interactions is None:
        raise DataError(
            f"{folder} has no interactions file; put interactions.parquet, .csv or .jsonl "
            "(or .gz of these) there"
        )
    items = _find(folder, "items", FORMATS)
    embeddings = _find(folder, "embeddings", ("npy", "parquet"))
    return Tables(
        interactions=Table(read_table(interactions), str(interactions)),
        items=Table(read_table(items), str(items)) if items else None,
        embeddings=read_matrix(embeddings) if embeddings else None,
    )


def _find(folder: Path, stem: str, formats: tuple[str, ...]) -> Path | None:
    endings = [f"{stem}.{form}{gz}" for form in formats for gz in ("", ".gz")]
    found = [folder / name for name in endings if (folder / name).is_file()]
    if len(found) > 1:
        names = " and ".join(file.name for file in found)
        raise DataError(f"{folder} has both {names}; keep one of them")
    return found[0] if found else None


def read_table(file: Path) -> pl.DataFrame:
    """Reads a Parquet, CSV or JSONL file, which may be gzipped."""
    form = file.name.removesuffix(".gz").rpartition(".")[2]
    if form not in FORMATS:
        raise DataError(f"{file} is not a table; give a .{', .'.join(FORMATS)} file")
    with _readable(file):
        source = _uncompressed(file)
        if form == "parquet":
            return pl.read_parquet(source)
        if form == "csv":
            # IDs stay text: read as numbers, 007 and 7 would become one item.
            texts = dict.fromkeys(ID_COLUMNS, pl.String)
            return pl.read_csv(source, infer_schema_length=None, schema_overrides=texts)
        return _read_jsonl(source, file)


def _read_jsonl(source: io.BytesIO | Path, file: Path) -> pl.DataFrame:
    frame = pl.read_ndjson(source, infer_schema_length=None)
    for column in ID_COLUMNS:
        if frame.schema.get(column) == pl.String:
            content = source.getvalue() if isinstance(source, io.BytesIO) else source.read_bytes()
            _refuse_mixed_json(content, column, file)
    return frame


def _refuse_mixed_json(content: bytes, column: str, file: Path) -> None:
    # polars reads a column of 1 and "1" as text, which would merge two different items.
    other = re.search(rb'"%s"\s*+:\s*+(?!null|")' % column.encode(), content)
    if other:
        row = content.count(b"\n", 0, other.start()) + 1
        raise DataError(
            f"{file}, row {row}: {column} is a number or another type where other rows have text; "
            "write all of them the same way"
        )


def below(frame: pl.DataFrame, more: pl.DataFrame) -> pl.DataFrame:
    """Appends the rows of `more` to `frame`; a column that one of them lacks is null there."""
    try:
        return pl.concat([frame, more], how="diagonal_relaxed")
    except pl.exceptions.PolarsError as error:
        before, now = frame.schema, more.schema
        odd = [c for c in now if c in before and now[c] != before[c]]
        kinds = ", ".join(f"{c} is {now[c]} where the catalogue has {before[c]}" for c in odd)
        raise DataError(
            f"the new items do not fit the catalogue: {kinds or error}; write them the same way "
            "(lists need Parquet or JSONL)"
        ) from None


def read_matrix(file: Path) -> Matrix:
    """Reads `.npy` with one row per item, or Parquet with `item_id` and one column of lists."""
    name = str(file)
    with _readable(file):
        source = _uncompressed(file)
        if file.name.removesuffix(".gz").endswith(".npy"):
            return Matrix(np.load(source, allow_pickle=False), None, name)
        frame = pl.read_parquet(source)
    vectors = [c for c, t in frame.schema.items() if isinstance(t, (pl.List, pl.Array))]
    if "item_id" not in frame.columns or len(vectors) != 1:
        raise DataError(
            f"{name} has the columns {', '.join(frame.columns)}; it needs item_id and one column "
            "of lists of numbers"
        )
    column = frame[vectors[0]]
    lengths = column.list.len() if isinstance(column.dtype, pl.List) else column.arr.len()
    if lengths.null_count() or lengths.n_unique() > 1:
        odd = int(((lengths != lengths[0]) | lengths.is_null()).arg_max() or 0)
        raise DataError(
            f"{name}, row {odd + 1}: the vector has {lengths[odd]} numbers where the first has "
            f"{lengths[0]}; give every item a vector of one length"
        )
    values = column.explode().to_numpy().reshape(len(frame), -1)
    return Matrix(values, frame["item_id"], name)


@contextlib.contextmanager
def _readable(file: Path) -> Iterator[None]:
    try:
        yield
    except (pl.exceptions.PolarsError, OSError, ValueError, EOFError, zlib.error) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else "it ends too early"
        if file.stat().st_size == 0:
            reason = "it is empty"
        raise DataError(
            f"cannot read {file}: {reason.rstrip('.')}; the file may be damaged or cut short, so "
            "write it again"
        ) from error


def _uncompressed(file: Path) -> io.BytesIO | Path:
    """The file itself, or its content in memory if it is gzipped."""
    if file.suffix != ".gz":
        return file
    with gzip.open(file, "rb") as stream:
        return io.BytesIO(stream.read())


def from_frame(frame: Any, name: str) -> Table:
    """Wraps a polars or pandas frame."""
    if isinstance(frame, pl.LazyFrame):
        return Table(frame.collect(), name)
    if isinstance(frame, pl.DataFrame):
        return Table(frame, name)
    if type(frame).__module__.split(".")[0] != "pandas":
        raise DataError(f"{name} is a {type(frame).__name__}; give a polars or pandas data frame")
    for column in ID_COLUMNS:
        if column in frame.columns:
            _refuse_mixed_pandas(frame[column], column, name)
    return Table(pl.from_pandas(frame), name)


def _refuse_mixed_pandas(column: Any, label: str, name: str) -> None:
    if column.dtype != object:
        return
    kinds = column.dropna().map(type)
    odd = kinds[kinds != kinds.iloc[0]] if len(kinds) else kinds
    if len(odd):
        row = column.index.get_loc(odd.index[0]) + 1
        raise DataError(
            f"{name}, row {row}: {label} is {odd.iloc[0].__name__} where earlier rows have "
            f"{kinds.iloc[0].__name__}; write all of them the same way"
        )
