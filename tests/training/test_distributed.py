"""Processes that train together: how many, that none is left behind or waited for in vain, and that
they go on after one was killed."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from maskgr.errors import RequestError
from maskgr.training import workspace as workspaces
from maskgr.training.distributed import check_processes, companions, processes_for, world
from maskgr.training.workspace import workspace
from tests.conftest import Outcome
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


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def train(words: list[str], mark: Path | None = None) -> None:
    """`maskgr train`; the process that writes is killed after its third step, once (`mark`)."""
    from maskgr.cli import main
    from maskgr.training import fit

    whole = fit.Trainer._checkpoint

    def checkpoint(self: fit.Trainer, **how: Any) -> None:
        whole(self, **how)
        if mark and os.environ["RANK"] == "0" and self.state.step == 3 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    fit.Trainer._checkpoint, fit._plot = checkpoint, lambda run: None  # type: ignore[method-assign]
    sys.argv = ["maskgr", "train", *words]
    with pytest.raises(SystemExit) as stop:
        main()
    if stop.value.code:
        raise RuntimeError(f"exit code {stop.value.code}")


def machine(port: int, words: list[str], mark: Path) -> None:
    """torchrun, but for a function: a forked process has imported everything."""
    from torch.distributed.launcher.api import elastic_launch
    from torch.distributed.run import config_from_args, parse_args

    os.setpgid(0, 0)
    options = ["--nnodes=2", "--nproc-per-node=1", "--max-restarts=3", "--rdzv-backend=c10d"]
    config, _, _ = config_from_args(
        parse_args([*options, f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=test", "script.py"])
    )
    config.start_method = "fork"
    elastic_launch(config, train)(words, mark)


def process(port: int, rank: int, target: Callable[..., None], *arguments: Any) -> None:
    """One of two processes, each as if on a machine of its own."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "LOCAL_WORLD_SIZE": 1}
    os.environ.update({name: str(value) for name, value in place.items()}, WORLD_SIZE="2")
    os.environ["RANK"] = str(rank)
    target(*arguments)


def ended(processes: list[Any]) -> list[int]:
    """The exit codes; the groups of those that do not end are killed."""
    try:
        for own in processes:
            own.join(300)
        return [own.exitcode for own in processes]
    finally:
        for own in processes:
            if own.is_alive():
                os.killpg(os.getpgid(own.pid), signal.SIGKILL)


def test_worker_of_two_machines_is_killed_and_all_go_on_to_the_same_weights(
    maskgr: Callable[..., Outcome], tmp_path: Path
) -> None:
    shop, mark = tmp_path / "shop", tmp_path / "mark"
    maskgr("data", "fetch", "synthetic", "--set", "users=40", "--set", "items=30", "--out", shop)
    settings = ("fit.steps=6", "checkpoint_minutes=0", "validations=1")
    how = [*("--model", "sasrec", "--preset", "tiny"), *(f"--set={own}" for own in settings)]
    killed, whole = ([str(shop), "--out", str(tmp_path / n), *how] for n in ("killed", "whole"))
    port = free_port()
    assert ended([start(machine, port, killed, mark) for _ in range(2)]) == [0, 0]
    assert mark.exists()
    port = free_port()
    assert ended([start(process, port, rank, train, whole) for rank in (0, 1)]) == [0, 0]
    files = [tmp_path / n / "recommender" / "network.safetensors" for n in ("killed", "whole")]
    assert files[0].read_bytes() == files[1].read_bytes()


def disagree(folder: Path, shared: bool) -> None:
    """Both processes write what the error says."""
    workspaces.SIGHT = 0.1
    own = folder if shared else folder / os.environ["RANK"]
    try:
        with workspace(own / "run", device="cpu") as work:
            work.world.require_alike("the same")
            work.world.require_alike(os.environ["RANK"])
    except RequestError as error:
        (folder / f"{os.environ['RANK']}.txt").write_text(str(error))


@pytest.mark.parametrize(
    ("shared", "expected"),
    [
        (False, "1 of the 2 processes do not see the folder "),
        (True, "the processes of this training have different data or settings; "),
    ],
)
def test_raises_in_all_processes_when_machines_differ(
    tmp_path: Path, shared: bool, expected: str
) -> None:
    port = free_port()
    found = [start(process, port, rank, disagree, tmp_path, shared) for rank in (0, 1)]
    assert ended(found) == [0, 0]
    for rank in (0, 1):
        assert (tmp_path / f"{rank}.txt").read_text().startswith(expected)
    assert not list(tmp_path.rglob(".shared-*"))


def test_started_again_by_torchrun_a_training_goes_on(
    maskgr: Callable[..., Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resumed: list[bool] = []
    monkeypatch.setattr("maskgr.run.start_run", lambda *_, resume, **__: resumed.append(resume))
    run = tmp_path / "run"
    words = ("train", "synthetic", "--preset", "tiny", "--processes", 1, "--out", run)
    for restarts, begun in (("3", False), ("0", True), ("3", True)):
        monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", restarts)
        if begun:
            (run / "training" / "checkpoints").mkdir(parents=True, exist_ok=True)
            (run / "training" / "run.json").write_text("{}")
        assert (restarts == "0") == ("holds a training" in maskgr(*words).err)
    assert resumed == [False, True]
