"""One thread runs the model; requests that may be answered together are.

A job waits at most `window` seconds for others of its key. Jobs of one key ask the same model in
the same way with the same filter, so that answering them together gives each what it would have
got alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from maskgr.serving.problems import ProblemError

WINDOW, LARGEST, QUEUE = 0.002, 64, 512  # seconds, jobs answered together, jobs that wait


class Observer(Protocol):
    """Is told what the thread does."""

    def batch(self, size: int, waited: Sequence[float]) -> None: ...


@dataclass(eq=False)
class Job:
    """`run` answers the arguments of several jobs of one key, in order; the key None is alone."""

    key: Hashable
    run: Callable[[list[Any]], Sequence[Any]]
    argument: Any
    deadline: float  # by time.monotonic
    future: asyncio.Future[Timed] = field(init=False)
    queued: float = field(init=False)


@dataclass(frozen=True)
class Timed:
    """An answer, and how long it waited and was computed, in seconds."""

    value: Any
    waited: float
    computed: float


class Batcher:
    """Jobs in the order they came; `submit` from the event loop, answered by one thread."""

    def __init__(
        self,
        *,
        window: float = WINDOW,
        largest: int = LARGEST,
        queue: int = QUEUE,
        observer: Observer | None = None,
    ) -> None:
        self.window, self.largest, self.queue = window, largest, queue
        self._observer = observer
        self._jobs: deque[Job] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="maskgr-model", daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        return len(self._jobs)

    def require_room(self, jobs: int = 1) -> None:
        """Raises 429 if so many more jobs cannot wait."""
        if len(self._jobs) + jobs > self.queue:
            raise ProblemError(
                429,
                f"{len(self._jobs)} requests wait already, of at most {self.queue}; try again in a "
                "second",
                headers={"Retry-After": "1"},
            )

    async def submit(self, job: Job) -> Timed:
        """The job's answer; raises what `run` raised, or 429 or 504."""
        return (await self.submit_all([job]))[0].result()

    async def submit_all(self, jobs: Sequence[Job]) -> list[asyncio.Future[Timed]]:
        """The same for several at once: all of them wait, or none."""
        loop = asyncio.get_running_loop()
        with self._changed:
            self.require_room(len(jobs))
            for job in jobs:
                job.future, job.queued = loop.create_future(), time.monotonic()
                self._jobs.append(job)
            self._changed.notify()
        futures = [job.future for job in jobs]
        left = max(job.deadline for job in jobs) - time.monotonic()
        alarm = loop.call_later(max(left, 0), _give_up, futures)
        for future in futures:
            with contextlib.suppress(Exception):  # whoever asked takes it from the future
                await future
        alarm.cancel()
        return futures

    def close(self) -> None:
        """Answers what waits, then ends the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _work(self) -> None:
        while batch := self._next():
            self._answer(batch)

    def _next(self) -> list[Job]:
        """The first job, and those of its key that came before its window ended."""
        with self._changed:
            while True:
                while not self._jobs:
                    if self._closed:
                        return []
                    self._changed.wait()
                first = self._jobs[0]
                end = first.queued + self.window
                while not self._closed and first.key is not None:
                    left = end - time.monotonic()
                    if left <= 0 or len(self._jobs) >= self.largest:
                        break
                    self._changed.wait(left)
                batch = self._taken(first)
                if batch:
                    return batch

    def _taken(self, first: Job) -> list[Job]:
        """Removes the jobs that go with the first from the queue, without those given up."""
        batch: list[Job] = []
        now, rest = time.monotonic(), deque[Job]()
        for job in self._jobs:
            if job.future.done() or job.deadline < now:
                continue
            fits = job is first or (job.key is not None and job.key == first.key)
            if fits and len(batch) < self.largest:
                batch.append(job)
            else:
                rest.append(job)
        self._jobs = rest
        return batch

    def _answer(self, batch: list[Job]) -> None:
        start = time.monotonic()
        if self._observer:
            self._observer.batch(len(batch), [start - job.queued for job in batch])
        try:
            values = batch[0].run([job.argument for job in batch])
        except Exception as error:
            if len(batch) > 1:  # one job's failure must not be that of the others
                for job in batch:
                    self._answer([job])
                return
            values = [error]
        computed = time.monotonic() - start
        answers = [
            (job.future, value, Timed(value, start - job.queued, computed))
            for job, value in zip(batch, values, strict=True)
        ]
        batch[0].future.get_loop().call_soon_threadsafe(_deliver, answers)


def _deliver(answers: list[tuple[asyncio.Future[Timed], Any, Timed]]) -> None:
    for future, value, answer in answers:
        if future.done():
            continue  # given up
        if isinstance(value, Exception):
            future.set_exception(value)
        else:
            future.set_result(answer)


def _give_up(futures: list[asyncio.Future[Timed]]) -> None:
    """The thread leaves these out, or their answers are dropped."""
    for future in futures:
        if not future.done():
            late = "the answer took longer than the time limit; ask for less, or try again"
            future.set_exception(ProblemError(504, late))
