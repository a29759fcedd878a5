"""The quality of semantic IDs, reported before anything is trained on them."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from maskgr.sids.quantizers import reconstruction_errors
from maskgr.sids.semantic_ids import SemanticIds
from maskgr.sids.uniqueness import collisions
from maskgr.sids.vectors import Digits, prepare, unit


@dataclass(frozen=True)
class Level:
    """One level: how much of its codebook is used, and the error after decoding up to it."""

    codes: int
    codes_used: int
    perplexity: float  # exp(entropy): the number of equally frequent codes with this entropy
    reconstruction_error: float  # relative to the vectors' mean squared length
    appended: bool  # the de-duplication digit, which does not come from the quantiser


@dataclass(frozen=True)
class Agreement:
    """How often two items have the same value in `column`: any two, and two with one prefix."""

    column: str
    chance: float
    same_first_digit: float | None
    same_first_two: float | None


@dataclass(frozen=True)
class Report:
    items: int
    unique_share_before: float  # items alone under their tuple, as the quantiser gave it
    unique_share_after: float
    distinct_before: int  # different tuples
    largest_collision: int
    collision_sizes: dict[int, int]  # size -> groups of that size, before
    error_before: float  # reconstruction error before the uniqueness policy
    error_after: float
    levels: tuple[Level, ...]
    agreement: tuple[Agreement, ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def report(sids: SemanticIds) -> Report:
    before = collisions(quantised := sids.quantizer.encode(sids.vectors))
    sizes = Counter(before.group_sizes.tolist())
    depth = len(sids.quantizer.codebook_sizes)
    errors = reconstruction_errors(sids.quantizer, sids.vectors, sids.digits[:, :depth])
    return Report(
        items=len(sids.items),
        unique_share_before=before.unique_share,
        unique_share_after=collisions(sids.digits).unique_share,
        distinct_before=len(before.group_sizes),
        largest_collision=int(before.group_sizes.max()),
        collision_sizes=dict(sorted(sizes.items())),
        error_before=reconstruction_errors(sids.quantizer, sids.vectors, quantised)[-1],
        error_after=errors[-1],
        levels=tuple(_levels(sids, errors)),
        agreement=tuple(_agreements(sids)),
    )


def _levels(sids: SemanticIds, errors: list[float]) -> list[Level]:
    levels = []
    for level, codes in enumerate(sids.codebook_sizes):
        counts = np.bincount(sids.digits[:, level], minlength=codes)
        levels.append(
            Level(
                codes=codes,
                codes_used=int((counts > 0).sum()),
                perplexity=perplexity(counts),
                reconstruction_error=errors[min(level, len(errors) - 1)],
                appended=level >= len(errors),
            )
        )
    return levels


def perplexity(counts: npt.NDArray[np.int64]) -> float:
    """exp(entropy) of the frequencies."""
    shares = counts[counts > 0] / counts.sum()
    return float(np.exp(-(shares * np.log(shares)).sum()))


def _agreements(sids: SemanticIds) -> list[Agreement]:
    """One entry for every column whose values repeat, such as a category or a brand."""
    found = []
    for column in sids.items.columns[1:]:
        values = _comparable(sids.items[column])
        if values is None:
            continue
        known = np.flatnonzero(values >= 0)
        digits, values = sids.digits[known], values[known]
        whole = _same_pairs(values, np.zeros((len(values), 0), np.int32))
        if whole is not None and len(np.unique(values)) <= len(values) / 2:
            prefixes = [
                _same_pairs(values, digits[:, :n]) if n < sids.levels else None for n in (1, 2)
            ]
            found.append(Agreement(column, whole, *prefixes))
    return found


def _comparable(column: pl.Series) -> npt.NDArray[np.int64] | None:
    """(items,) a number for each different value, -1 where missing; None for e.g. prices."""
    if isinstance(column.dtype, pl.List) and column.dtype.inner == pl.String:
        column = column.list.join(" > ")
    if column.dtype != pl.String:
        return None
    column = column.set(column == "", None)
    codes = column.rank("dense").cast(pl.Int64).fill_null(0) - 1
    return codes.to_numpy()


def _same_pairs(values: npt.NDArray[np.int64], prefixes: Digits) -> float | None:
    """The share of pairs of items with equal prefixes that have equal values too."""
    groups = np.zeros(len(values), np.int64)  # a number for each different prefix
    for level in range(prefixes.shape[1]):
        groups = np.unique(
            groups * (1 + prefixes[:, level].max()) + prefixes[:, level], return_inverse=True
        )[1]
    sizes = np.bincount(groups)
    both = np.unique(groups * (1 + values.max(initial=0)) + values, return_counts=True)[1]
    pairs = int((sizes * (sizes - 1)).sum())
    return float((both * (both - 1)).sum() / pairs) if pairs else None


# Words that do not tell what the items of a prefix have in common.
_STOP = frozenset(
    re.findall(
        r"\w+",
        "a an and as at by for from in into is it its no not of on or per set size the this to "
        "with you your brand categories category description price title",
    )
)


@dataclass(frozen=True)
class Prefix:
    """The items that share an item's first digits."""

    digits: tuple[int, ...]
    items: int
    words: tuple[tuple[str, float], ...]  # the commonest, with the share of items that have them


