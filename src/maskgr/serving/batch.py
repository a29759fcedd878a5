"""Recommendations for a file of histories or for all users: streamed, resumed after interruptions.

Input: JSONL, gzipped or not, a line per user: {"user_id": ..., "history": [item, ...]}, oldest item
first. Output, in the same order: user_id, items and scores; where sessions are asked for, sessions
and scores. It is Parquet where its name ends in .parquet, else JSONL. Until all is done, what is
done lies beside it in the folder OUTPUT.KEY.parts, from which the same command goes on; the key
depends on the model, the settings and the input.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import shutil
import warnings
from collections.abc import Callable, Iterator
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import polars as pl

from maskgr.artefact import refusal, remove_folder, sha256, write_file
from maskgr.errors import ArtefactError, DataError, RequestError
from maskgr.recommender import Recommender

CHUNK = 1024  # users ranked and written at once
CHECKSUM = 32  # hexadecimal digits
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
    return _write(target, _key(recommender, *about), chunks, _answer(recommender, session))


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
    return _write(target, _key(recommender, *about), chunks, _answer(recommender, session))


def _answer(recommender: Recommender, session: int | None) -> pl.DataType:
    """The type of an answer: an item's ID, or a list of them."""
    item = recommender.items.schema["item_id"]
    return item if session is None else pl.List(item)


def _write(
    target: Path,
    key: str,
    chunks: Callable[[int], Iterator[tuple[list[Any], Answers]]],
    answer: pl.DataType,
) -> int:
    """Writes what `chunks` gives after the users that are done; returns the number of users."""
    kind = _Parquet if target.suffix == ".parquet" else _Lines
    sink = kind(target.with_name(f"{target.name}.{key}.parts"), answer)
    try:
        for users, answers in chunks(sink.done):
            scores = [[_score(score) for _, score in found] for found in answers]
            sink.add(users, [[answer for answer, _ in found] for found in answers], scores)
        with write_file(target) as draft:
            sink.join(draft)
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

    def __init__(self, folder: Path, answer: pl.DataType) -> None:
        self.folder, self.answer = folder, answer
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

    def add(self, users: list[Any], answers: list[list[Any]], scores: list[Any]) -> None:
        last = self.done + len(users)
        content = self.encode(users, answers, scores)
        checksum = hashlib.sha256(content).hexdigest()[:CHECKSUM]
        file = self.folder / f"{self.done:012}-{last:012}-{checksum}{self.suffix}"
        with write_file(file) as draft:
            draft.write_bytes(content)
        self.files.append(file)
        self.done = last

    def encode(self, users: list[Any], answers: list[list[Any]], scores: list[Any]) -> bytes:
        raise NotImplementedError

    def join(self, draft: Path) -> None:
        raise NotImplementedError


class _Lines(_Sink):
    suffix = ".jsonl"

    def encode(self, users: list[Any], answers: list[list[Any]], scores: list[Any]) -> bytes:
        what = _what(self.answer)
        rows = [
            {"user_id": user, what: found, "scores": own}
            for user, found, own in zip(users, answers, scores, strict=True)
        ]
        lines = [json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows]
        return "".join(lines).encode(
            "utf-8", "backslashreplace"
        )  # half a character stays "\\ud800"

    def join(self, draft: Path) -> None:
        with draft.open("wb") as out:
            for file in self.files:
                with file.open("rb") as part:
                    shutil.copyfileobj(part, out)


class _Parquet(_Sink):
    suffix = ".parquet"

    def encode(self, users: list[Any], answers: list[list[Any]], scores: list[Any]) -> bytes:
        content = BytesIO()
        self._frame(users, answers, scores).write_parquet(content)
        return content.getvalue()

    def _frame(self, users: list[Any], answers: list[list[Any]], scores: list[Any]) -> pl.DataFrame:
        schema = {_what(self.answer): pl.List(self.answer), "scores": pl.List(pl.Float64)}
        columns = dict(zip(("user_id", *schema), (users, answers, scores), strict=True))
        try:
            return pl.DataFrame(columns, schema_overrides=schema)
        except (pl.exceptions.PolarsError, TypeError, ValueError, OverflowError) as error:
            raise DataError(
                f"users have IDs of several types or of none that Parquet has ({error}); write all "
                "of them the same way, or JSONL"
            ) from error

    def join(self, draft: Path) -> None:
        if not self.files:
            self._frame([], [], []).write_parquet(draft)
            return
        try:
            pl.scan_parquet(self.files).sink_parquet(draft)
        except pl.exceptions.SchemaError as error:
            raise DataError(
                f"users have IDs of several types ({error}); write all of them the same way, or "
                "JSONL"
            ) from error


def _what(answer: pl.DataType) -> str:
    """The column of answers: each is an item, or a session of them."""
    return "sessions" if isinstance(answer, pl.List) else "items"


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
    except (ValueError, KeyError, TypeError, RecursionError):
        raise DataError(
            f'{source}, line {number} is not {{"user_id": ..., "history": [...]}}; mend it'
        ) from None
    if not isinstance(history, list):
        raise DataError(f"{source}, line {number}: history is not a list of items; mend it")
    return user, history
