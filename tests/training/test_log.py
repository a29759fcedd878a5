from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from maskgr.training.batches import Place
from maskgr.training.distributed import World
from maskgr.training.log import COLUMNS, RunLog, read_log


def state(step: int) -> Any:
    return SimpleNamespace(
        step=step, total=30, place=Place(), seconds=float(step), tokens=10 * step, best_step=0
    )


def world(rank: int = 0) -> World:
    return World(rank, 1, torch.device("cpu"))


def write(run: Path, steps: int, *, rank: int = 0) -> None:
    with RunLog(run, world(rank)) as log:
        for step in range(1, steps + 1):
            log.step(state(step), torch.tensor(float(step)), torch.tensor(2.0), 0.5)
        log.validation(state(steps), {"recall@10": 0.25, "training_recall@10": 0.75})


def test_losses_are_averaged_between_rows(tmp_path: Path) -> None:
    write(tmp_path, 20)
    rows = read_log(tmp_path)
    assert [(row["step"], row["loss"]) for row in rows] == [(1, 1), (10, 6), (20, 15.5), (20, None)]
    assert (rows[-1]["recall@10"], rows[-1]["training_recall@10"]) == (0.25, 0.75)


def test_line_that_a_kill_cut_off_is_left_out(tmp_path: Path) -> None:
    write(tmp_path, 20)
    file = tmp_path / "log.csv"
    file.write_text(file.read_text() + "21,0,2")
    assert [row["step"] for row in read_log(tmp_path)] == [1, 10, 20, 20]


def test_damaged_lines_are_left_out(tmp_path: Path) -> None:
    write(tmp_path, 20)
    file = tmp_path / "log.csv"
    first, *rows = file.read_bytes().splitlines()
    file.write_bytes(
        b"\n".join([b"\xff" + first, b"\xfe" + rows[0], b"inf" + rows[1][2:], *rows[2:]])
    )
    assert [row["step"] for row in read_log(tmp_path)] == [20, 20]


@pytest.mark.parametrize(("step", "kept"), [(0, []), (15, [1, 10]), (20, [1, 10, 20, 20])])
def test_rewinding_drops_later_rows(tmp_path: Path, step: int, kept: list[int]) -> None:
    write(tmp_path, 20)
    RunLog(tmp_path, world()).rewind(step)
    assert [row["step"] for row in read_log(tmp_path)] == kept
    assert (tmp_path / "log.csv").read_text().splitlines()[0] == ",".join(COLUMNS)


def test_only_the_writing_process_writes(tmp_path: Path) -> None:
    write(tmp_path, 20, rank=1)
    assert not list(tmp_path.iterdir())
