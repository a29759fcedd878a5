"""`maskgr recommend`, `maskgr explain` and `maskgr add-items`: a trained run at work."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

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
    AllowOption,
    BeamsOption,
    CacheOption,
    DenyOption,
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
    choose_decoding,
    listed,
    split_ids,
)
from maskgr.errors import DataError, RequestError


def recommend(
    run: RunArgument,
    history: HistoryOption = "",
    top: Annotated[int, typer.Option(help="How many items, or sessions.")] = 10,
    session: SessionOption = None,
    source: Annotated[
        Path | None,
        typer.Option("--input", help='JSONL, a line per user: {"user_id": …, "history": […]}.'),
    ] = None,
    target: Annotated[
        Path | None, typer.Option("--output", help="JSONL to write; resumed if interrupted.")
    ] = None,
    allow: AllowOption = "",
    deny: DenyOption = "",
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
    """Recommend next items, or sessions of them, for one history or a file of histories."""
    from maskgr.recommender import Recommender
    from maskgr.serving.batch import recommend_file

    if (source is None) != (target is None) or (source and (history or allow or deny or as_json)):
        raise RequestError(
            "--input and --output go together, and without --history, --allow, --deny and --json"
        )
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
    if source and target:
        with interruptible("the same command goes on"):
            done = recommend_file(
                recommender,
                source,
                target,
                top,
                session=session,
                exclude_seen=exclude_seen,
                unknown=unknown,
                decoding=decoding,
            )
        print(f"{done:,} users; saved to {target}")
        return
    how = {
        "exclude_seen": exclude_seen,
        **listed(allow, deny),
        "unknown": unknown,
        "decoding": decoding,
    }
    if session is None:
        rows = described(recommender, recommender.recommend([split_ids(history)], top, **how)[0])
        show = show_recommendations
    else:
        found = recommender.sessions([split_ids(history)], session, top, **how)[0]
        rows, show = described_sessions(recommender, found), show_sessions
    if as_json:
        print_json(rows)
    else:
        show(rows)


def explain(
    run: RunArgument,
    history: HistoryOption = "",
    top: Annotated[int, typer.Option(help="How many items.")] = 5,
    allow: AllowOption = "",
    deny: DenyOption = "",
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
        split_ids(history),
        top,
        exclude_seen=exclude_seen,
        **listed(allow, deny),
        unknown=unknown,
        decoding=decoding,
    )
    if as_json:
        print_json(found.to_dict())
    else:
        show_explanation(recommender, found)


def add_items(
    run: RunArgument,
    items: Annotated[Path, typer.Argument(metavar="ITEMS", help="Parquet, CSV or JSONL.")],
    embeddings: Annotated[
        Path | None,
        typer.Option(
            help="Vectors of the new items (.npy, or Parquet with item_id), where the dataset "
            "came with its own."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Another folder to save to; by default the run's own.")
    ] = None,
) -> None:
    """Make new items recommendable without training, by their text."""
    from maskgr.artefact import is_artefact
    from maskgr.data.embeddings import align_embeddings
    from maskgr.data.problems import Problems
    from maskgr.data.tables import read_matrix, read_table
    from maskgr.recommender import RECOMMENDER, Recommender

    recommender, new, vectors = Recommender.load(run), read_table(items), None
    if embeddings is not None:
        if "item_id" not in new.columns:
            raise DataError(f"{items} has no column item_id (it has: {', '.join(new.columns)})")
        vectors = align_embeddings(read_matrix(embeddings), new["item_id"], Problems())
    more = recommender.add_items(new, embeddings=vectors)
    inside = run / RECOMMENDER
    more.save(out or (inside if is_artefact(inside) else run))
    added = len(more.items) - len(recommender.items)
    print(f"{added:,} new items, {len(more.items):,} in all; saved to {out or run}")
