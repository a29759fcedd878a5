"""Files and frames in, polars tables out: nothing is judged here but whether it can be read."""

from __future__ import annotations

import contextlib
import gzip
import io
import re
import zlib
from collections.abc import Callable, Iterator
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
    """A data frame and what to call it in a message: its file, or `the items frame`."""

    frame: pl.DataFrame
    name: str


@dataclass(frozen=True)
class Matrix:
    """Vectors, one a row; `ids` says whose, or None where they follow the catalogue's order."""

    values: npt.NDArray[Any]  # (rows, dimensions)
    ids: pl.Series | None
    name: str


@dataclass(frozen=True)
class Tables:
    """A dataset as its owner keeps it."""

    interactions: Table
    items: Table | None = None
    embeddings: Matrix | None = None

    @classmethod
    def of(cls, interactions: Any, items: Any, embeddings: Any, name: str) -> Tables:
        """From frames in memory; `name` is what messages call the whole."""
        return cls(
            from_frame(interactions, f"{name} interactions"),
            None if items is None else from_frame(items, f"{name} items"),
            None
            if embeddings is None
            else Matrix(np.asarray(embeddings), None, f"{name} embeddings"),
        )


def read_folder(folder: Path) -> Tables:
    """`interactions.*`, and where present `items.*` and `embeddings.*`."""
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
        raise DataError(f"{folder} has both {names}; keep the one that counts")
    return found[0] if found else None


def read_table(file: Path) -> pl.DataFrame:
    """A Parquet, CSV or JSONL file, gzipped or not."""
    form = file.name.removesuffix(".gz").rpartition(".")[2]
    if form not in READERS:
        raise DataError(f"{file} is not a table; give a .{', .'.join(READERS)} file")
    with _readable(file):
        source = io.BytesIO(_unzip(file)) if file.suffix == ".gz" else file
        return READERS[form](source, file)


def _read_parquet(source: io.BytesIO | Path, file: Path) -> pl.DataFrame:
    return pl.read_parquet(source)


def _read_csv(source: io.BytesIO | Path, file: Path) -> pl.DataFrame:
    # IDs stay text: a CSV does not say whether 007 is a number, and 7 is another item.
    texts = dict.fromkeys(ID_COLUMNS, pl.String)
    return pl.read_csv(source, infer_schema_length=None, schema_overrides=texts)


def _read_jsonl(source: io.BytesIO | Path, file: Path) -> pl.DataFrame:
    frame = pl.read_ndjson(source, infer_schema_length=None)
    for column in ID_COLUMNS:
        if frame.schema.get(column) == pl.String:
            content = source.getvalue() if isinstance(source, io.BytesIO) else source.read_bytes()
            _refuse_mixed_json(content, column, file)
    return frame


READERS: dict[str, Callable[[io.BytesIO | Path, Path], pl.DataFrame]] = {
    "parquet": _read_parquet,
    "csv": _read_csv,
    "jsonl": _read_jsonl,
}


def _refuse_mixed_json(content: bytes, column: str, file: Path) -> None:
    # The reader turns a column of 1 and "1" into text, which would join two different items.
    other = re.search(rb'"%s"\s*+:\s*+(?!null|")' % column.encode(), content)
    if other:
        row = content.count(b"\n", 0, other.start()) + 1
        raise DataError(
            f"{file}, row {row}: {column} is a number or another type where other rows have text; "
            "write all of them the same way"
        )


def below(frame: pl.DataFrame, more: pl.DataFrame) -> pl.DataFrame:
    """The catalogue with other items' rows behind it; a column that one lacks is empty there."""
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
    """`.npy` with a row an item, or Parquet with `item_id` and one column of lists."""
    name = str(file)
    with _readable(file):
        plain = file.name.removesuffix(".gz")
        source: Any = io.BytesIO(_unzip(file)) if file.suffix == ".gz" else file
        if plain.endswith(".npy"):
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


def _unzip(file: Path) -> bytes:
    with gzip.open(file, "rb") as stream:
        return stream.read()


def from_frame(frame: Any, name: str) -> Table:
    """A polars or pandas frame."""
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
