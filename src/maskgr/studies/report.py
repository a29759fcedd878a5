"""The request that a study gets, and the table that it returns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass
from pathlib import Path
from typing import Any

from maskgr.errors import RequestError
from maskgr.evaluation.metrics import Floats, Mean, means
from maskgr.evaluation.protocol import Protocol
from maskgr.models.base import capabilities, model_class, train_config
from maskgr.studies.runner import Job, Measure, Runner

Row = tuple[str | float, ...]


@dataclass(frozen=True)
class Asked:
    """The request; every study takes the same."""

    data: str  # a folder or a built-in source
    out: Path  # folder of its trainings; a finished one is used again
    _: KW_ONLY
    model: str | None = None  # None: the study's own
    preset: str | None = None  # None: the study's own, mostly cpu
    minutes: float | None = None  # of each training; None: the preset's
    users: int | None = None  # evaluated users; None: all
    seed: int = 0
    only: tuple[str, ...] = ()  # the variants to train, of a study that has variants

    def runner(self) -> Runner:
        return Runner.open(self.data, self.out)

    def job(self, settings: Sequence[str] = ()) -> Job:
        """A training of the model asked for, with `key=value` settings on top of the preset."""
        preset = self.preset or "cpu"
        model = self.model or train_config(preset).name
        if "decode digits" not in capabilities(model_class(model)):
            raise RequestError(f"{model} does not generate, and studies do; use --model maskgr")
        job = Job(model, preset, tuple(settings), self.minutes, self.seed)
        _ = job.config  # raises before anything is trained
        return job

    def measure(self, protocols: tuple[Protocol, ...], **decoding: Any) -> Measure:
        """The users to evaluate, and how."""
        return Measure(users=self.users, protocols=protocols, decoding=decoding)


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


def percent(found: Mapping[str, Floats], names: Iterable[str]) -> list[float]:
    """The means of these metrics, in percent."""
    metrics = means(found)
    return [round(100 * metrics[name].mean, 2) for name in names]


def plus_minus(value: Mean) -> str:
    """In percent, with half of the interval."""
    return f"{100 * value.mean:.2f} ± {50 * (value.high - value.low):.2f}"
