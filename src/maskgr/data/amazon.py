"""Reads the Amazon product data of 2014: 5-core reviews and product metadata."""

from __future__ import annotations

import ast
import gzip
import html
import json
import math
import re
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import polars as pl

from maskgr.errors import DataError

# Either kind of quote: the official metadata are Python literals, converted copies are JSON.
_ASIN = re.compile(r"""asin["']\s*:\s*["']([^"']*)["']""")

_INTERACTIONS = pl.Schema({"user_id": pl.String, "item_id": pl.String, "timestamp": pl.Int64})
_ITEMS = pl.Schema(
    {
        "item_id": pl.String(),
        "title": pl.String(),
        "brand": pl.String(),
        "categories": pl.List(pl.String()),
        "description": pl.String(),
        "price": pl.Float64(),
    }
)


def read_amazon(reviews: Path, meta: Path) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Interactions in file order, and the reviewed items in order of first appearance.

    An item without metadata has nulls.
    """
    interactions = _read_reviews(reviews)
    wanted = interactions["item_id"].unique(maintain_order=True).to_list()
    return interactions, _read_items(meta, wanted)


def _read_reviews(file: Path) -> pl.DataFrame:
    users, items, times = [], [], []
    for number, line in _lines(file):
        row = _parse(file, number, line)
        users.append(_identifier(file, number, row, "reviewerID"))
        items.append(_identifier(file, number, row, "asin"))
        times.append(_time(file, number, row))
    if not users:
        raise DataError(f"{file} holds no reviews; delete it and fetch it again")
    return pl.DataFrame(
        {"user_id": users, "item_id": items, "timestamp": times}, schema=_INTERACTIONS
    )


def _read_items(file: Path, wanted: Sequence[str]) -> pl.DataFrame:
    found: dict[str, dict[str, Any]] = {item: {"item_id": item} for item in wanted}
    for number, line in _lines(file):
        mentioned = _ASIN.findall(line)
        # Parsing is slow and most lines describe other products, so these are skipped. A line that
        # names no product may be a damaged description of a wanted one, so it is parsed.
        if mentioned and not any(asin in found for asin in mentioned):
            continue
        row = _parse(file, number, line)
        item = _identifier(file, number, row, "asin")
        if item in found and len(found[item]) == 1:  # the first of several lines counts
            found[item] = _item(file, number, item, row)
    return pl.DataFrame(list(found.values()), schema=_ITEMS)


def _lines(file: Path) -> Iterator[tuple[int, str]]:
    """The lines that are not blank, with their line numbers."""
    number = 0
    try:
        with gzip.open(file, "rb") as stream:
            for number, line in enumerate(stream, start=1):
                if line.strip():
                    yield number, line.decode("utf-8")
    except FileNotFoundError:
        raise DataError(f"there is no file {file}; fetch it first") from None
    except EOFError as error:
        raise DataError(
            f"{file} is cut short after line {number}; delete it and fetch it again"
        ) from error
    except UnicodeDecodeError as error:
        raise _damaged(file, number, "not UTF-8") from error
    except (OSError, zlib.error) as error:
        raise DataError(
            f"{file} cannot be read after line {number} ({error}); delete it and fetch it again"
        ) from error


def _parse(file: Path, number: int, line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        try:
            row = ast.literal_eval(line)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError) as error:
            raise _damaged(file, number, "neither JSON nor a Python literal") from error
    if not isinstance(row, dict):
        raise _damaged(file, number, "not a record")
    return row


def _identifier(file: Path, number: int, row: dict[str, Any], key: str) -> str:
    value = _required(file, number, row, key)
    if not isinstance(value, str) or not value or not value.isprintable():
        raise _damaged(file, number, f"'{key}' is {value!r}, not an identifier")
    return value


def _time(file: Path, number: int, row: dict[str, Any]) -> int:
    value = _required(file, number, row, "unixReviewTime")
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**63:
        raise _damaged(file, number, f"'unixReviewTime' is {value!r}, not whole seconds")
    return value


def _required(file: Path, number: int, row: dict[str, Any], key: str) -> Any:
    if key not in row:
        raise _damaged(file, number, f"'{key}' is missing")
    return row[key]


def _damaged(file: Path, number: int, what: str) -> DataError:
    return DataError(f"{file}, line {number}: {what}; delete the file and fetch it again")


def _item(file: Path, number: int, item: str, row: dict[str, Any]) -> dict[str, Any]:
    try:
        return {
            "item_id": item,
            "title": _text(row.get("title")),
            "brand": _text(row.get("brand")),
            "categories": _categories(row.get("categories")),
            "description": _text(row.get("description")),
            "price": _price(row.get("price")),
        }
    except (TypeError, OverflowError) as error:
        raise _damaged(file, number, f"{error} in the metadata of {item}") from error


def _text(value: object) -> str | None:
    """The text without HTML entities and line breaks; None if it is empty."""
    if value is None:
        return None
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not text")
    # A Python literal may spell a character as two surrogate escapes, which UTF-8 cannot encode.
    whole = value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return " ".join(html.unescape(whole).split()) or None


def _categories(paths: object) -> list[str] | None:
    """All category paths merged into one list of distinct names; a single path stays as it is."""
    if paths is None:
        return None
    if not isinstance(paths, list) or not all(isinstance(path, list) for path in paths):
        raise TypeError(f"{paths!r} is not a list of category paths")
    names = (_text(name) for path in paths for name in path)
    return list(dict.fromkeys(name for name in names if name is not None)) or None


def _price(value: object) -> float | None:
    if value is None:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(f"{value!r} is not a price")
    return float(value) if math.isfinite(value) else None
