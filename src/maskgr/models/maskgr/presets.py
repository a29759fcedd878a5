"""The presets of MaskGR in our form."""

from __future__ import annotations

from maskgr.decoding.config import DecodingConfig
from maskgr.models.base import TrainConfig
from maskgr.models.maskgr.config import MaskGRConfig
from maskgr.nn.transformer import TransformerConfig
from maskgr.sids.config import QuantizerConfig, SidsConfig
from maskgr.training.fit import FitConfig

CPU_ENCODER = TransformerConfig(layers=2, width=256, heads=4, hidden=512, dropout=0.3)
CPU_FIT = FitConfig(minutes=30, token_budget=1600, learning_rate=2e-3)
PRESETS = {
    # Seconds to minutes: for tests and the demo.
    "tiny": TrainConfig(
        "maskgr",
        MaskGRConfig(
            TransformerConfig(layers=2, width=64, heads=2, hidden=256),
            items="text",
            sids=SidsConfig(quantizer=QuantizerConfig(levels=3, codes=64), unique="share"),
        ),
        FitConfig(steps=600, token_budget=2048, learning_rate=3e-3, validations=6),
    ),
    # A laptop, over lunch.
    "cpu": TrainConfig(
        "maskgr",
        MaskGRConfig(
            CPU_ENCODER,
            denoiser_share=0.15,
            sids=SidsConfig(unique="share"),
            decoding=DecodingConfig(steps=2),
        ),
        CPU_FIT,
        history_limit=200,
    ),
    # The same with digits alone: no item has a vector of its own, as in the paper.
    "digits": TrainConfig(
        "maskgr",
        MaskGRConfig(
            CPU_ENCODER,
            vectors="digits",
            neighbours=0,
            denoiser_share=0.4,
            sids=SidsConfig(quantizer=QuantizerConfig(levels=16), unique="share"),
            decoding=DecodingConfig(steps=2),
        ),
        CPU_FIT,
        history_limit=200,
    ),
}
