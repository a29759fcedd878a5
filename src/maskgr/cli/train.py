"""`maskgr train`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from maskgr.cli.console import interruptible, show_notes
from maskgr.cli.options import (
    ColumnsOption,
    DataArgument,
    DeviceOption,
    EventsOption,
    KCoreOption,
    MinutesOption,
    ModelOption,
    RepeatsOption,
    SettingsOption,
    TargetsOption,
    TextOption,
    UnknownItemsOption,
    UnusedItemsOption,
    data_config,
)
from maskgr.data.config import DataConfig
from maskgr.errors import RequestError

if TYPE_CHECKING:
    from maskgr.models.base import TrainConfig


def train(
    data: DataArgument,
    out: Annotated[Path, typer.Option(help="The run folder to write.")],
    model: ModelOption = None,
    preset: Annotated[str, typer.Option(help="Settings to start from; see maskgr models.")] = "cpu",
    settings: SettingsOption = None,
    minutes: MinutesOption = None,
    sids: Annotated[
        Path | None, typer.Option(help="Semantic IDs that maskgr sids made; else they are made.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with an interrupted run.")
    ] = False,
    seed: Annotated[int | None, typer.Option(help="Fixes every random choice.")] = None,
    device: DeviceOption = None,
    processes: Annotated[
        int | None,
        typer.Option(
            help="Processes that train together; by default one per core in long CPU trainings."
        ),
    ] = None,
    k_core: KCoreOption = DataConfig.k_core,
    unknown_items: UnknownItemsOption = DataConfig.unknown_items,
    unused_items: UnusedItemsOption = DataConfig.unused_items,
    repeats: RepeatsOption = DataConfig.repeats,
    columns: ColumnsOption = None,
    events: EventsOption = None,
    targets: TargetsOption = None,
    text: TextOption = None,
) -> None:
    """Train a model on a dataset and save it as a run folder.

    Under `torchrun --nproc-per-node N -m maskgr train …` it trains on N devices.
    """
    from maskgr.data.open import open_dataset
    from maskgr.models.base import train_config
    from maskgr.run import require_fresh, start_run
    from maskgr.training.distributed import companions

    config = train_config(
        preset, settings or (), model=model, minutes=minutes, seed=seed, device=device
    )
    count = _processes(processes, config)
    if not resume:
        require_fresh(out)  # before the data are read and other processes are started
    reading = data_config(
        k_core, unknown_items, unused_items, repeats, columns, events, targets, text
    )
    dataset = open_dataset(data, reading)
    show_notes(dataset)
    command = [sys.executable, "-m", "maskgr", *sys.argv[1:]]
    with interruptible("go on with --resume"), companions(count, command):
        recommender = start_run(
            out,
            dataset,
            config,
            data=str(Path(data).absolute()) if Path(data).exists() else data,
            data_config=reading,
            sids=sids,
            resume=resume,
            progress=sys.stderr.isatty(),
        )
    if recommender is not None:
        print(
            f"trained {config.name} on {len(dataset.users):,} users and {len(dataset.items):,} "
            f"items in {recommender.made['seconds']:.1f} s; saved to {out}"
        )


def _processes(asked: int | None, config: TrainConfig) -> int:
    from maskgr.models.base import model_class
    from maskgr.training.distributed import check_processes, processes_for

    several = model_class(config.name).supports_ddp
    if asked is None:
        asked = processes_for(config.fit.minutes if several else 0.0, config.device)
    elif asked > 1 and not several:
        raise RequestError(f"{config.name} is trained by one process; leave --processes out")
    check_processes(asked, config.device)
    return asked
