"""The paper's tables of decoding orders and of the number of network evaluations, as one."""

from __future__ import annotations

from maskgr.data.open import open_dataset
from maskgr.data.splits import leave_out
from maskgr.decoding.orders import ORDERS
from maskgr.evaluation.protocol import evaluate
from maskgr.models.base import Decodes, require
from maskgr.studies.report import Asked, Report, Row, percent, trained


def run(asked: Asked) -> Report:
    """Three orders with 1 to m steps each; with one step they are the same."""
    dataset = open_dataset(asked.data)
    recommender = trained(asked, asked.data, "run")
    levels = require(recommender.model, Decodes).levels
    test = asked.sample(leave_out(dataset.histories, recommender.config.leave_out).test)
    rows: list[Row] = []
    for order in ORDERS:
        for steps in range(1, levels + 1):
            decoding = recommender.decoding(retrieval="generative", order=order, steps=steps)
            ranker = recommender.ranker(decoding)
            found = evaluate(ranker, test, len(dataset.items), protocols=("all",))
            values = found.metrics["all"]
            figures = percent(values, ("recall@10", "ndcg@5"))
            rows.append((order, steps, *figures, round(found.users_per_second)))
    interval = values["recall@10"]
    return Report(
        f"Orders and steps of {recommender.config.name} on {asked.data}, test, "
        f"{len(test.users):,} users, protocol all, percent",
        ("order", "steps", "recall@10", "ndcg@5", "users/s"),
        tuple(rows),
        (
            "paper, Beauty, all steps: recall@10 random 7.54, left-to-right 8.09, greedy 8.15",
            f"the 95 % interval of a recall@10 here is ± {50 * (interval.high - interval.low):.2f}",
        ),
    )
