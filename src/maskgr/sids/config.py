"""Settings of semantic IDs: text encoder, quantiser and uniqueness policy."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from maskgr.errors import RequestError
from maskgr.settings import require_choice, require_numbers

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
QuantizerName = Literal["residual-kmeans", "rqvae", "pq", "opq", "random", "item-id"]
Policy = Literal["append", "reassign", "share"]


@dataclass(frozen=True)
class EncoderConfig:
    """How an item's text becomes a vector."""

    encoder: str = "auto"
    """`wordllama`, `sentence-transformers:MODEL`, `huggingface:MODEL` or `embeddings` (given);
    auto is `embeddings` where the dataset has some, else `wordllama`."""
    template: str | None = None
    """How columns become text (see `maskgr.sids.text`); None: the text columns, labelled."""
    text: tuple[str, ...] = ()
    """The columns that are text where there is no template; empty: those of the dataset."""
    max_tokens: int = 512
    """Longer texts are cut here, or at the model's own limit where that is lower."""
    batch_size: int = 64
    """Texts per batch; fewer need less memory."""
    dtype: Dtype = "auto"
    """The model's precision; `auto` is bfloat16 on cuda and float32 elsewhere. Not WordLlama."""

    def __post_init__(self) -> None:
        kind, _, model = self.encoder.partition(":")
        names_model = kind in ("sentence-transformers", "huggingface") and model
        if self.encoder not in ("auto", "wordllama", "embeddings") and not names_model:
            raise RequestError(
                f"encoder is {self.encoder!r}; give auto, wordllama, embeddings, "
                "sentence-transformers:MODEL or huggingface:MODEL"
            )
        require_numbers(self, max_tokens=(1, 1_000_000), batch_size=(1, 1_000_000))
        object.__setattr__(self, "text", tuple(self.text))  # JSON has lists
        require_choice("dtype", self.dtype, Dtype)


@dataclass(frozen=True)
class QuantizerConfig:
    """How vectors become digits."""

    quantizer: QuantizerName = "residual-kmeans"
    """The quantiser: see `maskgr.sids.quantizers.QUANTIZERS`."""
    levels: int = 4
    """Digits of a semantic ID (for pq and opq: blocks of the vector)."""
    codes: int = 256
    """Codes per level."""
    components: int = 32
    """Principal components of a text embedding that residual k-means works in; 0 keeps all
    dimensions. Learned vectors are never projected."""
    rqvae_latent: int = 32
    """Width of the space in which the RQ-VAE quantises."""
    rqvae_steps: int = 1500
    """Optimiser steps of the RQ-VAE."""

    def __post_init__(self) -> None:
        require_choice("quantizer", self.quantizer, QuantizerName)
        require_numbers(
            self,
            levels=(1, 64),
            codes=(2, 1_000_000),
            components=(0, 65_536),
            rqvae_latent=(1, 65_536),
            rqvae_steps=(1, 10**8),
        )


@dataclass(frozen=True)
class SidsConfig:
    """How items become semantic IDs."""

    encoder: EncoderConfig = field(default_factory=EncoderConfig)
    quantizer: QuantizerConfig = field(default_factory=QuantizerConfig)
    unique: Policy = "append"
    """What happens to items with equal digits (see `maskgr.sids.uniqueness`)."""

    def __post_init__(self) -> None:
        require_choice("unique", self.unique, Policy)


@dataclass(frozen=True)
class FitOptions:
    """Options of one fit of a quantiser that are not settings: see `fit_quantizer`."""

    normalise: bool
    seed: int
    device: str
    progress: bool
