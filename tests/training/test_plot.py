from __future__ import annotations

import math
from pathlib import Path

import pytest

from maskgr.training.log import COLUMNS
from maskgr.training.plot import _curve, _stages, draw


def log(folder: Path, *rows: dict[str, float]) -> Path:
    folder.mkdir()
    lines = [",".join(str(row.get(name, "")) for name in COLUMNS) for row in rows]
    (folder / "log.csv").write_text("\n".join([",".join(COLUMNS), *lines]) + "\n")
    return folder


def test_stages_follow_each_other_in_time(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    first = log(
        tmp_path / "first",
        {"step": 1, "seconds": 10, "loss": 3.0},
        {"step": 2, "seconds": 20, "dense_recall@10": 0.1, "recall@10": 0.1},
    )
    second = log(tmp_path / "second", {"step": 1, "seconds": 5, "loss": 2.0, "bound": 8.0})
    stages, starts = _stages([tmp_path / "none", first, second])
    assert [[row["seconds"] for row in rows] for rows in stages] == [[], [10, 20], [25]]
    assert starts == [0, 0, 20]
    curve = _curve(stages, "loss")
    assert [curve[0], curve[2]] == [(10 / 60, 3.0), (25 / 60, 2.0)]
    assert math.isnan(curve[1][0])  # the stages' losses are not of one kind
    assert _curve(stages, "generative_recall@10") == []
    assert draw(second, first).read_bytes().startswith(b"\x89PNG")
    assert draw(first).read_bytes().startswith(b"\x89PNG")
