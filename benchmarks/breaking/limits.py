"""Too little disk, too small files, too little memory: one sentence, exit code 2, and what was
there before is as it was."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .children import Child, command, start
from .kills import Breaker
from .shop import JOBS, Job, content, leftovers, tree

DISKS = (0.0, 0.3, 0.6, 0.9)  # of the room that the job needs
FILES = (0.1, 0.5, 0.9)  # of the largest file that the job writes
MEMORY = (2, 16, 64, 128, 256)  # MiB beyond what the process has when the command begins
ROOM = 64 * 1024  # bytes that a file system needs for itself


@dataclass(frozen=True)
class Outcome:
    """What became of one command under one limit."""

    job: str
    limit: str
    outcome: str  # refused, done, aborted, or what may not happen
    said: str = ""

    @property
    def failed(self) -> bool:
        return self.outcome not in ("refused", "done", "aborted")


@contextlib.contextmanager
def small_disk(folder: Path, size: int) -> Iterator[None]:
    """A file system of `size` bytes at `folder`, gone at the end."""
    folder.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "maskgr-faults", str(folder)]
    subprocess.run(mount, check=True, capture_output=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True, capture_output=True)


def why_no_mount(folder: Path) -> str | None:
    """A sentence where file systems cannot be mounted here."""
    if os.geteuid():
        return "a small file system needs root to be mounted; left out"
    try:
        with small_disk(folder, 2**20):
            return None
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", b"") or str(error).encode()
        return f"a small file system cannot be mounted here ({said.decode().strip()}); left out"


def size_of(folder: Path) -> int:
    """Bytes on a file system of pages."""
    page = resource.getpagesize()
    pages = [-(-path.stat().st_size // page) if path.is_file() else 1 for path in folder.rglob("*")]
    return page * sum(pages)


def judged(breaker: Breaker, job: Job, child: Child, before: dict[str, str]) -> tuple[str, str]:
    """The outcome of a command that was to be refused; `before`: every file that was there."""
    if child.wait(breaker.patience) is None:
        child.end()
        return "hangs", ""
    mine = [line for line in child.said if not line.startswith(("warning: ", "note: "))]
    errors = [line for line in mine if line.startswith("error: ")]
    said = " | ".join(mine[-1:])
    now = tree(breaker.work)
    if child.code == 0:
        return "done", ""
    lost = [name for name, own in before.items() if now.get(name) != own]
    if lost:
        return f"changed {lost}", said
    if left := leftovers(breaker.work):
        return f"left {left}", said
    if child.code is not None and child.code < 0:
        return ("aborted" if len(mine) <= 4 else "aborted with many words"), said
    if any("Traceback" in line for line in child.said):
        return "a traceback", " | ".join(child.said[-3:])
    if child.code != 2 or len(errors) != 1 or mine[-1] != errors[0]:
        return f"exit code {child.code}, {len(errors)} sentences", said
    return "refused", said


def limit_all(breaker: Breaker, *, quick: bool = False) -> Iterator[Outcome]:
    why = why_no_mount(breaker.root / "disk")
    if why is not None:
        yield Outcome("every command", "a full disk", "done", why)
    for job in JOBS.values():
        if job.processes > 1 or (quick and job.name not in ("sids", "add-items", "train")):
            continue
        needed, largest = _sizes(breaker, job)
        if why is None:
            for share in DISKS[::3] if quick else DISKS:
                yield _with_disk(breaker, job, share, needed)
        for share in FILES[:1] if quick else FILES:
            limits = {resource.RLIMIT_FSIZE: int(share * largest)}
            yield _with_limits(breaker, job, f"files of {share:.0%}", limits)
        for more in MEMORY[:1] if quick else MEMORY:
            limits = {resource.RLIMIT_AS: _address_space() + more * 2**20}
            yield _with_limits(breaker, job, f"{more} MiB of memory", limits)


def _sizes(breaker: Breaker, job: Job) -> tuple[int, int]:
    """Bytes that the job needs beside what is there, at most, and those of its largest file."""
    _fresh(breaker)
    before = size_of(breaker.work)
    breaker.run(job.words, breaker.work)
    old = content(breaker.work / job.out) is not None
    out = breaker.work / (job.run or job.out)
    files = [out] if out.is_file() else [path for path in out.rglob("*") if path.is_file()]
    own = size_of(out) if out.is_dir() else out.stat().st_size
    needed = max(size_of(breaker.work) - before, own if old else 0)
    return needed, max(file.stat().st_size for file in files)


def _fresh(breaker: Breaker) -> None:
    """A copy of the template in the work folder, which may be the root of a file system."""
    breaker.work.mkdir(exist_ok=True)
    for path in breaker.work.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    shutil.copytree(breaker.template, breaker.work, dirs_exist_ok=True)


def _with_disk(breaker: Breaker, job: Job, share: float, needed: int) -> Outcome:
    size = size_of(breaker.template) + ROOM + int(share * needed)
    with small_disk(breaker.work, size):
        _fresh(breaker)
        before = tree(breaker.work)
        child = start(command(job.words), breaker.work, breaker.output)
        outcome, said = judged(breaker, job, child, before)
    return Outcome(job.name, f"a disk with {share:.0%} of the room", outcome, said)


def _with_limits(breaker: Breaker, job: Job, name: str, limits: dict[int, int]) -> Outcome:
    _fresh(breaker)
    before = tree(breaker.work)
    child = start(command(job.words), breaker.work, breaker.output, limits)
    return Outcome(job.name, name, *judged(breaker, job, child, before))


def _address_space() -> int:
    """Bytes of this process, which a fork begins with."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()
