"""Runs a study: trains what is missing, measures it in every way, writes the files as it goes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from maskgr.data.splits import leave_out
from maskgr.models.base import Decodes
from maskgr.studies.findings import Findings
from maskgr.studies.measures import Scores
from maskgr.studies.results import Cell, Part
from maskgr.studies.runner import Job, Runner, TrainingError, each_trained
from maskgr.studies.study import Asked, Study, Variant, Way, data_name


def conduct(name: str, study: Study, asked: Asked) -> Findings:
    """Everything that was asked for; a training that fails is raised after the others."""
    variants = study.chosen(asked.only)
    seeds = range(asked.seed, asked.seed + asked.seeds)
    jobs = {(own.name, seed): own.job(asked, seed) for own in variants for seed in seeds}
    runners = [study.open(data, asked) for data in asked.data]
    for runner in runners:  # no user has so many items: better said now than after a training
        for count in {job.config.leave_out for job in jobs.values()}:
            leave_out(runner.dataset.histories, count)
    table = _Table(name, study, asked, runners, variants)
    owners = {job: own for own in variants for seed in seeds for job in [jobs[own.name, seed]]}
    # What exists first, then seed by seed: every model is in the table early.
    todo = [(runner, jobs[own.name, s]) for s in seeds for runner in runners for own in variants]
    todo.sort(key=lambda own: not own[0].is_trained(own[1]))
    known = [own for own in todo if own[0].is_trained(own[1])]
    try:
        for (runner, job), run in each_trained(todo):
            table.add(runner, owners[job], job, table.measure(runner, job, run))
            if (runner, job) not in known[:-1]:
                table.findings().save()
    except TrainingError:
        if table.found:
            table.findings().save()
        raise
    return table.findings()


class _Table:
    """The findings as they grow."""

    def __init__(
        self,
        name: str,
        study: Study,
        asked: Asked,
        runners: Sequence[Runner],
        variants: Sequence[Variant],
    ) -> None:
        self.name, self.study, self.asked = name, study, asked
        self.runners, self.variants = runners, variants
        # (runner, variant) -> way -> seed -> what was measured
        self.found: dict[tuple[Runner, str], dict[int, tuple[Way, dict[int, Scores]]]] = {}

    def measure(self, runner: Runner, job: Job, run: Path) -> list[tuple[Way, Scores]]:
        model = runner.load(run).model
        levels = model.levels if isinstance(model, Decodes) else 0
        return [
            (way, runner.measure(run, self.study.measure_of(way, self.asked)))
            for way in self.study.ways(job.model, levels)
        ]

    def add(
        self, runner: Runner, variant: Variant, job: Job, ways: Sequence[tuple[Way, Scores]]
    ) -> None:
        own = self.found.setdefault((runner, variant.name), {})
        for place, (way, scores) in enumerate(ways):
            own.setdefault(place, (way, {}))[1][job.seed] = scores

    def findings(self) -> Findings:
        parts = [part for runner in self.runners if (part := self._part(runner)).cells]
        missing = [
            own.name if len(self.runners) == 1 else f"{own.name} on {data_name(runner.data)}"
            for runner in self.runners
            for own in self.variants
            if (runner, own.name) not in self.found
        ]
        return Findings(self.name, self.study, self.asked, tuple(parts), tuple(missing))

    def _part(self, runner: Runner) -> Part:
        cells = [
            Cell.of(
                variant.name,
                variant.model,
                way.key or ", ".join(map(str, way.labels)),
                way.labels,
                found,
            )
            for variant in self.variants
            for way, found in self.found.get((runner, variant.name), {}).values()
        ]
        cells = list(self.study.derive(cells))
        return Part(data_name(runner.data), runner.dataset.fingerprint, tuple(cells))
