"""Item text from the columns of the items table, by a template.

A template is text with columns in braces, divided into segments by `;` or `|`:

    Title: {title}; Brand: {brand}; In {categories: > } | for {price} dollars

- `{column}` stands for the item's value. A value that is null, NaN, infinite, blank or an empty
  list is missing.
- A segment that names a missing value disappears, label and all; a segment without a column stays
  as long as another one does.
- The remaining segments are joined by the template's separators: `;` writes "; ", `|` a space.
- `{column:joiner}` writes a list with this text between its entries. Without a joiner it is " > "
  for columns with "categor" in their name (a path) and ", " for all others. Lists in lists are
  flattened; missing entries are skipped.
- `{{`, `}}`, `;;` and `||` write the character itself.

Values are written plainly: a column called `price` (or `..._price`) with two decimals, other
numbers without trailing zeros, dates as ISO 8601, text as it is (HTML included). Runs of white
space become one space.

Without a template, every text column is written as `Label: value`, in the order title, brand,
categories, description, price and then as they were named. Which columns are text is a choice of
the dataset (see `maskgr.data.text_columns`); columns that are not text, numbers, dates or lists of
these (structs, bytes) are left out, and a column that new items lack is missing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import polars as pl

from maskgr.data.text_columns import text_columns
from maskgr.errors import DataError

_FIRST = ("title", "brand", "categories", "description", "price")
_JOINTS = {";": "; ", "|": " "}
_TOKEN = re.compile(r"\{\{|\}\}|;;|\|\||\{[^{}]*\}|[;|{}]|[^;|{}]+")


@dataclass(frozen=True)
class _Field:
    column: str
    joiner: str


@dataclass(frozen=True)
class _Segment:
    joint: str  # separates it from the text before it
    parts: tuple[str | _Field, ...]

    @property
    def has_field(self) -> bool:
        return any(isinstance(part, _Field) for part in self.parts)


def item_texts(
    items: pl.DataFrame, template: str | None = None, columns: Sequence[str] = ()
) -> list[str]:
    """One text per item, in the order of the table; "" where every value named is missing.

    columns: those that are text where there is no template; none: those that look like it.
    """
    if template is None:
        segments = _default(items, columns or text_columns(items))
    else:
        segments = _parse(template, items)
    if not segments or items.is_empty():
        return [""] * items.height
    parts = {str(i): pl.lit(s.joint) + _segment(s, items.schema) for i, s in enumerate(segments)}
    present = [str(i) for i, s in enumerate(segments) if s.has_field]
    text = (
        pl.concat_str(pl.col(list(parts)), ignore_nulls=True)
        .str.replace("^(?:; | )", "")  # the joint of the first remaining segment
        # Single spaces, by far the most common white space, are not matched: this makes it fast.
        .str.replace_all(r"\s{2,}|[^\S ]", " ")
    )
    kept = pl.when(pl.any_horizontal(pl.col(present).is_not_null())).then(text)
    return items.select(**parts).select(text=kept.otherwise(pl.lit("")))["text"].to_list()


def _default(items: pl.DataFrame, columns: Sequence[str]) -> list[_Segment]:
    present = [name for name in columns if name in items.columns and _writable(items[name].dtype)]
    rank = {name: i for i, name in enumerate(_FIRST)}
    present.sort(key=lambda name: rank.get(name.lower(), len(rank)))  # stable for the others
    return [
        _Segment(_JOINTS[";"], (f"{_label(name)}: ", _Field(name, _joiner(name))))
        for name in present
    ]


def _label(column: str) -> str:
    words = column.replace("_", " ").strip()
    return words[:1].upper() + words[1:]


def _joiner(column: str) -> str:
    return " > " if "categor" in column.lower() else ", "


def _parse(template: str, items: pl.DataFrame) -> list[_Segment]:
    segments: list[_Segment] = []
    joint, parts = _JOINTS[";"], list[str | _Field]()
    for match in _TOKEN.finditer(template):
        token = match.group()
        if token in _JOINTS:
            segments += _closed(joint, parts)
            joint, parts = _JOINTS[token], []
        elif token in ("{", "}"):
            raise DataError(
                f"the template has a {token!r} without its partner at character "
                f"{match.start() + 1}; close it, or write {token * 2!r} for the character itself"
            )
        elif token[0] == "{" and token[-1] == "}":
            parts.append(_field(token[1:-1], items))
        else:
            parts.append(token[0] if token in ("{{", "}}", ";;", "||") else token)
    segments += _closed(joint, parts)
    if not any(segment.has_field for segment in segments):
        raise DataError(
            "the template names no column, so all items would have the same text; "
            f"name one of {_listed(items.columns)} in braces"
        )
    return segments


def _closed(joint: str, parts: list[str | _Field]) -> list[_Segment]:
    """The segment without white space at its ends; an empty list if nothing is left."""
    if parts and isinstance(parts[0], str):
        parts[0] = parts[0].lstrip()
    if parts and isinstance(parts[-1], str):
        parts[-1] = parts[-1].rstrip()
    return [_Segment(joint, tuple(parts))] if any(parts) else []


def _field(inside: str, items: pl.DataFrame) -> _Field:
    column, colon, joiner = inside.partition(":")
    if inside in items.columns:  # a column may have a colon in its name
        column, colon, joiner = inside, "", ""
    if column not in items.columns:
        raise DataError(
            f"the template names the column {column!r}, which the items do not have; "
            f"they have {_listed(items.columns)}"
        )
    dtype = items.schema[column]
    if not _writable(dtype):
        raise DataError(
            f"the template names the column {column!r}, whose type {dtype} cannot be written as "
            "text; turn it into text, numbers or lists of these first"
        )
    if colon and not isinstance(dtype, pl.List | pl.Array):
        raise DataError(
            f"the template gives the joiner {joiner!r} for the column {column!r}, which holds "
            f"no lists; write {{{column}}}"
        )
    return _Field(column, joiner if colon else _joiner(column))


def _listed(columns: Sequence[str]) -> str:
    return ", ".join(map(repr, columns))


def _writable(dtype: pl.DataType) -> bool:
    while isinstance(dtype, pl.List | pl.Array):
        dtype = _inner(dtype)
    return not isinstance(dtype, pl.Struct | pl.Binary | pl.Object)


def _segment(segment: _Segment, schema: pl.Schema) -> pl.Expr:
    """The segment's text; null if a value it names is missing."""
    parts = [
        pl.lit(part) if isinstance(part, str) else _value(part, schema[part.column])
        for part in segment.parts
    ]
    return pl.concat_str(parts, ignore_nulls=False)


