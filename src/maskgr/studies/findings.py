"""The tables, figures and files of a study."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from maskgr.errors import RequestError
from maskgr.evaluation.protocol import Protocol
from maskgr.studies.page import page
from maskgr.studies.pairs import gap_text, p_text, pair_dict
from maskgr.studies.report import Report, Row, to_csv, write_text
from maskgr.studies.results import Cell, Checked, Part, check, compare
from maskgr.studies.study import Asked, Study, data_name
from maskgr.version import __version__

MISSING = "–"
REASONS = (  # for differences to the paper, in every study
    "Budget: every model has the same wall-clock time, minutes on a few cores; the paper trained "
    "on four GPUs until validation stopped improving.",
    "Network: unless the preset is `published`, `maskgr-paper` has half of the paper's layers and "
    "a sixth of its hidden entries, with small batches and without dropout, and is told the level "
    "of every digit; its objective, attention and digits are the paper's.",
    "Text: the paper's items are embedded by Flan-T5-XXL (4,096 numbers each); here by whatever "
    "the dataset came with, else by WordLlama.",
    "Decoding: beams are constrained to items of the catalogue, unless a row says otherwise; the "
    "paper's are not. Unless the preset is `published` or costs are measured, `maskgr-paper` "
    "encodes a history once, and keeps its keys and values for all beams and steps.",
    "Ours (`maskgr`) is another model: its digits are normalised over the catalogue, made of "
    "learned vectors, and histories have up to 200 items.",
)


@dataclass(frozen=True, eq=False)
class Drawn:
    """What a figure is made of."""

    study: Study
    part: Part
    title: str

    @property
    def metrics(self) -> tuple[str, ...]:
        return self.study.metrics

    @property
    def paper_data(self) -> str:
        return self.study.paper_of(self.part.data)

    def paper(self, cell: Cell) -> Mapping[str, float]:
        return self.study.paper(self.paper_data, cell)


@dataclass(frozen=True, eq=False)
class Findings:
    """What was measured so far; `missing` names what was not."""

    name: str
    study: Study
    asked: Asked
    parts: tuple[Part, ...]
    missing: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        return self.asked.out / "-".join([self.name, *map(data_name, self.asked.data)])

    @property
    def protocols(self) -> list[Protocol]:
        return list(self.parts[0].cells[0].values)

    @cached_property
    def checked(self) -> list[list[Checked]]:
        """The claims on each dataset."""
        return [check(part, self.study.claims(part)) for part in self.parts]

    # Tables

    def reports(self) -> list[Report]:
        """For people: results of each dataset, and how the paper's findings fare."""
        found = []
        for part, checked in zip(self.parts, self.checked, strict=True):
            found.append(self._results(part))
            if checked:
                found.append(self._claims(part, checked))
        return found

    def title(self, part: Part) -> str:
        return f"{self.study.title}: {part.data}, {self.study.measure.split}, {part.users:,} users"

    def _results(self, part: Part) -> Report:
        drawn = Drawn(self.study, part, "")
        rows: list[Row] = []
        for cell in part.cells:
            head, facts = (cell.variant, *cell.labels), _facts(cell, self.study.facts)
            for protocol in self.protocols:
                means = [cell.mean(protocol, metric) for metric in self.study.metrics]
                texts = [MISSING if m is None else str(m) for m in means]
                rows.append((*head, protocol, *texts, *facts))
                facts = ("",) * len(facts)  # once is enough
            if figures := drawn.paper(cell):
                texts = [_figure(figures.get(metric)) for metric in self.study.metrics]
                rows.append((*head, f"paper, {drawn.paper_data}", *texts, *facts))
        columns = (self.study.first, *self.study.labels, "protocol")
        return Report(
            f"{self.title(part)}, percent",
            (*columns, *self.study.metrics, *self.study.facts),
            tuple(rows),
            (*self._interval_notes(part), *self.study.notes),
        )

    def _interval_notes(self, part: Part) -> list[str]:
        seeds = [len(own.seeds) for own in part.cells]
        notes = [
            f"±: half of the 95 % interval over {part.users:,} users"
            + (
                f" and {max(seeds)} seeds"
                if max(seeds) > 1
                else "; with one seed it says nothing of another training"
            )
        ]
        if min(seeds) < max(seeds):
            few = dict.fromkeys(own.variant for own in part.cells if len(own.seeds) < max(seeds))
            notes.append(f"fewer seeds: {', '.join(few)}")
        if self.missing:
            notes.append(f"not measured: {', '.join(self.missing)}")
        return notes

    def _claims(self, part: Part, checked: list[Checked]) -> Report:
        rows: list[Row] = [
            (
                own.claim.text if place == 0 else "",
                own.verdict if place == 0 else "",
                f"{pair.model} less {pair.other}",
                own.claim.metric,
                gap_text(pair),
                p_text(pair.adjusted),
            )
            for own in checked
            for place, pair in enumerate(own.pairs)
        ]
        return Report(
            f"The paper's findings: {part.data}, protocol {part.protocol}",
            ("finding", "verdict", "difference", "metric", "points", "p"),
            tuple(rows),
            (
                "points: difference in percentage points on the same users, with half of its "
                "paired 95 % interval; p is adjusted for all differences of the metric here (Holm)",
                "holds: every difference is positive with p < 0.05 (where no worse is enough: none "
                "is negative); holds partly: some are; does not hold: none is, and some are "
                "negative with p < 0.05; not decided: none is beyond chance",
            ),
        )

    # Files

    def to_dict(self) -> dict[str, Any]:
        """Everything but the configurations, as fractions; the paper's figures in percent."""
        return {
            "study": self.name,
            "title": self.study.title,
            "paper": self.study.where,
            "split": self.study.measure.split,
            "parts": [
                {
                    "data": part.data,
                    "fingerprint": part.fingerprint,
                    "users": part.users,
                    "cells": [self._cell_dict(part, cell) for cell in part.cells],
                    "claims": [
                        {
                            "finding": own.claim.text,
                            "verdict": own.verdict,
                            "differences": [pair_dict(pair) for pair in own.pairs],
                        }
                        for own in checked
                    ],
                }
                for part, checked in zip(self.parts, self.checked, strict=True)
            ],
            "missing": list(self.missing),
        }

    def _cell_dict(self, part: Part, cell: Cell) -> dict[str, Any]:
        drawn = Drawn(self.study, part, "")
        return {
            self.study.first: cell.variant,
            **dict(zip(self.study.labels, cell.labels, strict=True)),
            "seeds": list(cell.seeds),
            "protocols": {
                protocol: {
                    metric: asdict(mean)
                    for metric in self.study.metrics
                    if (mean := cell.mean(protocol, metric)) is not None
                }
                for protocol in self.protocols
            },
            "paper_data": drawn.paper_data if drawn.paper(cell) else None,
            "paper": dict(drawn.paper(cell)),
            **cell.facts,
        }

    def configurations(self) -> dict[str, Any]:
        """Everything that decided the results: the command, each training and each way."""
        return {
            "command": self.asked.words(self.name),
            "environment": environment(),
            "measured": asdict(self.study.measure),
            "variants": [
                {
                    "data": part.data,
                    "fingerprint": part.fingerprint,
                    "variant": cell.variant,
                    "labels": list(cell.labels),
                    "decoding": cell.scores[0].decoding,
                    "runs": [Path(own.run).name for own in cell.scores],
                    "trainings": [own.config for own in cell.scores],
                }
                for part in self.parts
                for cell in part.cells
            ],
        }

    def _tidy(self) -> list[dict[str, Any]]:
        """A line for each dataset, cell and protocol, and for the paper's figures."""
        rows = []
        for part in self.parts:
            drawn = Drawn(self.study, part, "")
            for cell in part.cells:
                head: dict[str, Any] = {"data": part.data, self.study.first: cell.variant}
                head |= dict(zip(self.study.labels, cell.labels, strict=True))
                for protocol in self.protocols:
                    means = {m: cell.mean(protocol, m) for m in self.study.metrics}
                    ends = {
                        f"{m}{end}": None if mean is None else getattr(mean, name)
                        for m, mean in means.items()
                        for end, name in (("", "mean"), (" low", "low"), (" high", "high"))
                    }
                    more = {"seeds": len(cell.seeds), **cell.facts}
                    rows.append({**head, "protocol": protocol, **ends, **more})
                if figures := drawn.paper(cell):
                    blank = dict.fromkeys(rows[-1], "")
                    own = {m: figures[m] / 100 for m in self.study.metrics if m in figures}
                    label = {"protocol": f"paper, {drawn.paper_data}"}
                    rows.append({**blank, **head, **label, **own})
        return rows

    def _differences(self) -> list[dict[str, Any]]:
        """The pairs of the claims for every metric and protocol."""
        found = []
        for part, checked in zip(self.parts, self.checked, strict=True):
            pairs = list(dict.fromkeys(pair for own in checked for pair in own.claim.pairs))
            for protocol in self.protocols:
                for metric in self.study.metrics:
                    known = [
                        pair
                        for pair in pairs
                        if all(metric in own.values[protocol] for own in pair)
                    ]
                    found += [
                        {"data": part.data, **pair_dict(pair)}
                        for pair in compare(protocol, metric, known)
                    ]
        return found

    def save(self) -> None:
        """Writes all files, each atomically."""
        folder = self.folder
        folder.mkdir(parents=True, exist_ok=True)
        reports, pictures = self.reports(), self._draw()
        parts = [report.to_markdown() for report in reports]
        parts += [f"![{self.title(part)}]({file.name})\n" for part, file in pictures]
        write_text(folder / "table.md", "\n".join(parts))
        write_text(folder / "table.csv", to_csv(self._tidy()))
        write_text(folder / "table.json", _json(self.to_dict()))
        write_text(folder / "differences.csv", to_csv(self._differences()))
        configurations = _json(self.configurations())
        write_text(folder / "configurations.json", configurations)
        html = page(
            title=self.study.title,
            where=self.study.where,
            command=" ".join(self.asked.words(self.name)),
            environment=environment(),
            reports=reports,
            pictures=[(self.title(part), file.read_bytes()) for part, file in pictures],
            reasons=(*self.study.reasons, *REASONS),
            configurations=configurations,
        )
        write_text(folder / "report.html", html)

    def _draw(self) -> list[tuple[Part, Path]]:
        """The figure of each dataset; none without matplotlib."""
        found = []
        for part in self.parts:
            name = "figure.png" if len(self.asked.data) == 1 else f"figure-{part.data}.png"
            seeds = max(len(own.seeds) for own in part.cells)
            title = f"{self.title(part)}, {seeds} seed{'s' * (seeds > 1)}, 95 % intervals"
            try:
                self.study.draw(self.folder / name, Drawn(self.study, part, title))
            except RequestError as error:  # tables without a picture are still tables
                print(f"note: {error}", file=sys.stderr)
                return []
            found.append((part, self.folder / name))
        return found


def environment() -> dict[str, Any]:
    return {
        "maskgr": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }


def _facts(cell: Cell, names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(_brief(cell.facts[name]) for name in names)


def _brief(value: float | None) -> str:
    """Three significant digits, or all before the point."""
    if value is None:
        return ""
    if 0 < value < 0.01:
        return "< 0.01"
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"
