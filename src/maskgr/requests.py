"""What a request says, checked, in the numbers of the catalogue."""

from __future__ import annotations

import math
from collections.abc import Iterable
from numbers import Integral
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from maskgr.data.config import Unknown
from maskgr.data.dataset import Dataset
from maskgr.data.ingest import cast_ids, codes, require_scalar_ids
from maskgr.data.sequences import Sequences
from maskgr.data.tables import from_frame
from maskgr.decoding.config import DecodingConfig
from maskgr.errors import DataError, RequestError
from maskgr.settings import require_choice
from maskgr.where import matching


def whole_number(name: str, value: Any) -> int:
    """`value` as an int; 2.5, True and texts are refused."""
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise RequestError(f"{name} is {value!r}; give a whole number")
    return int(value)


def at_least_one(name: str, value: Any) -> int:
    number = whole_number(name, value)
    if number < 1:
        raise RequestError(f"{name} is {number}; use 1 or more")
    return number


def yes_or_no(name: str, value: Any) -> bool | None:
    if value is not None and not isinstance(value, bool | np.bool_):
        raise RequestError(f"{name} is {value!r}; give True, False or None")
    return None if value is None else bool(value)


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple | np.ndarray | pl.Series) or _is_pandas(value)


def _is_pandas(value: Any) -> bool:
    return type(value).__module__.split(".")[0] == "pandas" and hasattr(value, "to_list")


def listed(value: Any, what: str, *, ordered: bool = True, of: str = "IDs") -> list[Any]:
    """`value` as a list; texts, numbers and, where the order matters, sets are refused."""
    if _is_list(value):
        rows = value.tolist() if isinstance(value, np.ndarray) else list(value)
        if isinstance(rows, list):  # an array of no dimension is a scalar
            return rows
    if isinstance(value, set | frozenset) and not ordered:
        return list(value)
    kind = "a set, which has no order" if isinstance(value, set | frozenset) else f"{value!r:.60}"
    raise RequestError(f"{what} is {kind}; give a list of {of}")


def numbered_histories(
    items: pl.DataFrame, histories: Any, unknown: Unknown
) -> tuple[Sequences, bool]:
    """The item numbers of one history or of a list of them, and whether it was a list.

    An empty list is a list of no histories.
    """
    rows = listed(histories, "the history")
    many = not rows or any(_is_list(row) for row in rows)
    if not many:
        return Sequences.of([item_numbers(items, rows, "the history", unknown)]), False
    lists = [listed(row, f"history {number}") for number, row in enumerate(rows, 1)]
    flat = [item for row in lists for item in row]
    numbers = _codes(items, flat, "the history", unknown)
    lengths = np.array([len(row) for row in lists], dtype=np.int64)
    found = Sequences.from_lengths(numbers, lengths)
    return (found.keep(numbers >= 0) if (numbers < 0).any() else found), True


def item_numbers(
    items: pl.DataFrame, ids: Iterable[Any], where: str, unknown: Unknown
) -> npt.NDArray[np.int32]:
    """The numbers of item IDs; `where` they stand is for the error message."""
    numbers = _codes(items, list(ids), where, unknown)
    known: npt.NDArray[np.int32] = numbers[numbers >= 0]
    return known


def _codes(
    items: pl.DataFrame, ids: list[Any], where: str, unknown: Unknown
) -> npt.NDArray[np.int32]:
    """(ids,) item numbers, -1 for an ID that the catalogue does not have, where that is allowed."""
    require_choice("unknown", unknown, Unknown)
    if not ids:
        return np.empty(0, dtype=np.int32)
    catalogue = items["item_id"]
    try:
        given = pl.Series("item_id", ids, strict=False)
        numbers = codes(given.cast(catalogue.dtype, strict=False), catalogue).to_numpy()
    except (pl.exceptions.PolarsError, TypeError, ValueError, OverflowError):
        raise RequestError(
            f"{where} holds something that is no item ID (first: {ids[0]!r:.60}); give IDs as the "
            "catalogue has them"
        ) from None
    if unknown == "raise" and (numbers < 0).any():
        stranger = ids[int(np.argmax(numbers < 0))]
        raise RequestError(
            f"item {stranger!r:.60} of {where} is not in the catalogue; remove it, or pass "
            "unknown='skip' (--unknown skip)"
        )
    return numbers.astype(np.int32)


