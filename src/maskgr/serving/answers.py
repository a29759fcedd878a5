"""From a request to the model's answer: checks, jobs for the batcher, JSON."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from maskgr.data.sequences import Sequences
from maskgr.decoding.config import DecodingConfig
from maskgr.errors import RequestError
from maskgr.evaluation.ranking import Query
from maskgr.explain import Explanation, explain
from maskgr.models.base import HasItemVectors
from maskgr.serving import schemas
from maskgr.serving.batching import Job, Timed
from maskgr.serving.problems import ProblemError
from maskgr.serving.served import Served

NEAREST = 3  # items of the history that are named beside an explained item


@dataclass(frozen=True, eq=False)
class Asked:
    """A request, checked against the model that answers it."""

    served: Served
    body: schemas.Ask
    request_id: str
    start: float  # by time.monotonic
    history: list[int]  # item numbers
    deny: list[int]
    allow: list[int] | None
    unknown: list[str | int]
    decoding: DecodingConfig | None
    retrieval: str
    shown: dict[str, Any] | None  # the decoding, as answers name it

    @classmethod
    def check(cls, served: Served, body: schemas.Ask, request_id: str, start: float) -> Asked:
        unknown: list[str | int] = []
        for column in body.fields or ():
            if column not in served.columns:
                known = ", ".join(served.columns) or "none"
                raise ProblemError.at(
                    "#/fields", f"items have no column {column!r}; they have: {known}"
                )
        lists = {
            name: _numbers(served, getattr(body, name), name, body.unknown, unknown)
            for name in ("allow", "deny")
        }
        history = _numbers(served, _history(served, body), "history", body.unknown, unknown)
        changes = {
            name: value
            for name in ("retrieval", "order", "steps", "beams")
            if (value := getattr(body, name, None)) is not None
        }
        return cls(
            served,
            body,
            request_id,
            start,
            history or [],
            lists["deny"] or [],
            lists["allow"],
            list(dict.fromkeys(unknown)),
            *served.decoding(changes),
        )

    @property
    def top(self) -> int:
        """As many as there are, where more are asked for."""
        return min(self.body.top, len(self.served.ids))

    @property
    def excludes_seen(self) -> bool:
        asked = self.body.exclude_seen
        return not self.served.recommender.repeats if asked is None else asked

    def allowed(self) -> npt.NDArray[np.bool_] | None:
        """(items,) what `allow` and `where` leave; None: every item."""
        if self.allow is None and self.body.where is None:
            return None
        allowed = np.ones(len(self.served.ids), dtype=bool)
        if self.allow is not None:
            allowed[:] = False
            allowed[self.allow] = True
        if self.body.where is not None:
            with pointed("#/where"):
                allowed &= self.served.mask(self.body.where)
        left = allowed.copy()
        left[self.deny] = False
        if not left.any():
            raise ProblemError(
                422, "allow, deny and where leave no item; allow more, deny fewer or ask for less"
            )
        return allowed

    def ids(self, numbers: Sequence[int]) -> list[Any]:
        return self.served.ids.gather(list(numbers)).to_list() if numbers else []

    def filters(self) -> dict[str, Any]:
        """As the verbs of a recommender take them."""
        return {
            "exclude_seen": self.body.exclude_seen,
            "allow": None if self.allow is None else self.ids(self.allow),
            "deny": self.ids(self.deny),
            "where": self.body.where,
        }

    def answer(self, timed: Timed) -> dict[str, Any]:
        """What every answer has."""
        return {
            "request_id": self.request_id,
            "model": self.served.about,
            "retrieval": self.retrieval,
            "decoding": self.shown,
            "unknown": self.unknown,
            "took_ms": milliseconds(time.monotonic() - self.start),
            "timings_ms": {
                "queue": milliseconds(timed.waited),
                "model": milliseconds(timed.computed),
            },
        }


def milliseconds(seconds: float) -> float:
    return round(1000 * seconds, 3)


def recommend_job(asked: Asked, deadline: float) -> Job:
    """Answers `(items, scores)`. What each user must not get, which is different for each, goes as
    excluded items; so only `allow` and `where` keep requests from being answered together."""
    allowed = asked.allowed()
    filtered = None if allowed is None else hashlib.sha256(allowed.tobytes()).digest()
    key = ("recommend", asked.served, asked.decoding, filtered)
    excluded = [*(asked.history if asked.excludes_seen else ()), *asked.deny]
    ranker = asked.served.recommender.ranker(asked.decoding)

    def run(arguments: list[tuple[list[int], list[int], int]]) -> list[tuple[list[int], Any]]:
        histories, barred, tops = zip(*arguments, strict=True)
        query = Query(Sequences.of(histories), max(tops), allowed, Sequences.of(barred))
        ranked = ranker.rank(query)
        return [
            (items[:top].tolist(), scores[:top].tolist())
            for items, scores, top in zip(ranked.items, ranked.scores, tops, strict=True)
        ]

    return Job(key, run, (asked.history, excluded, asked.top), deadline)


def recommend_answer(asked: Asked, timed: Timed) -> dict[str, Any]:
    items, scores = timed.value
    found = [
        {**asked.served.item(item, asked.body.fields), "score": finite(score)}
        for item, score in zip(items, scores, strict=True)
        if item >= 0
    ]
    return {**asked.answer(timed), "items": found}


def sessions_job(asked: Asked, body: schemas.SessionsRequest, deadline: float) -> Job:
    how = {**asked.filters(), "repeats": body.repeats, "decoding": asked.decoding}
    key = ("sessions", asked.served, body.items, body.top, repr(how))

    def run(histories: list[list[Any]]) -> list[Any]:
        return asked.served.recommender.sessions(histories, body.items, body.top, **how)

    return Job(key, run, asked.ids(asked.history), deadline)


def sessions_answer(asked: Asked, timed: Timed) -> dict[str, Any]:
    served = asked.served
    found = [
        {
            "items": [served.item(served.numbers[str(i)], asked.body.fields) for i in ids],
            "score": finite(score),
        }
        for ids, score in timed.value
    ]
    return {**asked.answer(timed), "sessions": found}


def explain_job(asked: Asked, body: schemas.ExplainRequest, deadline: float) -> Job:
    def run(histories: list[list[Any]]) -> list[tuple[Explanation, list[Any], list[Any]]]:
        found = explain(
            asked.served.recommender,
            histories[0],
            asked.top,
            **asked.filters(),
            decoding=asked.decoding,
        )
        examples = [
            [_examples(asked, beam.digits, body.examples) for beam in step] for step in found.steps
        ]
        return [(found, examples, _nearest(asked, found))]

    return Job(None, run, asked.ids(asked.history), deadline)


def explain_answer(asked: Asked, timed: Timed) -> dict[str, Any]:
    (found, examples, nearest), served = timed.value, asked.served
    steps = [
        [{**beam, "examples": own} for beam, own in zip(step, some, strict=True)]
        for step, some in zip(found.to_dict()["steps"], examples, strict=True)
    ]
    items = [
        {
            **served.item(served.numbers[str(result.item_id)], asked.body.fields),
            "score": finite(result.score),
            "nearest": near,
        }
        for result, near in zip(found.results, nearest, strict=True)
    ]
    return {**asked.answer(timed), "steps": steps, "items": items, "searched": found.searched}


def _examples(asked: Asked, digits: Sequence[int | None], count: int) -> list[dict[str, Any]]:
    if not count:
        return []
    rows = asked.served.with_digits(digits)[:count]
    return [asked.served.item(row, asked.body.fields) for row in rows.tolist()]


def _nearest(asked: Asked, found: Explanation) -> list[list[dict[str, Any]]]:
    """For each result the items of the history with the most similar vectors."""
    served, model = asked.served, asked.served.recommender.model
    history = list(dict.fromkeys(asked.history))
    if not history or not found.results or not isinstance(model, HasItemVectors):
        return [[] for _ in found.results]
    items = [served.numbers[str(result.item_id)] for result in found.results]
    vectors = model.item_vectors(np.array(items + history))
    vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-9)
    cosines = vectors[: len(items)] @ vectors[len(items) :].T  # (results, history)
    ids = asked.ids(history)
    return [
        [
            {"item_id": ids[place], "similarity": round(float(row[place]), 4)}
            for place in np.argsort(-row, kind="stable")[:NEAREST].tolist()
        ]
        for row in cosines
    ]


def sids_answer(served: Served, digits: list[int | None], examples: int) -> dict[str, Any]:
    """The codes of the level behind `digits`, the largest first."""
    sids = served.require_sids()
    if len(digits) > sids.levels:
        raise ProblemError.at(
            "prefix", f"a prefix has at most {sids.levels} digits, not {len(digits)}"
        )
    rows = served.with_digits(digits)
    level, children, items = len(digits), [], []
    if level < sids.levels:
        codes, counts = np.unique(sids.digits[rows, level], return_counts=True)
        for code, count in sorted(zip(codes, counts, strict=True), key=lambda c: -c[1]):
            own = rows[sids.digits[rows, level] == code][:examples]
            children.append(
                {
                    "code": int(code),
                    "count": int(count),
                    "examples": [served.item(row) for row in own.tolist()],
                }
            )
    else:
        items = [served.item(row) for row in rows[: schemas.PAGE].tolist()]
    return {
        "model": served.about,
        "prefix": digits,
        "level": level,
        "count": len(rows),
        "children": children,
        "items": items,
    }


def finite(score: float) -> float | None:
    return round(score, 6) if math.isfinite(score) else None


@contextmanager
def pointed(pointer: str) -> Iterator[None]:
    """Says which key of the request a mistake is about."""
    try:
        yield
    except RequestError as error:
        raise ProblemError.at(pointer, str(error)) from None


def _history(served: Served, body: schemas.Ask) -> Sequence[Any]:
    if body.history is not None and body.user_id is not None:
        raise ProblemError.at("#/user_id", "history and user_id are both given; give one of them")
    if body.user_id is None:
        return body.history or []
    with pointed("#/user_id"):
        return served.recommender.history_of(body.user_id)


def _numbers(
    served: Served,
    ids: Sequence[Any] | None,
    name: str,
    unknown: str,
    skipped: list[str | int],
) -> list[int] | None:
    """The items' numbers; IDs that are not known are appended to `skipped`, or raise."""
    if ids is None:
        return None
    known = []
    for place, item in enumerate(ids):
        number = served.number(item)
        if number is not None:
            known.append(number)
        elif unknown == "skip":
            skipped.append(item)
        else:
            raise ProblemError.at(
                f"#/{name}/{place}",
                f"item {item!r} of {name} is not in the catalogue; remove it, or send "
                '"unknown": "skip"',
            )
    return known
