"""`maskgr compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from maskgr.cli.console import interruptible, print_json, print_table
from maskgr.cli.options import (
    ColumnsOption,
    DataArgument,
    DeviceOption,
    EventsOption,
    JsonOption,
    KCoreOption,
    RepeatsOption,
    SettingsOption,
    TargetsOption,
    TextOption,
    UnknownItemsOption,
    UnusedItemsOption,
    UsersOption,
    data_config,
    split_ids,
)
from maskgr.data.config import DataConfig, SplitName


def compare(
    data: DataArgument,
    models: Annotated[
        str,
        typer.Option(
            metavar="NAMES",
            help="What to compare, separated by commas: model, model:preset, or a run folder.",
        ),
    ],
    out: Annotated[Path, typer.Option(help="The folder of the trainings and the results.")],
    minutes: Annotated[
        float | None, typer.Option(help="Time for training each model; else the preset's.")
    ] = None,
    preset: Annotated[
        str | None, typer.Option(help="Settings to start from, where a model names none.")
    ] = None,
    settings: SettingsOption = None,
    seed: Annotated[int, typer.Option(min=0, help="The first seed.")] = 0,
    seeds: Annotated[int, typer.Option(min=1, help="Trainings of each model.")] = 1,
    users: UsersOption = None,
    split: Annotated[SplitName, typer.Option(help="The items to predict.")] = "test",
    device: DeviceOption = None,
    k_core: KCoreOption = DataConfig.k_core,
    unknown_items: UnknownItemsOption = DataConfig.unknown_items,
    unused_items: UnusedItemsOption = DataConfig.unused_items,
    repeats: RepeatsOption = DataConfig.repeats,
    columns: ColumnsOption = None,
    events: EventsOption = None,
    targets: TargetsOption = None,
    text: TextOption = None,
    as_json: JsonOption = False,
) -> None:
    """Train models on the same data and put them side by side.

    Popularity is always among them. The same command goes on after an interruption, and trains
    nothing that it has trained before.
    """
    from maskgr.studies.compare import compare as run
    from maskgr.studies.compare import entries
    from maskgr.studies.measures import Measure

    asked = entries(
        split_ids(models),
        preset=preset,
        settings=settings or (),
        minutes=minutes,
        seeds=range(seed, seed + seeds),
        device=device,
    )
    reading = data_config(
        k_core, unknown_items, unused_items, repeats, columns, events, targets, text
    )
    with interruptible("the same command goes on"):
        found = run(data, out, asked, Measure(split=split, users=users), reading)
    if as_json:
        print_json(found.to_dict())
    else:
        for report in found.reports():
            print_table(report.columns, report.rows, title=report.title)
            for note in report.notes:
                print(note)
            print()
        print(f"saved to {out}: comparison.md, .csv, .json and .png, differences.csv")
    if found.failure is not None:
        raise found.failure
