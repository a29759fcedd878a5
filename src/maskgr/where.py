"""Conditions on the columns of items: polars expressions, or SQL such as `price < 30`."""

from __future__ import annotations

import re

import numpy as np
import numpy.typing as npt
import polars as pl

from maskgr.errors import RequestError

RESULT = "\0where"  # a name that no column has
LONGEST = 2000  # characters of SQL; the parser's time and stack grow with them
QUOTED = re.compile(r"""'(?:[^']|'')*'|"(?:[^"]|"")*\"""")
# What could hide a word from `QUOTED`: dollar quotes, escapes, comments, backticks.
HIDING = re.compile(r"\$|\\|`|#|--|/\*")
# A query inside the condition could read any file of this machine.
QUERY = re.compile(r"\b(select|with|table|values|from)\b", re.IGNORECASE)


def matching(items: pl.DataFrame, where: pl.Expr | str) -> npt.NDArray[np.bool_]:
    """(items,) whether each row of `items` fulfils the condition; unknown (null) does not."""
    if not isinstance(where, str | pl.Expr):
        raise RequestError(
            f"where is a {type(where).__name__}; give SQL such as 'price < 30', or a polars "
            "expression"
        )
    shown = f"{where}".replace("\n", " ")
    shown = shown if len(shown) <= 80 else f"{shown[:80]}…"
    expression = _parsed(where, shown) if isinstance(where, str) else where
    unknown = [name for name in expression.meta.root_names() if name not in items.columns]
    if unknown:
        raise RequestError(
            f"where {shown}: items have no column {unknown[0]}; they have "
            f"{', '.join(items.columns)}"
        )
    try:
        found = items.with_columns(expression.alias(RESULT))[RESULT]
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException) as error:
        raise RequestError(
            f"where {shown}: {_reason(error)}; compare columns with values"
        ) from None
    if found.dtype != pl.Boolean:
        raise RequestError(
            f"where {shown}: this is {found.dtype} for each item, not true or false; compare it "
            "with something"
        )
    mask: npt.NDArray[np.bool_] = found.fill_null(False).to_numpy()
    return mask


def _parsed(where: str, shown: str) -> pl.Expr:
    advice = "write for example in_stock and price < 30"
    if len(where) > LONGEST:
        raise RequestError(f"where has {len(where):,} characters; use {LONGEST:,} at most")
    hiding, query = HIDING.search(where), QUERY.search(QUOTED.sub("''", where))
    if hiding or query:
        word = (hiding or query or [""])[0]
        raise RequestError(f"where {shown}: {word} has no place in a condition on items; {advice}")
    try:
        expression = pl.sql_expr(where)
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException) as error:
        raise RequestError(f"where {shown}: {_reason(error)}; {advice}") from None
    assert "subplan" not in f"{expression}".lower()
    return expression


def _reason(error: BaseException) -> str:
    """The first sentence of what polars says."""
    return f"{error}".strip().splitlines()[0].split(". ")[0].rstrip(".:") or "it fails"
