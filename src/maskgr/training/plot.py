"""A run as a plot: the loss, the held-out bound and recall beside those of training items."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from maskgr.figures import new_figure, save_png
from maskgr.training.log import read_log

PANELS = {  # title -> curves
    "training loss, nats": ("loss",),
    "recall@10": ("recall@10", "training_recall@10"),
    "bound, nats an item": ("bound", "training_bound"),
    "learning rate": ("learning_rate",),
}


def draw(run: Path) -> Path:
    """Writes `training.png` beside the log that it is drawn from."""
    rows = read_log(run)
    figure = new_figure(11, 7)
    for axes, (title, columns) in zip(figure.subplots(2, 2).flat, PANELS.items(), strict=True):
        for column, style in zip(columns, ("-", "--"), strict=False):
            if curve := _curve(rows, column):
                label = "training items" if column.startswith("training_") else "held out"
                marker = "." if len(curve) < 100 else ""
                axes.plot(*zip(*curve, strict=True), style, marker=marker, label=label)
        if len(axes.lines) > 1:
            axes.legend()
        axes.set(title=title, xlabel="minutes")
        axes.grid(alpha=0.3)
    save_png(figure, run / "training.png")
    return run / "training.png"


def _curve(rows: list[dict[str, Any]], name: str) -> list[tuple[float, float]]:
    """(minutes, value) of the rows that have one."""
    return [(row["seconds"] / 60, row[name]) for row in rows if row.get(name) is not None]
