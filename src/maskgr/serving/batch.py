"""Recommendations for a file of histories or for all users: streamed, resumed after interruptions.

Input: JSONL, gzipped or not, a line per user: {"user_id": ..., "history": [item, ...]}, oldest item
first. Output, in the same order: user_id, items and scores; where sessions are asked for, sessions
and scores. It is Parquet where its name ends in .parquet, else JSONL. Until all is done, what is
done lies beside it under OUTPUT.KEY.part, from which the same command goes on; the key depends on
the model, the settings and the input.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import polars as pl

from maskgr.artefact import refusal, sync, write_file
from maskgr.errors import ArtefactError, DataError, RequestError
from maskgr.recommender import Recommender

CHUNK = 1024  # users ranked and written at once
Answers = list[list[tuple[Any, float]]]  # for each user items or sessions, and their scores


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

    def answer(histories: list[list[Any]]) -> Answers:
        if session is None:
            return recommender.recommend(histories, top, **options)
        return recommender.sessions(histories, session, top, **options)

    def chunks(done: int) -> Iterator[tuple[list[Any], Answers]]:
        users = islice(_users(source), done, None)
        while chunk := list(islice(users, CHUNK)):
            yield [user for user, _ in chunk], answer([history for _, history in chunk])

    stat = source.stat()
    about = (stat.st_size, stat.st_mtime_ns, top, session, sorted(options.items()))
    return _write(target, _key(recommender, *about), chunks, session is not None)


def recommend_all(
    recommender: Recommender,
    target: Path,
    top: int = 10,
    *,
    session: int | None = None,
    **options: Any,
) -> int:
    """The same for every user of the training data, each with all of their history."""
    users = recommender.users

    def answer(rows: np.ndarray) -> Answers:
        numbers = users.histories.select(rows)
        if session is None:
            return recommender.recommend_numbers(numbers, top, **options)  # type: ignore[return-value]
        items = recommender.items["item_id"]
        histories = [items.gather(row).to_list() for row in numbers]
        return recommender.sessions(histories, session, top, **options)

    def chunks(done: int) -> Iterator[tuple[list[Any], Answers]]:
        for start in range(done, len(users.ids), CHUNK):
            rows = np.arange(start, min(start + CHUNK, len(users.ids)))
            yield users.ids.gather(rows).to_list(), answer(rows)

    about = ("all users", top, session, sorted(options.items()))
    return _write(target, _key(recommender, *about), chunks, session is not None)


def _write(
    target: Path,
    key: str,
    chunks: Callable[[int], Iterator[tuple[list[Any], Answers]]],
    sessions: bool,
) -> int:
    """Writes what `chunks` gives after the users that are done; returns the number of users."""
    part = target.with_name(f"{target.name}.{key}.part")
    what = "sessions" if sessions else "items"
    kind = _Parquet if target.suffix == ".parquet" else _Lines
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        sink: _Sink = kind(part, what)
        for users, answers in chunks(sink.done):
            scores = [[_score(score) for _, score in found] for found in answers]
            sink.add(users, [[answer for answer, _ in found] for found in answers], scores)
        sink.finish(target)
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

    def add(self, users: list[Any], answers: list[list[Any]], scores: list[Any]) -> None: ...

    def finish(self, target: Path) -> None: ...


class _Lines:
    """JSONL: whole lines of the part file are kept."""

    def __init__(self, part: Path, what: str) -> None:
        self.part, self.what = part, what
        self.done = _finished_lines(part)
        part.touch()

    def add(self, users: list[Any], answers: list[list[Any]], scores: list[Any]) -> None:
        rows = [
            {"user_id": user, self.what: found, "scores": own}
            for user, found, own in zip(users, answers, scores, strict=True)
        ]
        lines = [json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows]
        with self.part.open("a", encoding="utf-8") as out:
            out.writelines(lines)
        self.done += len(users)

    def finish(self, target: Path) -> None:
        sync(self.part)
        os.replace(self.part, target)


class _Parquet:
    """Parquet: a file for each chunk in a folder, joined at the end without reading them whole."""

    def __init__(self, part: Path, what: str) -> None:
        self.part, self.what = part, what
        part.mkdir(exist_ok=True)
        files = sorted(part.glob("[0-9]*.parquet"))
        with _whole(part):
            self.done = (
                int(pl.scan_parquet(files).select(pl.len()).collect().item()) if files else 0
            )

    def add(self, users: list[Any], answers: list[list[Any]], scores: list[Any]) -> None:
        columns: dict[str, Sequence[Any]] = {"user_id": users, self.what: answers, "scores": scores}
        lists = {"scores": pl.List(pl.Float64)}
        frame = pl.DataFrame(columns, schema_overrides=lists)
        with write_file(self.part / f"{self.done:012}.parquet") as draft:
            frame.write_parquet(draft)
        self.done += len(users)

    def finish(self, target: Path) -> None:
        files = sorted(self.part.glob("[0-9]*.parquet"))
        with write_file(target) as draft, _whole(self.part):
            if files:
                pl.scan_parquet(files).sink_parquet(draft)
            else:
                pl.DataFrame({"user_id": [], self.what: [], "scores": []}).write_parquet(draft)
        shutil.rmtree(self.part)


@contextlib.contextmanager
def _whole(part: Path) -> Iterator[None]:
    try:
        yield
    except pl.exceptions.PolarsError as error:
        if refusal(error):
            raise
        raise ArtefactError(f"{part} is damaged ({error}); delete it and start again") from error


def _key(recommender: Recommender, *settings: Any) -> str:
    """A hash of everything that decides the output."""
    model = (recommender.config, dict(recommender.made))
    ids = recommender.items["item_id"].to_list()
    about = repr((model, [str(own) for own in settings], ids))
    return hashlib.sha256(about.encode()).hexdigest()[:8]


def _users(source: Path) -> Iterator[tuple[Any, list[Any]]]:
    opener = gzip.open if source.suffix == ".gz" else open
    with opener(source, "rt", encoding="utf-8") as lines:
        try:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield _user(line, source, number)
        except (OSError, EOFError, UnicodeDecodeError) as error:
            raise DataError(f"cannot read {source}: {error}; write it again") from error


def _user(line: str, source: Path, number: int) -> tuple[Any, list[Any]]:
    try:
        row = json.loads(line)
        user, history = row["user_id"], row["history"]
    except (ValueError, KeyError, TypeError):
        raise DataError(
            f'{source}, line {number} is not {{"user_id": ..., "history": [...]}}; mend it'
        ) from None
    if not isinstance(history, list):
        raise DataError(f"{source}, line {number}: history is not a list of items; mend it")
    return user, history


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
