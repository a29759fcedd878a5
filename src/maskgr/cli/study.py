"""`maskgr study`: a table or figure of the paper, or one of our own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from maskgr.cli.console import interruptible, print_json, print_table
from maskgr.cli.options import (
    DefaultCommand,
    JsonOption,
    UsersOption,
    split_ids,
)


class _DefaultRun(DefaultCommand):
    default = "run"


app = typer.Typer(
    help="The paper's tables and figures: `maskgr study NAME --out FOLDER`.",
    cls=_DefaultRun,
    no_args_is_help=True,
)


@app.command("list")
def list_studies(as_json: JsonOption = False) -> None:
    """List the studies."""
    from maskgr.studies.registry import STUDIES, study_of

    if not as_json:
        print_table(("study", "shows"), list(STUDIES.items()))
        return
    studies = {name: study_of(name) for name in STUDIES}
    print_json(
        [
            {
                "name": name,
                "about": STUDIES[name],
                "paper": study.where or None,
                "variants": [own.name for own in study.variants],
                "metrics": study.metrics,
            }
            for name, study in studies.items()
        ]
    )


@app.command()
def run(
    name: Annotated[str, typer.Argument(metavar="NAME", help="See maskgr study list.")],
    out: Annotated[
        Path,
        typer.Option(help="The folder of trainings and results; studies share what is in it."),
    ],
    data: Annotated[
        list[str] | None,
        typer.Option(
            help="A dataset folder or a built-in source; repeatable, or separated by commas.",
            show_default="beauty",
        ),
    ] = None,
    preset: Annotated[
        str,
        typer.Option(help="cpu, published (for a GPU) or tiny; recipe takes any of maskgr's."),
    ] = "cpu",
    minutes: Annotated[
        float | None, typer.Option(help="Time for training each model; else the preset's.")
    ] = None,
    users: UsersOption = None,
    seed: Annotated[int, typer.Option(min=0, help="The first seed.")] = 0,
    seeds: Annotated[int, typer.Option(min=1, help="Trainings of each model.")] = 1,
    only: Annotated[
        list[str] | None,
        typer.Option(help="Variants or models by name; repeatable, or separated by commas."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Train what a study needs, measure it, and put it beside the paper's figures.

    The same command goes on after an interruption. Studies with the same --out train nothing
    twice.
    """
    from maskgr.studies.registry import run_study
    from maskgr.studies.study import Asked

    asked = Asked(
        tuple(part for text in data or ["beauty"] for part in split_ids(text)),
        out,
        preset=preset,
        minutes=minutes,
        users=users,
        seed=seed,
        seeds=seeds,
        only=tuple(part for text in only or () for part in split_ids(text)),
    )
    with interruptible("the same command goes on"):
        found = run_study(name, asked)
    if as_json:
        print_json(found.to_dict())
        return
    for report in found.reports():
        print_table(report.columns, report.rows, title=report.title)
        for note in report.notes:
            print(note)
        print()
    print(f"saved to {found.folder}: report.html, figures, table.md, .csv and .json, …")
