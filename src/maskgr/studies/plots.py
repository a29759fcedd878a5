"""Pictures of results, readable in black and white."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from maskgr.evaluation.metrics import Mean
from maskgr.figures import new_figure, save_png

STYLES = (  # of up to four series: filled and hollow marks tell them apart without colour
    {"marker": "o", "color": "black", "markerfacecolor": "black"},
    {"marker": "o", "color": "black", "markerfacecolor": "white"},
    {"marker": "s", "color": "dimgray", "markerfacecolor": "dimgray"},
    {"marker": "s", "color": "dimgray", "markerfacecolor": "white"},
)


def interval_plot(
    file: Path,
    title: str,
    names: Sequence[str],
    panels: Mapping[str, Mapping[str, Sequence[Mean]]],
) -> None:
    """A row for each name, a panel for each metric, a mark with its interval for each series.

    panels: title of a panel -> name of a series -> a mean for each name.
    """
    count = len(next(iter(panels.values())))
    figure = new_figure(1.5 + 2.6 * len(panels), 1.6 + 0.2 * (1 + count) * len(names))
    grid = figure.subplots(1, len(panels), sharey=True, squeeze=False)
    gap = 0.6 / count  # between the series of a row
    for axes, (metric, series) in zip(grid.flat, panels.items(), strict=True):
        for number, ((label, means), style) in enumerate(zip(series.items(), STYLES, strict=False)):
            offset = (number - (count - 1) / 2) * gap
            axes.errorbar(
                [100 * m.mean for m in means],
                [row + offset for row in range(len(names))],
                xerr=[
                    [100 * (m.mean - m.low) for m in means],
                    [100 * (m.high - m.mean) for m in means],
                ],
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
