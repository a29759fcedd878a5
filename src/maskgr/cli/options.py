"""Options that several commands share; their choices are the `Literal` types of the settings."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
import typer.core

from maskgr.data.config import DataConfig, Repeats, Unknown, UnknownItems, UnusedItems
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
    Repeats,
    typer.Option(
        "--repeats",
        help="Further events of a user with the same item; dedupe drops those of the same time.",
    ),
]
ColumnsOption = Annotated[
    str | None,
    typer.Option(
        "--columns",
        metavar="OURS=YOURS,…",
        help="Names of your columns by ours, e.g. user_id=customer,item_id=sku.",
    ),
]
EventsOption = Annotated[
    str | None,
    typer.Option(
        "--events",
        metavar="TYPE=WEIGHT,…",
        help="Event types to keep and their weights, e.g. purchase=1,view=0.2; by default all.",
    ),
]
TargetsOption = Annotated[
    str | None,
    typer.Option(
        "--targets",
        metavar="TYPE,…",
        help="Event types to predict; the others stay in the histories. By default all.",
    ),
]
TextOption = Annotated[
    str | None,
    typer.Option(
        "--text",
        metavar="COLUMN,…",
        help="Item columns that are text; by default those of strings and lists of strings.",
    ),
]

HistoryOption = Annotated[
    str, typer.Option("--history", help="The user's item IDs, oldest first, separated by commas.")
]
UserOption = Annotated[
    str | None, typer.Option("--user", help="The ID of a user of the training data.")
]
AllowOption = Annotated[str, typer.Option("--allow", help="Only these item IDs.")]
DenyOption = Annotated[str, typer.Option("--deny", help="None of these item IDs.")]
WhereOption = Annotated[
    str | None,
    typer.Option("--where", help="Only items that fulfil this, e.g. 'in_stock and price < 30'."),
]
SeenOption = Annotated[
    bool | None,
    typer.Option(
        "--exclude-seen/--include-seen",
        help="Leave out the items of the history; by default where users never repeat an item.",
    ),
]
UnknownOption = Annotated[
    Unknown, typer.Option("--unknown", help="Item IDs that are not in the catalogue.")
]

SessionOption = Annotated[
    int | None,
    typer.Option("--session", min=1, help="Generate this many next items together, as sessions."),
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
RemaskOption = Annotated[
    int | None,
    typer.Option("--remask", min=0, help="Digits of each result that are revealed once more."),
]
GuidanceOption = Annotated[
    float | None,
    typer.Option("--guidance", min=0, help="Weight of classifier-free guidance; 0 is none."),
]

Engine = Literal["plain", "ray"]
EngineOption = Annotated[
    Engine, typer.Option("--engine", help="This process, or actors on Ray (maskgr[ray]).")
]
ActorsOption = Annotated[
    int | None,
    typer.Option("--actors", min=1, help="Actors on Ray; by default one for each CPU."),
]
AddressOption = Annotated[
    str | None,
    typer.Option(
        "--address", help="A Ray cluster, e.g. HOST:6379; by default one here, for this job."
    ),
]


class DefaultCommand(typer.core.TyperGroup):
    """A group in which one command's name may be left out."""

    default: str

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] != "--help":
            args = [self.default, *args]
        return super().parse_args(ctx, args)


def ray_options(engine: Engine, actors: int | None, address: str | None) -> dict[str, Any]:
    """The options of Ray, which have no effect without it."""
    options = {"actors": actors, "address": address}
    given = [name for name, value in options.items() if value is not None]
    if engine == "plain" and given:
        raise RequestError(f"--{given[0]} goes with --engine ray")
    return options


