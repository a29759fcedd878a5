"""The paper's table of generative, dense and unified retrieval by its model with a dense head."""

from __future__ import annotations

from dataclasses import replace

from maskgr.errors import RequestError
from maskgr.evaluation.protocol import PROTOCOLS
from maskgr.studies.report import Asked, Report, Row, percent

MODEL = "maskgr-paper"
WAYS = ("generative", "dense", "unified")
METRICS = ("recall@5", "recall@10", "ndcg@5", "ndcg@10")
# The published network would take weeks on a laptop. This one has half its layers, a sixth of its
# hidden entries, and small batches, for which the published learning rate is too high.
SMALL = (
    "layers=4",
    "heads=4",
    "network.hidden=512",
    "dropout=0.1",
    "accumulate=1",
    "learning_rate=2e-3",
    "ema=0.999",
    "minutes=30",
)
PAPER: dict[str, Row] = {  # Beauty, percent; the protocol is that of the authors' code
    "generative": (5.38, 8.15, 3.51, 4.41),
    "dense": (5.41, 8.50, 3.53, 4.45),
    "unified": (5.43, 8.59, 3.54, 4.47),
}


def run(asked: Asked) -> Report:
    """One trained model, asked in three ways."""
    if asked.model not in (None, MODEL):
        raise RequestError(
            f"{asked.model} has no dense head beside generation; leave --model out, which trains "
            f"{MODEL}"
        )
    small = () if asked.preset else SMALL
    asked = replace(asked, model=MODEL, preset=asked.preset or "paper")
    settings = (*small, *_head(asked, small))
    runner = asked.runner()
    run = runner.train(asked.job(settings))
    rows: list[Row] = []
    for way in WAYS:
        found = runner.measure(run, asked.measure(PROTOCOLS, retrieval=way))
        for protocol in PROTOCOLS:
            figures = percent(found.values[protocol], METRICS)
            rows.append((way, protocol, *figures, round(found.users_per_second)))
    rows += [(way, "paper, Beauty", *figures, "") for way, figures in PAPER.items()]
    return Report(
        f"Retrieval on {asked.data}, test, {found.users:,} users, percent",
        ("retrieval", "protocol", *METRICS, "users/s"),
        tuple(rows),
        (
            f"{MODEL}, preset {asked.preset} with {' '.join(settings)}",
            f"trained for {found.minutes:.1f} minutes in all",
        ),
    )


def _head(asked: Asked, settings: tuple[str, ...]) -> tuple[str, ...]:
    """The dense head as in Section 3.3: read at half the depth, a fifth of items masked whole."""
    layers = asked.job(settings).config.model.network.layers
    return ("dense.head=true", f"dense.layer={max(1, layers // 2)}", "whole_item=0.2")
