"""The paper's figure of data efficiency: training sequences lose a share of their items."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from maskgr.evaluation.differences import share_of
from maskgr.studies.findings import Drawn
from maskgr.studies.plots import Curves, line_plot
from maskgr.studies.results import RETAINED, Cell, Claim, Part
from maskgr.studies.study import FORMS, Study, Variant

DROPS = (0.0, 0.25, 0.375, 0.5, 0.625, 0.75)
METRICS = ("recall@5", "ndcg@5")
MODELS = (*FORMS, "tiger")


def variant(model: str, drop: float) -> str:
    return f"{model} -{drop:.1%}" if drop else model


def derive(cells: Sequence[Cell]) -> Sequence[Cell]:
    """Each metric also as a share of what the whole training set gives."""
    whole = {cell.model: cell for cell in cells if cell.variant == cell.model}
    found = []
    for cell in cells:
        base = whole.get(cell.model)
        for metric in METRICS:
            if base is None or not all(own[metric].any() for own in base.values.values()):
                continue
            shares = {
                name: share_of(own[metric], base.values[name][metric])
                for name, own in cell.values.items()
            }
            cell = cell.with_metric(RETAINED + metric, shares)
        found.append(cell)
    return found


def claims(part: Part) -> Iterator[Claim]:
    for form in FORMS:
        for text, drops, weak in (
            ("retains more than TIGER when up to half of the items are dropped", DROPS[1:4], False),
            ("retains no less than TIGER when 62.5 and 75 % are dropped", DROPS[4:], True),
        ):
            pairs = part.pairs(
                *(((variant(form, drop), ""), (variant("tiger", drop), "")) for drop in drops)
            )
            for metric in METRICS:
                yield Claim(f"{form} {text}", RETAINED + metric, pairs, weak)


def draw(file: Path, drawn: Drawn) -> None:
    part, panels = drawn.part, []
    dropped = {variant(model, drop): 100 * drop for model in MODELS for drop in DROPS}
    for metric in METRICS:
        series = {
            model: [
                (dropped[own.variant], mean)
                for own in cells
                if (mean := own.mean(part.protocol, RETAINED + metric)) is not None
            ]
            for model, cells in part.each_model()
        }
        ticks = tuple(100 * drop for drop in DROPS)
        panels.append(
            Curves(
                "items dropped, percent", f"{RETAINED}{metric}, percent", series, {}, ticks=ticks
            )
        )
    line_plot(file, drawn.title, panels)


STUDY = Study(
    title="Sparse training data",
    where="Figure 3",
    first="training",
    variants=[
        Variant(variant(model, drop), model, (f"sparsify={drop}",) if drop else ())
        for model in MODELS
        for drop in DROPS
    ],
    metrics=(*METRICS, *(RETAINED + metric for metric in METRICS)),
    facts=("minutes",),
    derive=derive,
    claims=claims,
    draw=draw,
    notes=(
        "retained: as a share of the same model's figure with the whole training set; its interval "
        "is that of the ratio (delta method, the same users in both)",
        "each training sequence keeps at least three items; validation and test are whole",
    ),
    reasons=(
        "The paper's figure has no numbers. A fixed wall-clock budget means more passes over a "
        "smaller training set, for every model alike.",
    ),
)