def split_ids(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def data_config(
    k_core: int,
    unknown_items: UnknownItems,
    unused_items: UnusedItems,
    repeats: Repeats,
    columns: str | None,
    events: str | None,
    targets: str | None,
    text: str | None,
) -> DataConfig:
    """The data options of a command as settings."""
    return DataConfig(
        k_core,
        unknown_items,
        unused_items,
        repeats,
        None if columns is None else _pairs("--columns", columns),
        None
        if events is None
        else {k: _weight(k, v) for k, v in _pairs("--events", events).items()},
        None if targets is None else tuple(split_ids(targets)),
        None if text is None else tuple(split_ids(text)),
    )


def _pairs(option: str, text: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for part in split_ids(text):
        key, equals, value = (word.strip() for word in part.partition("="))
        if not key or (equals and not value) or (option == "--columns" and not equals):
            example = "user_id=customer" if option == "--columns" else "purchase=1"
            raise RequestError(f"{option} {text}: {part!r} is no pair; write for example {example}")
        if key in found:
            raise RequestError(f"{option} {text}: {key} is there twice; give it once")
        found[key] = value
    return found


def _weight(kind: str, text: str) -> float:
    try:
        return float(text or 1)  # a type without a weight counts as one
    except ValueError:
        raise RequestError(f"--events {kind}={text}: {text!r} is not a number") from None


def listed(allow: str, deny: str) -> dict[str, Any]:
    """The allow and deny lists as the verbs of a recommender take them."""
    return {"allow": split_ids(allow) if allow else None, "deny": split_ids(deny)}


def choose_decoding(
    recommender: Recommender, *, session: int | None = None, **options: Any
) -> DecodingConfig | None:
    """The model's own decoding with the options that were given; None where none was.

    session: the number of items in a session, where sessions are asked for.

    Options without effect are refused: a user would take the result for that of another search.
    """
    from maskgr.models.base import PlansSessions, require

    if session is not None:
        require(recommender.model, PlansSessions)
        if options.get("retrieval") not in (None, "auto", "generative"):
            raise RequestError(
                f"sessions are generated, so --retrieval {options['retrieval']} has no effect on "
                "them; leave it out"
            )
        options["retrieval"] = "generative"
    changes = {name: value for name, value in options.items() if value is not None}
    if not changes:
        return None
    decoding = recommender.decoding(**changes)
    resolved = _resolved(recommender, decoding, session)
    idle = next((name for name in without_effect(resolved, session) if name in changes), None)
    if idle is not None:
        option = "unconstrained" if idle == "constrained" else idle
        how = "dense retrieval" if resolved.retrieval == "dense" else "one step"
        raise RequestError(f"--{option} has no effect on {how}; leave it out")
    return decoding


def decoding_used(
    recommender: Recommender, chosen: DecodingConfig | None = None, session: int | None = None
) -> dict[str, Any]:
    """The settings that decide a result, resolved.

    Every result names retrieval, order and steps: None where there are none. A model that does not
    decode ranks the catalogue directly: its retrieval is `ranking`. Other settings are named where
    they have an effect.
    """
    from maskgr.models.base import Decodes

    named: dict[str, Any] = {"retrieval": "ranking", "order": None, "steps": None}
    if not isinstance(recommender.model, Decodes):
        return named
    used = _resolved(recommender, chosen or recommender.decoding(), session)
    idle = without_effect(used, session)
    off = [name for name in ("remask", "guidance") if not getattr(used, name)]
    effective = {k: value for k, value in asdict(used).items() if k not in (*idle, *off)}
    return {**({} if session is None else {"session": session}), **named, **effective}


def _resolved(
    recommender: Recommender, decoding: DecodingConfig, session: int | None
) -> DecodingConfig:
    """The same with `auto` and 0 replaced by what they mean for the model."""
    from maskgr.models.base import Decodes, require

    model = require(recommender.model, Decodes)
    resolved = model.resolved(decoding)
    if session is None:
        return resolved
    return replace(resolved, steps=decoding.steps or session * model.levels)


def without_effect(resolved: DecodingConfig, session: int | None = None) -> tuple[str, ...]:
    """Names of the settings that change nothing about a search."""
    if resolved.retrieval == "dense":
        return ("order", "steps", "beams", "cache", "constrained", "remask")
    if resolved.steps > 1:
        return ()
    if resolved.remask:
        return ("order",)
    exact = resolved.constrained and resolved.retrieval == "generative" and session is None
    return ("order", "beams") if exact else ("order",)
