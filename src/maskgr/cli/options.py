"""Options that several commands share; their choices are the `Literal` types of the settings."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import typer.core

from maskgr.data.config import Repeats, Unknown, UnknownItems, UnusedItems
from maskgr.decoding.config import Cache, DecodingConfig, Order, Retrieval
from maskgr.errors import RequestError

if TYPE_CHECKING:
    from maskgr.recommender import Recommender

DataArgument = Annotated[
    str, typer.Argument(metavar="DATA", help="A dataset folder, or a source: synthetic, beauty, …")
]
RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="A folder that train wrote.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
SettingsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Change a setting; a wrong key lists all of them."
    ),
]
DeviceOption = Annotated[
    str | None, typer.Option("--device", help="auto, cpu, cuda, cuda:NUMBER or mps.")
]
ModelOption = Annotated[
    str | None, typer.Option("--model", help="The model to train; see maskgr models.")
]
MinutesOption = Annotated[
    float | None, typer.Option("--minutes", help="Time for training; the schedule is fitted to it.")
]
UsersOption = Annotated[
    int | None, typer.Option("--users", min=1, help="A random sample of users instead of all.")
]

KCoreOption = Annotated[
    int,
    typer.Option("--k-core", min=0, help="Keep users and items with at least this many events."),
]
UnknownItemsOption = Annotated[
    UnknownItems,
    typer.Option("--unknown-items", help="Items in the log but not in the catalogue."),
]
UnusedItemsOption = Annotated[
    UnusedItems, typer.Option("--unused-items", help="Items in the catalogue but not in the log.")
]
RepeatsOption = Annotated[
    Repeats, typer.Option("--repeats", help="Further events of a user with the same item.")
]

HistoryOption = Annotated[
    str, typer.Option("--history", help="The user's item IDs, oldest first, separated by commas.")
]
UnknownOption = Annotated[
    Unknown, typer.Option("--unknown", help="Item IDs that are not in the catalogue.")
]

RetrievalOption = Annotated[
    Retrieval | None, typer.Option("--retrieval", help="How items are found.")
]
OrderOption = Annotated[
    Order | None, typer.Option("--order", help="The order in which digits are revealed.")
]
StepsOption = Annotated[
    int | None,
    typer.Option("--steps", min=1, help="Network evaluations; 1 scores every item at once."),
]
BeamsOption = Annotated[
    int | None,
    typer.Option("--beams", min=1, help="Partly revealed items that are kept after each step."),
]
CacheOption = Annotated[
    Cache | None,
    typer.Option("--cache", help="Encode a history once (frozen) or for every beam (off)."),
]


class DefaultCommand(typer.core.TyperGroup):
    """A group in which one command's name may be left out."""

    default: str

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] != "--help":
            args = [self.default, *args]
        return super().parse_args(ctx, args)


def split_ids(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def choose_decoding(recommender: Recommender, **options: Any) -> DecodingConfig | None:
    """The model's own decoding with the options that were given; None where none was.

    Options without effect are refused: a user would take the result for that of another search.
    """
    from maskgr.models.base import Decodes, require

    changes = {name: value for name, value in options.items() if value is not None}
    if not changes:
        return None
    decoding = recommender.decoding(**changes)
    resolved = require(recommender.model, Decodes).resolved(decoding)
    idle = next((name for name in without_effect(resolved) if name in changes), None)
    if idle is not None:
        option = "unconstrained" if idle == "constrained" else idle
        how = "dense retrieval" if resolved.retrieval == "dense" else "one step"
        raise RequestError(f"--{option} has no effect on {how}; leave it out")
    return decoding


def decoding_used(recommender: Recommender, chosen: DecodingConfig | None) -> dict[str, Any]:
    """The settings that decide a result, resolved; empty for a model that does not decode."""
    from maskgr.models.base import Decodes

    model = recommender.model
    if not isinstance(model, Decodes):
        return {}
    used = model.resolved(chosen or model.decoding())
    idle = without_effect(used)
    return {name: value for name, value in asdict(used).items() if name not in idle}


def without_effect(resolved: DecodingConfig) -> tuple[str, ...]:
    """Names of the settings that change nothing about a search."""
    if resolved.retrieval == "dense":
        return ("order", "steps", "beams", "cache", "constrained")
    if resolved.steps > 1:
        return ()
    exact = resolved.constrained and resolved.retrieval == "generative"
    return ("order", "beams") if exact else ("order",)
