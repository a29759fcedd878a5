"""`maskgr study`: a table of the paper, or one of our own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from maskgr.cli.console import interruptible, print_json, print_table
from maskgr.cli.options import (
    DefaultCommand,
    JsonOption,
    MinutesOption,
    ModelOption,
    UsersOption,
)
from maskgr.errors import RequestError


class _DefaultRun(DefaultCommand):
    default = "run"


app = typer.Typer(
    help="Tables of the paper: `maskgr study NAME --out FOLDER`.",
    cls=_DefaultRun,
    no_args_is_help=True,
)


@app.command("list")
def list_studies(as_json: JsonOption = False) -> None:
    """List the studies."""
    from maskgr.studies.registry import STUDIES

    if as_json:
        print_json(STUDIES)
    else:
        print_table(("study", "shows"), list(STUDIES.items()))


@app.command()
def run(
    name: Annotated[str, typer.Argument(metavar="NAME", help="See maskgr study list.")],
    out: Annotated[Path, typer.Option(help="The folder of its trainings, which are used again.")],
    data: Annotated[str, typer.Option(help="A dataset folder or a built-in source.")] = "beauty",
    model: ModelOption = None,
    preset: Annotated[
        str | None, typer.Option(help="Settings to start from; by default the study's own.")
    ] = None,
    minutes: MinutesOption = None,
    users: UsersOption = None,
    seed: Annotated[int, typer.Option(help="Fixes every random choice.")] = 0,
    only: Annotated[
        list[str] | None, typer.Option(help="A variant of the study recipe; repeatable.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Train what a study needs, and print its table."""
    from maskgr.studies.registry import run_study
    from maskgr.studies.report import Asked

    if only and name != "recipe":
        raise RequestError(f"--only chooses among the variants of recipe, and {name} has none")
    asked = Asked(
        data,
        out,
        model=model,
        preset=preset,
        minutes=minutes,
        users=users,
        seed=seed,
        only=tuple(only or ()),
    )
    with interruptible("the same command goes on"):
        found = run_study(name, asked)
    if as_json:
        print_json(found.to_dict())
        return
    print_table(found.columns, found.rows, title=found.title)
    for note in found.notes:
        print(note)
