"""Recommendations for a file of histories: streamed, and resumed where it was interrupted.

Input: JSONL, gzipped or not, a line per user: {"user_id": ..., "history": [item, ...]}, oldest item
first. Output: JSONL in the same order: {"user_id": ..., "items": [...], "scores": [...]}; where
sessions are asked for, {"user_id": ..., "sessions": [[...], ...], "scores": [...]}. Until all is
done the lines are in OUTPUT.KEY.part, from which the same command goes on; the key depends on the
model, the settings and the input.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

from maskgr.artefact import sync
from maskgr.data.config import Unknown
from maskgr.decoding.config import DecodingConfig
from maskgr.errors import DataError
from maskgr.recommender import Recommender

CHUNK = 1024  # users ranked and written at once


def recommend_file(
    recommender: Recommender,
    source: Path,
    target: Path,
    top: int,
    *,
    session: int | None = None,
    exclude_seen: bool | None = None,
    unknown: Unknown = "raise",
    decoding: DecodingConfig | None = None,
) -> int:
    """Writes `target`; returns the number of users.

    session: the number of items in a session, for sessions instead of items.
    """
    if not source.is_file():
        raise DataError(f"there is no file {source}; check the path")
    target.parent.mkdir(parents=True, exist_ok=True)
    about = (source.stat(), top, session, exclude_seen, unknown, decoding)
    part = target.with_name(f"{target.name}.{_key(recommender, *about)}.part")
    how: dict[str, Any] = {
        "exclude_seen": exclude_seen,
        "unknown": unknown,
        "decoding": decoding,
    }
    done = _finished_lines(part)
    users = _users(source)
    for _ in islice(users, done):
        pass
    with part.open("a", encoding="utf-8") as out:
        while chunk := list(islice(users, CHUNK)):
            histories = [history for _, history in chunk]
            if session is None:
                answers = recommender.recommend(histories, top, **how)
            else:
                answers = recommender.sessions(histories, session, top, **how)
            _write(out, chunk, answers, "items" if session is None else "sessions")
            done += len(chunk)
    sync(part)
    os.replace(part, target)
    return done


def _key(recommender: Recommender, source: os.stat_result, *settings: Any) -> str:
    """A hash of everything that decides the output."""
    model = (recommender.config, dict(recommender.made))
    ids = recommender.items["item_id"].to_list()
    about = repr((source.st_size, source.st_mtime_ns, model, settings, ids))
    return hashlib.sha256(about.encode()).hexdigest()[:8]


def _write(out: TextIO, chunk: list[tuple[Any, list[Any]]], answers: list[Any], what: str) -> None:
    """`answers`: for each user pairs of an item or a session, and its score."""
    for (user, _), found in zip(chunk, answers, strict=True):
        row = {
            "user_id": user,
            what: [answer for answer, _ in found],
            "scores": [round(score, 5) if math.isfinite(score) else None for _, score in found],
        }
        out.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")
    out.flush()


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
