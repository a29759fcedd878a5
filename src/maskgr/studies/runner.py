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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import polars as pl
from torch import nn

from maskgr.artefact import MANIFEST, is_artefact, read_manifest, sha256, write_folder
from maskgr.data.config import DataConfig, SplitName
from maskgr.data.dataset import Dataset
from maskgr.data.open import open_dataset
from maskgr.data.splits import leave_out
from maskgr.devices import pick_device
from maskgr.errors import ArtefactError, RequestError
from maskgr.evaluation.metrics import Floats
from maskgr.evaluation.protocol import PROTOCOLS, Evaluation, Protocol, evaluate
from maskgr.models.base import Decodes, TrainConfig, model_class, train_config
from maskgr.recommender import RECOMMENDER, Recommender
from maskgr.run import TRAINING
from maskgr.training.distributed import FOLLOWS
from maskgr.training.log import read_log

KIND, SCHEMA = "evaluation", 1
RUNS, EVALUATIONS = "runs", "evaluations"
USERS = "users.parquet"
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


@dataclass(frozen=True)
class Measure:
    """What to measure of a run."""

    split: SplitName = "test"
    users: int | None = None  # a random sample; None: all
    ks: tuple[int, ...] = (5, 10)
    protocols: tuple[Protocol, ...] = PROTOCOLS
    decoding: Mapping[str, Any] = field(default_factory=dict)  # changes to the model's own


@dataclass(frozen=True, eq=False)
class Scores:
    """What was measured of a run, user by user, and facts about the run."""

    values: dict[Protocol, dict[str, Floats]]  # (users,)
    users_per_second: float
    invalid_share: float | None  # of beams that are no item, where beams may be so
    minutes: float  # of training, all in all
    parameters: int  # 0: it has no network
    decoding: dict[str, Any]  # as it was done; empty for models that do not decode
    config: dict[str, Any]  # everything that decided the training
    run: str  # its folder

    @property
    def users(self) -> int:
        return len(next(iter(next(iter(self.values.values())).values())))


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
        """Each job with its run folder, as soon as it is trained; tells how far the list is.

        A failure does not hold up the others: it is raised after the last of them.
        """
        progress, failed = _Progress(self, jobs), []
        for job in jobs:
            progress.begin(job)
            try:
                folder = self.train(job)
            except RequestError as error:
                failed.append(error)
                print(f"error: {error}", file=sys.stderr)
            else:
                yield job, folder
            progress.end(job)
        if failed:
            raise TrainingError(f"{len(failed)} of {len(jobs)} trainings failed: {failed[0]}")

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
                return _read(folder)
            except ArtefactError as error:
                print(f"warning: {error}; measuring again", file=sys.stderr)
        recommender = self.load(run)
        split = leave_out(self.dataset.histories, recommender.config.leave_out)
        holdout = split.holdout(measure.split)
        if measure.users is not None:
            holdout = holdout.sample(measure.users)
        decoding = recommender.decoding(**measure.decoding) if measure.decoding else None
        found = evaluate(
            recommender.ranker(decoding),
            holdout,
            len(self.dataset.items),
            ks=measure.ks,
            protocols=measure.protocols,
        )
        facts = {
            "minutes": training_minutes(run, recommender),
            "parameters": _parameters(recommender),
            "decoding": _decoding(recommender, measure.decoding),
            "config": recommender.config.to_dict(),
            "run": str(run),
        }
        _write(folder, self.dataset.users.gather(holdout.users), found, facts, asdict(measure))
        return _read(folder)


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

    def __init__(self, runner: Runner, jobs: Sequence[Job]) -> None:
        self.runner, self.jobs, self.place = runner, jobs, 0
        self.missing = [job for job in jobs if not runner.is_trained(job)]
        self.extra: list[float] = []  # minutes that each took beyond what it was given

    def begin(self, job: Job) -> None:
        self.place += 1
        self.start = time.perf_counter()
        self.given = self._given(job)
        known = "training" if job in self.missing else "trained before"
        left = self._left()
        rest = f"; {left} left in all" if left else ""
        print(f"[{self.place}/{len(self.jobs)}] {job}: {known}{rest}", file=sys.stderr, flush=True)

    def end(self, job: Job) -> None:
        if job in self.missing:
            self.missing.remove(job)
            self.extra.append((time.perf_counter() - self.start) / 60 - self.given)

    def _given(self, job: Job) -> float:
        """Minutes of its budget that are left."""
        return max(0.0, job.budget - _logged(self.runner.folder(job)) / 60)

    def _left(self) -> str:
        given = sum(self._given(job) for job in self.missing)
        if not self.extra:
            return f"at least {_duration(given)}" if given else ""
        more = len(self.missing) * sum(self.extra) / len(self.extra)
        return f"about {_duration(max(0.0, given + more))}" if self.missing else ""


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


def _parameters(recommender: Recommender) -> int:
    model = recommender.model
    return sum(p.numel() for p in model.parameters()) if isinstance(model, nn.Module) else 0


def _decoding(recommender: Recommender, changes: Mapping[str, Any]) -> dict[str, Any]:
    model = recommender.model
    if not isinstance(model, Decodes):
        return {}
    return asdict(model.resolved(recommender.decoding(**changes)))


def _write(
    folder: Path,
    ids: pl.Series,
    found: Evaluation,
    facts: Mapping[str, Any],
    measure: Mapping[str, Any],
) -> None:
    columns = [
        pl.Series(f"{protocol} {name}", own)
        for protocol, values in found.values.items()
        for name, own in values.items()
    ]
    speed = {"users_per_second": found.users_per_second, "invalid_share": found.invalid_share}
    with write_folder(folder, KIND, SCHEMA, {**facts, **speed, "measure": measure}) as draft:
        pl.DataFrame([ids.alias("user_id"), *columns]).write_parquet(draft / USERS)


def _read(folder: Path) -> Scores:
    config = read_manifest(folder, KIND, SCHEMA).config
    measure = config.pop("measure")
    frame = pl.read_parquet(folder / USERS)
    values: dict[Protocol, dict[str, Floats]] = {name: {} for name in measure["protocols"]}
    for column in frame.columns[1:]:
        protocol, _, name = column.partition(" ")
        values[protocol][name] = frame[column].to_numpy()  # type: ignore[index]
    return Scores(values, **config)


def _digest(content: Any) -> str:
    text = json.dumps(content, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:DIGEST]
