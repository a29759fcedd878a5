"""The paper's figure of the next two items, generated together, against steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from maskgr.evaluation.metrics import Mean
from maskgr.studies.findings import Drawn
from maskgr.studies.measures import Measure
from maskgr.studies.plots import Curves, line_plot
from maskgr.studies.results import Claim, Part
from maskgr.studies.study import FORMS, Study, Variant, Way

ITEMS = 2
METRIC = "session_recall@10"
STEPS = (1, 2, 3, 4, 6, 8)


def ways(model: str, levels: int) -> Sequence[Way]:
    """Some steps up to one for each digit; TIGER has only these."""
    every = ITEMS * levels
    if model not in FORMS:
        return (Way((every,), key="all"),)
    counts = [*(n for n in STEPS if n < every), every]
    return [Way((n,), {"decoding": {"steps": n}}, "all" if n == every else str(n)) for n in counts]


def claims(part: Part) -> Iterator[Claim]:
    for form in FORMS:
        half = part.pairs(((form, "4"), ("tiger", "all")))
        yield Claim(f"{form} in 4 steps is no worse than TIGER in 8", METRIC, half, weak=True)
        more = part.pairs(((form, "all"), ("tiger", "all")))
        yield Claim(f"{form} with all steps is above TIGER", METRIC, more)


def draw(file: Path, drawn: Drawn) -> None:
    part = drawn.part
    series: dict[str, list[tuple[float, Mean]]] = {}
    for model, cells in part.each_model():
        for own in cells:
            if (mean := own.mean(part.protocol, METRIC)) is not None:
                series.setdefault(model, []).append((float(own.labels[0]), mean))
    y = f"{METRIC}, percent, protocol {part.protocol}"
    line_plot(file, drawn.title, [Curves("evaluations of the network", y, series, {})])


STUDY = Study(
    title="Sessions: the next two items together",
    where="Figure 4, right (ML-1M)",
    variants=[
        Variant("maskgr-paper", "maskgr-paper", (f"leave_out={ITEMS}",)),
        Variant("maskgr", "maskgr", (f"leave_out={ITEMS}", f"session={ITEMS}")),
        Variant("tiger", "tiger", (f"leave_out={ITEMS}",)),
    ],
    metrics=(METRIC,),
    labels=("steps",),
    facts=("ms/user", "minutes"),
    measure=Measure(ks=(10,), session=ITEMS),
    ways=ways,
    paper_data=("ml-1m",),
    claims=claims,
    draw=draw,
    notes=(
        "10 beams, each a pair of items; the recall of each place, averaged; the last two items of "
        "a user are the test, the two before validation",
        "TIGER generates the first item, puts it behind the history and generates the second: one "
        "step for each of the digits",
    ),
    reasons=("The paper's figure has no numbers; it says that MaskGR's 4 steps equal TIGER's 8.",),
)
