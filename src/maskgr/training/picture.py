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
        # with a dense head: either way by itself, too
        for name in (column, *(f"{way}_{column}" for way in ("generative", "dense"))):
            points = [(r["seconds"] / 60, r[name]) for r in rows if r.get(name) is not None]
            if points:
                marker = "." if len(points) < 60 else ""
                axes.plot(*zip(*points, strict=True), marker=marker, label=name)
        if len(axes.lines) > 1:
            axes.legend()
        axes.set(title=title, xlabel="minutes")
        axes.grid(alpha=0.3)
    save_png(figure, run / "training.png")
    return run / "training.png"
