"""How items become semantic IDs: the settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class EncoderConfig:
    """How an item's text becomes a vector."""

    encoder: str = "auto"
    """`wordllama`, `sentence-transformers:MODEL`, `huggingface:MODEL` or `embeddings` (given);
    auto is `embeddings` where the dataset has some, else `wordllama`."""
    template: str | None = None
    """How columns become text (see `maskgr.sids.text`); None: all columns, labelled."""
    max_tokens: int = 512
    """Longer texts are cut here, or at the model's own limit where that is lower."""
    batch_size: int = 64
    """Texts at a time; less memory with fewer."""
    device: str = "auto"
    """Where a model runs: `auto` (cuda, then mps, then cpu) or a torch device. Not WordLlama."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """The model's precision; `auto` is bfloat16 on cuda and float32 elsewhere. Not WordLlama."""


@dataclass(frozen=True)
class QuantizerConfig:
    """How vectors become digits."""

    quantizer: Literal["residual-kmeans", "rqvae", "pq", "opq", "random", "item-id"] = (
        "residual-kmeans"
    )
    """Which quantiser: see `maskgr.sids.quantizers.QUANTIZERS`."""
    levels: int = 4
    """Digits of a semantic ID (for pq and opq: blocks of the vector)."""
    codes: int = 256
    """Codes at each level."""
    seed: int = 0
    """Same seed and vectors, same digits."""
    components: int = 32
    """Principal components that residual k-means works in; 0 takes the vectors as they are."""
    restarts: int = 3
    """K-means runs from different starting points, of which the best is kept."""
    sample: int = 256
    """Vectors a code, at most, that k-means is fitted on; all are then assigned."""
    rqvae_hidden: tuple[int, ...] = (512, 256)
    """Widths of the RQ-VAE encoder's hidden layers; the decoder mirrors them."""
    rqvae_latent: int = 32
    """Width of the space in which the RQ-VAE quantises."""
    rqvae_steps: int = 1500
    """Optimiser steps of the RQ-VAE."""
    rqvae_batch: int = 1024
    """Vectors a step of the RQ-VAE."""
    rqvae_learning_rate: float = 1e-3
    """Peak learning rate of the RQ-VAE, after warm-up."""
    rqvae_weight_decay: float = 1e-4
    """Weight decay on the RQ-VAE's matrices."""
    rqvae_commitment: float = 0.25
    """Weight of the loss that keeps the RQ-VAE's latents close to their codes."""
    rqvae_estimator: Literal["straight-through", "rotation"] = "rotation"
    """How gradients pass the RQ-VAE's codebooks (rotation: Fifty et al., 2024)."""
    device: str = "auto"
    """Where the RQ-VAE is trained: auto (cuda, else mps, else cpu) or a torch device."""
