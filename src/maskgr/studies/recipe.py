"""What the preset `cpu` gains by each of its choices, and alternatives to them.

Every variant gets the same wall-clock budget and is judged on validation alone. One seed and ten
minutes rank choices that differ clearly; they do not tell small differences from chance.
"""

from __future__ import annotations

from collections.abc import Sequence

from maskgr.studies.measures import Measure
from maskgr.studies.study import Study, Variant, Way

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


def ways(model: str, levels: int) -> Sequence[Way]:
    return [Way((steps,), {"decoding": {"steps": steps}}) for steps in sorted({1, levels})]


STUDY = Study(
    title="The recipe and its alternatives",
    where="",
    first="variant",
    variants=[Variant(name, "maskgr", settings) for name, settings in VARIANTS.items()],
    metrics=("recall@10", "ndcg@10"),
    labels=("steps",),
    facts=("minutes", "users/s"),
    measure=Measure(split="validation", protocols=("all",)),
    ways=ways,
    notes=("validation chose each network, so these figures flatter",),
)
