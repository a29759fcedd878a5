"""A model in service: loaded, checked, warmed up, with quick access to its items."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import polars as pl

from maskgr.artefact import MANIFEST, is_artefact
from maskgr.decoding.config import DecodingConfig
from maskgr.errors import ArtefactError
from maskgr.models.base import Decodes, HasItemVectors, HasSids, PlansSessions
from maskgr.recommender import RECOMMENDER, Recommender
from maskgr.serving.problems import ProblemError
from maskgr.sids.semantic_ids import SemanticIds

FIELDS_KEPT, KEPT = 65_536, 64  # items' columns; filters and ways to decode
SHOWN = ("order", "steps", "beams")  # of the decoding, in answers
USERS, USER_ITEMS = 6, 12  # example users of /v1/model, and how many of their items


class Resolved(NamedTuple):
    """A way to decode (None: the model's own), and as answers name it."""

    decoding: DecodingConfig | None
    retrieval: str
    shown: dict[str, Any] | None


@dataclass(frozen=True, eq=False)
class Served:
    """One version of a model; never changes, so an answer is wholly of one version."""

    name: str
    version: str
    recommender: Recommender
    path: Path | None = None
    _fields: Any = field(init=False)
    _masks: Any = field(init=False)
    _decodings: Any = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_fields", lru_cache(FIELDS_KEPT)(self._read_fields))
        object.__setattr__(self, "_masks", lru_cache(KEPT)(self._read_mask))
        object.__setattr__(self, "_decodings", lru_cache(KEPT)(self._resolve))

    @classmethod
    def load(cls, name: str, path: Path) -> Served:
        """Checks every file's checksum, loads, and answers once, so that the first user is not
        the one who waits."""
        version, recommender = _version(path), Recommender.load(path)
        served = cls(name, version, recommender, path)
        served.warm_up()
        if _version(path) != version:
            raise ArtefactError(f"{path} changed while it was loaded; load it again")
        return served

    def warm_up(self) -> None:
        """Reads what is read when first needed, so that no file is needed later."""
        users = self.recommender.users.ids
        if len(users):
            self.recommender.history_of(users[0])
        self.recommender.recommend([self.ids[:2].to_list()], min(10, len(self.ids)))
        _ = self.numbers, self.searchable, self.description

    @property
    def about(self) -> dict[str, str]:
        return {"name": self.name, "version": self.version}

    @cached_property
    def ids(self) -> pl.Series:
        return self.recommender.items["item_id"]

    @property
    def columns(self) -> list[str]:
        return [name for name in self.recommender.items.columns if name != "item_id"]

    @cached_property
    def numbers(self) -> dict[str, int]:
        """An item's number by its ID as text, so that the path's '7' is the body's 7."""
        return {item: number for number, item in enumerate(self.ids.cast(pl.String).to_list())}

    @cached_property
    def sids(self) -> SemanticIds | None:
        model = self.recommender.model
        return model.semantic_ids() if isinstance(model, HasSids) else None

    @cached_property
    def searchable(self) -> pl.Series:
        """(items,) ID and text columns in lower case."""
        items, text = self.recommender.items, []
        for name, kind in items.schema.items():
            if kind == pl.String:
                text.append(pl.col(name))
            elif kind == pl.List(pl.String):
                text.append(pl.col(name).list.join(" "))
        own = pl.concat_str(
            [pl.col("item_id").cast(pl.String), *text], separator="\n", ignore_nulls=True
        )
        return items.select(own.str.to_lowercase().alias("text"))["text"]

    def number(self, item_id: str | int) -> int | None:
        return self.numbers.get(str(item_id))

    def item(self, number: int, fields: Sequence[str] | None = None) -> dict[str, Any]:
        """The item as answers have it."""
        item_id, values, sid = self._fields(number)
        if fields is not None:
            values = {name: values[name] for name in fields}
        return {"item_id": item_id, "fields": values, "sid": sid}

    def _read_fields(self, number: int) -> tuple[Any, dict[str, Any], list[int] | None]:
        row = self.recommender.items.row(number, named=True)
        item_id = row.pop("item_id")
        sid = None if self.sids is None else self.sids.digits[number].tolist()
        return item_id, {name: _plain(value) for name, value in row.items()}, sid

    def mask(self, where: str) -> npt.NDArray[np.bool_]:
        """(items,) the items that satisfy a condition."""
        found: npt.NDArray[np.bool_] = self._masks(where)
        return found

    def _read_mask(self, where: str) -> npt.NDArray[np.bool_] | None:
        return self.recommender.allowed(None, (), "raise", where)

    def search(self, text: str, start: int, limit: int) -> tuple[list[int], int, int | None]:
        """Items that have every word of `text`: their numbers from item `start` on, how many there
        are in all, and where the next page starts."""
        matches = pl.Series([True]).extend_constant(True, len(self.ids) - 1)
        for word in text.lower().split():
            matches &= self.searchable.str.contains(word, literal=True)
        rows = matches.arg_true()
        later = rows.filter(rows >= min(start, len(self.ids)))
        page = later[:limit].to_list()
        return page, len(rows), int(later[limit]) if len(later) > limit else None

    def require_sids(self) -> SemanticIds:
        if self.sids is None:
            raise ProblemError(422, f"the model {self.name} has no semantic IDs; ask another model")
        return self.sids

    def with_digits(self, digits: Sequence[int | None]) -> npt.NDArray[np.int64]:
        """Numbers of the items that have these first digits; None is any."""
        codes = self.require_sids().digits
        rows = np.arange(len(codes))
        for level, digit in enumerate(digits):
            if digit is not None:
                rows = rows[codes[rows, level] == digit]
        return rows

    @cached_property
    def description(self) -> dict[str, Any]:
        """The model as /v1/model has it."""
        recommender, sids = self.recommender, self.sids
        model = recommender.model
        retrieval, decoding = self.decoding({})[1:]
        similar = {"vectors": HasItemVectors, "sids": HasSids}
        return {
            **self.about,
            "kind": recommender.config.name,
            "items": len(self.ids),
            "fields": self.columns,
            "levels": None if sids is None else sids.levels,
            "codes": None if sids is None else list(sids.codebook_sizes),
            "decodes": isinstance(model, Decodes),
            "sessions": isinstance(model, PlansSessions),
            "similar": [by for by, kind in similar.items() if isinstance(model, kind)],
            "retrieval": retrieval,
            "decoding": decoding,
            "history_limit": recommender.config.history_limit,
            "repeats": recommender.repeats,
            "knows_users": len(recommender.users.ids) > 0,
            "example_users": self._example_users(),
        }

    def _example_users(self) -> list[dict[str, Any]]:
        """A few with at least three items, from all over the list."""
        users, ids = self.recommender.users, self.ids
        long = np.flatnonzero(users.histories.lengths >= 3)
        rows = long[np.linspace(0, len(long) - 1, min(USERS, len(long))).astype(int)]
        return [
            {
                "user_id": users.ids[row],
                "history": ids.gather(users.histories[row][-USER_ITEMS:]).to_list(),
            }
            for row in rows.tolist()
        ]

    def decoding(self, changes: dict[str, Any]) -> Resolved:
        """The model's decoding with `changes`."""
        found: Resolved = self._decodings(tuple(changes.items()))
        return found

    def _resolve(self, changes: tuple[tuple[str, Any], ...]) -> Resolved:
        model = self.recommender.model
        if not isinstance(model, Decodes):
            if changes:
                self.recommender.decoding(**dict(changes))  # raises, with the models that can
            return Resolved(None, "ranking", None)
        chosen = self.recommender.decoding(**dict(changes))
        used = model.resolved(chosen)
        shown = {key: value for key, value in asdict(used).items() if key in SHOWN}
        return Resolved(chosen, used.retrieval, None if used.retrieval == "dense" else shown)


def _version(path: Path) -> str:
    """A digest of the manifest, which has the checksum of every other file."""
    folder = path / RECOMMENDER if is_artefact(path / RECOMMENDER) else path
    manifest = folder / MANIFEST
    content = manifest.read_bytes() if manifest.is_file() else b""
    return hashlib.sha256(content).hexdigest()[:12]


def _plain(value: Any) -> Any:
    """As JSON has it: no NaN."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
