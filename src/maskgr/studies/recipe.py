"""What the preset `cpu` gains by each of its choices, and alternatives to them.

Every variant gets the same wall-clock budget and is judged on validation alone. One seed and ten
minutes rank choices that differ clearly; they do not tell small differences from chance.
"""

from __future__ import annotations

from dataclasses import replace

from maskgr.errors import RequestError
from maskgr.studies.report import Asked, Report, Row, percent

STEPS = {"1 step": 1, "m steps": 0}
VARIANTS: dict[str, tuple[str, ...]] = {
    "as it is": (),
    "items by text": ("items=text",),
    "items by both": ("items=both",),
    "no text": ("items=id",),
    "no repeat bias": ("repeat_bias=false",),
    "no neighbours": ("neighbours=0",),
    "32 neighbours": ("neighbours=32",),
    "sampled softmax": ("loss=sampled", "repeat_bias=false"),
    "denoiser 10 %": ("denoiser_share=0.1",),
    "denoiser 40 %": ("denoiser_share=0.4",),
    "1 layer": ("layers=1",),
    "3 layers": ("layers=3",),
    "width 128": ("width=128",),
    "width 384": ("width=384", "heads=6"),
    "FFN 256": ("hidden=256",),
    "FFN 1024": ("hidden=1024",),
    "2 heads": ("heads=2",),
    "8 heads": ("heads=8",),
    "dropout 0.2": ("dropout=0.2",),
    "dropout 0.4": ("dropout=0.4",),
    "dropout 0.5": ("dropout=0.5",),
    "learning rate 1e-3": ("learning_rate=1e-3",),
    "learning rate 4e-3": ("learning_rate=4e-3",),
    "weight decay 0.03": ("weight_decay=0.03",),
    "weight decay 0.1": ("weight_decay=0.1",),
    "batch 800": ("token_budget=800",),
    "batch 3200": ("token_budget=3200",),
    "history of 50": ("history_limit=50",),
    "3 levels": ("levels=3",),
    "8 levels": ("levels=8",),
    "16 levels": ("levels=16",),
    "64 codes": ("codes=64",),
    "1024 codes": ("codes=1024",),
    "OPQ": ("quantizer.quantizer=opq",),
    "appended digit": ("unique=append",),
}


def run(asked: Asked) -> Report:
    """Trains the variants in `only`, or all."""
    unknown = [name for name in asked.only if name not in VARIANTS]
    if unknown:
        raise RequestError(
            f"there is no variant {unknown[0]!r}; the variants are {', '.join(VARIANTS)}"
        )
    names = asked.only or tuple(VARIANTS)
    # A model without these settings is refused before any training.
    jobs = {asked.job(VARIANTS[name]): name for name in names}
    runner, users = asked.runner(), 0
    rows: list[Row] = []
    for job, run in runner.each_trained(list(jobs)):
        figures: list[float] = []
        for steps in STEPS.values():
            how = replace(asked.measure(("all",), steps=steps), split="validation")
            found = runner.measure(run, how)
            figures += percent(found.values["all"], ("recall@10", "ndcg@10"))
        users = found.users
        rows.append((jobs[job], asked.seed, round(found.minutes, 1), *figures))
    return Report(
        f"Variants of {asked.preset or 'cpu'} on {asked.data}, validation, "
        f"{users:,} users, protocol all, percent",
        ("variant", "seed", "minutes", *(f"{s}, {m}" for s in STEPS for m in ("R@10", "N@10"))),
        tuple(rows),
    )
