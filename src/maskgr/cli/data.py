"""`maskgr data`: fetch a built-in dataset, inspect any."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from maskgr.cli.console import show_inspection
from maskgr.cli.options import (
    ColumnsOption,
    DataArgument,
    EventsOption,
    JsonOption,
    KCoreOption,
    RepeatsOption,
    SettingsOption,
    TargetsOption,
    TextOption,
    UnknownItemsOption,
    UnusedItemsOption,
    data_config,
)
from maskgr.data.config import DataConfig, SyntheticConfig
from maskgr.errors import RequestError
from maskgr.settings import apply_settings

app = typer.Typer(help="Fetch a built-in dataset, inspect your own.", no_args_is_help=True)


@app.command()
def fetch(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The name of the source.")],
    out: Annotated[Path | None, typer.Option(help="Also save it as a dataset folder.")] = None,
    settings: SettingsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Get a built-in dataset.

    synthetic is generated, and has settings; beauty, sports, toys and ml-1m are downloaded.
    """
    from maskgr.data import open as sources
    from maskgr.data.inspect import inspect_dataset

    if settings and name != sources.SYNTHETIC:
        raise RequestError(f"{name} has no settings; only {sources.SYNTHETIC} takes --set")
    dataset = sources.fetch(name, synthetic=apply_settings(SyntheticConfig(), settings or ()))
    if out is not None:
        dataset.save(out)
    show_inspection(inspect_dataset(dataset).to_dict(), as_json)


@app.command()
def inspect(
    data: DataArgument,
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
    """Show counts, and every problem with what to do about it.

    The exit code is 0 if the data can be used as they are, and 1 if not.
    """
    from maskgr.data.open import inspect_data

    report = inspect_data(
        data,
        data_config(k_core, unknown_items, unused_items, repeats, columns, events, targets, text),
    )
    show_inspection(report.to_dict(), as_json)
    if not report.usable:
        raise typer.Exit(1)
