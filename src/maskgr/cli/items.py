"""`maskgr similar`, `maskgr embeddings` and `maskgr add-items`: what a run knows of items."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from maskgr.cli.console import described, print_json, show_recommendations
from maskgr.cli.options import (
    AllowOption,
    DenyOption,
    JsonOption,
    RunArgument,
    WhereOption,
    listed,
)
from maskgr.errors import DataError, RequestError

if TYPE_CHECKING:
    import polars as pl


def similar(
    run: RunArgument,
    item: Annotated[str, typer.Argument(metavar="ITEM", help="The ID of an item.")],
    top: Annotated[int, typer.Option(help="How many items.")] = 10,
    by: Annotated[
        Literal["vectors", "sids"],
        typer.Option(help="The cosine of learned vectors, or the digits in common."),
    ] = "vectors",
    allow: AllowOption = "",
    deny: DenyOption = "",
    where: WhereOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the items most like an item."""
    from maskgr.recommender import Recommender

    recommender = Recommender.load(run)
    found = recommender.similar_items(item, top, by=by, where=where, **listed(allow, deny))
    rows = described(recommender, found)
    if as_json:
        print_json(rows)
    else:
        show_recommendations(rows)


def embeddings(
    run: RunArgument,
    out: Annotated[Path, typer.Option(help="The Parquet file to write: item_id, embedding.")],
) -> None:
    """Write the vectors that a model learned of the items."""
    from maskgr.artefact import write_file
    from maskgr.recommender import Recommender

    if out.suffix != ".parquet":
        raise RequestError(f"--out {out} does not end in .parquet; embeddings are written as one")
    frame = Recommender.load(run).embeddings()
    with write_file(out) as draft:
        frame.write_parquet(draft)
    width = frame["embedding"].dtype.shape[0]  # type: ignore[attr-defined]
    print(f"{len(frame):,} items, {width} numbers each; saved to {out}")


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
    from maskgr.data.tables import read_table
    from maskgr.recommender import RECOMMENDER, Recommender

    recommender, new = Recommender.load(run), read_table(items)
    more = recommender.add_items(new, embeddings=new_vectors(embeddings, new, items))
    inside = run / RECOMMENDER
    more.save(out or (inside if is_artefact(inside) else run))
    added = len(more.items) - len(recommender.items)
    print(f"{added:,} new items, {len(more.items):,} in all; saved to {out or run}")


def new_vectors(file: Path | None, items: pl.DataFrame | None, name: Path | None) -> Any:
    """The vectors of new items, in their order; None where no file has them."""
    from maskgr.data.embeddings import align_embeddings
    from maskgr.data.problems import Problems
    from maskgr.data.tables import read_matrix

    if file is None:
        return None
    if items is None:
        raise RequestError("--embeddings are those of new items; give --items, too")
    if "item_id" not in items.columns:
        raise DataError(f"{name} has no column item_id (it has: {', '.join(items.columns)})")
    return align_embeddings(read_matrix(file), items["item_id"], Problems())
