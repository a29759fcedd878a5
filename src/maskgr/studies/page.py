"""A study as one HTML file that needs nothing else."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from maskgr.studies.report import Report

STYLE = """
:root { color-scheme: light dark; --line: #c8c8c8; --soft: #f3f3f3; --text: #1a1a1a; --back: #fff; }
@media (prefers-color-scheme: dark) {
  :root { --line: #555; --soft: #262626; --text: #e8e8e8; --back: #161616; }
}
body { font: 16px/1.5 system-ui, sans-serif; color: var(--text); background: var(--back);
  max-width: 72rem; margin: 0 auto; padding: 1.5rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.9rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; padding: 0.3rem 0; }
th, td { padding: 0.25rem 0.6rem; border-bottom: 1px solid var(--line); text-align: left;
  vertical-align: top; }
td.number, th.number { text-align: right; white-space: nowrap; }
thead th { border-bottom: 2px solid var(--text); }
tr.paper { background: var(--soft); font-style: italic; }
img { max-width: 100%; height: auto; background: #fff; }
figure { margin: 1rem 0; } figcaption { font-size: 0.9rem; }
pre { background: var(--soft); padding: 0.8rem; overflow-x: auto; font-size: 0.8rem; }
"""


def page(
    *,
    title: str,
    where: str,
    command: str,
    environment: Mapping[str, Any],
    reports: Sequence[Report],
    pictures: Sequence[tuple[str, bytes]],
    reasons: Sequence[str],
    configurations: str,
) -> str:
    """The whole page."""
    source = f"The paper has this in {where}." if where else "The paper has nothing like this."
    machine = ", ".join(f"{name} {value}" for name, value in environment.items())
    why = "".join(f"<li>{_text(reason)}</li>\n" for reason in reasons)
    known = f"<h2>Why figures differ from the paper's</h2>\n<ul>\n{why}</ul>\n" if where else ""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        f"<header>\n<h1>{escape(title)}</h1>\n<p>{escape(source)}</p>\n</header>\n<main>\n"
        + "".join(_figure(*picture) for picture in pictures)
        + "".join(_table(report) for report in reports)
        + f"<section>\n{known}</section>\n"
        "<section>\n<h2>How to get the same</h2>\n"
        f"<pre>{escape(command)}</pre>\n<p>{escape(machine)}</p>\n"
        "<details>\n<summary>Configurations of every training and measurement</summary>\n"
        f"<pre>{escape(configurations)}</pre>\n</details>\n</section>\n</main>\n</body>\n</html>\n"
    )


def _text(words: str) -> str:
    """A sentence with `code` in it."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(words))


def _figure(title: str, png: bytes) -> str:
    image = b64encode(png).decode()
    return (
        f'<figure>\n<img src="data:image/png;base64,{image}" alt="{escape(title)}; the figures are '
        f'in the tables below">\n<figcaption>{escape(title)}</figcaption>\n</figure>\n'
    )


def _table(report: Report) -> str:
    numeric = [
        _is_numeric([row[place] for row in report.rows]) for place in range(len(report.columns))
    ]
    head = "".join(
        f'<th scope="col"{_class(own)}>{escape(name)}</th>'
        for name, own in zip(report.columns, numeric, strict=True)
    )
    body = "".join(_row(row, numeric) for row in report.rows)
    notes = "".join(f"<p>{_text(note)}</p>\n" for note in report.notes)
    return (
        '<section>\n<div class="wide" tabindex="0" role="region" '
        f'aria-label="{escape(report.title)}">'
        f"\n<table>\n<caption>{escape(report.title)}</caption>\n<thead><tr>{head}</tr></thead>\n"
        f"<tbody>\n{body}</tbody>\n</table>\n</div>\n{notes}</section>\n"
    )


def _row(row: Sequence[str | float], numeric: Sequence[bool]) -> str:
    published = any(str(cell).startswith("paper, ") for cell in row)
    cells = "".join(
        f"<td{_class(own)}>{escape(str(cell))}</td>" for cell, own in zip(row, numeric, strict=True)
    )
    return f"<tr{' class=paper' if published else ''}>{cells}</tr>\n"


def _class(numeric: bool) -> str:
    return ' class="number"' if numeric else ""


def _is_numeric(cells: Sequence[str | float]) -> bool:
    """Numbers, with or without an interval or a sign."""
    texts = [str(cell) for cell in cells if str(cell) not in ("", "–")]
    return all(text.strip("+-< ")[:1].isdigit() for text in texts)
