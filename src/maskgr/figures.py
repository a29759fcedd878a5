"""Figures as PNG files, drawn without a screen."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from maskgr.artefact import write_file
from maskgr.errors import RequestError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def new_figure(width: float, height: float) -> Figure:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RequestError(
            "a picture needs matplotlib; pip install 'maskgr[plots]', or do without it"
        ) from error
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_png(figure: Figure, file: Path) -> None:
    """Whole or not at all, like every other file here."""
    content = BytesIO()
    figure.savefig(content, format="png", dpi=110)
    with write_file(file) as draft:
        draft.write_bytes(content.getvalue())
