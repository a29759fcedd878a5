"""`maskgr train`."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

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
    preset: Annotated[
        str | None, typer.Option(help="Settings to start from (cpu); see maskgr models.")
    ] = None,
    settings: SettingsOption = None,
    minutes: MinutesOption = None,
    sids: Annotated[
        Path | None, typer.Option(help="Semantic IDs that maskgr sids made; else they are made.")
    ] = None,
    holdout: Annotated[
        Literal["last", "none"],
        typer.Option(help="Hold out the last items to validate and evaluate; or train on all."),
    ] = "last",
    like: Annotated[
        Path | None,
        typer.Option(
            help="With --holdout none: the evaluated run whose settings, numbers of steps and "
            "weights are used."
        ),
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

    A run that was evaluated can be trained once more on everything: --holdout none --like RUN.
    Under `torchrun --nproc-per-node N -m maskgr train …` it trains on N devices.
    """
    from maskgr.run import how_to_go_on

    with interruptible(lambda: how_to_go_on(out)):
        config = _config(holdout, like, preset, settings, model, minutes, seed, device)
        reading = data_config(
            k_core, unknown_items, unused_items, repeats, columns, events, targets, text
        )
        _train(data, out, config, reading, sids, like, resume, processes)


def _train(
    data: str,
    out: Path,
    config: TrainConfig,
    reading: DataConfig,
    sids: Path | None,
    like: Path | None,
    resume: bool,
    processes: int | None,
) -> None:
    from maskgr.data.open import open_dataset
    from maskgr.run import goes_on, require_fresh, start_run
    from maskgr.training.distributed import companions

    count_processes(processes, config, 0)  # raises before the data are read
    resume = resume or goes_on(out)
    if not resume:
        require_fresh(out)  # before the data are read and other processes are started
    dataset = open_dataset(data, reading)
    show_notes(dataset)
    with companions(count_processes(processes, config, len(dataset.items)), this_command()):
        recommender = start_run(
            out,
            dataset,
            config,
            data=str(Path(data).absolute()) if Path(data).exists() else data,
            data_config=reading,
            sids=sids,
            like=like,
            resume=resume,
            progress=sys.stderr.isatty(),
        )
    if recommender is not None:
        print(
            f"trained {config.name} on {len(dataset.users):,} users and {len(dataset.items):,} "
            f"items in {recommender.made['seconds']:.1f} s; saved to {out}"
        )
        if like is not None:
            print(f"nothing was held out, so it has no figures of its own; {like} has them")


def _config(
    holdout: str,
    like: Path | None,
    preset: str | None,
    settings: list[str] | None,
    model: str | None,
    minutes: float | None,
    seed: int | None,
    device: str | None,
) -> TrainConfig:
    from maskgr.models.base import train_config
    from maskgr.recommender import Recommender, everything

    if (holdout == "none") != (like is not None):
        raise RequestError(
            "--holdout none and --like RUN go together: validation in RUN has chosen how long to "
            "train"
        )
    if like is None:
        return train_config(
            preset or "cpu", settings or (), model=model, minutes=minutes, seed=seed, device=device
        )
    given = {"--preset": preset, "--set": settings, "--model": model, "--minutes": minutes}
    extra = [option for option, value in given.items() if value]
    if extra:
        raise RequestError(f"--like takes the settings of {like}; leave {extra[0]} out")
    config = everything(Recommender.load(like))
    return replace(
        config,
        seed=config.seed if seed is None else seed,
        device=config.device if device is None else device,
    )


def this_command() -> list[str]:
    """The command for another process of the same training."""
    return [sys.executable, "-m", "maskgr", *sys.argv[1:]]


def count_processes(asked: int | None, config: TrainConfig, items: int) -> int:
    """Those that were asked for, or what suits the machine and a catalogue of so many items."""
    from maskgr.models.base import model_class
    from maskgr.training.distributed import check_processes, processes_for

    several = model_class(config.name).supports_ddp
    if asked is None:
        asked = processes_for(config.fit.minutes if several else 0.0, config.device, items)
    elif asked > 1 and not several:
        raise RequestError(f"{config.name} is trained by one process; leave --processes out")
    check_processes(asked, config.device)
    return asked
