"""One process or many: the same code trains under `torchrun`, one process a device, on one machine
or on several.

On a CPU several processes of one thread each do more than one process with as many threads: they
meet once a step, not at every operation, and a busy core holds up the others less.

Every process builds the same batches and draws the same noise, and takes its share of the
sequences. So many processes do what one would with the same batch, up to rounding.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import IO, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.rendezvous import rendezvous

from maskgr.devices import pick_device
from maskgr.errors import ArtefactError, RequestError


@dataclass(frozen=True)
class World:
    """This process's place among those that train together."""

    rank: int
    size: int
    device: torch.device
    threads: int = 0  # of the CPU, for what one process does alone; 0: as many as it has anyway

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

    def require_alike(self, about: str) -> None:
        """Raises in every process where one of them has another text: on several machines the
        command is given several times."""
        own = int.from_bytes(hashlib.sha256(about.encode()).digest()[:7])
        if int(self.total(torch.tensor(own != self.agree(own), dtype=torch.int64).to(self.device))):
            raise RequestError(
                "the processes of this training have different data or settings; start all of them "
                "with the same command on the same data"
            )

    def wait(self) -> None:
        if self.size > 1:
            dist.barrier()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """For what one process does while the others wait, or are done: with their threads."""
        own = torch.get_num_threads()
        torch.set_num_threads(self.threads or own)
        try:
            yield
        finally:
            torch.set_num_threads(own)


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
    try:
        if restartable():
            store = _of_this_start(store, rank, size)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=PATIENCE)
        yield World(dist.get_rank(), size, chosen, threads)
    except RuntimeError as error:
        # gloo has no error class of its own.
        if not isinstance(error, dist.DistError) and "gloo" not in str(error):
            raise
        raise ArtefactError(
            "a process that trains with this one stopped, for the reason that it gave; go on with "
            "--resume"
        ) from error
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        torch.set_num_threads(threads)  # what one process does after that, it does alone


def _of_this_start(store: Any, rank: int, size: int) -> Any:
    """A part of `torchrun`'s store that no earlier start of the processes has written to.

    It lasts as long as `torchrun` itself, and a process that is started again would read the
    addresses of dead ones in it (github.com/pytorch/pytorch/issues/135712). So every process signs
    in with a new token, and the tokens that all of them see name the part.
    """
    store.set(f"start/{rank}", secrets.token_hex(8))
    end, seen = time.monotonic() + MEETING.total_seconds(), ""
    while time.monotonic() < end:
        tokens = "-".join(store.get(f"start/{n}").decode() for n in range(size))
        if store.add(tokens, int(tokens != seen)) == size:
            return dist.PrefixStore(tokens, store)  # type: ignore[attr-defined]
        seen = tokens
        time.sleep(0.05)
    raise dist.DistError("not all processes have started")


def on_one_machine() -> bool:
    """Whether all processes of this training are on this machine."""
    size = os.environ.get("WORLD_SIZE", "1")
    return os.environ.get("LOCAL_WORLD_SIZE", size) == size


def restartable() -> bool:
    """Whether `torchrun` starts dead processes again, each with the same command.

    It also starts those again that live, when a machine is replaced; TORCHELASTIC_RESTART_COUNT
    does not count that.
    """
    return int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0


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
