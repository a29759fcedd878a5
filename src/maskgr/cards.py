"""HTML cards for notebooks: self-contained, no scripts, readable on light and dark pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

# Colours are the page's own, with transparency: nothing has to know whether it is dark.
BOX = (
    "display:inline-block;max-width:52em;padding:.7em 1em;margin:.3em 0;border-radius:.5em;"
    "border:1px solid rgba(128,128,128,.4);font:14px/1.5 system-ui,sans-serif;color:inherit"
)
TITLE = "font-weight:600;font-size:1.05em"
MUTED = "opacity:.7"
CELL = "padding:.1em 1.2em .1em 0;text-align:left;vertical-align:top;border:0"
TABLE = "border-collapse:collapse;margin-top:.4em;color:inherit;background:transparent"
LONGEST = 80  # characters of a cell of a table


def card(
    title: str,
    about: str,
    facts: Mapping[str, Any],
    *,
    rows: Sequence[Mapping[str, Any]] = (),
    notes: Sequence[str] = (),
) -> str:
    """A title with a sentence, facts below each other, a small table, and notes."""
    parts = [f'<div style="{TITLE}">{escape(title)}</div>']
    parts.append(f'<div style="{MUTED}">{escape(about)}</div>')
    lines = [_row([name, shown(value)]) for name, value in facts.items()]
    parts.append(f'<table style="{TABLE}">{"".join(lines)}</table>')
    if rows:
        head = "".join(f'<th style="{CELL};{MUTED}">{escape(name)}</th>' for name in rows[0])
        body = [_row([_short(shown(cell)) for cell in row.values()]) for row in rows]
        parts.append(f'<table style="{TABLE}"><tr>{head}</tr>{"".join(body)}</table>')
    parts += [f'<div style="{MUTED}">{escape(note)}</div>' for note in notes]
    return f'<div style="{BOX}">{"".join(parts)}</div>'


def _row(cells: Sequence[str]) -> str:
    first, *others = (f'<td style="{CELL}">{escape(cell)}</td>' for cell in cells)
    return f'<tr style="background:transparent">{first}{"".join(others)}</tr>'


def _short(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


def shown(value: Any) -> str:
    """A value as people read it."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4g}"
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
