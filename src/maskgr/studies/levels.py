"""The paper's table of the number of digits, and its guess why five are worse than four."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from maskgr.studies import paper
from maskgr.studies.paper import beauty
from maskgr.studies.results import Cell, Claim, Part
from maskgr.studies.study import FORMS, Study, Variant, Way

PAPER = {
    3: beauty(4.96, 7.93, 3.24, 4.20),
    4: beauty(5.38, 8.15, 3.51, 4.41),
    5: beauty(4.86, 7.53, 3.26, 4.11),
}


def name(form: str, digits: int) -> str:
    return f"{form} {digits} digits"


def ways(model: str, levels: int) -> Sequence[Way]:
    items_only = Way(("items only",), key="all")
    if model == "maskgr":
        return (items_only,)
    return (items_only, Way(("any digits",), {"decoding": {"constrained": False}}, "free"))


def published(data: str, cell: Cell) -> Mapping[str, float]:
    """Beside the search without a constraint, which is the paper's; ours has none such."""
    found = {name(form, digits): row for form in FORMS for digits, row in PAPER.items()}
    return found[cell.variant] if cell.model == "maskgr" or cell.key == "free" else {}


def claims(part: Part) -> Iterator[Claim]:
    for form in FORMS:
        key = "all" if form == "maskgr" else "free"
        for other in (3, 5):
            pairs = part.pairs(((name(form, 4), key), (name(form, other), key)))
            yield Claim(f"{form}: 4 digits are above {other}", "recall@10", pairs)
    lost = part.pairs(*(((name(FORMS[0], n), "all"), (name(FORMS[0], n), "free")) for n in PAPER))
    yield Claim("The constraint gains recall by ruling out invalid IDs", "recall@10", lost)


STUDY = Study(
    title="The number of digits",
    where="Table 3",
    first="variant",
    variants=[
        Variant(name(form, digits), form, (f"levels={digits}",))
        for form in FORMS
        for digits in PAPER
    ],
    metrics=paper.METRICS,
    labels=("search",),
    facts=("invalid beams %", "users/s", "minutes"),
    ways=ways,
    paper=published,
    claims=claims,
    notes=(
        "`maskgr-paper` appends one more digit where items collide, as the paper does",
        "any digits: the search has no constraint, and the share of beams that end as no item is "
        "given",
    ),
    reasons=(
        "The paper guesses that five digits are worse because of invalid IDs, and leaves a "
        "constrained search to future work: the rows without a constraint test that guess.",
    ),
)
