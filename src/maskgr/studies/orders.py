"""The paper's tables of decoding orders and of the number of network evaluations, as one."""

from __future__ import annotations

from maskgr.decoding.orders import ORDERS
from maskgr.evaluation.metrics import Mean
from maskgr.models.base import Decodes, require
from maskgr.studies.report import Asked, Report, Row, percent


def run(asked: Asked) -> Report:
    """Three orders with 1 to m steps each; with one step they are the same."""
    runner, job = asked.runner(), asked.job()
    run = runner.train(job)
    levels = require(runner.load(run).model, Decodes).levels
    rows: list[Row] = []
    for order in ORDERS:
        for steps in range(1, levels + 1):
            how = asked.measure(("all",), retrieval="generative", order=order, steps=steps)
            found = runner.measure(run, how)
            figures = percent(found.values["all"], ("recall@10", "ndcg@5"))
            rows.append((order, steps, *figures, round(found.users_per_second)))
    interval = Mean.of(found.values["all"]["recall@10"])
    return Report(
        f"Orders and steps of {job.model} on {asked.data}, test, "
        f"{found.users:,} users, protocol all, percent",
        ("order", "steps", "recall@10", "ndcg@5", "users/s"),
        tuple(rows),
        (
            "paper, Beauty, all steps: recall@10 random 7.54, left-to-right 8.09, greedy 8.15",
            f"the 95 % interval of a recall@10 here is ± {50 * (interval.high - interval.low):.2f}",
        ),
    )
