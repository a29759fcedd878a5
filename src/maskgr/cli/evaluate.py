"""`maskgr evaluate`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from maskgr.cli.console import print_json, show_evaluations
from maskgr.cli.options import (
    BeamsOption,
    CacheOption,
    GuidanceOption,
    JsonOption,
    OrderOption,
    RemaskOption,
    RetrievalOption,
    RunArgument,
    SessionOption,
    StepsOption,
    UsersOption,
    choose_decoding,
    decoding_used,
)
from maskgr.data.config import DataConfig, SplitName
from maskgr.errors import ArtefactError, RequestError
from maskgr.evaluation.config import Protocol

if TYPE_CHECKING:
    from maskgr.data.dataset import Dataset
    from maskgr.recommender import Recommender


def evaluate(
    run: RunArgument,
    data: Annotated[
        str | None, typer.Option(help="The dataset; by default the one it was trained on.")
    ] = None,
    split: Annotated[SplitName, typer.Option(help="The items to predict.")] = "test",
    protocol: Annotated[
        Protocol, typer.Option(help="The one whose figures are at the top level of the JSON.")
    ] = "all",
    k: Annotated[
        str | None, typer.Option(help="Cut-offs of the metrics: 5,10 by default, for sessions 10.")
    ] = None,
    users: UsersOption = None,
    session: SessionOption = None,
    retrieval: RetrievalOption = None,
    order: OrderOption = None,
    steps: StepsOption = None,
    beams: BeamsOption = None,
    cache: CacheOption = None,
    remask: RemaskOption = None,
    guidance: GuidanceOption = None,
    unconstrained: Annotated[
        bool, typer.Option("--unconstrained", help="Search digits that no item has, too.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Measure recall and NDCG over the whole catalogue, beside popularity and neighbours.

    Two protocols: `all` ranks every item, `unseen` leaves out the items of the user's history.
    With --session, the average session recall instead: the share of the next items that one of the
    sessions generated has at the same place.
    """
    from maskgr.evaluation.protocol import SESSION_BEAMS, evaluate_sessions
    from maskgr.recommender import Recommender

    cutoffs = _cutoffs(k or ("5,10" if session is None else "10"))
    recommender = Recommender.load(run)
    if session is not None and beams is None:
        beams = SESSION_BEAMS
    decoding = choose_decoding(
        recommender,
        session=session,
        retrieval=retrieval,
        order=order,
        steps=steps,
        beams=beams,
        cache=cache,
        remask=remask,
        guidance=guidance,
        constrained=False if unconstrained else None,
    )
    held_out = recommender.config.leave_out
    dataset = _data_of(recommender, run, data)
    known = None if session is None else recommender.split(dataset)
    if session is not None and session > held_out:
        raise RequestError(
            f"--session {session} needs {session} held-out items a user, and {run} was trained "
            f"with leave_out={held_out}; train with {_session_settings(recommender, session)}, or "
            "ask for fewer"
        )
    if session is None or known is None:
        result = recommender.evaluate(
            dataset, split=split, ks=cutoffs, users=users, decoding=decoding
        )
    else:
        assert beams is not None
        holdout = known.holdout(split)
        holdout = holdout if users is None else holdout.sample(users)
        planner = recommender.planner(decoding)
        result = evaluate_sessions(planner, holdout, session, ks=cutoffs, beams=beams)
    name, used = recommender.config.name, decoding_used(recommender, decoding, session)
    if as_json:
        print_json({"model": name, "split": split, **used, **result.to_dict(protocol)})
    else:
        show_evaluations(split, {name: result}, {name: used})


def _session_settings(recommender: Recommender, session: int) -> str:
    """The settings of a training after which such sessions can be evaluated."""
    keys = ["leave_out"]
    if hasattr(recommender.config.model, "session"):  # trained for sessions of so many items
        keys.append("session")
    return " ".join(f"--set {key}={session}" for key in keys)


def _data_of(recommender: Recommender, run: Path, given: str | None) -> Dataset:
    """The dataset of a run and no other: other histories would leak or mislead."""
    from maskgr.data.open import open_dataset

    made = recommender.made
    where = given or made.get("data")
    if where is None:
        return recommender.dataset()
    dataset = open_dataset(where, DataConfig(**made.get("data_config", {})))
    if dataset.fingerprint != made.get("fingerprint"):
        raise ArtefactError(
            f"{where} is not what {run} was trained on (it differs in users, items or events); "
            "give the same data with --data, or train again"
        )
    return dataset


def _cutoffs(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise RequestError(f"--k {text} is not a list of numbers; write for example 5,10") from None
