"""kill -9 at random moments over every command that writes, and over a service that reloads.

After each kill: what was there before is unchanged or wholly replaced, every artefact is whole, no
process is left. At the end of each sequence of kills the command, given again, finishes with the
bytes of a run that nobody disturbed, and leaves no draft behind.
"""

from __future__ import annotations

import http.client
import json
import random
import re
import resource
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from maskgr.errors import MaskGRError

from .children import POLL, Child, command, start
from .shop import (
    JOBS,
    OLD,
    TRAIN,
    Job,
    artefacts,
    checked,
    content,
    fresh,
    leftovers,
    tree,
    write_inputs,
)

REAL = 20  # one kill in so many is of the command itself, not of a fork
AFTER, WITHIN = 0.3, 0.3  # of the kills come after the usual first write, and within some write
SIGHTS = 10  # looks at a draft, of which one is the last
SHARES = {  # of all kills
    "train": 0.2,
    "train, two processes": 0.1,
    "update": 0.15,
    "sids": 0.15,
    "recommend, JSONL": 0.1,
    "recommend, Parquet": 0.05,
    "add-items": 0.1,
    "export, hub": 0.07,
    "export, ONNX": 0.03,
    "reload": 0.05,
}


@dataclass
class Tally:
    """What became of the kills of one command."""

    job: str
    before: int = 0  # anything was written
    while_writing: int = 0
    done: int = 0  # the result was complete, the process still there
    drafts: int = 0  # of these kills, those that left a draft or a part
    real: int = 0
    finished: int = 0  # sequences that ended with the right result
    failures: list[str] = field(default_factory=list)

    @property
    def kills(self) -> int:
        return self.before + self.while_writing + self.done


@dataclass(frozen=True)
class Usual:
    """A run that nobody disturbed."""

    first: float  # share of its time until the first write
    content: dict[str, str]


