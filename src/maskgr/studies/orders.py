"""The paper's table of decoding orders, for every number of steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from maskgr.decoding.orders import ORDERS
from maskgr.evaluation.metrics import Mean
from maskgr.studies import paper
from maskgr.studies.findings import Drawn
from maskgr.studies.measures import Measure
from maskgr.studies.paper import beauty
from maskgr.studies.plots import Curves, line_plot
from maskgr.studies.results import Cell, Claim, Part
from maskgr.studies.study import FORMS, Study, Variant, Way

PAPER = {
    "random": beauty(5.01, 7.54, 3.27, 4.09),
    "left-to-right": beauty(5.31, 8.09, 3.46, 4.37),
    "greedy": beauty(5.38, 8.15, 3.51, 4.41),
}


def ways(model: str, levels: int) -> Sequence[Way]:
    """One step has no order."""
    return [
        Way(
            ("any" if steps == 1 else order, steps),
            {"decoding": {"retrieval": "generative", "order": order, "steps": steps}},
            order if steps == levels else "",
        )
        for order in ORDERS
        for steps in range(1, levels + 1)
        if steps > 1 or order == ORDERS[0]
    ]


def published(data: str, cell: Cell) -> Mapping[str, float]:
    """With all steps."""
    return PAPER.get(cell.key, {})


def claims(part: Part) -> Iterator[Claim]:
    for form in FORMS:
        for ahead, behind in (
            ("greedy", "random"),
            ("left-to-right", "random"),
            ("greedy", "left-to-right"),
        ):
            pairs = part.pairs(((form, ahead), (form, behind)))
            yield Claim(f"{form}: {ahead} is above {behind}", "recall@10", pairs)


def draw(file: Path, drawn: Drawn) -> None:
    part, panels = drawn.part, []
    for model, cells in part.each_model():
        first = next(own for own in cells if own.labels[1] == 1)
        series: dict[str, list[tuple[float, Mean]]] = {
            order: [
                (float(own.labels[1]), mean)
                for own in (first, *(c for c in cells if c.labels[0] == order))
                if (mean := own.mean(part.protocol, "recall@10")) is not None
            ]
            for order in ORDERS
        }
        y = f"recall@10 of {model}, percent, protocol {part.protocol}"
        ticks = sorted({x for points in series.values() for x, _ in points})
        panels.append(Curves("steps", y, series, {}, ticks=ticks))
    line_plot(file, drawn.title, panels)


STUDY = Study(
    title="Decoding orders",
    where="Table 4",
    variants=[Variant(name, name) for name in FORMS],
    metrics=paper.METRICS,
    labels=("order", "steps"),
    facts=("ms/user", "minutes"),
    measure=Measure(protocols=("all",)),
    ways=ways,
    paper=published,
    claims=claims,
    draw=draw,
    notes=("random: one order for each history, fixed by the seed",),
    reasons=(
        "`maskgr` scores the joint of all digits that a step reveals, so its order can matter only "
        "by what a later step learns from the digits before.",
    ),
)
