"""The paper's table of generative, dense and unified retrieval."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from maskgr.models.base import TrainConfig
from maskgr.studies import paper
from maskgr.studies.paper import beauty
from maskgr.studies.results import Cell, Claim, Part
from maskgr.studies.study import FORMS, Study, Variant, Way

PAPER = {
    "generative": beauty(5.38, 8.15, 3.51, 4.41),
    "dense": beauty(5.41, 8.50, 3.53, 4.45),
    "unified": beauty(5.43, 8.59, 3.54, 4.47),
}


def head(config: TrainConfig) -> tuple[str, ...]:
    """The dense head as in Section 3.3: read at half the depth, a fifth of items masked whole."""
    layer = max(1, config.model.network.layers // 2)
    return ("dense.head=true", f"dense.layer={layer}", "whole_item=0.2")


def ways(model: str, levels: int) -> Sequence[Way]:
    """Ours has no head: one step of generation is dense retrieval."""
    if model == "maskgr":
        steps = {"generative": levels, "dense": 1}
        return [Way((kind,), {"decoding": {"steps": n}}, kind) for kind, n in steps.items()]
    return [Way((kind,), {"decoding": {"retrieval": kind}}, kind) for kind in PAPER]


def published(data: str, cell: Cell) -> Mapping[str, float]:
    return PAPER[cell.key]


def claims(part: Part) -> Iterator[Claim]:
    for form in FORMS:
        for kind in ("dense", "unified"):
            pairs = part.pairs(((form, kind), (form, "generative")))
            yield Claim(f"{form}: {kind} is above generative", "recall@10", pairs)


STUDY = Study(
    title="Generative, dense and unified retrieval",
    where="Table 5",
    variants=[Variant("maskgr-paper", "maskgr-paper", head), Variant("maskgr", "maskgr")],
    metrics=paper.METRICS,
    labels=("retrieval",),
    ways=ways,
    paper=published,
    claims=claims,
    notes=(
        "`maskgr-paper` has the paper's dense head here, one training for all three ways; `maskgr` "
        "has none: its generation in one step is dense retrieval, and the other row takes a step "
        "for each digit",
    ),
    reasons=(
        "The paper's generative row is a model without a head; here the head and the digits share "
        "one network and its time.",
    ),
)