def allowed_items(
    items: pl.DataFrame,
    allow: Iterable[Any] | None,
    deny: Iterable[Any] | None,
    unknown: Unknown,
    where: pl.Expr | str | None = None,
) -> npt.NDArray[np.bool_] | None:
    """(items,) the items that the lists and the condition leave; None: all."""
    denied = [] if deny is None else listed(deny, "the deny list", ordered=False)
    if allow is None and not denied and where is None:
        return None
    allowed = np.ones(len(items), dtype=bool) if where is None else matching(items, where).copy()
    if allow is not None:
        listing = np.zeros(len(items), dtype=bool)
        ids = listed(allow, "the allow list", ordered=False)
        listing[item_numbers(items, ids, "the allow list", unknown)] = True
        allowed &= listing
    allowed[item_numbers(items, denied, "the deny list", unknown)] = False
    if not allowed.any():
        what = "the allow and deny lists leave" if where is None else "these filters leave"
        raise RequestError(f"{what} no item; allow more or deny fewer")
    return allowed


def new_items(catalogue: pl.DataFrame, items: Any) -> pl.DataFrame:
    """Rows for new items, checked against the catalogue."""
    frame = from_frame(items, "the new items").frame
    if "item_id" not in frame.columns:
        raise DataError(f"the new items have no column item_id (they have: {frame.columns})")
    strange = [name for name in frame.columns if name not in catalogue.columns]
    if strange:
        raise DataError(
            f"the new items have a column {strange[0]} that the catalogue does not have (it "
            f"has: {', '.join(catalogue.columns)}); rename it, or leave it out"
        )
    require_scalar_ids(frame, "the new items", ("item_id",))
    ids = cast_ids(frame["item_id"], catalogue["item_id"].dtype)
    wrong = ids.is_null() | ids.is_duplicated() | ids.is_in(catalogue["item_id"].implode())
    if wrong.any():
        first = frame["item_id"][int(wrong.arg_max() or 0)]
        raise DataError(
            f"{int(wrong.sum())} of the new items are old, repeated or without an ID (first: "
            f"{first!r}); give each new item once"
        )
    return frame.with_columns(item_id=ids)


def session_count(
    catalogue: int, items: int, top: int, available: int | None, limit: int, *, repeats: bool
) -> int:
    """`top` sessions of `items` items, or fewer where the lists leave fewer.

    available: items that the lists leave, None: all; limit: items that the model sees at once.
    """
    items, top = whole_number("items", items), whole_number("top", top)
    longest = limit if repeats else min(limit, catalogue)
    if not 1 <= items <= longest:
        why = (
            f"a catalogue of {catalogue:,}"
            if longest < limit
            else f"a model that sees {limit} items at once"
        )
        raise RequestError(
            f"a session of {items} items is impossible with {why}; ask for 1 to {longest}"
        )

    def sessions(n: int) -> int:
        return n**items if repeats else math.perm(n, items)

    if not 1 <= top <= sessions(catalogue):
        most = "or more" if top < 1 else f"to {sessions(catalogue):,}"
        raise RequestError(
            f"cannot give {top} sessions of {items} items from a catalogue of {catalogue:,}; "
            f"ask for 1 {most}"
        )
    available = catalogue if available is None else available
    if not sessions(available):
        raise RequestError(
            f"the allow and deny lists leave {available} items, too few for a session of "
            f"{items}; allow more or deny fewer"
        )
    return min(top, sessions(available))


def require_dataset(data: Any) -> None:
    if not isinstance(data, Dataset):
        raise RequestError(
            f"data is {data!r:.60}; give a Dataset, from Dataset.load or Dataset.from_frames"
        )


def checked_decoding(decoding: Any) -> DecodingConfig:
    if not isinstance(decoding, DecodingConfig):
        raise RequestError(
            f"decoding is {decoding!r:.60}; give a DecodingConfig, for example "
            "recommender.decoding(steps=1)"
        )
    return decoding
