"""Recommendations for a file of histories or for all users: streamed, resumed after interruptions.

The input is described in `histories`. Output, in the same order: user_id, items and scores; where
sessions are asked for, sessions and scores. It is Parquet where its name ends in .parquet, else
JSONL. Until all is done, what is done lies beside it in the folder OUTPUT.KEY.parts, from which the
same command goes on; the key depends on the model, the settings and the input. Parquet keeps the
key in its metadata (`shards` has the use of it).
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import warnings
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import polars as pl

from maskgr.artefact import refusal, remove_folder, sha256, write_file
from maskgr.errors import ArtefactError, DataError, RequestError
from maskgr.recommender import Recommender
from maskgr.requests import numbered_histories
from maskgr.serving.histories import Row, read_histories, user_type

CHUNK = 1024  # users ranked and written at once
CHECKSUM = 32  # hexadecimal digits
KEY = "maskgr"  # in a Parquet file's metadata
Answers = list[list[tuple[Any, float]]]  # for each user items or sessions, and their scores
Chunks = Callable[[int], Iterator[tuple[list[Any], Answers]]]  # after so many users


def recommend_file(
    recommender: Recommender,
    source: Path,
    target: Path,
    top: int = 10,
    *,
    session: int | None = None,
    **options: Any,
) -> int:
    """Writes `target` for the histories of `source`; returns the number of users.

    session: the number of items in a session, for sessions instead of items.
    options: as in `Recommender.recommend`, or `Recommender.sessions`.
    """
    if not source.is_file():
        raise DataError(f"there is no file {source}; check the path")
    if target.resolve() == source.resolve() or (target.exists() and target.samefile(source)):
        raise RequestError(f"{target} is the input, which would be lost; give another output")
    how = {"top": top, "session": session, **options}
    key = file_key(model_key(recommender), source, how)
    return recommend_as(recommender, source, target, key, how)


def recommend_as(
    recommender: Recommender, source: Path, target: Path, key: str, how: Mapping[str, Any]
) -> int:
    """The same under a key; `how` has the arguments of `recommend_file` by name."""

    def chunks(done: int) -> Iterator[tuple[list[Any], Answers]]:
        users = read_histories(source, done)
        while rows := list(islice(users, CHUNK)):
            try:
                found = answer(recommender, [row.history for row in rows], how)
            except RequestError as error:
                _name_row(recommender, source, rows, how)
                raise error
            yield [row.user for row in rows], found

    return _write(recommender, target, key, chunks, user_type(source), how)


def recommend_all(
    recommender: Recommender,
    target: Path,
    top: int = 10,
    *,
    session: int | None = None,
    **options: Any,
) -> int:
    """The same for every user of the training data, each with all of their history."""
    users, how = recommender.users, {"top": top, "session": session, **options}

    def answers(rows: np.ndarray) -> Answers:
        numbers = users.histories.select(rows)
        if session is None:
            return recommender.recommend_numbers(numbers, top, **options)  # type: ignore[return-value]
        items = recommender.items["item_id"]
        return answer(recommender, [items.gather(row).to_list() for row in numbers], how)

    def chunks(done: int) -> Iterator[tuple[list[Any], Answers]]:
        for start in range(done, len(users.ids), CHUNK):
            rows = np.arange(start, min(start + CHUNK, len(users.ids)))
            yield users.ids.gather(rows).to_list(), answers(rows)

    key = _key(model_key(recommender), "all users", how)
    return _write(recommender, target, key, chunks, users.ids.dtype, how)


def answer(recommender: Recommender, histories: list[list[Any]], how: Mapping[str, Any]) -> Answers:
    """What `how` asks for, for every history."""
    options = {name: value for name, value in how.items() if name not in ("top", "session")}
    if how["session"] is None:
        return recommender.recommend(histories, how["top"], **options)
    return recommender.sessions(histories, how["session"], how["top"], **options)


def _name_row(
    recommender: Recommender, source: Path, rows: list[Row], how: Mapping[str, Any]
) -> None:
    """Raises with the place of the first history that cannot be understood, if there is one."""

    def error(count: int) -> RequestError | None:
        histories = [row.history for row in rows[:count]]
        try:
            numbered_histories(recommender.items, histories, how.get("unknown", "raise"))
        except RequestError as found:
            return found
        return None

    first = bisect_left(range(1, len(rows) + 1), True, key=lambda n: error(n) is not None)
    if first < len(rows):
        raise DataError(f"{source}, {rows[first].place}: {error(first + 1)}")


def _write(
    recommender: Recommender,
    target: Path,
    key: str,
    chunks: Chunks,
    users: pl.DataType,
    how: Mapping[str, Any],
) -> int:
    """Writes what `chunks` gives after the users that are done; returns the number of users."""
    items = pl.List(recommender.items["item_id"].dtype)
    what = {"items": items} if how["session"] is None else {"sessions": pl.List(items)}
    # As the data say: inferred, a file without users or items would have other types.
    schema = pl.Schema({"user_id": users, **what, "scores": pl.List(pl.Float64)})
    kind = _Parquet if target.suffix == ".parquet" else _Lines
    sink = kind(target.with_name(f"{target.name}.{key}.parts"), schema)
    try:
        for own, found in chunks(sink.done):
            scores = [[_score(score) for _, score in row] for row in found]
            sink.add([own, [[answer for answer, _ in row] for row in found], scores])
        with write_file(target) as draft:
            sink.join(draft, key)
        remove_folder(sink.folder)
    except (DataError, RequestError):
        remove_folder(sink.folder)  # the next request is another one, and has another key
        raise
    except ArtefactError as error:
        if not isinstance(error.__cause__, Exception):
            raise  # no file was refused
        raise ArtefactError(
            f"cannot write {target}: {refusal(error.__cause__)}; the same command goes on from "
            "what is done"
        ) from error
    return sink.done


def _score(score: float) -> float | None:
    return round(score, 5) if math.isfinite(score) else None


class _Sink:
    """What is done, in a folder: a file for each chunk of users, joined at the end.

    A file's name has the numbers of its first user and of the one after its last, and its checksum.
    From the first file that is damaged or missing on, everything is done again.
    """

    suffix: ClassVar[str]

    def __init__(self, folder: Path, schema: pl.Schema) -> None:
        self.folder, self.schema = folder, schema
        self.files: list[Path] = []
        self.done = 0  # users
        for file in sorted(folder.glob(f"*-*-*{self.suffix}")):
            first, last, checksum = file.stem.split("-")
            if int(first) != self.done or sha256(file)[:CHECKSUM] != checksum:
                warnings.warn(
                    f"{file} is damaged, or the one before it is missing; from user "
                    f"{self.done + 1:,} on all are ranked again",
                    stacklevel=2,
                )
                break
            self.files.append(file)
            self.done = int(last)

    def add(self, columns: list[list[Any]]) -> None:
        last = self.done + len(columns[0])
        content = self.encode(columns)
        checksum = hashlib.sha256(content).hexdigest()[:CHECKSUM]
        file = self.folder / f"{self.done:012}-{last:012}-{checksum}{self.suffix}"
        with write_file(file) as draft:
            draft.write_bytes(content)
        self.files.append(file)
        self.done = last

    def encode(self, columns: list[list[Any]]) -> bytes:
        raise NotImplementedError

    def join(self, draft: Path, key: str) -> None:
        raise NotImplementedError


class _Lines(_Sink):
    suffix = ".jsonl"

    def encode(self, columns: list[list[Any]]) -> bytes:
        rows = [dict(zip(self.schema, row, strict=True)) for row in zip(*columns, strict=True)]
        lines = [json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows]
        return "".join(lines).encode()

    def join(self, draft: Path, key: str) -> None:
        with draft.open("wb") as out:
            for file in self.files:
                with file.open("rb") as part:
                    shutil.copyfileobj(part, out)


class _Parquet(_Sink):
    suffix = ".parquet"

    def encode(self, columns: list[list[Any]]) -> bytes:
        content = BytesIO()
        frame = pl.DataFrame(dict(zip(self.schema, columns, strict=True)), self.schema)
        frame.write_parquet(content)
        return content.getvalue()

    def join(self, draft: Path, key: str) -> None:
        rows = pl.LazyFrame(schema=self.schema)
        if self.files:
            rows = pl.scan_parquet(self.files, glob=False)
        rows.sink_parquet(draft, metadata={KEY: key})


def count_rows(files: list[Path]) -> int:
    """The rows of Parquet files of one schema."""
    if not files:
        return 0
    return int(pl.scan_parquet(files, glob=False).select(pl.len()).collect().item())


def model_key(recommender: Recommender) -> str:
    """A hash of the model and its catalogue."""
    model = (recommender.config, dict(recommender.made))
    ids = recommender.items["item_id"].to_list()
    return hashlib.sha256(repr((model, ids)).encode()).hexdigest()


def file_key(model: str, source: Path, how: Mapping[str, Any]) -> str:
    """A hash of everything that decides the output: `model` is a `model_key`."""
    stat = source.stat()
    return _key(model, (stat.st_size, stat.st_mtime_ns), how)


def _key(model: str, source: Any, how: Mapping[str, Any]) -> str:
    about = repr((model, source, [str(own) for own in sorted(how.items())]))
    return hashlib.sha256(about.encode()).hexdigest()[:8]
