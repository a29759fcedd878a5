from __future__ import annotations

from pathlib import Path

import pytest

from maskgr.training.log import COLUMNS
from maskgr.training.plot import PANELS, draw


def write_log(folder: Path, *rows: dict[str, float]) -> None:
    lines = [",".join(str(row.get(name, "")) for name in COLUMNS) for row in rows]
    (folder / "log.csv").write_text("\n".join([",".join(COLUMNS), *lines]) + "\n")


def test_curves_of_held_out_and_of_training_items_are_drawn_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    write_log(
        tmp_path,
        {"step": 1, "seconds": 60, "loss": 3.0, "learning_rate": 0.1},
        {"step": 2, "seconds": 120, "loss": 2.0, "learning_rate": 0.2},
        {"step": 2, "seconds": 120, "recall@10": 0.1, "training_recall@10": 0.3, "bound": 8.0},
    )
    figures = []
    monkeypatch.setattr(
        "maskgr.training.plot.save_png", lambda figure, path: figures.append(figure)
    )
    draw(tmp_path)
    curves = {
        axes.get_title(): {line.get_label(): line.get_xydata().tolist() for line in axes.lines}
        for axes in figures[0].axes
    }
    assert list(curves) == list(PANELS)
    assert list(curves["training loss, nats"].values()) == [[[1, 3.0], [2, 2.0]]]
    assert curves["recall@10"] == {"held out": [[2, 0.1]], "training items": [[2, 0.3]]}
    assert curves["bound, nats an item"] == {"held out": [[2, 8.0]]}


def test_plot_is_a_png_beside_the_log(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    write_log(tmp_path, {"step": 1, "seconds": 10, "loss": 3.0})
    assert draw(tmp_path) == tmp_path / "training.png"
    assert (tmp_path / "training.png").read_bytes().startswith(b"\x89PNG")
