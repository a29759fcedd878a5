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
    panels = {title: [_curve(rows, name) for name in names] for title, names in PANELS.items()}
    panels = {title: curves for title, curves in panels.items() if any(curves)}
    figure = new_figure(4.5 * max(len(panels), 1), 3.8)
    grid = figure.subplots(1, max(len(panels), 1), squeeze=False)
    for axes, (title, curves) in zip(grid.flat, panels.items(), strict=False):
        for curve, style, label in zip(curves, "-:", ("held out", "training items"), strict=False):
            if curve:
                marker = "." if len(curve) < 100 else ""
                axes.plot(*zip(*curve, strict=True), style, marker=marker, label=label)
        if len(curves) > 1:
            axes.legend()
        axes.set(title=title, xlabel="minutes")
        axes.grid(alpha=0.3)
    save_png(figure, run / "training.png")
    return run / "training.png"


def _curve(rows: list[dict[str, Any]], name: str) -> list[tuple[float, float]]:
    """(minutes, value) of the rows that have one."""
    return [(row["seconds"] / 60, row[name]) for row in rows if row.get(name) is not None]
