"""What the preset `cpu` gains by each of its choices, and what else was tried.

Every variant gets the same wall-clock budget and is judged on validation alone. One seed and ten
minutes rank choices that differ clearly; they do not tell small differences from chance.
"""

from __future__ import annotations

from maskgr.data.open import open_dataset
from maskgr.data.splits import leave_out
from maskgr.errors import RequestError
from maskgr.evaluation.protocol import evaluate
from maskgr.studies.report import Asked, Report, Row, require_dense, trained

WAYS = ("generative", "dense", "fused")
VARIANTS: dict[str, tuple[str, ...]] = {
    "as it is": (),
    "IDs of text": ("collaborative=0",),
    "first stage 10 %": ("collaborative=0.1",),
    "first stage 50 %": ("collaborative=0.5",),
    "IDs of all components": ("components=0",),
    "OPQ": ("quantizer=opq",),
    "3 digits": ("levels=3",),
    "appended digit": ("unique=append",),
    "whole codebooks": ("catalogue_aware=false",),
    "digits not taught": ("distil=0",),
    "digits all taught": ("distil=1",),
    "one copy of an item": ("copies=1",),
    "four copies of an item": ("copies=4",),
    "history of digits": ("history=tokens", "collaborative=0"),
    "1 layer for the history": ("history_layers=1",),
    "3 layers for the history": ("history_layers=3",),
    "items masked whole, 30 %": ("whole_item=0.3",),
    "no text": ("text_input=false",),
    "no repeat bias": ("repeat_bias=false",),
    "no followers": ("followers=0",),
    "32 followers": ("followers=32",),
    "cosine": ("similarity=cosine", "temperature=0.07", "learn_temperature=true"),
    "dense head an MLP": ("dense.hidden=256",),
    "dropout 0.2": ("dropout=0.2",),
    "dropout 0.4": ("dropout=0.4",),
    "dropout 0.5": ("dropout=0.5",),
    "learning rate 1e-3": ("learning_rate=1e-3",),
    "learning rate 4e-3": ("learning_rate=4e-3",),
    "weight decay 0.03": ("weight_decay=0.03",),
    "weight decay 0.1": ("weight_decay=0.1",),
    "batch 3200": ("token_budget=3200",),
    "batch 12800": ("token_budget=12800",),
    "2 heads": ("heads=2",),
    "8 heads": ("heads=8",),
    "width 128": ("width=128",),
    "width 384": ("width=384", "heads=6"),
    "FFN 256": ("network.hidden=256",),
    "FFN 1024": ("network.hidden=1024",),
    "2 layers for the digits": ("layers=2",),
    "history of 50": ("history_limit=50",),
}


def run(asked: Asked) -> Report:
    """Those named by `only`, or all."""
    require_dense(asked)
    unknown = [name for name in asked.only if name not in VARIANTS]
    if unknown:
        raise RequestError(
            f"there is no variant {unknown[0]!r}; the variants are {', '.join(VARIANTS)}"
        )
    holdout = leave_out(open_dataset(asked.data).histories).validation
    if asked.users is not None:
        holdout = holdout.sample(asked.users)
    rows: list[Row] = []
    for name in asked.only or VARIANTS:
        folder = f"{name.replace(' ', '-').replace('%', 'percent').replace(',', '')}-{asked.seed}"
        recommender = trained(asked, asked.data, folder, VARIANTS[name])
        figures: list[float] = []
        for way in WAYS:
            how = recommender.decoding(retrieval=way)
            found = evaluate(recommender, holdout, decoding=how, protocols=("all",))
            values = found.metrics["all"]
            figures += [round(100 * values[k].mean, 2) for k in ("recall@10", "ndcg@10")]
        minutes = round(recommender.made["seconds"] / 60, 1)
        rows.append((name, asked.seed, minutes, *figures))
    return Report(
        f"Variants of {asked.preset} on {asked.data}, validation, {len(holdout.users):,} users, "
        "protocol all, percent",
        ("variant", "seed", "minutes", *(f"{w} {m}" for w in WAYS for m in ("R@10", "N@10"))),
        tuple(rows),
    )
