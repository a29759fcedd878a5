"""`maskgr update`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from maskgr.cli.console import interruptible
from maskgr.cli.options import DeviceOption, RunArgument, SettingsOption
from maskgr.cli.train import count_processes, this_command


def update(
    run: RunArgument,
    events: Annotated[
        Path, typer.Option(help="The new events, as in a dataset: Parquet, CSV or JSONL.")
    ],
    out: Annotated[Path, typer.Option(help="The run folder to write.")],
    items: Annotated[
        Path | None, typer.Option(help="New items, with the columns of the catalogue.")
    ] = None,
    embeddings: Annotated[
        Path | None,
        typer.Option(help="Vectors of the new items, where the dataset came with its own."),
    ] = None,
    minutes: Annotated[float | None, typer.Option(help="Time for training; 5 by default.")] = None,
    settings: SettingsOption = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with an interrupted update.")
    ] = False,
    device: DeviceOption = None,
    processes: Annotated[
        int | None, typer.Option(help="Processes that train together; see maskgr train.")
    ] = None,
) -> None:
    """Go on from a trained run with new events, users and items.

    The old events are in the run, so the dataset is not needed again. New events come after them.
    Semantic IDs of old items stay what they are.
    """
    from maskgr.run import how_to_go_on

    with interruptible(lambda: how_to_go_on(out)):
        options = [*(settings or ()), *([] if device is None else [f"device={device}"])]
        _update(run, events, out, items, embeddings, minutes, options, resume, processes)


def _update(
    run: Path,
    events: Path,
    out: Path,
    items: Path | None,
    embeddings: Path | None,
    minutes: float | None,
    settings: list[str],
    resume: bool,
    processes: int | None,
) -> None:
    from maskgr.cli.items import new_vectors
    from maskgr.data.tables import read_table
    from maskgr.recommender import Recommender
    from maskgr.run import goes_on, require_fresh, start_update
    from maskgr.training.distributed import companions
    from maskgr.update import prepare, update_config

    resume = resume or goes_on(out)
    if not resume:
        require_fresh(out)
    before = Recommender.load(run)
    config = update_config(before, settings, minutes=minutes)
    count = count_processes(processes, config, len(before.items))
    new = None if items is None else read_table(items)
    prepared = prepare(
        before, read_table(events), new, embeddings=new_vectors(embeddings, new, items)
    )
    with companions(count, this_command()):
        after = start_update(
            out, prepared, config, of=run, resume=resume, progress=sys.stderr.isatty()
        )
    if after is not None:
        print(
            f"{len(prepared.changed):,} users with new events and "
            f"{len(after.items) - len(before.items):,} new items in {after.made['seconds']:.1f} s; "
            f"saved to {out}"
        )
