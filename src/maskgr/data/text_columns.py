"""Which columns of an items table are text by default."""

from __future__ import annotations

import polars as pl

SAMPLE = 1000  # values that are looked at
NO_TEXT = {"id", "ids", "url", "urls", "uri", "link", "href", "image", "images", "sku", "asin",
           "ean", "gtin", "upc", "isbn", "uuid", "guid"}  # fmt: skip
ADDRESS = r"^(?i:https?://|www\.|data:|s3://|//)"
FLAG = r"^(?i:true|false|yes|no|y|n|t|f)$"


def text_columns(items: pl.DataFrame) -> tuple[str, ...]:
    """Columns of strings or lists of strings, in the order of the table; not those whose names or
    values are identifiers or addresses, or whose values are flags or numbers."""
    return tuple(name for name in items.columns if name != "item_id" and _is_text(items[name]))


def _is_text(column: pl.Series) -> bool:
    dtype = column.dtype
    while isinstance(dtype, pl.List | pl.Array):
        dtype = dtype.inner() if isinstance(dtype.inner, type) else dtype.inner
    if not isinstance(dtype, pl.String | pl.Categorical | pl.Enum):
        return False
    if column.name.lower().replace("-", "_").split("_")[-1] in NO_TEXT:
        return False
    if column.dtype.is_nested():
        return True
    values = column.drop_nulls().head(SAMPLE).cast(pl.String).str.strip_chars()
    values = values.filter(values != "")
    if values.is_empty():
        return True
    plain = (
        values.str.contains(f"{ADDRESS}|{FLAG}")
        | values.cast(pl.Float64, strict=False).is_not_null()
    )
    return not plain.all()
