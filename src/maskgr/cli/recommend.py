"""`maskgr recommend` and `maskgr explain`: a trained run at work."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from maskgr.cli.console import (
    described,
    described_sessions,
    interruptible,
    print_json,
    show_explanation,
    show_recommendations,
    show_sessions,
)
from maskgr.cli.options import (
    ActorsOption,
    AddressOption,
    AllowOption,
    BeamsOption,
    CacheOption,
    DenyOption,
    EngineOption,
    GuidanceOption,
    HistoryOption,
    JsonOption,
    OrderOption,
    RemaskOption,
    RetrievalOption,
    RunArgument,
    SeenOption,
    SessionOption,
    StepsOption,
    UnknownOption,
    UserOption,
    WhereOption,
    choose_decoding,
    listed,
    ray_options,
    split_ids,
)
from maskgr.errors import RequestError

if TYPE_CHECKING:
    from maskgr.recommender import Recommender


def recommend(
    run: RunArgument,
    history: HistoryOption = "",
    user: UserOption = None,
    top: Annotated[int, typer.Option(help="How many items, or sessions.")] = 10,
    session: SessionOption = None,
    source: Annotated[
        Path | None,
        typer.Option(
            "--input",
            help='JSONL, a line per user: {"user_id": …, "history": […]}; Parquet with these '
            "columns; or a folder of such files.",
        ),
    ] = None,
    all_users: Annotated[
        bool, typer.Option("--all-users", help="For every user of the training data.")
    ] = False,
    target: Annotated[
        Path | None,
        typer.Option(
            "--output",
            help="Parquet or JSONL to write, or a folder, with a Parquet file for each of the "
            "input; resumed if interrupted.",
        ),
    ] = None,
    engine: EngineOption = "plain",
    actors: ActorsOption = None,
    address: AddressOption = None,
    allow: AllowOption = "",
    deny: DenyOption = "",
    where: WhereOption = None,
    exclude_seen: SeenOption = None,
    unknown: UnknownOption = "raise",
    retrieval: RetrievalOption = None,
    order: OrderOption = None,
    steps: StepsOption = None,
    beams: BeamsOption = None,
    cache: CacheOption = None,
    remask: RemaskOption = None,
    guidance: GuidanceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Recommend next items, or sessions of them: for a history, a user, a file of histories, or all
    users."""
    from maskgr.recommender import Recommender

    _require_one_question(history, user, source, all_users, target, as_json)
    on_ray = ray_options(engine, actors, address)
    if engine == "ray" and (source is None or not source.is_dir()):
        raise RequestError("--engine ray needs a folder of files as --input")
    recommender = Recommender.load(run)
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
    )
    how: dict[str, Any] = {
        "exclude_seen": exclude_seen,
        **listed(allow, deny),
        "where": where,
        "unknown": unknown,
        "decoding": decoding,
    }
    how |= {"top": top, "session": session}
    if target is not None:
        if source is not None and source.is_dir():
            _to_folder(recommender, source, target, how, run if engine == "ray" else None, on_ray)
        else:
            _to_file(recommender, source, target, how)
        return
    del how["session"]
    asked = [recommender.history_of(user) if user is not None else split_ids(history)]
    if session is None:
        rows = described(recommender, recommender.recommend(asked, **how)[0])
        show = show_recommendations
    else:
        found = recommender.sessions(asked, session, **how)[0]
        rows, show = described_sessions(recommender, found), show_sessions
    if as_json:
        print_json(rows)
    else:
        show(rows)


def _require_one_question(
    history: str,
    user: str | None,
    source: Path | None,
    all_users: bool,
    target: Path | None,
    as_json: bool,
) -> None:
    asked = {
        "--history": bool(history),
        "--user": user is not None,
        "--input": source is not None,
        "--all-users": all_users,
    }
    given = [option for option, is_given in asked.items() if is_given]
    if len(given) > 1:
        raise RequestError(f"{given[0]} and {given[1]} ask for different users; give one of them")
    to_file = source is not None or all_users
    if to_file != (target is not None) or (to_file and as_json):
        raise RequestError("--input or --all-users goes with --output, and without --json")


def _to_file(
    recommender: Recommender, source: Path | None, target: Path, how: dict[str, Any]
) -> None:
    from maskgr.serving.batch import recommend_all, recommend_file

    with interruptible("the same command goes on"):
        if source is None:
            done = recommend_all(recommender, target, **how)
        else:
            done = recommend_file(recommender, source, target, **how)
    print(f"{done:,} users; saved to {target}")


def _to_folder(
    recommender: Recommender,
    source: Path,
    target: Path,
    how: dict[str, Any],
    run: Path | None,
    on_ray: dict[str, Any],
) -> None:
    """`run`: where actors on Ray load the recommender from; None: no Ray."""
    from maskgr.serving.batch import model_key
    from maskgr.serving.shards import recommend_folder

    engine = None
    if run is not None:
        from maskgr.serving.on_ray import recommend_shards

        model = model_key(recommender)
        engine = partial(recommend_shards, run=run.absolute(), model=model, **on_ray)
    with interruptible("the same command goes on"):
        done = recommend_folder(
            recommender, source.absolute(), target.absolute(), engine=engine, **how
        )
    before = f" ({done.before:,} were there)" if done.before else ""
    print(f"{done.users:,} users in {done.files:,} files{before}; saved to {target}")


def explain(
    run: RunArgument,
    history: HistoryOption = "",
    user: UserOption = None,
    top: Annotated[int, typer.Option(help="How many items.")] = 5,
    allow: AllowOption = "",
    deny: DenyOption = "",
    where: WhereOption = None,
    exclude_seen: SeenOption = None,
    unknown: UnknownOption = "raise",
    retrieval: RetrievalOption = None,
    order: OrderOption = None,
    steps: StepsOption = None,
    beams: BeamsOption = None,
    cache: CacheOption = None,
    remask: RemaskOption = None,
    guidance: GuidanceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show how the recommendations of `maskgr recommend` are generated, step by step."""
    from maskgr.explain import explain as trace
    from maskgr.recommender import Recommender

    _require_one_question(history, user, None, False, None, as_json)
    recommender = Recommender.load(run)
    decoding = choose_decoding(
        recommender,
        retrieval=retrieval,
        order=order,
        steps=steps,
        beams=beams,
        cache=cache,
        remask=remask,
        guidance=guidance,
    )
    found = trace(
        recommender,
        recommender.history_of(user) if user is not None else split_ids(history),
        top,
        exclude_seen=exclude_seen,
        **listed(allow, deny),
        where=where,
        unknown=unknown,
        decoding=decoding,
    )
    if as_json:
        print_json(found.to_dict())
    else:
        show_explanation(recommender, found)