class Breaker:
    """Kills one job after another in folders under `root`."""

    def __init__(self, root: Path, seed: int, patience: float, memory: int, end: float) -> None:
        self.root, self.patience, self.end = root, patience, end
        self.template, self.work, self.output = root / "template", root / "work", root / "output"
        self.rng = random.Random(seed)
        self.memory = memory  # bytes of address space of each process
        self.seconds: dict[tuple[str, bool], float] = {}  # of jobs, forked and real, when last seen

    @property
    def out_of_time(self) -> bool:
        return time.monotonic() > self.end

    # Running

    def start(self, words: tuple[str, ...], folder: Path, *, real: bool = False) -> Child:
        limits = {resource.RLIMIT_AS: self.memory}
        return start(command(words, real=real), folder, self.output, limits)

    def run(self, words: tuple[str, ...], folder: Path, *, real: bool = False) -> Child:
        """To its end; raises where it fails or hangs."""
        child = self.start(words, folder, real=real)
        child.wait(self.patience)
        self.require_success(child, words)
        return child

    def require_success(self, child: Child, words: tuple[str, ...]) -> None:
        if child.poll() is None:
            child.end()
            raise Failure(f"hangs: maskgr {' '.join(words)}")
        if child.code:
            raise Failure(f"exit code {child.code}: maskgr {' '.join(words)}: {child.said[-1:]}")

    def prepare(self, *, onnx: bool) -> None:
        """The template: the shop, a run, and what stands where the jobs will write."""
        shutil.rmtree(self.template, ignore_errors=True)
        self.template.mkdir(parents=True)
        child = start(lambda: write_inputs(self.template), self.template, self.output)
        if child.wait(self.patience) != 0:
            raise Failure(f"the shop cannot be made: {child.said[-3:]}")
        self.run(("train", "shop", *TRAIN, "--out", "run"), self.template)
        for words in (*OLD, *([JOBS["export, ONNX"].words] if onnx else [])):  # this one is slow
            self.run(words, self.template)

    def usual(self, job: Job) -> Usual:
        """Undisturbed, forked and as the real command: both have to give the same bytes."""
        found = []
        for real in (False, True):
            fresh(self.template, self.work)
            paths = set(self.work.rglob("*"))
            child, first = self.start(job.words, self.work, real=real), None
            while child.poll() is None and child.seconds < self.patience:
                if first is None and set(self.work.rglob("*")) != paths:
                    first = child.seconds
                time.sleep(POLL)
            self.require_success(child, job.words)
            self.seconds[job.name, real] = child.seconds
            result = content(self.work / job.out)
            assert result is not None
            found.append(Usual((first or 0.0) / child.seconds, result))
        forked, command_ = found
        if forked.content != command_.content:
            odd = [n for n in forked.content if forked.content[n] != command_.content.get(n)]
            raise Failure(f"a fork and the real command differ in {odd}")
        return forked

    # Killing commands

    def kill_job(self, job: Job, kills: int) -> Tally:
        tally = Tally(job.name)
        try:
            usual = self.usual(job)
        except Failure as failure:
            tally.failures.append(str(failure))
            return tally
        while tally.kills < kills and not self.out_of_time:
            fresh(self.template, self.work)
            try:
                self.sequence(job, usual, min(job.kills, kills - tally.kills), tally)
                tally.finished += 1
            except (Failure, MaskGRError, OSError, ValueError) as failure:
                tally.failures.append(str(failure))
        return tally

    def sequence(self, job: Job, usual: Usual, kills: int, tally: Tally) -> None:
        """Kills the job up to `kills` times in one folder, then lets it finish."""
        before, inputs = content(self.work / job.out), self.inputs(job)
        words = job.words
        for _ in range(kills):
            real = self.rng.randrange(REAL) == 0
            untouched = tree(self.work)
            child = self.start(words, self.work, real=real)
            if not self.kill(child, job, words, usual, real=real):
                break  # it was done first
            tally.real += real
            now = content(self.work / job.out)
            if tree(self.work) == untouched:
                tally.before += 1
            elif now == usual.content:
                tally.done += 1
            else:
                tally.while_writing += 1
            parts = [*self.work.glob(f"{job.out}.*.parts")]
            tally.drafts += bool(leftovers(self.work) or parts)
            self.check(job, inputs, (before, usual.content), now)
            if now == usual.content:
                break
            words = job.after_kill(self.work)
        if content(self.work / job.out) != usual.content:
            self.run(words, self.work)
        self.check(job, inputs, (usual.content,), content(self.work / job.out))
        if left := leftovers(self.work):
            raise Failure(f"{left} left behind")

    def inputs(self, job: Job) -> dict[str, str]:
        """Everything that the job has no business to change."""
        found = tree(self.work, (job.run or job.out, "cache"))
        return {
            name: own for name, own in found.items() if not re.search(r"(^|/)\.|\.parts/", name)
        }

    def kill(
        self, child: Child, job: Job, words: tuple[str, ...], usual: Usual, *, real: bool
    ) -> bool:
        """At a random moment; false where the job has ended before."""
        dice, sights = self.rng.random(), self.rng.randrange(SIGHTS)
        first = usual.first if dice < AFTER else 0.0
        moment = self.rng.uniform(first, 1) * self.seconds[job.name, real]
        victim = self.rng.randrange(job.processes)  # 0: the process that was started
        if dice > 1 - WITHIN:
            while child.poll() is None and sights >= 0:
                sights -= bool(leftovers(self.work))
        else:
            child.wait(max(0.0, moment - child.seconds))
        if child.poll() is not None:
            if child.code:
                raise Failure(f"exit code {child.code} without a kill: {child.said[-1:]}")
            if words == job.words:  # what goes on is shorter
                self.seconds[job.name, real] = child.seconds
            return False
        others = child.others()
        if len(others) >= job.processes:
            child.end()
            raise Failure(f"{len(others) + 1} processes where {job.processes} were asked for")
        if victim and others:
            child.kill(others[0])
            if child.wait(self.patience) is None:
                child.end()
                raise Failure("goes on although a process that trains with it was killed")
        else:
            child.kill()
            child.wait(self.patience)
        self.no_orphans(child)
        return True

    def no_orphans(self, child: Child) -> None:
        end = time.monotonic() + self.patience
        while child.others():
            if time.monotonic() > end:
                child.end()
                raise Failure("a process outlives the one that started it")
            time.sleep(POLL)

    def check(
        self,
        job: Job,
        inputs: dict[str, str],
        allowed: tuple[dict[str, str] | None, ...],
        now: dict[str, str] | None,
    ) -> None:
        if self.inputs(job) != inputs:
            raise Failure("the job changed what it only reads")
        if now not in allowed:
            odd = "is gone" if now is None else "is neither what it was nor what it becomes"
            raise Failure(f"{job.out} {odd}")
        for folder in artefacts(self.work):
            checked(folder)

    # Killing a service

    def kill_service(self, kills: int) -> Tally:
        """While it starts or reloads; then it is started again and has to answer as before."""
        tally = Tally("reload")
        fresh(self.template, self.work)
        before = tree(self.work)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        words = ("serve", "run", "--port", str(port), "--admin-key-file", "keys")
        child = self.start(words, self.work)
        try:
            boot = self.ready(child, port)
            expected = ask(port)
            reload = timed(lambda: post(port, "/v1/admin/reload", {}))
            while tally.kills < kills and not self.out_of_time:
                starting = self.rng.random() < 0.2
                if starting:
                    child.kill()
                    child.wait(self.patience)
                    child = self.start(words, self.work, real=self.rng.randrange(REAL) == 0)
                    child.wait(self.rng.uniform(0, boot))
                    tally.before += 1
                else:
                    send(port, "/v1/admin/reload", {})
                    child.wait(self.rng.uniform(0, 1.5 * reload))
                    tally.while_writing += 1
                if child.poll() is not None:
                    raise Failure(f"the service ended by itself: {child.said[-1:]}")
                child.kill()
                child.wait(self.patience)
                self.no_orphans(child)
                if tree(self.work) != before:
                    raise Failure("a file changed under a service that only reads")
                child = self.start(words, self.work)
                self.ready(child, port)
                if ask(port) != expected:
                    raise Failure("the service answers otherwise after it was killed")
                post(port, "/v1/admin/reload", {})
                if ask(port) != expected:
                    raise Failure("the service answers otherwise after it was reloaded")
                tally.finished += 1
        except (Failure, OSError) as failure:
            tally.failures.append(str(failure))
        finally:
            child.end()
        return tally

    def ready(self, child: Child, port: int) -> float:
        """Waits until the service answers; the seconds since it was started."""
        while child.seconds < self.patience and child.poll() is None:
            try:
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=self.patience)
                connection.request("GET", "/readyz")
                if connection.getresponse().status == 200:
                    return child.seconds
            except OSError:
                pass
            time.sleep(POLL)
        raise Failure(f"the service does not start: {child.said[-1:]}")


