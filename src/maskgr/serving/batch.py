"""Recommendations for a file of histories or for all users: streamed, resumed after interruptions.

The input is described in `histories`. Output, in the same order: user_id, items and scores; where
sessions are asked for, sessions and scores. It is Parquet where its name ends in .parquet, else
JSONL. Until all is done, what is done lies beside it under OUTPUT.KEY.part, from which the same
command goes on; the key depends on the model, the settings and the input. Parquet keeps the key in
its metadata (`shards` has the use of it).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import shutil
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import polars as pl

from maskgr.artefact import refusal, sync, write_file
from maskgr.errors import ArtefactError, DataError, RequestError
from maskgr.recommender import Recommender
from maskgr.requests import numbered_histories
from maskgr.serving.histories import Row, read_histories, user_type

CHUNK = 1024  # users ranked and written at once
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
    part = target.with_name(f"{target.name}.{key}.part")
    items = pl.List(recommender.items["item_id"].dtype)
    what = {"items": items} if how["session"] is None else {"sessions": pl.List(items)}
    # As the data say: inferred, a file without users or items would have other types.
    schema = pl.Schema({"user_id": users, **what, "scores": pl.List(pl.Float64)})
    kind = _Parquet if target.suffix == ".parquet" else _Lines
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        sink: _Sink = kind(part, schema, key)
        for own, found in chunks(sink.done):
            scores = [[_score(score) for _, score in row] for row in found]
            sink.add([own, [[answer for answer, _ in row] for row in found], scores])
        sink.finish(target)
    except DataError:  # the input will be another file when it is mended
        shutil.rmtree(part) if part.is_dir() else part.unlink(missing_ok=True)
        raise
    except (OSError, pl.exceptions.PolarsError) as error:
        reason = refusal(error)
        if reason is None:
            raise
        raise ArtefactError(
            f"cannot write {target}: {reason}; the same command goes on from what is done"
        ) from error
    return sink.done


def _score(score: float) -> float | None:
    return round(score, 5) if math.isfinite(score) else None


class _Sink(Protocol):
    done: int  # users whose answers are kept

    def add(self, columns: list[list[Any]]) -> None: ...

    def finish(self, target: Path) -> None: ...


class _Lines:
    """JSONL: whole lines of the part file are kept."""

    def __init__(self, part: Path, schema: pl.Schema, key: str) -> None:
        self.part, self.names = part, schema.names()
        self.done = _finished_lines(part)
        part.touch()

    def add(self, columns: list[list[Any]]) -> None:
        rows = [dict(zip(self.names, row, strict=True)) for row in zip(*columns, strict=True)]
        lines = [json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows]
        with self.part.open("a", encoding="utf-8") as out:
            out.writelines(lines)
        self.done += len(rows)

    def finish(self, target: Path) -> None:
        sync(self.part)
        os.replace(self.part, target)


class _Parquet:
    """Parquet: a file for each chunk in a folder, joined at the end without reading them whole."""

    def __init__(self, part: Path, schema: pl.Schema, key: str) -> None:
        self.part, self.schema, self.key = part, schema, key
        part.mkdir(exist_ok=True)
        files = sorted(part.glob("[0-9]*.parquet"))
        with _whole(part):
            self.done = count_rows(files)

    def add(self, columns: list[list[Any]]) -> None:
        frame = pl.DataFrame(dict(zip(self.schema, columns, strict=True)), self.schema)
        with write_file(self.part / f"{self.done:012}.parquet") as draft:
            frame.write_parquet(draft)
        self.done += len(frame)

    def finish(self, target: Path) -> None:
        files = sorted(self.part.glob("[0-9]*.parquet"))
        with write_file(target) as draft, _whole(self.part):
            rows = pl.scan_parquet(files, glob=False) if files else pl.LazyFrame(schema=self.schema)
            rows.sink_parquet(draft, metadata={KEY: self.key})
        shutil.rmtree(self.part)


def count_rows(files: list[Path]) -> int:
    """The rows of Parquet files of one schema."""
    if not files:
        return 0
    return int(pl.scan_parquet(files, glob=False).select(pl.len()).collect().item())


@contextlib.contextmanager
def _whole(part: Path) -> Iterator[None]:
    try:
        yield
    except pl.exceptions.PolarsError as error:
        if refusal(error):
            raise
        raise ArtefactError(f"{part} is damaged ({error}); delete it and start again") from error


KEY = "maskgr"  # in a Parquet file's metadata


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


def _finished_lines(part: Path) -> int:
    """The number of whole lines; an unfinished last line is removed."""
    if not part.exists():
        return 0
    content = part.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        with part.open("r+b") as file:
            file.truncate(whole)
    return content[:whole].count(b"\n")
