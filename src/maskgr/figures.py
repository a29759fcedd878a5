"""Matplotlib figures saved as PNG files; no display is needed."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from maskgr.artefact import write_file
from maskgr.errors import RequestError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of this size in inches."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RequestError(
            "a picture needs matplotlib; pip install 'maskgr[plots]', or leave the picture out"
        ) from error
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_png(figure: Figure, file: Path) -> None:
    """Writes the figure atomically."""
    content = BytesIO()
    figure.savefig(content, format="png", dpi=110)
    with write_file(file) as draft:
        draft.write_bytes(content.getvalue())
