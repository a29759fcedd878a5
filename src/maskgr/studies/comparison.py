"""Results of several models on the same users: tables, files and a picture."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from maskgr.errors import RequestError
from maskgr.evaluation.differences import holm, mean_over_seeds, paired_difference
from maskgr.evaluation.metrics import Floats, Mean
from maskgr.evaluation.protocol import Protocol
from maskgr.studies.measures import Measure, Scores
from maskgr.studies.pairs import Pair, gap_text, p_text, pair_dict
from maskgr.studies.plots import interval_plot
from maskgr.studies.report import Report, Row, to_csv, write_text
from maskgr.studies.runner import TrainingError

NAME = "comparison"  # of the files, with their endings
DIFFERENCES = "differences.csv"
RANKED_BY = "recall@10"  # which model is best
SHOWN = ("recall@10", "ndcg@10")  # differences on the screen; the files have all


@dataclass(frozen=True, eq=False)
class Measured:
    """A model with what was measured of it, once for each seed."""

    name: str
    seeds: tuple[int, ...]
    scores: tuple[Scores, ...]  # as the seeds

    def values(self, protocol: Protocol, metric: str) -> Floats:
        """(seeds, users)"""
        return np.stack([own.values[protocol][metric] for own in self.scores])

    def mean(self, protocol: Protocol, metric: str) -> Mean:
        return mean_over_seeds(self.values(protocol, metric))

    @property
    def minutes(self) -> float:
        return float(np.mean([own.minutes for own in self.scores]))

    @property
    def users_per_second(self) -> float:
        return float(np.mean([own.users_per_second for own in self.scores]))

    @property
    def parameters(self) -> int:
        return self.scores[0].parameters


@dataclass(frozen=True, eq=False)
class Comparison:
    """What was measured so far; `missing` names the models that were not."""

    data: str
    fingerprint: str
    measure: Measure
    models: tuple[Measured, ...]
    missing: tuple[str, ...]
    failure: TrainingError | None = None

    @property
    def metrics(self) -> list[str]:
        return [f"{name}@{k}" for k in self.measure.ks for name in ("recall", "ndcg")]

    @property
    def users(self) -> int:
        return self.models[0].scores[0].users

    @cached_property
    def pairs(self) -> list[Pair]:
        """Each two models, for every metric and protocol."""
        found = []
        for protocol in self.measure.protocols:
            for metric in self.metrics:
                values = {m.name: m.values(protocol, metric) for m in self.models}
                names = list(combinations(values, 2))
                each = [paired_difference(values[one], values[two]) for one, two in names]
                adjusted = holm([own.p for own in each])
                found += [
                    Pair(protocol, metric, *two, own, p)
                    for two, own, p in zip(names, each, adjusted, strict=True)
                ]
        return found

    def reports(self) -> list[Report]:
        """The tables for people: results, costs, differences to the best."""
        return [self._results(), self._costs(), *([self._gaps()] if len(self.models) > 1 else ())]

    def _results(self) -> Report:
        seeds = [len(own.scores) for own in self.models]
        most, users = max(seeds), self.users
        notes = [
            f"±: half of the 95 % interval over {users:,} users"
            + (f" and {most} seeds" if most > 1 else "; with one seed it says nothing of others")
        ]
        if self.measure.split == "validation":
            notes.append("validation chose each network, so these figures flatter")
        if min(seeds) < most:
            few = [m.name for m in self.models if len(m.scores) < most]
            notes.append(f"fewer seeds: {', '.join(few)}")
        if self.missing:
            notes.append(f"not measured so far: {', '.join(self.missing)}")
        return Report(
            f"{self.data}, {self.measure.split}, {users:,} users, percent",
            ("model", "protocol", *self.metrics),
            tuple(
                (own.name, protocol, *(str(own.mean(protocol, m)) for m in self.metrics))
                for protocol in self.measure.protocols
                for own in self.models
            ),
            tuple(notes),
        )

    def _costs(self) -> Report:
        return Report(
            "What each took",
            ("model", "seeds", "minutes of training", "users/s in evaluation", "parameters"),
            tuple(
                (
                    own.name,
                    len(own.scores),
                    round(own.minutes, 2),
                    _brief(own.users_per_second),
                    own.parameters,
                )
                for own in self.models
            ),
            tuple(
                f"{own.name} decodes: {_decoding(own.scores[0].decoding)}"
                for own in self.models
                if own.scores[0].decoding
            ),
        )

    def _gaps(self) -> Report:
        """Each model less the best."""
        pairs = {
            (p.protocol, p.metric, p.model, p.other): p
            for pair in self.pairs
            for p in (pair, pair.turned())
        }
        rows: list[Row] = []
        notes = []
        for protocol in self.measure.protocols:
            best = max(self.models, key=lambda own: own.mean(protocol, RANKED_BY).mean).name
            notes.append(f"best under {protocol}: {best}")
            for name in (own.name for own in self.models if own.name != best):
                found = [pairs[protocol, metric, name, best] for metric in SHOWN]
                cells = [text for pair in found for text in (gap_text(pair), p_text(pair.adjusted))]
                rows.append((name, protocol, *cells))
        notes.append(
            "the same users, paired t-interval of 95 %; p is adjusted for all pairs of models "
            "(Holm)"
        )
        return Report(
            f"Each model less the best by {RANKED_BY}, percentage points",
            ("model", "protocol", *(text for metric in SHOWN for text in (metric, "p"))),
            tuple(rows),
            tuple(notes),
        )

    def to_dict(self) -> dict[str, Any]:
        """Everything, as fractions."""
        return {
            "data": self.data,
            "fingerprint": self.fingerprint,
            "split": self.measure.split,
            "users": self.users,
            "models": [self._model_dict(own) for own in self.models],
            "differences": [pair_dict(pair) for pair in self.pairs],
            "missing": list(self.missing),
        }

    def _model_dict(self, model: Measured) -> dict[str, Any]:
        return {
            "model": model.name,
            "seeds": list(model.seeds),
            "minutes": model.minutes,
            "users_per_second": model.users_per_second,
            "parameters": model.parameters,
            "decoding": model.scores[0].decoding,
            "runs": [own.run for own in model.scores],
            "protocols": {
                protocol: {m: asdict(model.mean(protocol, m)) for m in self.metrics}
                for protocol in self.measure.protocols
            },
            "by_seed": [
                {
                    protocol: {m: float(own.values[protocol][m].mean()) for m in self.metrics}
                    for protocol in self.measure.protocols
                }
                for own in model.scores
            ],  # as the seeds
            "config": model.scores[0].config,
        }

    def save(self, out: Path) -> None:
        """Writes the table (Markdown, CSV, JSON), the differences (CSV) and the picture (PNG)."""
        found = self.to_dict()
        write_text(out / f"{NAME}.json", json.dumps(found, indent=2, ensure_ascii=False) + "\n")
        write_text(
            out / f"{NAME}.csv", to_csv([row for own in found["models"] for row in _tidy(own)])
        )
        write_text(out / DIFFERENCES, to_csv(found["differences"]))
        parts = [report.to_markdown() for report in self.reports()]
        try:
            self.draw(out / f"{NAME}.png")
            parts.append(f"![Each model with its intervals]({NAME}.png)\n")
        except RequestError as error:  # tables without a picture are still tables
            print(f"note: {error}", file=sys.stderr)
        write_text(out / f"{NAME}.md", "\n".join(parts))

    def draw(self, file: Path) -> None:
        panels = {
            metric: {
                f"protocol {protocol}": [own.mean(protocol, metric) for own in self.models]
                for protocol in self.measure.protocols
            }
            for metric in self.metrics
        }
        title = f"{self.data}, {self.measure.split}, {self.users:,} users, 95 % intervals"
        interval_plot(file, title, [own.name for own in self.models], panels)


def _brief(rate: float) -> float:
    """Three digits, or all before the point."""
    return round(rate) if rate >= 100 else float(f"{rate:.3g}")


def _decoding(used: Mapping[str, Any]) -> str:
    """What decided a search; one step has no order and needs no beams."""
    words = [f"retrieval {used['retrieval']}"]
    if used["retrieval"] != "dense":
        words.append(f"steps {used['steps']}")
        if used["steps"] > 1:
            words += [f"order {used['order']}", f"beams {used['beams']}"]
    return ", ".join(words)


def _tidy(model: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A line a protocol."""
    facts = {k: model[k] for k in ("minutes", "users_per_second", "parameters")}
    return [
        {
            "model": model["model"],
            "protocol": protocol,
            **{
                f"{metric}{end}": value[key]
                for metric, value in values.items()
                for end, key in (("", "mean"), (" low", "low"), (" high", "high"))
            },
            "seeds": len(model["seeds"]),
            **facts,
        }
        for protocol, values in model["protocols"].items()
    ]