def _value(field: _Field, dtype: pl.DataType) -> pl.Expr:
    """The column as text, null where it is missing."""
    value = pl.col(field.column)
    if not isinstance(dtype, pl.List | pl.Array):
        return _scalar(value, dtype, field.column)
    value, inner = _flat(value, dtype)
    entries = value.list.eval(_scalar(pl.element(), inner, field.column)).list.drop_nulls()
    return _null_if_blank(entries.list.join(field.joiner))


def _flat(value: pl.Expr, dtype: pl.List | pl.Array) -> tuple[pl.Expr, pl.DataType]:
    """Lists in lists as one list, and the type of its entries."""
    if isinstance(dtype, pl.Array):
        value = value.arr.to_list()
    inner = _inner(dtype)
    if not isinstance(inner, pl.List | pl.Array):
        return value, inner
    element, innermost = _flat(pl.element(), inner)
    return value.list.eval(element.explode()), innermost


def _inner(dtype: pl.List | pl.Array) -> pl.DataType:
    inner = dtype.inner
    return inner() if isinstance(inner, type) else inner


def _scalar(value: pl.Expr, dtype: pl.DataType, column: str) -> pl.Expr:
    if dtype.is_float():
        value = pl.when(value.is_finite()).then(value)
    if dtype.is_numeric() and column.lower().split("_")[-1] == "price":
        text = value.cast(pl.Float64).round(2).cast(pl.String)
        text = text.str.replace(r"(\.\d)$", "${1}0")
    elif dtype.is_float():
        text = value.cast(pl.String).str.strip_suffix(".0")
    elif dtype.is_decimal():
        text = value.cast(pl.String).str.replace(r"(\.\d*?)0+$", "$1").str.strip_suffix(".")
    elif isinstance(dtype, pl.Datetime):
        # Dates are often read as datetimes at midnight; such a time of day means nothing.
        text = value.dt.strftime("%Y-%m-%dT%H:%M:%S").str.strip_suffix("T00:00:00")
    elif isinstance(dtype, pl.Duration):
        text = value.dt.to_string("iso")
    else:
        text = value.cast(pl.String)
    return _null_if_blank(text)


def _null_if_blank(text: pl.Expr) -> pl.Expr:
    stripped = text.str.strip_chars()
    return pl.when(stripped != "").then(stripped)
