"""`maskgr export`: a trained run for other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from maskgr.cli.options import RunArgument
from maskgr.errors import RequestError


def export(
    run: RunArgument,
    out: Annotated[Path, typer.Option(help="The folder to write.")],
    target: Annotated[
        Literal["onnx", "hub"],
        typer.Option("--format", help="For ONNX Runtime, or for the Hugging Face hub."),
    ],
    figures: Annotated[
        Path | None,
        typer.Option(help="For the model card of a hub folder: what evaluate --json printed."),
    ] = None,
) -> None:
    """Write a trained model for programs without torch, or as a folder for the Hugging Face hub."""
    from maskgr.recommender import Recommender
    from maskgr.serving.export import export_hub, export_onnx
    from maskgr.serving.model_card import Figures

    if figures is not None and target != "hub":
        raise RequestError("--figures go into the model card of --format hub; leave them out")
    recommender = Recommender.load(run)
    if target == "onnx":
        export_onnx(recommender, out)
    else:
        name = recommender.config.name
        export_hub(recommender, out, None if figures is None else Figures.read(figures, name))
    print(f"exported {recommender.config.name} with {len(recommender.items):,} items to {out}")
