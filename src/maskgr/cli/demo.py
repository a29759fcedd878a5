"""`maskgr demo`: everything on the generated data, told as it goes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from maskgr.cli.console import print_table, show_evaluations, show_explanation, show_report
from maskgr.cli.options import decoding_used

SHOWN = 6  # items of the example history


def demo(
    out: Annotated[Path, typer.Option(help="The folder for the data and the run.")] = Path(
        "runs/demo"
    ),
) -> None:
    """See it work: generate a shop, train, evaluate, recommend."""
    run_demo(out)


def run_demo(out: Path) -> None:
    from maskgr.data.config import SyntheticConfig
    from maskgr.data.open import from_shop
    from maskgr.data.splits import leave_out
    from maskgr.data.synthetic import generate
    from maskgr.evaluation.protocol import evaluate
    from maskgr.explain import explain
    from maskgr.models.base import train_config
    from maskgr.recommender import Recommender
    from maskgr.sids.report import report
    from maskgr.sids.semantic_ids import SemanticIds

    shop = generate(SyntheticConfig())
    dataset = from_shop(shop)
    dataset.save(out / "data")
    print(
        f"1. A generated shop: {len(dataset.users):,} users, {len(dataset.items):,} items, "
        f"{len(dataset.histories.values):,} events -> {out / 'data'}"
    )

    print("\n2. Training MaskGR (preset tiny), with popularity and neighbours beside it")
    models = {name: Recommender.train(dataset, model=name) for name in ("popularity", "neighbours")}
    maskgr = Recommender.train(
        dataset,
        config=train_config("tiny"),
        progress=sys.stderr.isatty(),
        made={"data": str((out / "data").absolute())},
    )
    maskgr.save(out / "run")
    print(f"   {maskgr.made['seconds']:.0f} seconds -> {out / 'run'}")

    print("\n3. The semantic IDs that it made of what it learned about the items:\n")
    sids = out / "run" / "sids"
    show_report(report(SemanticIds.load(sids)))

    print("\n4. Evaluated beside the oracle, which knows how the shop's users choose:\n")
    test = leave_out(dataset.histories).test
    models["maskgr"] = maskgr
    results = {
        name: evaluate(model.ranker(), test, len(dataset.items), shop=shop)
        for name, model in models.items()
    }
    show_evaluations("test", results, {name: decoding_used(own) for name, own in models.items()})

    history = dataset.items[test.histories[0]]
    ids = history["item_id"].to_list()
    print(f"\n5. The last items of user {dataset.users[0]}:\n")
    print_table(["item_id", "title"], history.select("item_id", "title").tail(SHOWN).rows())
    print("\n   and how the next item is generated, digit by digit:\n")
    show_explanation(maskgr, explain(maskgr, ids, top=5))
    print(
        f"\nNext: maskgr recommend {out / 'run'} --history {','.join(ids[-3:])}\n"
        f"      maskgr sids show {sids} {ids[-1]}\n"
        "      maskgr data inspect YOUR_FOLDER"
    )
