"""Commands and functions in processes that can be killed.

They are forked from this process, which has imported everything and computed nothing: a fork has
the first thread alone, so that a pool of threads would be lost in it. Each child leads a session of
its own, by which it and whatever it starts is found in /proc.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

PRELOADED = (
    "maskgr.cli",
    "maskgr.run",
    "maskgr.update",
    "maskgr.serving.batch",
    "maskgr.serving.export",
    "maskgr.serving.server",
    "maskgr.sids.report",
    "torch._dynamo",
    "torch.utils.tensorboard",
    "matplotlib.backends.backend_agg",
    "matplotlib.figure",
)
HOUSEKEEPING = ("jemalloc_bg", "polars-ooc")  # of polars: nothing waits for these threads
POLL = 0.02  # seconds


def preload() -> None:
    from maskgr.models.base import MODELS

    for name in (*PRELOADED, *(target.partition(":")[0] for target in MODELS.values())):
        import_module(name)
    tasks = Path("/proc/self/task").iterdir()
    names = [
        Path(task, "comm").read_text().strip() for task in tasks if task.name != str(os.getpid())
    ]
    others = [name for name in names if not name.startswith(HOUSEKEEPING)]
    if others:
        sys.exit(f"threads run before the first fork, which has none of them: {', '.join(others)}")


@dataclass
class Child:
    """A process that leads its session, and where its output goes."""

    pid: int
    output: Path
    started: float
    code: int | None = None  # negative: the signal that ended it

    def poll(self) -> int | None:
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if pid else None
        return self.code

    def wait(self, seconds: float) -> int | None:
        """The exit code; None where it still runs after so many seconds."""
        end = time.monotonic() + seconds
        while self.poll() is None and (left := end - time.monotonic()) > 0:
            time.sleep(min(POLL, left))
        return self.code

    def others(self) -> list[int]:
        """Processes of its session that are alive, without itself."""
        return [pid for pid in session(self.pid) if pid != self.pid]

    def kill(self, pid: int | None = None) -> None:
        """With SIGKILL: itself, or another process of its session."""
        if pid is not None and pid not in session(self.pid):
            return
        if pid is not None or self.poll() is None:
            os.kill(pid or self.pid, signal.SIGKILL)

    def end(self) -> None:
        """Itself and its whole session."""
        self.kill()
        for pid in self.others():
            self.kill(pid)
        self.wait(60)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    @property
    def said(self) -> list[str]:
        return self.output.read_text(errors="replace").splitlines()


def session(leader: int) -> list[int]:
    """The living processes of a session."""
    found = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                fields = Path(entry.path, "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # gone
            state, _, _, own = fields[:4]
            if own == str(leader) and state not in "ZX":
                found.append(int(entry.name))
    return found


def start(
    target: Callable[[], object],
    folder: Path,
    output: Path,
    limits: dict[int, int] | None = None,
) -> Child:
    """Runs `target` in a child whose current folder is `folder`."""
    sys.stdout.flush()
    sys.stderr.flush()
    started, pid = time.monotonic(), os.fork()
    if pid:
        return Child(pid, output, started)
    code = 1
    try:
        os.setsid()
        os.chdir(folder)
        nothing = os.open(os.devnull, os.O_RDONLY)
        written = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for number, handle in enumerate((nothing, written, written)):
            os.dup2(handle, number)
        for kind, limit in (limits or {}).items():
            resource.setrlimit(kind, (limit, limit))
        target()
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def command(words: tuple[str, ...], *, real: bool = False) -> Callable[[], object]:
    """`maskgr WORDS` as a target: in the fork, or as the command itself, imports and all."""
    if real:
        program = [sys.executable, "-m", "maskgr", *words]
        return lambda: os.execv(sys.executable, program)

    def run() -> None:
        import torch

        from maskgr.cli import main

        torch.set_num_threads(1)
        sys.argv = ["maskgr", *words]
        main()

    return run


def call(function: Callable[[], Any], folder: Path, output: Path, seconds: float) -> Any:
    """The JSON of what `function` returns in a child; its last line of output where it failed."""
    answer = output.with_suffix(".json")
    answer.unlink(missing_ok=True)
    child = start(lambda: answer.write_text(json.dumps(function())), folder, output)
    if child.wait(seconds) is None:
        child.end()
        raise ChildError(f"hangs after {seconds:.0f} seconds")
    if child.code:
        raise ChildError(f"exit code {child.code}: {' | '.join(child.said[-1:])}")
    return json.loads(answer.read_text())


class ChildError(Exception):
    """A function in a child came to no answer."""
