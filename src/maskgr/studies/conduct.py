"""Runs a study: trains what is missing, measures it in every way, writes the files as it goes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from maskgr.data.splits import leave_out
from maskgr.errors import RequestError
from maskgr.models.base import Decodes
from maskgr.studies.findings import Findings
from maskgr.studies.measures import Scores
from maskgr.studies.results import Cell, Part
from maskgr.studies.runner import EVALUATIONS, RUNS, Job, Runner, alone, each_trained
from maskgr.studies.study import Asked, Study, Variant, Way, data_name

SECONDS = 20.0  # at least between two versions of the files while nothing is trained


def conduct(name: str, study: Study, asked: Asked) -> Findings:
    """Everything that was asked for; a training that fails is raised after the others.

    Studies with the same `out` share their trainings.
    """
    variants = study.chosen(asked.only)
    seeds = range(asked.seed, asked.seed + asked.seeds)
    jobs = {(own.name, seed): own.job(asked, seed) for own in variants for seed in seeds}
    _require_ours(asked.out)
    with alone(asked.out):
        runners = [study.open(data, asked) for data in asked.data]
        for runner in runners:  # users with too few items: better said now than after a training
            for count in {job.config.leave_out for job in jobs.values()}:
                leave_out(runner.dataset.histories, count)
        table = _Table(name, study, asked, runners, variants)
        # What exists first, then seed by seed: every model is in the table early.
        todo = [(runner, jobs[v.name, s]) for s in seeds for runner in runners for v in variants]
        known = {(runner, job) for runner, job in todo if runner.is_trained(job)}
        todo.sort(key=lambda own: own not in known)
        owners = {jobs[own.name, seed]: own for own in variants for seed in seeds}
        written = -SECONDS
        try:
            for (runner, job), run in each_trained(todo):
                table.add(runner, owners[job], job, run)
                known.discard((runner, job))
                if not known or time.monotonic() - written >= SECONDS:  # a training comes next
                    table.findings().save()
                    written = time.monotonic()
        finally:  # a failed training, or Ctrl-C: what was measured is shown
            if table.found:
                table.findings().save()
    return table.findings()


def _require_ours(out: Path) -> None:
    """Raises for a folder of other things: its files would be mixed with ours."""
    known = any((out / name).exists() for name in (RUNS, EVALUATIONS, ".lock"))
    if out.exists() and not known and (not out.is_dir() or any(out.iterdir())):
        raise RequestError(f"{out} exists and holds no study; give another --out")


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

    def add(self, runner: Runner, variant: Variant, job: Job, run: Path) -> None:
        """Measures a trained variant in every way."""
        model = runner.load(run).model
        levels = model.levels if isinstance(model, Decodes) else 0
        own = self.found.setdefault((runner, variant.name), {})
        for place, way in enumerate(self.study.ways(job.model, levels)):
            measure = self.study.measure_of(way, job.model, self.asked)
            scores = runner.measure(run, measure)
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
