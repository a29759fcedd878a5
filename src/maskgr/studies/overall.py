"""The paper's main tables: MaskGR beside its six baselines, on several datasets."""

from __future__ import annotations

from collections.abc import Iterator

from maskgr.studies import paper
from maskgr.studies.results import Claim, Part
from maskgr.studies.study import FORMS, Study, Variant

BASELINES = ("sasrec", "bert4rec", "dreamrec", "cadirec", "tiger", "liger")


def claims(part: Part) -> Iterator[Claim]:
    for form in FORMS:
        for text, others in (
            ("is above TIGER", ("tiger",)),
            ("is above continuous diffusion", ("dreamrec", "cadirec")),
            ("is above every baseline", BASELINES),
        ):
            pairs = part.pairs(*(((form, ""), (other, "")) for other in others))
            yield Claim(f"{form} {text}", "ndcg@5", pairs)


STUDY = Study(
    title="Overall performance",
    where="Tables 1 and 7",
    variants=[Variant(name, name) for name in (*FORMS, *BASELINES, "popularity")],
    metrics=paper.METRICS,
    facts=("minutes", "users/s", "parameters"),
    paper=lambda data, cell: paper.overall(data, cell.model),
    paper_data=paper.DATA,
    claims=claims,
    reasons=(
        "The rows of the paper's table come from different papers and protocols: SASRec from "
        "TIGER's paper; BERT4Rec, DreamRec and CaDiRec from CaDiRec's, which removes seen items "
        "(protocol unseen); TIGER, LIGER and MaskGR were run by the authors, nothing removed "
        "(protocol all).",
        "The paper's SASRec has a binary loss with one negative; `sasrec` here has a softmax over "
        "all items, which is a third better, and so has the backbone of `cadirec` (the presets "
        "`published` have the binary loss). The paper's recall@10 and ndcg@10 of SASRec on Toys "
        "are those of TIGER in TIGER's paper.",
        "The paper says that CaDiRec takes 1,000 steps to answer; the model runs no diffusion to "
        "answer. BERT4Rec's masking ratio was 0.6 on Beauty and 0.2 on ML-1M, not 0.15.",
    ),
)
