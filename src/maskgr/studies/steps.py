"""The paper's figure of quality against evaluations of the network, with what these cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from maskgr.evaluation.metrics import Mean
from maskgr.studies import paper
from maskgr.studies.findings import Drawn
from maskgr.studies.measures import Measure
from maskgr.studies.plots import Curves, line_plot
from maskgr.studies.results import Cell, Claim, Part
from maskgr.studies.study import CACHED, FORMS, Study, Variant, Way

METRICS = ("ndcg@5", "recall@10")
PUBLISHED = {"MaskGR": 5, "TIGER": 4, "LIGER": 4}  # steps
FREE, QUICK = "free", "cached"  # without the catalogue's constraint; the history encoded once
AXES = {
    "NFE": "evaluations of the network",
    "ms/user": "ms a user, in batches",
    "MFLOP/user": "MFLOP a user",
}


def ways(model: str, levels: int) -> Sequence[Way]:
    """1 to m steps; all of them for models that generate digit by digit. Once more without the
    constraint, where a model has one, and with a cache, where that is an approximation."""
    counts = range(1, levels + 1) if model in FORMS else (levels,)
    found = [
        Way(
            (steps, "items only"),
            {"decoding": {"steps": steps}, "costs": True},
            "all" if steps == levels else str(steps),
        )
        for steps in counts
    ]
    if model != "maskgr":
        free = {"decoding": {"steps": levels, "constrained": False}, "costs": True}
        found.append(Way((levels, "any digits"), free, FREE))
    if model == "maskgr-paper":
        quick = {"decoding": {"steps": levels, **CACHED}, "costs": True}
        found.append(Way((levels, "items only, cached"), quick, QUICK))
    return found


def published(data: str, cell: Cell) -> Mapping[str, float]:
    """With all steps."""
    return {
        name: value
        for name, value in paper.overall(data, cell.model).items()
        if cell.key == "all" and name in METRICS
    }


def claims(part: Part) -> Iterator[Claim]:
    for form in FORMS:
        pairs = part.pairs(*(((form, "3"), (other, "all")) for other in ("tiger", "liger")))
        text = f"{form} in 3 steps is above TIGER and LIGER, which take one for each digit"
        yield Claim(text, "ndcg@5", pairs)
        few = part.pairs(*(((form, "all"), (form, str(n))) for n in (2, 3, 4)))
        yield Claim(f"{form} gains by more steps", "ndcg@5", few)


def draw(file: Path, drawn: Drawn) -> None:
    part, metric, panels = drawn.part, METRICS[0], []
    for fact, label in AXES.items():
        series: dict[str, list[tuple[float, Mean]]] = {}
        for model, cells in part.each_model():
            for own in cells:
                mean, x = own.mean(part.protocol, metric), own.facts[fact]
                if own.key not in (FREE, QUICK) and mean is not None and x is not None:
                    series.setdefault(model, []).append((x, mean))
        y = f"{metric}, percent, protocol {part.protocol}"
        if fact != "NFE":
            panels.append(Curves(label, y, series, {}, log=True))
            continue
        crosses = {
            f"paper: {name} with all steps": [
                (float(count), paper.overall(drawn.paper_data, name.lower())[metric])
            ]
            for name, count in PUBLISHED.items()
        }
        most = max([x for own in series.values() for x, _ in own] + [*PUBLISHED.values()])
        panels.append(Curves(label, y, series, crosses, ticks=range(1, int(most) + 1)))
    line_plot(file, drawn.title, panels)


STUDY = Study(
    title="Quality against the cost of an answer",
    where="Figure 4, left",
    variants=[Variant(name, name) for name in (*FORMS, "tiger", "liger")],
    metrics=METRICS,
    labels=("steps", "search"),
    facts=("passes/user", "ms/user", "ms alone", "MFLOP/user", "invalid beams %", "minutes"),
    measure=Measure(protocols=("all",)),
    ways=ways,
    paper=published,
    paper_data=paper.DATA,
    claims=claims,
    draw=draw,
    notes=(
        "steps: evaluations of the network one after the other (NFE). passes/user: sequences that "
        "go through it, 1 + (steps - 1) × beams. `maskgr-paper` encodes the history in each of "
        "them; `tiger`, `liger` and `maskgr` encode it once, and only new digits after that",
        "MFLOP/user: matrix products and attention, counted by torch.utils.flop_counter; a "
        "multiplication and an addition are two. What is computed once for all users is left out",
        "ms/user: in batches, as evaluation ranks; ms alone: a request for one user, the median",
        "any digits: the search has no constraint, and the share of beams that end as no item "
        "is given; cached: the history is encoded once, which is an approximation",
    ),
    reasons=(
        "The paper counts steps, and steps alone. A step of `maskgr-paper` encodes the whole "
        "history again for each beam, a step of TIGER one digit of each beam: equal steps are not "
        "equal costs.",
        "The paper says that three steps are 13 % above TIGER and 4.7 % above LIGER; the other "
        "points of its figure have no numbers.",
    ),
)
