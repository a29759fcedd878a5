"""Where a training keeps its files, and which process of it this is."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from maskgr.artefact import is_artefact
from maskgr.errors import RequestError
from maskgr.training.distributed import World, on_one_machine, world

SIGHT = 60.0  # seconds after which every machine has to see a new file: NFS caches folders as long


@dataclass(frozen=True)
class Workspace:
    """The folder of a training, the processes that share it, and how to go about it."""

    run: Path
    world: World
    resume: bool = False  # go on from the checkpoints in the folder
    progress: bool = False

    def stage(self, name: str) -> Workspace:
        """A folder of its own for a part of the training that has its own checkpoints."""
        return replace(self, run=self.run / name)

    def once(self, name: str, make: Callable[[Path], None]) -> Path:
        """The artefact `name`: made by one process, where all find it; kept when resuming."""
        folder = self.run / name
        if self.world.writes and not (self.resume and is_artefact(folder)):
            with self.world.alone():
                make(folder)
        self.world.wait()
        return folder


@contextmanager
def workspace(
    run: Path, *, device: str = "auto", resume: bool = False, progress: bool = False
) -> Iterator[Workspace]:
    """For the processes that `torchrun` or `companions` started, or for this one alone."""
    with world(device) as here:
        resume = bool(here.agree(resume))
        if here.writes and not resume:
            require_fresh(run)
        _require_shared(run, here)
        yield Workspace(run, here, resume, progress)


def _require_shared(run: Path, here: World) -> None:
    """Raises in every process where one of them does not see the files of the first."""
    here.wait()
    if on_one_machine():
        return
    mark = run / f".shared-{here.agree(secrets.randbits(60)):x}"
    if here.writes:
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()
    here.wait()
    end = time.monotonic() + SIGHT
    while not (seen := mark.exists()) and time.monotonic() < end:
        time.sleep(0.1)
    blind = int(here.total(torch.tensor(int(not seen), device=here.device)))
    if here.writes:
        mark.unlink()
    if blind:
        raise RequestError(
            f"{blind} of the {here.size} processes do not see the folder {run} of the first one; "
            "give a folder on a file system that all machines share"
        )


def require_fresh(run: Path) -> None:
    """Raises if the folder holds a training: hours of work are never overwritten or mixed."""
    if any((stage / "checkpoints").is_dir() for stage in (run, *run.glob("*/"))):
        raise RequestError(
            f"{run} holds a training; --resume (resume=True) goes on with it, another folder "
            "begins a new one"
        )
