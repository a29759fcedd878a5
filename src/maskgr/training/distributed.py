"""One process or many: the same code trains under `torchrun`, one process a device.

On a CPU several processes of one thread each do more than one process with as many threads: they
meet once a step, not at every operation, and a busy core holds up the others less.

Every process builds the same batches and draws the same noise, and takes its share of the
sequences. So many processes do what one would with the same batch, up to rounding.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import IO

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.rendezvous import rendezvous

from maskgr.devices import pick_device
from maskgr.errors import RequestError


@dataclass(frozen=True)
class World:
    """This process's place among those that train together."""

    rank: int
    size: int
    device: torch.device

    @property
    def writes(self) -> bool:
        """Files and the terminal belong to one process."""
        return self.rank == 0

    def wrap(self, module: nn.Module) -> nn.Module:
        """A module whose gradients are averaged over the processes."""
        if self.size == 1:
            return module
        devices = [self.device] if self.device.type == "cuda" else None
        # Buffers are data that every process has: sending them at each step would cost more than
        # the gradients. (Newer torch has another word for it, older torch only this one.)
        with warnings.catch_warnings(category=FutureWarning, action="ignore"):
            return nn.parallel.DistributedDataParallel(
                module, device_ids=devices, broadcast_buffers=False
            )

    def total(self, value: Tensor) -> Tensor:
        """The sum of every process's `value`."""
        if self.size > 1:
            dist.all_reduce(value)
        return value

    def agree(self, number: int) -> int:
        """The first process's number, in every process: clocks differ."""
        if self.size == 1:
            return number
        shared = torch.tensor(number, device=self.device)
        dist.broadcast(shared, src=0)
        return int(shared.item())

    def wait(self) -> None:
        if self.size > 1:
            dist.barrier()


@contextmanager
def world(device: str = "auto") -> Iterator[World]:
    """The processes that `torchrun` started, or this one alone."""
    size, chosen = int(os.environ.get("WORLD_SIZE", "1")), pick_device(device)
    if size == 1:
        yield World(0, 1, chosen)
        return
    threads = torch.get_num_threads()
    here = int(os.environ.get("LOCAL_WORLD_SIZE", size))  # of the processes, those on this machine
    if chosen.type == "cuda":
        chosen = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(chosen)
    else:
        torch.set_num_threads(max(1, min(threads, (os.cpu_count() or 1) // here)))
    backend = "nccl" if chosen.type == "cuda" else "gloo"
    store, rank, size = next(rendezvous("env://", timeout=MEETING))
    store.set_timeout(PATIENCE)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=PATIENCE)
    try:
        yield World(dist.get_rank(), size, chosen)
    finally:
        dist.destroy_process_group()
        torch.set_num_threads(threads)  # what one process does after that, it does alone


FOLLOWS = "MASKGR_FOLLOWS"  # set in processes that `companions` started
MEETING = timedelta(minutes=10)  # for all processes to start
PATIENCE = timedelta(days=7)  # while one process encodes or quantises a catalogue
MOST = 4  # processes by default: each has its own copy of the data
LONG = 5.0  # minutes of training that make more processes worth while
MANY = 200_000  # items whose vectors, of which each process has its own, take gigabytes


def check_processes(count: int, device: str) -> None:
    """Raises before any process is started that the machine has no core or GPU for."""
    cuda = pick_device(device).type == "cuda"
    most = torch.cuda.device_count() if cuda else os.cpu_count() or 1
    if not 1 <= count <= most:
        what = "GPUs" if cuda else "cores"
        raise RequestError(
            f"--processes {count} does not fit the {most} {what} here; use 1 to {most}"
        )


def processes_for(minutes: float, device: str, items: int) -> int:
    """How many processes to train with on this machine, unless told otherwise."""
    launched = "WORLD_SIZE" in os.environ
    if launched or minutes < LONG or items > MANY or pick_device(device).type != "cpu":
        return 1
    return min(os.cpu_count() or 1, MOST)


@contextmanager
def companions(count: int, command: Sequence[str]) -> Iterator[None]:
    """Runs `command` in `count` - 1 more processes, which train together with this one.

    A process that was itself started so starts none; it ends with the one that started it.
    """
    if os.environ.get(FOLLOWS):
        threading.Thread(target=_end_with_parent, daemon=True).start()
    if count < 2 or "WORLD_SIZE" in os.environ:
        yield
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(count)}
    threads = max(1, (os.cpu_count() or 1) // count)
    finished, others = threading.Event(), []
    try:
        for rank in range(1, count):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": str(threads)}
            own[FOLLOWS] = "1"
            said = tempfile.TemporaryFile()  # noqa: SIM115 - for as long as the process lasts
            other = subprocess.Popen(
                command,
                env={**os.environ, **place, **own},
                stdin=subprocess.PIPE,  # never written: it closes when this process ends
                stdout=subprocess.DEVNULL,
                stderr=said,
                process_group=0,  # Ctrl-C is for this process, which ends the others
            )
            others.append(other)
            threading.Thread(target=_watch, args=(other, said, finished), daemon=True).start()
        os.environ.update(place, RANK="0", LOCAL_RANK="0")
        yield
        finished.set()
        for other in others:
            other.wait()
    finally:
        finished.set()
        for other in others:
            other.kill()
        for name in (*place, "RANK", "LOCAL_RANK"):
            os.environ.pop(name, None)


def _end_with_parent() -> None:
    """Ends this process when the one that started it is gone, however that died."""
    # Not `sys.stdin`: a thread that waits there makes the interpreter abort when it shuts down.
    while os.read(0, 1):
        pass
    os._exit(1)


def _watch(other: subprocess.Popen[bytes], said: IO[bytes], finished: threading.Event) -> None:
    """Ends this process when another one dies: it would wait for it for ever."""
    if other.wait() and not finished.is_set():
        said.seek(0)
        last = said.read().decode(errors="replace").strip().splitlines()[-1:]
        print(
            f"error: a process that trains with this one stopped (exit code {other.returncode}"
            f"{''.join(f', {line}' for line in last)}); go on with --resume, or with --processes 1",
            file=sys.stderr,
        )
        os._exit(1)
