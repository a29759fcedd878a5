"""Pictures of results, readable in black and white."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maskgr.evaluation.metrics import Mean
from maskgr.figures import new_figure, save_png

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from maskgr.studies.findings import Drawn

STYLES = (  # of up to four series: filled and hollow marks tell them apart without colour
    {"marker": "o", "color": "black", "markerfacecolor": "black"},
    {"marker": "o", "color": "black", "markerfacecolor": "white"},
    {"marker": "s", "color": "dimgray", "markerfacecolor": "dimgray"},
    {"marker": "s", "color": "dimgray", "markerfacecolor": "white"},
)
LINES: tuple[dict[str, Any], ...] = (  # of up to six: marks, dashes and greys tell them apart
    {"marker": "o", "linestyle": "-", "color": "black"},
    {"marker": "s", "linestyle": "--", "color": "black", "markerfacecolor": "white"},
    {"marker": "^", "linestyle": "-.", "color": "dimgray"},
    {"marker": "D", "linestyle": ":", "color": "dimgray", "markerfacecolor": "white"},
    {"marker": "v", "linestyle": "--", "color": "darkgray"},
    {"marker": "P", "linestyle": "-", "color": "darkgray"},
)
PAPER: dict[str, Any] = {"marker": "x", "color": "black", "linestyle": "none", "markersize": 7}
PAPER_MARKS = ("x", "+", "2")  # of several published series
DODGE = 0.008  # of the axis, between the points of two series at one place
Draw = Callable[[Path, "Drawn"], None]  # writes the figure of a part of the findings


def interval_plot(
    file: Path,
    title: str,
    names: Sequence[str],
    panels: Mapping[str, Mapping[str, Sequence[Mean | None]]],
    published: str = "",
) -> None:
    """A row for each name, a panel for each metric, a mark with its interval for each series.

    panels: title of a panel -> name of a series -> a mean for each name, or none.
    published: the series of published figures, which are crosses without an interval.
    """
    count = max(len(series) for series in panels.values())
    figure = new_figure(max(8.0, 1.5 + 2.6 * len(panels)), 1.6 + 0.2 * (1 + count) * len(names))
    grid = figure.subplots(1, len(panels), sharey=True, squeeze=False)
    gap = 0.6 / count  # between the series of a row
    for axes, (metric, series) in zip(grid.flat, panels.items(), strict=True):
        for number, ((label, means), style) in enumerate(zip(series.items(), STYLES, strict=False)):
            offset = (number - (count - 1) / 2) * gap
            known = [(row + offset, m) for row, m in enumerate(means) if m is not None]
            if label == published:
                places = [place for place, _ in known]
                axes.plot([100 * m.mean for _, m in known], places, label=label, **PAPER)
                continue
            axes.errorbar(
                [100 * m.mean for _, m in known],
                [place for place, _ in known],
                xerr=_margins([m for _, m in known]),
                linestyle="none",
                capsize=3,
                markersize=5,
                label=label,
                **style,
            )
        axes.set(title=metric, xlabel="percent", yticks=range(len(names)), yticklabels=names)
        axes.set_xlim(left=0)
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.grid(axis="x", alpha=0.3)
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.suptitle(title, fontsize="medium")
    figure.legend(handles, labels, loc="outside lower center", ncols=count, frameon=False)
    save_png(figure, file)


@dataclass(frozen=True)
class Curves:
    """A panel of lines: for each series its points (x, mean)."""

    x: str
    y: str
    series: Mapping[str, Sequence[tuple[float, Mean]]]
    published: Mapping[str, Sequence[tuple[float, float]]]  # percent
    log: bool = False
    ticks: Sequence[float] = ()
    signed: bool = False  # differences: zero is drawn, and is not the end of the axis


def line_plot(file: Path, title: str, panels: Sequence[Curves]) -> None:
    """Panels beside each other, one legend for all; crosses are published figures."""
    figure = new_figure(max(8.0, 0.6 + 4.2 * len(panels)), 4.4)  # the title has to fit
    grid = figure.subplots(1, len(panels), squeeze=False)
    styles: dict[str, dict[str, Any]] = {}
    for name in (name for panel in panels for name in panel.series):
        styles.setdefault(name, LINES[len(styles) % len(LINES)])
    handles: dict[str, Any] = {}
    for axes, panel in zip(grid.flat, panels, strict=True):
        _draw_curves(axes, panel, styles)
        handles |= dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    figure.suptitle(title, fontsize="medium")
    figure.legend(
        handles.values(), handles.keys(), loc="outside lower center", ncols=4, frameon=False
    )
    save_png(figure, file)


def _draw_curves(axes: Axes, panel: Curves, styles: Mapping[str, dict[str, Any]]) -> None:
    every = [x for points in panel.series.values() for x, _ in points]
    gap = 0.0 if panel.log or not every else DODGE * (max(every) - min(every))
    for number, (name, points) in enumerate(panel.series.items()):
        shift = (number - (len(panel.series) - 1) / 2) * gap
        axes.errorbar(
            [x + shift for x, _ in points],
            [100 * m.mean for _, m in points],
            yerr=_margins([m for _, m in points]),
            capsize=3,
            markersize=5,
            label=name,
            **styles[name],
        )
    for (name, known), mark in zip(panel.published.items(), PAPER_MARKS, strict=False):
        style = {**PAPER, "marker": mark}
        axes.plot([x for x, _ in known], [y for _, y in known], label=name, **style)
    axes.set(xlabel=panel.x, ylabel=panel.y)
    if panel.log:
        from matplotlib.ticker import FormatStrFormatter, LogLocator, NullFormatter

        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter(FormatStrFormatter("%g"))
        axes.xaxis.set_minor_formatter(NullFormatter())
    if panel.ticks:
        axes.set_xticks(panel.ticks, [f"{tick:g}" for tick in panel.ticks])
        axes.minorticks_off()
    if panel.signed:
        axes.axhline(0, color="black", linewidth=0.8)
    else:
        axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)


def draw_rows(file: Path, drawn: Drawn) -> None:
    """A row for each cell, with its intervals and the paper's figures."""
    part, published = drawn.part, f"paper, {drawn.paper_data}"
    panels: dict[str, dict[str, Sequence[Mean | None]]] = {}
    for metric in drawn.metrics:
        series: dict[str, Sequence[Mean | None]] = {
            f"protocol {protocol}": [own.mean(protocol, metric) for own in part.cells]
            for protocol in part.cells[0].values
        }
        figures = [drawn.paper(own).get(metric) for own in part.cells]
        if any(value is not None for value in figures):
            series[published] = [
                None if value is None else Mean(value / 100, value / 100, value / 100)
                for value in figures
            ]
        panels[metric] = series
    interval_plot(file, drawn.title, [str(own) for own in part.cells], panels, published)


def _margins(means: Sequence[Mean]) -> list[list[float]]:
    """Both halves of intervals, in percent."""
    return [[100 * (m.mean - m.low) for m in means], [100 * (m.high - m.mean) for m in means]]
