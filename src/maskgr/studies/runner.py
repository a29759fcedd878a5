"""Trains what is missing, one model at a time in a process of its own, and measures each run once.

A run's folder is named after everything that decides the training: data, settings, seed. Whoever
asks for the same training finds it there, an interrupted one is resumed, and a changed setting is
another run. What was measured is kept user by user, so that models can be compared in pairs.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from maskgr.artefact import MANIFEST, is_artefact, sha256
from maskgr.data.config import DataConfig
from maskgr.data.dataset import Dataset
from maskgr.data.open import open_dataset
from maskgr.data.splits import Holdout, leave_out
from maskgr.devices import pick_device
from maskgr.errors import ArtefactError, RequestError
from maskgr.models.base import TrainConfig, model_class, train_config
from maskgr.recommender import RECOMMENDER, Recommender
from maskgr.run import TRAINING
from maskgr.studies.measures import Measure, Scores, measured, read_scores, write_scores
from maskgr.training.distributed import FOLLOWS
from maskgr.training.log import read_log

RUNS, EVALUATIONS = "runs", "evaluations"
DIGEST = 10  # hexadecimal digits of a folder's name


class TrainingError(RequestError):
    """Some trainings of a list; the others are done."""


@dataclass(frozen=True)
class Job:
    """A training, as `maskgr train` is asked for it."""

    model: str
    preset: str = "cpu"
    settings: tuple[str, ...] = ()  # key=value, on top of the preset
    minutes: float | None = None  # None: the preset's own
    seed: int = 0
    device: str | None = None  # None: the preset's own

    @cached_property
    def config(self) -> TrainConfig:
        """Everything that it decides; raises where it asks for what there is not."""
        config = train_config(
            self.preset,
            self.settings,
            model=self.model,
            minutes=self.minutes,
            seed=self.seed,
            device=self.device,
        )
        pick_device(config.device)
        return config

    @property
    def budget(self) -> float:
        """The minutes that training is known to take; 0 where it counts steps or just counts."""
        return self.config.fit.minutes if model_class(self.model).supports_ddp else 0.0

    def __str__(self) -> str:
        return f"{self.model}, preset {self.preset}, seed {self.seed}"

    def words(self) -> list[str]:
        """The options of `maskgr train`."""
        words = ["--model", self.model, "--preset", self.preset, "--seed", str(self.seed)]
        words += [word for setting in self.settings for word in ("--set", setting)]
        if self.minutes is not None:
            words += ["--minutes", str(self.minutes)]
        return words if self.device is None else [*words, "--device", self.device]


@dataclass(frozen=True, eq=False)
class Runner:
    """The trainings and measurements below `out`, on one dataset."""

    out: Path
    data: str  # as `maskgr train` is given it
    dataset: Dataset
    data_config: DataConfig = field(default_factory=DataConfig)

    @classmethod
    def open(cls, data: str, out: Path, config: DataConfig | None = None) -> Runner:
        config = config or DataConfig()
        return cls(out, data, open_dataset(data, config), config)

    def folder(self, job: Job) -> Path:
        digest = _digest([job.config.to_dict(), self.dataset.content])
        return self.out / RUNS / f"{job.model}-{job.preset}-{job.seed}-{digest}"

    def is_trained(self, job: Job) -> bool:
        return is_artefact(self.folder(job) / RECOMMENDER)

    def train(self, job: Job) -> Path:
        """The run folder of a training: finished before, gone on with, or made now."""
        folder = self.folder(job)
        if self.is_trained(job):
            return folder
        _load.cache_clear()  # the memory is needed
        command = [sys.executable, "-m", "maskgr", "train", self.data, "--out", str(folder)]
        command += [*job.words(), *self.data_config.words()]
        if (folder / TRAINING / "run.json").exists():
            command.append("--resume")
        code = run_bound(command)
        if code:
            why = "the reason is above" if code > 0 else f"signal {-code} ended it"
            raise RequestError(
                f"training {job} failed ({why}); the same command goes on from its last checkpoint"
            )
        return folder

    def each_trained(self, jobs: Sequence[Job]) -> Iterator[tuple[Job, Path]]:
        """Each job with its run folder: see `each_trained`."""
        for (_, job), folder in each_trained([(self, job) for job in jobs]):
            yield job, folder

    def load(self, run: Path) -> Recommender:
        """The recommender of a run on these data."""
        recommender = _load(run, sha256(_recommender(run) / MANIFEST))
        if recommender.made.get("fingerprint") != self.dataset.fingerprint:
            raise RequestError(f"{run} was trained on other data than {self.data}; leave it out")
        return recommender

    def measure(self, run: Path, measure: Measure) -> Scores:
        """What was measured before, or is measured now and kept."""
        manifest = sha256(_recommender(run) / MANIFEST)
        folder = self.out / EVALUATIONS / f"{run.name}-{_digest([manifest, asdict(measure)])}"
        if is_artefact(folder):
            try:
                return read_scores(folder)
            except ArtefactError as error:
                print(f"warning: {error}; measuring again", file=sys.stderr)
        recommender, holdout = self.questions(run, measure)
        if measure.users is not None:
            holdout = holdout.sample(measure.users)
        found, facts = measured(recommender, holdout, measure)
        minutes = {"minutes": training_minutes(run, recommender), "run": str(run)}
        ids = self.dataset.users.gather(holdout.users)
        write_scores(folder, ids, found, {**facts, **minutes}, measure)
        return read_scores(folder)

    def questions(self, run: Path, measure: Measure) -> tuple[Recommender, Holdout]:
        """Who is asked, and what."""
        recommender = self.load(run)
        split = leave_out(self.dataset.histories, recommender.config.leave_out)
        return recommender, split.holdout(measure.split)


def each_trained(jobs: Sequence[tuple[Runner, Job]]) -> Iterator[tuple[tuple[Runner, Job], Path]]:
    """Each job with its run folder, as soon as it is trained; tells how far the list is.

    A failure does not hold up the others: it is raised after the last of them.
    """
    progress, failed = _Progress(jobs), []
    for runner, job in jobs:
        progress.begin(runner, job)
        try:
            folder = runner.train(job)
        except RequestError as error:
            failed.append(error)
            print(f"error: {error}", file=sys.stderr)
        else:
            yield (runner, job), folder
        progress.end(runner, job)
    if failed:
        raise TrainingError(f"{len(failed)} of {len(jobs)} trainings failed: {failed[0]}")


@contextmanager
def alone(out: Path) -> Iterator[None]:
    """Refuses a folder in which another process is at work; a killed one leaves no trace."""
    import fcntl

    out.mkdir(parents=True, exist_ok=True)
    with (out / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RequestError(
                f"another process is at work in {out}; wait for it, or give another --out"
            ) from None
        yield


def run_bound(command: Sequence[str]) -> int:
    """Runs a command that ends with this process, however this one ends; returns its exit code.

    Ctrl-C is passed on once, so that a training writes a checkpoint; a second one ends it.
    """
    child = subprocess.Popen(
        command,
        env={**os.environ, FOLLOWS: "1"},
        stdin=subprocess.PIPE,  # never written: it closes when this process ends
        stdout=2,  # stdout is for tables
        process_group=0,
    )
    try:
        return child.wait()
    except KeyboardInterrupt:
        child.send_signal(signal.SIGINT)
        child.wait()
        raise
    finally:
        child.kill()  # nothing where it has ended
        child.wait()
        assert child.stdin is not None
        child.stdin.close()


def training_minutes(run: Path, recommender: Recommender) -> float:
    """Minutes that a training took. One that was resumed knows of its last part only; its logs
    know of all, but not of what comes before and after the steps."""
    return max(float(recommender.made.get("seconds", 0.0)), _logged(run)) / 60


def _logged(run: Path) -> float:
    """Seconds of training in the logs of all stages."""
    logs = [read_log(file.parent) for file in (run / TRAINING).rglob("log.csv")]
    return sum(float(rows[-1]["seconds"] or 0.0) for rows in logs if rows)


class _Progress:
    """Says on stderr which job is next, and how long all that are left may take."""

    def __init__(self, jobs: Sequence[tuple[Runner, Job]]) -> None:
        self.place, self.count = 0, len(jobs)
        self.several = len({runner.data for runner, _ in jobs}) > 1
        self.missing = [(runner, job) for runner, job in jobs if not runner.is_trained(job)]
        self.extra: list[float] = []  # minutes that each took beyond what it was given

    def begin(self, runner: Runner, job: Job) -> None:
        self.place += 1
        self.start = time.perf_counter()
        self.given = _given(runner, job)
        known = "training" if (runner, job) in self.missing else "trained before"
        left = self._left()
        rest = f"; {left} left in all" if left else ""
        what = f"{job} on {runner.data}" if self.several else str(job)
        print(f"[{self.place}/{self.count}] {what}: {known}{rest}", file=sys.stderr, flush=True)

    def end(self, runner: Runner, job: Job) -> None:
        if (runner, job) in self.missing:
            self.missing.remove((runner, job))
            self.extra.append((time.perf_counter() - self.start) / 60 - self.given)

    def _left(self) -> str:
        given = sum(_given(runner, job) for runner, job in self.missing)
        if not self.extra:
            return f"at least {_duration(given)}" if given else ""
        more = len(self.missing) * sum(self.extra) / len(self.extra)
        return f"about {_duration(max(0.0, given + more))}" if self.missing else ""


def _given(runner: Runner, job: Job) -> float:
    """Minutes of a job's budget that are left."""
    return max(0.0, job.budget - _logged(runner.folder(job)) / 60)


def _duration(minutes: float) -> str:
    whole = round(minutes)
    if whole < 1:
        return "a minute"
    return f"{whole} min" if whole < 60 else f"{whole // 60} h {whole % 60:02} min"


@lru_cache(maxsize=1)
def _load(run: Path, manifest: str) -> Recommender:
    """`manifest`: its checksum, since another training may have replaced the folder."""
    return Recommender.load(run)


def _recommender(run: Path) -> Path:
    """Where a run folder has its recommender; a folder that `save` wrote is one."""
    folder = run / RECOMMENDER if is_artefact(run / RECOMMENDER) else run
    if not is_artefact(folder):
        raise ArtefactError(f"{run} holds no trained model; finish its training, or leave it out")
    return folder


def _digest(content: Any) -> str:
    text = json.dumps(content, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:DIGEST]
