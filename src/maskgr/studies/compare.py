"""Models side by side: trained on the same data, measured on the same users."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from maskgr.data.config import DataConfig
from maskgr.data.splits import leave_out
from maskgr.errors import RequestError
from maskgr.models.base import MODELS, model_class, train_config
from maskgr.studies.comparison import NAME, Comparison, Measured
from maskgr.studies.measures import Measure, Scores
from maskgr.studies.runner import (
    EVALUATIONS,
    RUNS,
    Job,
    Runner,
    TrainingError,
    alone,
)

FLOOR = "popularity"  # in every comparison: what is not above it has learned nothing


@dataclass(frozen=True)
class Entry:
    """A model of the comparison: a training for each seed, or a run that exists."""

    name: str  # as it was asked for
    jobs: tuple[Job, ...] = ()
    run: Path | None = None


def entries(
    models: Sequence[str],
    *,
    preset: str | None = None,
    settings: Sequence[str] = (),
    minutes: float | None = None,
    seeds: Sequence[int] = (0,),
    device: str | None = None,
) -> list[Entry]:
    """`name`, `name:preset` or a run folder each, checked; popularity is always among them."""
    if not models:
        raise RequestError("no model is named; give --models, for example sasrec,tiger,maskgr")
    found: list[Entry] = []
    for word in models:
        name, colon, given = word.partition(":")
        if name not in MODELS and Path(word).is_dir():
            found.append(Entry(word, run=Path(word)))
            continue
        chosen = given if colon else _preset(name, preset)
        jobs = [Job(name, chosen, tuple(settings), minutes, seed, device) for seed in seeds]
        found.append(Entry(word, tuple(jobs)))
    if not any(entry.jobs and entry.jobs[0].model == FLOOR for entry in found):
        own = tuple(setting for setting in settings if _has(FLOOR, setting))
        jobs = [Job(FLOOR, _preset(FLOOR, None), own, minutes, seed, device) for seed in seeds]
        found.append(Entry(FLOOR, tuple(jobs)))
    _require_different(found)
    return found


def _preset(model: str, asked: str | None) -> str:
    """The preset asked for, or the only one that the model has."""
    presets = model_class(model).presets
    return next(iter(presets)) if len(presets) == 1 else asked or "cpu"


def _has(model: str, setting: str) -> bool:
    try:
        train_config(_preset(model, None), [setting], model=model)
    except RequestError:
        return False
    return True


def _require_different(found: Sequence[Entry]) -> None:
    """Raises where two entries are the same, and where one asks for what there is not."""
    known: dict[str, str] = {}
    for entry in found:
        key = str([job.config for job in entry.jobs] or entry.run)
        if key in known:
            raise RequestError(f"{known[key]} and {entry.name} are the same; name each model once")
        known[key] = entry.name


def compare(
    data: str,
    out: Path,
    models: Sequence[Entry],
    measure: Measure,
    data_config: DataConfig | None = None,
) -> Comparison:
    """Trains and measures what is missing; the files are written anew after each model."""
    _require_ours(out)
    runner = Runner.open(data, out, data_config)
    _require_same_data(out, runner.dataset.fingerprint)
    _require_same_users(runner, models)
    with alone(out):
        table = _Table(runner, models, measure)
        # What exists first, then seed by seed: every model is in the table early.
        owners = {job: entry.name for entry in models for job in entry.jobs}
        jobs = sorted(owners, key=lambda job: (not runner.is_trained(job), job.seed))
        known = [job for job in jobs if runner.is_trained(job)]
        for entry in models:
            if entry.run is not None:
                table.add(entry.name, entry.run, save=not known)
        try:
            for job, run in runner.each_trained(jobs):
                table.add(owners[job], run, save=job not in known[:-1])
        except TrainingError as error:
            if not any(table.scores.values()):
                raise
            return replace(table.comparison(), failure=error)
        return table.comparison()


class _Table:
    """The comparison as it grows."""

    def __init__(self, runner: Runner, entries: Sequence[Entry], measure: Measure) -> None:
        self.runner, self.entries, self.measure = runner, entries, measure
        self.scores: dict[str, dict[int, Scores]] = {entry.name: {} for entry in entries}

    def add(self, name: str, run: Path, *, save: bool) -> None:
        """`save`: unless more follows at once."""
        found = self.runner.measure(run, self.measure)
        self.scores[name][found.config["seed"]] = found
        if save:
            self.comparison().save(self.runner.out)

    def comparison(self) -> Comparison:
        names = [entry.name for entry in self.entries]
        found = {name: sorted(self.scores[name].items()) for name in names}
        return Comparison(
            data=self.runner.data,
            fingerprint=self.runner.dataset.fingerprint,
            measure=self.measure,
            models=tuple(
                Measured(name, *zip(*own, strict=True)) for name, own in found.items() if own
            ),
            missing=tuple(name for name, own in found.items() if not own),
        )


def _require_ours(out: Path) -> None:
    """Raises for a folder of other things: its files would be mixed with ours."""
    if not out.exists():
        return
    known = out.is_dir() and any((out / name).exists() for name in (RUNS, EVALUATIONS, ".lock"))
    if not known and (not out.is_dir() or any(out.iterdir())):
        raise RequestError(f"{out} exists and holds no comparison; give another --out")


def _require_same_data(out: Path, fingerprint: str) -> None:
    """Raises where the table in `out` is about other data: it would be replaced."""
    file = out / f"{NAME}.json"
    if not file.exists():
        return
    try:
        before = json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        return  # damaged, and about to be written anew
    if before.get("fingerprint") != fingerprint:
        raise RequestError(
            f"{out} holds a comparison on other data ({before.get('data')}); give another --out"
        )


def _require_same_users(runner: Runner, models: Sequence[Entry]) -> None:
    """Raises where models hold out different items, which gives them different users, and where
    no user has so many."""
    held_out = {
        entry.name: (
            entry.jobs[0].config if entry.run is None else runner.load(entry.run).config
        ).leave_out
        for entry in models
    }
    (first, count), *others = held_out.items()
    for name, own in others:
        if own != count:
            raise RequestError(
                f"{first} holds out {count} items of a user and {name} holds out {own}, so their "
                "figures cannot be compared; use the same leave_out"
            )
    leave_out(runner.dataset.histories, count)
