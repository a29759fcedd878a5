"""`maskgr demo`: the whole way on the embedded data, told as it goes."""

from __future__ import annotations

import sys
from pathlib import Path

from maskgr.cli.console import print_table, show_evaluation, show_explanation, show_report
from maskgr.config import PRESETS, TrainConfig
from maskgr.data.config import SyntheticConfig
from maskgr.data.open import from_shop
from maskgr.data.splits import leave_out
from maskgr.data.synthetic import generate
from maskgr.evaluation.protocol import evaluate
from maskgr.explain import explain
from maskgr.recommender import Recommender
from maskgr.sids.report import report
from maskgr.sids.semantic_ids import SemanticIds

SHOWN = 6  # items of the example history


def run_demo(out: Path) -> None:
    """Data, semantic IDs, training, evaluation beside the oracle, one user's recommendations."""
    shop = generate(SyntheticConfig())
    dataset = from_shop(shop)
    dataset.save(out / "data")
    print(
        f"1. A generated shop: {len(dataset.users):,} users, {len(dataset.items):,} items, "
        f"{len(dataset.histories.values):,} events -> {out / 'data'}"
    )

    config = PRESETS["tiny"]
    sids = SemanticIds.make(dataset, quantizer=config.quantizer)
    found = report(sids)
    sids.save(out / "sids", report=found.to_dict())
    print(f"\n2. Semantic IDs of its items, from their text alone -> {out / 'sids'}\n")
    show_report(found)

    print("\n3. Training MaskGR (tiny), with popularity to compare with")
    made = {"data": str((out / "data").absolute())}
    popularity = Recommender.train(dataset, config=TrainConfig(model="popularity"))
    maskgr = Recommender.train(
        dataset, config=config, sids=sids, progress=sys.stderr.isatty(), made=made
    )
    maskgr.save(out / "run")
    print(f"   {maskgr.made['seconds']:.0f} seconds -> {out / 'run'}")

    print("\n4. Evaluated beside the oracle, which knows how the shop's users choose:\n")
    test = leave_out(dataset.histories).test
    show_evaluation("popularity", "test", evaluate(popularity, test, shop=shop))
    show_evaluation("maskgr", "test", evaluate(maskgr, test, shop=shop))

    history = dataset.items[test.histories[0]]
    ids = history["item_id"].to_list()
    print(f"\n5. User {dataset.users[0]} took last:\n")
    print_table(["item_id", "title"], history.select("item_id", "title").tail(SHOWN).rows())
    print("\n   and the next item is unmasked digit by digit:\n")
    show_explanation(maskgr, explain(maskgr, ids, top=5))
    print(
        f"\nNext: maskgr recommend {out / 'run'} --history {','.join(ids[-3:])}\n"
        f"      maskgr sids show {out / 'sids'} {ids[-1]}\n"
        "      maskgr data inspect YOUR_FOLDER"
    )
