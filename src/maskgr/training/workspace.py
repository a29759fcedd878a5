"""Where a training keeps its files, and which process of it this is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from maskgr.artefact import is_artefact
from maskgr.errors import RequestError
from maskgr.training.distributed import World, world


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
            make(folder)
        self.world.wait()
        return folder


@contextmanager
def workspace(
    run: Path, *, device: str = "auto", resume: bool = False, progress: bool = False
) -> Iterator[Workspace]:
    """For the processes that `torchrun` or `companions` started, or for this one alone."""
    with world(device) as here:
        if here.writes and not resume:
            require_fresh(run)
        here.wait()
        yield Workspace(run, here, resume, progress)


def require_fresh(run: Path) -> None:
    """Raises if the folder holds a training: hours of work are never overwritten or mixed."""
    if any((stage / "checkpoints").is_dir() for stage in (run, *run.glob("*/"))):
        raise RequestError(
            f"{run} holds a training; --resume (resume=True) goes on with it, another folder "
            "begins a new one"
        )
