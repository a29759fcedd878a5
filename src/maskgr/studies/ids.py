"""The paper's table of what semantic IDs and the random masking ratio are worth."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from maskgr.studies import paper
from maskgr.studies.paper import beauty
from maskgr.studies.results import Cell, Claim, Part
from maskgr.studies.study import Study, Variant

ITEM_ID = ("quantizer.quantizer=item-id",)
RANDOM = ("quantizer.quantizer=random",)
# As the preset `digits`: no item has a vector of its own.
DIGITS = ("vectors=digits", "neighbours=0", "levels=16", "denoiser_share=0.4")
PAPER = {
    "bert4rec": beauty(3.60, 6.01, 2.16, 3.08),
    "maskgr-paper item IDs": beauty(4.69, 6.71, 3.12, 3.77),
    "maskgr-paper random SIDs": beauty(3.78, 5.53, 2.61, 3.05),
    "maskgr-paper": beauty(5.38, 8.15, 3.51, 4.41),
}


def published(data: str, cell: Cell) -> Mapping[str, float]:
    return PAPER.get(cell.variant, {})


def claims(part: Part) -> Iterator[Claim]:
    for ahead, behind, text in (
        ("maskgr-paper", "maskgr-paper random SIDs", "Semantic IDs are above random ones"),
        ("maskgr-paper", "maskgr-paper item IDs", "Semantic IDs are above item IDs"),
        (
            "maskgr-paper item IDs",
            "maskgr-paper item IDs fixed ratio",
            "A random masking ratio is above a fixed one",
        ),
        ("maskgr-paper item IDs", "bert4rec", "MaskGR with item IDs is above BERT4Rec"),
        ("maskgr", "maskgr item IDs", "Ours with text is above ours with item IDs"),
        (
            "maskgr digits alone",
            "maskgr random digits alone",
            "Ours of digits alone: learned ones are above random ones",
        ),
    ):
        yield Claim(text, "recall@10", part.pairs(((ahead, ""), (behind, ""))))


STUDY = Study(
    title="What semantic IDs are worth",
    where="Table 2",
    first="variant",
    variants=[
        Variant("maskgr-paper", "maskgr-paper"),
        Variant("maskgr-paper random SIDs", "maskgr-paper", RANDOM),
        Variant("maskgr-paper item IDs", "maskgr-paper", ITEM_ID),
        Variant(
            "maskgr-paper item IDs fixed ratio",
            "maskgr-paper",
            (*ITEM_ID, "masking=fixed", "fixed_ratio=0.15"),
        ),
        Variant("bert4rec", "bert4rec"),
        Variant("maskgr", "maskgr"),
        Variant("maskgr item IDs", "maskgr", ("items=id",)),
        Variant("maskgr digits alone", "maskgr", DIGITS),
        Variant("maskgr random digits alone", "maskgr", (*DIGITS, *RANDOM)),
    ],
    metrics=paper.METRICS,
    facts=("minutes", "parameters"),
    paper=published,
    claims=claims,
    notes=(
        "fixed ratio: 0.15 of the tokens are masked, as the paper says of BERT4Rec; `bert4rec` is "
        "the model with its own ratio and settings",
        "maskgr item IDs: vectors without text; digits alone: an item's vector is the sum of its "
        "16 digits' vectors, made of what the history's encoder learned, or drawn at random",
    ),
    reasons=(
        "The paper's BERT4Rec is CaDiRec's re-run, seen items removed (protocol unseen), with a "
        "ratio of 0.6, not 0.15.",
    ),
)