@dataclass(frozen=True)
class Portrait:
    """One item: its digits, the items and words of each prefix, its nearest neighbours."""

    item: dict[str, Any]
    digits: tuple[int, ...]
    prefixes: tuple[Prefix, ...]
    neighbours: tuple[dict[str, Any], ...]  # by cosine similarity, with their digits

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def portrait(sids: SemanticIds, item_id: Any, *, neighbours: int = 10) -> Portrait:
    row = sids.row(item_id)
    digits = tuple(int(d) for d in sids.digits[row])
    texts = _texts(sids.items)
    prefixes = []
    for length in range(1, sids.levels + 1):
        members = sids.with_prefix(digits[:length])
        words = _common_words([texts[i] for i in members])
        prefixes.append(Prefix(digits[:length], len(members), words))
    vectors = unit(prepare(sids.vectors, normalise=sids.quantizer.normalise))
    similarity = vectors @ vectors[row]
    similarity[row] = -np.inf
    near = np.argsort(-similarity, kind="stable")[: min(neighbours, len(similarity) - 1)]
    label = sids.items.columns[1] if len(sids.items.columns) > 1 else "item_id"
    return Portrait(
        item=sids.items.row(row, named=True),
        digits=digits,
        prefixes=tuple(prefixes),
        neighbours=tuple(
            {
                "item_id": sids.items["item_id"][int(i)],
                "similarity": float(similarity[i]),
                "digits": sids.digits[i].tolist(),
                label: sids.items[label][int(i)],
            }
            for i in near
        ),
    )


def _texts(items: pl.DataFrame) -> list[str]:
    """All text of each item, for counting words."""
    columns = [
        pl.col(name).list.join(" ") if isinstance(dtype, pl.List) else pl.col(name)
        for name, dtype in items.schema.items()
        if name != "item_id" and (dtype == pl.String or dtype == pl.List(pl.String))
    ]
    if not columns:
        return [""] * len(items)
    return (
        items.select(pl.concat_str(columns, separator=" ", ignore_nulls=True)).to_series().to_list()
    )


def _common_words(texts: list[str], most: int = 6) -> tuple[tuple[str, float], ...]:
    """The `most` common words, with the share of texts that contain them."""
    counts: Counter[str] = Counter()
    for text in texts:
        words = dict.fromkeys(re.findall(r"[^\W\d_][\w'’-]+", text.lower()))
        counts.update(word for word in words if word not in _STOP)
    return tuple((word, count / len(texts)) for word, count in counts.most_common(most))
