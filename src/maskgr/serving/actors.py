"""Rows of work on Ray Data: actors that load what they need once, and take one row after the other.

A row names a whole file (or holds the texts of one call), and an actor does with it what the plain
engine does, by the same function: the results are the same, and a file is streamed, kept in parts
and resumed as it is there. Reading, ranking and writing as three stages of Ray Data would need CPUs
that the actors do not take, or nothing would ever be read; it would pass all histories and results
through the object store; and it would not give a file for a file. Here the rows are all that Ray
moves, they are there before the first actor starts, and the actors can have every CPU.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import signal
import sys
import threading
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from maskgr import errors
from maskgr.errors import DataError, MaskGRError, RequestError

STORE = 128 * 2**20  # bytes of the object store of a cluster that is started here
TRIES = 3  # of a row whose actor dies

Work = Callable[[Mapping[str, Any]], Any]  # a row to its result: a number or bytes


def map_rows(
    start: Callable[..., Work],
    arguments: tuple[Any, ...],
    rows: Sequence[Mapping[str, Any]],
    actors: int | None = None,
    address: str | None = None,
) -> Iterator[tuple[int, Any]]:
    """The number and the result of every row, as they come: a DataError where the row is to blame,
    None where its actor has died at each try. Every other error ends the job.

    start: called once in each actor with its number of CPUs and `arguments`; what it returns is
        called with rows.
    actors: how many; by default one for each CPU. They share the CPUs.
    address: of a Ray cluster; by default RAY_ADDRESS, else one on this machine for this job.
    """
    with _connected(address) as ray:
        count, cpus = spread(actors, len(rows), _cpus(ray))
        # Ray Data starts a dead actor again, and gives it the same row without end.
        tries = ray.remote(num_cpus=0, max_restarts=-1)(_Tries).remote()
        numbered = [{"number": number, **row} for number, row in enumerate(rows)]
        found = ray.data.from_items(numbered, override_num_blocks=len(rows)).map(
            _Actor,
            fn_constructor_args=(start, arguments, cpus, tries),
            # One row at a time: a second one would wait behind the first while others are idle.
            compute=ray.data.ActorPoolStrategy(size=count, max_tasks_in_flight_per_actor=1),
            num_cpus=cpus,
        )
        for row in found.iter_rows():
            if row["error"] not in ("", "DataError"):
                raise getattr(errors, row["error"], RuntimeError)(row["message"])
            yield row["number"], DataError(row["message"]) if row["error"] else row["result"]


class _Tries:
    """Counts how often each row was begun."""

    def __init__(self) -> None:
        self.counts = Counter[int]()

    def begin(self, number: int) -> int:
        self.counts[number] += 1
        return self.counts[number]


class _Actor:
    """Loads when the first row comes. Errors are rows too: Ray would wrap them in its own."""

    def __init__(
        self, start: Callable[..., Work], arguments: tuple[Any, ...], cpus: int, tries: Any
    ) -> None:
        self.start, self.arguments, self.cpus, self.tries = start, arguments, cpus, tries
        self.work: Work | None = None

    def __call__(self, row: Mapping[str, Any]) -> dict[str, Any]:
        import ray

        found = {"number": row["number"], "error": "", "message": "", "result": None}
        if ray.get(self.tries.begin.remote(row["number"])) > TRIES:
            return found
        try:
            if self.work is None:
                self.work = self.start(self.cpus, *self.arguments)
            return {**found, "result": self.work(row)}
        except MaskGRError as error:
            return {**found, "error": type(error).__name__, "message": str(error)}
        except Exception:
            return {**found, "error": "RuntimeError", "message": traceback.format_exc()}


def spread(asked: int | None, rows: int, nodes: Sequence[int]) -> tuple[int, int]:
    """The number of actors and the CPUs of each, such that all fit the CPUs of the `nodes`: one
    that waits for a CPU would wait as long as the others work."""
    total = sum(nodes)
    if not 1 <= (asked or total) <= total:
        raise RequestError(
            f"--actors {asked} does not fit the {total} CPUs of the Ray cluster; use 1 to {total}"
        )
    actors = min(asked or total, rows)
    fits = [cpus for cpus in range(1, max(nodes) + 1) if sum(n // cpus for n in nodes) >= actors]
    return actors, fits[-1]


def _cpus(ray: Any) -> list[int]:
    """The CPUs of every machine of the cluster."""
    return [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]


@contextlib.contextmanager
def _connected(address: str | None) -> Iterator[Any]:
    """`ray`, connected to the cluster at `address`, or to one that lasts as long as the block; a
    program that is connected already stays so."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # no report over the network
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    try:
        ray: Any = importlib.import_module("ray")
        importlib.import_module("ray.data")
    except ImportError as error:
        raise RequestError(
            "--engine ray needs the package ray; install it with: pip install 'maskgr[ray]'"
        ) from error
    with _quiet(ray):
        if ray.is_initialized():
            yield ray
            return
        address = address or os.environ.get("RAY_ADDRESS") or "local"
        own = {"object_store_memory": STORE, "include_dashboard": False}
        handles = threading.current_thread() is threading.main_thread()
        before = signal.getsignal(signal.SIGTERM) or signal.SIG_DFL
        try:
            _init(ray, address, own if address == "local" else {})
            if handles:  # else SIGTERM prints a stack and aborts, as Ray would have it
                signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
            yield ray
        finally:
            ray.shutdown()
            if handles:
                signal.signal(signal.SIGTERM, before)


def _init(ray: Any, address: str, options: dict[str, Any]) -> None:
    try:
        with _silent():
            ray.init(address, logging_level=logging.CRITICAL, log_to_driver=False, **options)
    except Exception as error:  # Ray raises errors of all kinds
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        if address == "local":
            raise RequestError(f"Ray does not start ({reason}); leave --engine ray out") from error
        raise RequestError(
            f"no Ray cluster answers at {address} ({reason}); check the address"
        ) from error


@contextlib.contextmanager
def _quiet(ray: Any) -> Iterator[None]:
    """Ray's messages go to its log files alone."""
    consoles = [h for h in logging.getLogger("ray.data").handlers if h.level >= logging.INFO]
    levels = [handler.level for handler in consoles]
    with warnings.catch_warnings(category=DeprecationWarning, action="ignore"):
        context = ray.data.DataContext.get_current()
        shown, context.enable_progress_bars = context.enable_progress_bars, False
        for handler in consoles:
            handler.setLevel(logging.CRITICAL + 1)
        try:
            yield
        finally:
            context.enable_progress_bars = shown
            for handler, level in zip(consoles, levels, strict=True):
                handler.setLevel(level)


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Nothing reaches stderr, also not from Ray's C++, which says that it was told to be silent."""
    sys.stderr.flush()
    terminal, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(terminal, 2)
        os.close(terminal)
        os.close(nowhere)
