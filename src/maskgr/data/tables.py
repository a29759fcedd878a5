"""Reads files and data frames into polars tables; their content is checked in `ingest`."""

from __future__ import annotations

import contextlib
import gzip
import io
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from tokenize import TokenError
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

    def renamed(self, columns: Mapping[str, str], wanted: tuple[str, ...]) -> Table:
        """With the `wanted` names in place of those that `columns` has for them."""
        names = {columns[ours]: ours for ours in wanted if ours in columns}
        names = {theirs: ours for theirs, ours in names.items() if theirs in self.frame.columns}
        others = [ours for theirs, ours in names.items() if theirs != ours]  # replaced if present
        return replace(self, frame=self.frame.drop(others, strict=False).rename(names))


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
    def of(
        cls,
        interactions: Any,
        items: Any,
        embeddings: Any,
        name: str,
        columns: Mapping[str, str] | None = None,
    ) -> Tables:
        """Wraps frames in memory; `name` is the prefix of their names in messages, `columns` the
        names of the frames' columns by ours."""
        ids = _id_columns(columns)
        tables = cls(
            from_frame(interactions, f"{name} interactions", ids),
            None if items is None else from_frame(items, f"{name} items", ids),
            None
            if embeddings is None
            else Matrix(np.asarray(embeddings), None, f"{name} embeddings"),
        )
        return tables.renamed(columns or {})

    def renamed(self, columns: Mapping[str, str]) -> Tables:
        """With our names, where `columns` has others for them; each has to be in some table."""
        present = [t for t in (self.interactions, self.items) if t is not None]
        for ours, theirs in columns.items():
            tables = present if ours == "item_id" else present[:1]
            if not any(theirs in table.frame.columns for table in tables):
                has = "; ".join(f"{t.name} has {', '.join(t.frame.columns)}" for t in tables)
                raise DataError(
                    f"no table has the column {theirs!r} that --columns names for {ours} ({has}); "
                    "check its spelling"
                )
        items = None if self.items is None else self.items.renamed(columns, ("item_id",))
        return replace(
            self, interactions=self.interactions.renamed(columns, tuple(columns)), items=items
        )


def read_folder(folder: Path, columns: Mapping[str, str] | None = None) -> Tables:
    """Reads `interactions.*` and, if present, `items.*` and `embeddings.*`; `columns` has the names
    of the files' columns by ours."""
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
    ids = _id_columns(columns)
    tables = Tables(
        interactions=Table(read_table(interactions, ids), str(interactions)),
        items=Table(read_table(items, ids), str(items)) if items else None,
        embeddings=read_matrix(embeddings, ids[1:]) if embeddings else None,
    )
    return tables.renamed(columns or {})


def _id_columns(columns: Mapping[str, str] | None) -> tuple[str, ...]:
    """The columns that hold IDs: of users first."""
    return tuple((columns or {}).get(name, name) for name in ID_COLUMNS)


def _find(folder: Path, stem: str, formats: tuple[str, ...]) -> Path | None:
    endings = [f"{stem}.{form}{gz}" for form in formats for gz in ("", ".gz")]
    found = [folder / name for name in endings if (folder / name).is_file()]
    if len(found) > 1:
        names = " and ".join(file.name for file in found)
        raise DataError(f"{folder} has both {names}; keep one of them")
    return found[0] if found else None


def read_table(file: Path, ids: tuple[str, ...] = ID_COLUMNS) -> pl.DataFrame:
    """Reads a Parquet, CSV or JSONL file, which may be gzipped; `ids` are the columns of IDs."""
    form = file.name.removesuffix(".gz").rpartition(".")[2]
    if form not in FORMATS:
        raise DataError(f"{file} is not a table; give a .{', .'.join(FORMATS)} file")
    with _readable(file):
        source = _uncompressed(file)
        if form == "parquet":
            return pl.read_parquet(source)
        if form == "csv":
            # IDs stay text: read as numbers, 007 and 7 would become one item.
            texts = dict.fromkeys(ids, pl.String)
            frame = pl.read_csv(source, infer_schema_length=None, schema_overrides=texts)
            _refuse_repeated_columns(frame.columns, file)
            return frame
        return _read_jsonl(source, file, ids)


def _refuse_repeated_columns(columns: list[str], file: Path) -> None:
    # polars renames the second of two equal names, and only the first would be read.
    for column in columns:
        name, repeated, _ = column.rpartition("_duplicated_")
        if repeated and name in columns:
            raise DataError(
                f"{file} has the column {name!r} twice; rename or remove one of the two"
            )


def _read_jsonl(source: io.BytesIO | Path, file: Path, ids: tuple[str, ...]) -> pl.DataFrame:
    frame = pl.read_ndjson(source, infer_schema_length=None)
    for column in ids:
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


def read_matrix(file: Path, ids: tuple[str, ...] = ("item_id",)) -> Matrix:
    """Reads `.npy` with one row per item, or Parquet with `item_id` and one column of lists; `ids`
    has another name of `item_id`, which goes first where there are both."""
    name = str(file)
    with _readable(file):
        source = _uncompressed(file)
        if file.name.removesuffix(".gz").endswith(".npy"):
            with source.open("rb") if isinstance(source, Path) else source as stream:
                return Matrix(np.lib.format.read_array(stream, allow_pickle=False), None, name)
        frame = pl.read_parquet(source)
    vectors = [c for c, t in frame.schema.items() if isinstance(t, (pl.List, pl.Array))]
    item_id = next((name for name in (*ids, "item_id") if name in frame.columns), None)
    if item_id is None or len(vectors) != 1:
        raise DataError(
            f"{name} has the columns {', '.join(frame.columns)}; it needs item_id and one column "
            "of lists of numbers"
        )
    if frame.is_empty():
        raise DataError(f"{name} has no rows; give every item a vector, or remove the file")
    column = frame[vectors[0]]
    lengths = column.list.len() if isinstance(column.dtype, pl.List) else column.arr.len()
    if lengths.null_count():
        row = int(lengths.is_null().arg_max() or 0) + 1
        raise DataError(f"{name}, row {row} has no vector; give every item one")
    if lengths.n_unique() > 1:
        odd = int((lengths != lengths[0]).arg_max() or 0)
        raise DataError(
            f"{name}, row {odd + 1}: the vector has {lengths[odd]} numbers where the first has "
            f"{lengths[0]}; give every item a vector of one length"
        )
    values = column.explode().to_numpy().reshape(len(frame), -1)
    return Matrix(values, frame[item_id], name)


UNREADABLE = (
    *(pl.exceptions.PolarsError, pl.exceptions.PanicException, zlib.error, EOFError),
    *(OSError, ValueError, MemoryError, RecursionError),
    *(SyntaxError, TokenError),  # the header of an array is Python
)


@contextlib.contextmanager
def _readable(file: Path) -> Iterator[None]:
    try:
        yield
    except UNREADABLE as error:
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


def from_frame(frame: Any, name: str, ids: tuple[str, ...] = ID_COLUMNS) -> Table:
    """Wraps a polars or pandas frame; `ids` are the columns of IDs."""
    if isinstance(frame, pl.LazyFrame):
        return Table(frame.collect(), name)
    if isinstance(frame, pl.DataFrame):
        return Table(frame, name)
    if type(frame).__module__.split(".")[0] != "pandas":
        raise DataError(f"{name} is a {type(frame).__name__}; give a polars or pandas data frame")
    repeated = frame.columns[frame.columns.duplicated()]
    if len(repeated):
        raise DataError(
            f"{name} has the column {repeated[0]!r} twice; rename or remove one of the two"
        )
    for column in ids:
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
