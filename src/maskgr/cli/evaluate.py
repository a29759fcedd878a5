"""`maskgr evaluate`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from maskgr.cli.console import print_json, show_evaluations
from maskgr.cli.options import (
    BeamsOption,
    CacheOption,
    JsonOption,
    OrderOption,
    RetrievalOption,
    RunArgument,
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
    k: Annotated[str, typer.Option(help="Cut-offs of the metrics.")] = "5,10",
    users: UsersOption = None,
    retrieval: RetrievalOption = None,
    order: OrderOption = None,
    steps: StepsOption = None,
    beams: BeamsOption = None,
    cache: CacheOption = None,
    unconstrained: Annotated[
        bool, typer.Option("--unconstrained", help="Search digits that no item has, too.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Measure recall and NDCG over the whole catalogue.

    Two protocols: `all` ranks every item, `unseen` leaves out the items of the user's history.
    """
    from maskgr.data.open import shop_of
    from maskgr.data.splits import leave_out
    from maskgr.evaluation.protocol import evaluate as measure
    from maskgr.recommender import Recommender

    cutoffs = _cutoffs(k)
    recommender = Recommender.load(run)
    decoding = choose_decoding(
        recommender,
        retrieval=retrieval,
        order=order,
        steps=steps,
        beams=beams,
        cache=cache,
        constrained=False if unconstrained else None,
    )
    dataset = _data_of(recommender, run, data)
    holdout = leave_out(dataset.histories, recommender.config.leave_out).holdout(split)
    if users is not None:
        holdout = holdout.sample(users)
    result = measure(
        recommender.ranker(decoding),
        holdout,
        len(recommender.items),
        ks=cutoffs,
        shop=shop_of(dataset),
    )
    name, used = recommender.config.name, decoding_used(recommender, decoding)
    if as_json:
        print_json({"model": name, "split": split, **used, **result.to_dict(protocol)})
    else:
        show_evaluations(split, {name: result}, used)


def _data_of(recommender: Recommender, run: Path, given: str | None) -> Dataset:
    """The dataset of a run and no other: other histories would leak or mislead."""
    from maskgr.data.open import open_dataset

    made = recommender.made
    where = given or made.get("data")
    if where is None:
        raise RequestError(f"{run} does not say which data it was trained on; give --data")
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
