"""The paper's figure of coarse-grained retrieval: does the gap to TIGER grow with K?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from maskgr.evaluation.differences import paired_difference
from maskgr.evaluation.metrics import Mean
from maskgr.studies import paper
from maskgr.studies.findings import Drawn
from maskgr.studies.measures import Measure
from maskgr.studies.plots import Curves, line_plot
from maskgr.studies.results import Cell, Claim, Part
from maskgr.studies.study import FORMS, Study, Variant, Way

KS = (5, 10, 20, 40)
DEEP = "places 6-40"  # found there: recall@40 less recall@5


def ways(model: str, levels: int) -> Sequence[Way]:
    """Beams for the largest K, and the same for all K."""
    return (Way(changes={"decoding": {"beams": max(KS)}}),)


def derive(cells: Sequence[Cell]) -> Sequence[Cell]:
    return [
        cell.with_metric(
            DEEP,
            {name: own["recall@40"] - own["recall@5"] for name, own in cell.values.items()},
        )
        for cell in cells
    ]


def claims(part: Part) -> Iterator[Claim]:
    for form in FORMS:
        pairs = part.pairs(((form, ""), ("tiger", "")))
        for k in KS:
            yield Claim(f"{form} is above TIGER at {k}", f"recall@{k}", pairs)
        yield Claim(f"{form}: the gap to TIGER grows from K = 5 to 40", DEEP, pairs)


def draw(file: Path, drawn: Drawn) -> None:
    """Recall at each K, and the gap to TIGER in percentage points."""
    part = drawn.part
    found = {
        model: [(float(k), mean) for k in KS if (mean := own[0].mean(part.protocol, f"recall@{k}"))]
        for model, own in part.each_model()
    }
    published = {
        f"paper: {name}": [
            (float(k), paper.overall(drawn.paper_data, model)[f"recall@{k}"]) for k in KS[:2]
        ]
        for name, model in (("MaskGR", "maskgr"), ("TIGER", "tiger"))
    }
    panels = [
        Curves("K", f"recall@K, percent, protocol {part.protocol}", found, published, ticks=KS)
    ]
    if (tiger := part.find("tiger")) is not None:
        gaps = {
            form: [(float(k), _gap(part, cell, tiger, k)) for k in KS]
            for form in FORMS
            if (cell := part.find(form)) is not None
        }
        if gaps:
            label = "recall@K less TIGER's, percentage points"
            panels.append(Curves("K", label, gaps, {}, ticks=KS, signed=True))
    line_plot(file, drawn.title, panels)


def _gap(part: Part, cell: Cell, other: Cell, k: int) -> Mean:
    own, theirs = (c.values[part.protocol][f"recall@{k}"] for c in (cell, other))
    d = paired_difference(own, theirs)
    return Mean(d.mean, d.low, d.high)


STUDY = Study(
    title="Coarse-grained retrieval",
    where="Figure 2 (Beauty and Sports)",
    variants=[Variant(name, name) for name in (*FORMS, "tiger")],
    metrics=(*(f"recall@{k}" for k in KS), DEEP),
    measure=Measure(ks=KS),
    ways=ways,
    derive=derive,
    paper=lambda data, cell: {
        name: value
        for name, value in paper.overall(data, cell.model).items()
        if name.startswith("recall")
    },
    paper_data=paper.DATA,
    claims=claims,
    draw=draw,
    notes=(
        f"{max(KS)} beams for every K; {DEEP}: the share of users whose item is at places 6 to 40",
    ),
    reasons=("The paper prints recall at 5 and 10 alone; the rest of its figure has no numbers.",),
)
