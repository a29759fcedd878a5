"""A run as a picture: what was minimised, what it bounds, what it is for."""

from __future__ import annotations

from pathlib import Path

from maskgr.pictures import new_figure, save_png
from maskgr.training.log import read_log

PANELS = (
    ("loss", "training loss, nats a token"),
    ("bound", "validation bound, nats an item"),
    ("recall@10", "validation recall@10"),
    ("learning_rate", "learning rate"),
)


def draw(run: Path) -> Path:
    """Writes `training.png` beside the log it is drawn from."""
    rows = read_log(run)
    figure = new_figure(11, 7)
    for axes, (column, title) in zip(figure.subplots(2, 2).flat, PANELS, strict=True):
        points = [(row["seconds"] / 60, row[column]) for row in rows if row[column] is not None]
        if points:
            axes.plot(*zip(*points, strict=True), marker="." if len(points) < 60 else "")
        axes.set(title=title, xlabel="minutes")
        axes.grid(alpha=0.3)
    save_png(figure, run / "training.png")
    return run / "training.png"
