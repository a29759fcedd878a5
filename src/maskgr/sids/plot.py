"""The report as a picture: use of codes, collisions, reconstruction error, a map of the items."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from maskgr.figures import new_figure, save_png
from maskgr.sids.report import Report
from maskgr.sids.semantic_ids import SemanticIds
from maskgr.sids.vectors import Floats, prepare

if TYPE_CHECKING:
    from matplotlib.axes import Axes

POINTS = 20_000  # on the map; more would hide each other


def draw(sids: SemanticIds, report: Report, file: Path) -> None:
    """Draws the report to the PNG `file`."""
    figure = new_figure(12, 9)
    axes = figure.subplots(2, 2)
    _codes(axes[0, 0], sids)
    _collisions(axes[0, 1], report)
    _errors(axes[1, 0], report)
    _map(axes[1, 1], sids)
    figure.suptitle(
        f"{report.items:,} items, {' × '.join(map(str, sids.codebook_sizes))} codes: "
        f"{report.unique_share_before:.1%} unique before, {report.unique_share_after:.1%} after "
        f"“{sids.unique}”"
    )
    save_png(figure, file)


def _codes(axes: Axes, sids: SemanticIds) -> None:
    for level, codes in enumerate(sids.codebook_sizes):
        counts = np.sort(np.bincount(sids.digits[:, level], minlength=codes))[::-1]
        axes.plot(np.arange(1, codes + 1), np.maximum(counts, 0.5), label=f"level {level + 1}")
    axes.set(title="Use of codes", xlabel="code, by frequency", ylabel="items", yscale="log")
    axes.legend()


def _collisions(axes: Axes, report: Report) -> None:
    sizes = list(report.collision_sizes)
    axes.bar([str(size) for size in sizes], [report.collision_sizes[size] for size in sizes])
    axes.set(
        title="Items under one tuple, before de-duplication",
        xlabel="items",
        ylabel="tuples",
        yscale="log",
    )
    if len(sizes) > 20:
        axes.set_xticks(axes.get_xticks()[:: len(sizes) // 10])


def _errors(axes: Axes, report: Report) -> None:
    levels = [level for level in report.levels if not level.appended]
    axes.plot(
        range(len(levels) + 1), [1.0, *(level.reconstruction_error for level in levels)], "o-"
    )
    axes.set(
        title="Reconstruction error", xlabel="digits decoded", ylabel="relative squared distance"
    )
    axes.set_xticks(range(len(levels) + 1))
    axes.set_ylim(bottom=0)


def _map(axes: Axes, sids: SemanticIds) -> None:
    rows = np.random.default_rng(0).permutation(len(sids.items))[:POINTS]
    vectors = prepare(sids.vectors[rows], normalise=sids.quantizer.normalise)
    places = _two_dimensions(vectors)
    first = sids.digits[rows, 0]
    # Codes have no order of their own; neighbours on the map get neighbouring colours.
    angle = np.arctan2(*(places - places.mean(axis=0)).T)
    mean = np.bincount(first, angle) / np.maximum(np.bincount(first), 1)
    colours = np.argsort(np.argsort(mean))[first]
    axes.scatter(places[:, 0], places[:, 1], c=colours, s=3, cmap="hsv", linewidths=0)
    axes.set(title="Items (two principal components) by first digit", xticks=[], yticks=[])


def _two_dimensions(vectors: Floats) -> npt.NDArray[np.float64]:
    """(n, 2) the first two principal components."""
    rows = vectors.astype(np.float64)
    rows -= rows.mean(axis=0)
    _, directions = np.linalg.eigh(rows.T @ rows)
    places: npt.NDArray[np.float64] = rows @ directions[:, -2:]
    return places
