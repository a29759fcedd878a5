"""`maskgr sids`: make semantic IDs and look at them."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from maskgr.cli.console import print_json, show_notes, show_portrait, show_report
from maskgr.cli.options import (
    ActorsOption,
    AddressOption,
    ColumnsOption,
    DataArgument,
    DefaultCommand,
    DeviceOption,
    EngineOption,
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
    ray_options,
)
from maskgr.data.config import DataConfig
from maskgr.errors import RequestError
from maskgr.settings import apply_settings
from maskgr.sids.config import EncoderConfig, Policy, QuantizerConfig, QuantizerName, SidsConfig

if TYPE_CHECKING:
    from maskgr.data.dataset import Dataset


class _DefaultMake(DefaultCommand):
    default = "make"


app = typer.Typer(
    help="Semantic IDs: `maskgr sids DATA --out SIDS` makes them.",
    cls=_DefaultMake,
    no_args_is_help=True,
)


@app.command()
def make(
    data: DataArgument,
    out: Annotated[Path, typer.Option(help="The folder to write.")],
    encoder: Annotated[
        str,
        typer.Option(
            help="wordllama, sentence-transformers:MODEL, huggingface:MODEL, embeddings (of the "
            "dataset), or auto: embeddings where the dataset has some, else wordllama."
        ),
    ] = EncoderConfig.encoder,
    template: Annotated[
        str | None, typer.Option(help="How columns become text, e.g. '{title}; by {brand}'.")
    ] = EncoderConfig.template,
    quantizer: Annotated[
        QuantizerName, typer.Option(help="How vectors become digits.")
    ] = QuantizerConfig.quantizer,
    levels: Annotated[int, typer.Option(help="Digits of an ID.")] = QuantizerConfig.levels,
    codes: Annotated[int, typer.Option(help="Codes per level.")] = QuantizerConfig.codes,
    unique: Annotated[
        Policy, typer.Option(help="What happens to items with equal digits.")
    ] = SidsConfig.unique,
    settings: SettingsOption = None,
    seed: Annotated[int, typer.Option(help="The same seed gives the same IDs.")] = 0,
    device: DeviceOption = None,
    engine: EngineOption = "plain",
    actors: ActorsOption = None,
    address: AddressOption = None,
    picture: Annotated[Path | None, typer.Option(help="Also draw the report to this PNG.")] = None,
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
    """Make semantic IDs from text, with a report on their quality."""
    from maskgr.data.open import open_dataset
    from maskgr.sids.report import report
    from maskgr.sids.semantic_ids import SemanticIds

    if template is not None and text is not None:
        raise RequestError("--text and --template both say what text is; give one of them")
    config = SidsConfig(
        EncoderConfig(encoder, template), QuantizerConfig(quantizer, levels, codes), unique
    )
    config = apply_settings(config, settings or ())
    on_ray = ray_options(engine, actors, address)
    reading = data_config(
        k_core, unknown_items, unused_items, repeats, columns, events, targets, text
    )
    dataset = open_dataset(data, reading)
    show_notes(dataset)
    how: dict[str, Any] = {"device": device or "auto", "progress": sys.stderr.isatty()}
    if engine == "ray":
        how |= _on_ray(config, dataset, device, on_ray)
    made = SemanticIds.make(dataset, config, seed=seed, **how)
    found = report(made)
    made.save(out, report=found.to_dict())
    if picture is not None:
        from maskgr.sids.plot import draw

        draw(made, found, picture)
    if as_json:
        print_json(found.to_dict())
    else:
        show_report(found)
        print(f"saved to {out}")


def _on_ray(
    config: SidsConfig, dataset: Dataset, device: str | None, options: dict[str, Any]
) -> dict[str, Any]:
    """How texts are encoded by actors, which have CPUs."""
    from maskgr.serving.on_ray import encode_texts
    from maskgr.sids.encoders import resolved

    given = dataset.embeddings is not None
    if resolved(config.encoder, given=given).encoder == "embeddings":
        raise RequestError(
            "--engine ray encodes texts, and the dataset's own embeddings are used; leave it out"
        )
    if device not in (None, "cpu"):
        raise RequestError(f"--engine ray works on CPUs; leave --device {device} out")
    return {"device": "cpu", "encode_all": partial(encode_texts, **options)}


@app.command()
def show(
    sids: Annotated[Path, typer.Argument(metavar="SIDS", help="A folder that sids wrote.")],
    item: Annotated[str, typer.Argument(metavar="ITEM", help="The ID of an item.")],
    as_json: JsonOption = False,
) -> None:
    """Show an item's digits, its prefixes and its neighbours."""
    from maskgr.sids.report import portrait
    from maskgr.sids.semantic_ids import SemanticIds

    found = portrait(SemanticIds.load(sids), item)
    if as_json:
        print_json(found.to_dict())
    else:
        show_portrait(found)
