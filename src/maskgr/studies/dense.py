"""The paper's table of generative, dense and unified retrieval, with fused beside them."""

from __future__ import annotations

from maskgr.data.open import open_dataset
from maskgr.data.splits import leave_out
from maskgr.evaluation.protocol import PROTOCOLS, evaluate
from maskgr.studies.report import Asked, Report, Row, require_dense, trained

WAYS = ("generative", "dense", "unified", "fused")
METRICS = ("recall@5", "recall@10", "ndcg@5", "ndcg@10")
PAPER: dict[str, Row] = {  # Beauty, percent; the protocol is that of the authors' code
    "generative": (5.38, 8.15, 3.51, 4.41),
    "dense": (5.41, 8.50, 3.53, 4.45),
    "unified": (5.43, 8.59, 3.54, 4.47),
}


def run(asked: Asked) -> Report:
    """One model, asked in four ways."""
    require_dense(asked)
    dataset = open_dataset(asked.data)
    recommender = trained(asked, asked.data, "run")
    test = leave_out(dataset.histories, recommender.config.leave_out).test
    if asked.users is not None:
        test = test.sample(asked.users)
    rows: list[Row] = []
    for way in WAYS:
        found = evaluate(recommender, test, decoding=recommender.decoding(retrieval=way))
        for protocol in PROTOCOLS:
            values = found.metrics[protocol]
            figures = (round(100 * values[name].mean, 2) for name in METRICS)
            rows.append((way, protocol, *figures, round(found.users_per_second)))
    rows += [(way, "paper, Beauty", *figures, "") for way, figures in PAPER.items()]
    return Report(
        f"Retrieval on {asked.data}, test, {len(test.users):,} users, percent",
        ("retrieval", "protocol", *METRICS, "users/s"),
        tuple(rows),
        (f"trained for {recommender.made['seconds'] / 60:.1f} minutes in all",),
    )
