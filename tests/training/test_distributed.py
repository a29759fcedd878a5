"""Processes that train together: how many, and that none is left behind or waited for in vain."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from maskgr.errors import RequestError
from maskgr.training.distributed import check_processes, companions, processes_for, world
from tests.training.toy import start

CHILD = """
import os, sys, time
from pathlib import Path
from maskgr.training.distributed import companions

with companions(2, []):  # every process runs the same command
    Path(sys.argv[1]).write_text(str(os.getpid()))
    time.sleep(float(sys.argv[2]))
"""


@pytest.mark.parametrize("count", [-1, 0, 5])
@pytest.mark.parametrize(("device", "what"), [("cpu", "cores"), ("cuda", "GPUs")])
def test_raises_when_the_machine_has_no_room_for_the_processes(
    monkeypatch: pytest.MonkeyPatch, count: int, device: str, what: str
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 4 if device == "cpu" else 64)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    monkeypatch.setattr("maskgr.training.distributed.pick_device", torch.device)
    with pytest.raises(
        RequestError, match=f"--processes {count} does not fit the 4 {what} here; use 1 to 4"
    ):
        check_processes(count, device)
    check_processes(1, device)
    check_processes(4, device)


def test_number_of_processes_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 16)
    assert processes_for(90, "cpu", 12_000) == 4
    assert processes_for(1, "cpu", 12_000) == 1  # not worth it
    assert processes_for(90, "cpu", 1_000_000) == 1  # each has its own tables of items
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert processes_for(90, "cpu", 12_000) == 1  # torchrun has started them


def test_one_process_needs_no_companions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with companions(1, ["/no/such/command"]), world("cpu") as here:
        assert (here.rank, here.size, here.writes) == (0, 1, True)
        assert here.agree(7) == 7
        assert "WORLD_SIZE" not in os.environ


def sleep_beside_a_child(file: Path) -> None:
    with companions(2, [sys.executable, "-c", CHILD, str(file), "600"]):
        time.sleep(600)


def outlive_a_child(file: Path) -> None:
    """Goes on with something of its own after the child is done, as writing a model is."""
    with companions(2, [sys.executable, "-c", CHILD, str(file), "0"]):
        wait_for(lambda: file.exists() and file.read_text())
        wait_for(lambda: not is_alive(int(file.read_text())))
        time.sleep(0.3)
    file.with_suffix(".done").touch()


def wait_beside_a_child_that_fails(file: Path) -> None:
    with file.open("w") as errors:
        os.dup2(errors.fileno(), 2)
    with companions(2, [sys.executable, "-c", "raise SystemExit(7)"]), world("cpu"):
        file.with_suffix(".done").touch()


def is_alive(pid: int) -> bool:
    """Not where a process is gone, or a zombie that nobody has asked about."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z"


def wait_for(condition: Callable[[], object], seconds: float = 300) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_child_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    parent = start(sleep_beside_a_child, file)
    child = 0
    try:
        wait_for(lambda: file.exists() and file.read_text())
        child = int(file.read_text())
        assert is_alive(child)
        parent.kill()
        parent.join(300)
        wait_for(lambda: not is_alive(child), seconds=30)
    finally:
        parent.kill()
        if child and is_alive(child):
            os.kill(child, 9)


def test_child_that_is_done_first_does_not_end_its_parent(tmp_path: Path) -> None:
    parent = start(outlive_a_child, tmp_path / "pid")
    parent.join(300)
    assert parent.exitcode == 0
    assert (tmp_path / "pid.done").exists()


def test_failed_child_is_named_and_ends_its_parent(tmp_path: Path) -> None:
    parent = start(wait_beside_a_child_that_fails, tmp_path / "errors")
    parent.join(300)
    assert parent.exitcode == 1
    said = (tmp_path / "errors").read_text()
    assert "a process that trains with this one stopped (exit code 7)" in said
    assert not (tmp_path / "errors.done").exists()