class Failure(Exception):  # noqa: N818 - a finding, not a mistake
    """Something that may not happen."""


def send(port: int, path: str, body: dict[str, Any]) -> http.client.HTTPConnection:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    headers = {"Content-Type": "application/json", "Authorization": "Bearer admin"}
    connection.request("POST", path, json.dumps(body), headers)
    return connection


def post(port: int, path: str, body: dict[str, Any]) -> Any:
    answer = send(port, path, body).getresponse()
    content = json.loads(answer.read())
    if answer.status != 200:
        raise Failure(f"{path} answers {answer.status}: {content.get('detail')}")
    return content


def ask(port: int) -> Any:
    """Two recommendations, without what differs from request to request."""
    answers = [
        post(port, "/v1/recommend", {"history": history, "top": 5, "model": "run"})
        for history in ([], ["SKU-00003", "SKU-00001"])
    ]
    return [[answer["model"], answer["items"]] for answer in answers]


def timed(call: Callable[[], object]) -> float:
    start = time.monotonic()
    call()
    return time.monotonic() - start


def kill_all(breaker: Breaker, kills: int, only: set[str] | None = None) -> Iterator[Tally]:
    """The tally of each command; `kills` are shared among all of them, or among those asked for."""
    chosen = {
        name: share
        for name, share in SHARES.items()
        if only is None or {name, name.split(",")[0]} & only
    }
    for name, share in chosen.items():
        own = max(1, round(kills * share / sum(chosen.values())))
        yield breaker.kill_service(own) if name == "reload" else breaker.kill_job(JOBS[name], own)
