"""Options that several commands share; their choices are the `Literal` types of the settings."""

from __future__ import annotations

from dataclasses import asdict, replace
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


class DefaultCommand(typer.core.TyperGroup):
    """A group in which one command's name may be left out."""

    default: str

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] != "--help":
            args = [self.default, *args]
        return super().parse_args(ctx, args)


def split_ids(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


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
