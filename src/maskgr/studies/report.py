"""Tables of results, and the files that they are written to."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from maskgr.artefact import write_file

Row = tuple[str | float, ...]


@dataclass(frozen=True)
class Report:
    title: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Rows by column, as JSON wants them."""
        rows = [dict(zip(self.columns, row, strict=True)) for row in self.rows]
        return {**asdict(self), "rows": rows}

    def to_markdown(self) -> str:
        lines = [self.columns, ("---",) * len(self.columns), *self.rows]
        table = "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)
        notes = "".join(f"\n- {note}" for note in self.notes)
        return f"**{self.title}**\n\n{table}\n" + (f"{notes}\n" if notes else "")


def _cell(value: str | float) -> str:
    text = f"{value:,}" if isinstance(value, int) else str(value)
    return text.replace("|", "\\|")


def to_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    text = io.StringIO()
    if rows:
        writer = csv.DictWriter(text, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return text.getvalue()


def write_text(file: Path, text: str) -> None:
    with write_file(file) as draft:
        draft.write_text(text, encoding="utf-8")
