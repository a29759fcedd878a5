"""A run as a picture: what was minimised, what it bounds, what it is for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from maskgr.figures import new_figure, save_png
from maskgr.training.log import read_log

PANELS = (
    ("loss", "training loss, nats a token"),
    ("bound", "validation bound, nats an item"),
    ("recall@10", "validation recall@10"),
    ("learning_rate", "learning rate"),
)


def draw(run: Path, *earlier: Path) -> Path:
    """Writes `training.png` beside the log it is drawn from; `earlier` stages, each with a log in a
    folder of its own, come before it."""
    stages, starts = _stages([*earlier, run])
    figure = new_figure(11, 7)
    for axes, (column, title) in zip(figure.subplots(2, 2).flat, PANELS, strict=True):
        # With a dense head either way by itself, and not the mean of both, which chose the best.
        curves = {
            name: _curve(stages, name) for name in (f"generative_{column}", f"dense_{column}")
        }
        curves = {name: curve for name, curve in curves.items() if curve}
        for name, curve in (curves or {column: _curve(stages, column)}).items():
            if curve:
                marker = "." if len(curve) < 100 else ""
                axes.plot(*zip(*curve, strict=True), marker=marker, label=name)
        if len(curves) > 1:
            axes.legend()
        for start in starts[1:]:
            axes.axvline(start / 60, color="grey", linestyle=":")
        axes.set(title=title, xlabel="minutes")
        axes.grid(alpha=0.3)
    save_png(figure, run / "training.png")
    return run / "training.png"


def _stages(folders: Sequence[Path]) -> tuple[list[list[dict[str, Any]]], list[float]]:
    """The rows of each stage's log, their seconds counted from the beginning of the first; and when
    each began."""
    stages, starts, now = [], [], 0.0
    for folder in folders:
        rows = [{**row, "seconds": row["seconds"] + now} for row in read_log(folder)]
        stages.append(rows)
        starts.append(now)
        now = rows[-1]["seconds"] if rows else now
    return stages, starts


def _curve(stages: Sequence[list[dict[str, Any]]], name: str) -> list[tuple[float, float]]:
    """(minutes, value), with a gap between two stages."""
    points: list[tuple[float, float]] = []
    for rows in stages:
        own = [(r["seconds"] / 60, r[name]) for r in rows if r.get(name) is not None]
        points += [(math.nan, math.nan), *own] if points and own else own
    return points
