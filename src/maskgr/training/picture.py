"""A run as a picture: what was minimised, what it bounds, what it is for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from maskgr.pictures import new_figure, save_png
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
    rows, starts = _joined([*earlier, run])
    figure = new_figure(11, 7)
    for axes, (column, title) in zip(figure.subplots(2, 2).flat, PANELS, strict=True):
        # With a dense head either way by itself, and not the mean of both, which chose the best.
        names = [f"{way}_{column}" for way in ("generative", "dense")]
        names = [name for name in names if any(r.get(name) is not None for r in rows)]
        for name in names or [column]:
            points = [(r["seconds"] / 60, r[name]) for r in rows if r[name] is not None]
            if points:
                marker = "." if len(points) < 100 else ""
                axes.plot(*zip(*points, strict=True), marker=marker, label=name)
        for start in starts[1:]:
            axes.axvline(start / 60, color="grey", linestyle=":")
        if len(axes.lines) - len(starts[1:]) > 1:
            axes.legend()
        axes.set(title=title, xlabel="minutes")
        axes.grid(alpha=0.3)
    save_png(figure, run / "training.png")
    return run / "training.png"


def _joined(stages: Sequence[Path]) -> tuple[list[dict[str, Any]], list[float]]:
    """The rows of all stages' logs, with the seconds since the first began and a gap between two;
    and when each began."""
    rows: list[dict[str, Any]] = []
    starts, now = [], 0.0
    for stage in stages:
        own = read_log(stage)
        if rows and own:
            rows.append(dict.fromkeys(own[0], math.nan))
        starts.append(now)
        rows += [{**row, "seconds": row["seconds"] + now} for row in own]
        now = rows[-1]["seconds"] if own else now
    return rows, starts
