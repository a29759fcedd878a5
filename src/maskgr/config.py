"""Every setting and its default, as frozen dataclasses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class DataConfig:
    """How events and items become a Dataset."""

    k_core: int = 0
    """Users and items with fewer interactions are dropped, again and again until none is left."""
    unknown_items: Literal["error", "drop", "keep"] = "error"
    """Items in the log but not in the catalogue: refuse, drop their events, keep without text."""
    unused_items: Literal["keep", "drop", "error"] = "keep"
    """Items in the catalogue but not in the log: keep (recommendable), drop, refuse."""
    repeats: Literal["keep", "drop"] = "keep"
    """A user's second event with the same item: keep, or drop all but the first."""


@dataclass(frozen=True)
class SyntheticConfig:
    """The generated shop: its size and the process by which its users move."""

    users: int = 4000
    items: int = 1000
    """From 180 items on all 60 leaf categories are stocked; a smaller shop has fewer leaves."""
    min_length: int = 5
    mean_length: float = 12.0
    max_length: int = 40
    """Events of a user: short histories are the most frequent, the mean is as asked."""
    seed: int = 0
    segments: int = 16
    """Kinds of customer; a user belongs to one, which nobody sees, and it never changes."""
    focus: float = 2.5
    """How few departments and leaves a segment cares for: 0 (all alike) to 8 (hardly two)."""
    repeat: float = 0.1
    """Chance that the next item is one the user already had."""
    recency: float = 0.7
    """Which one: the last event weighs 1, each event before it this many times the one after."""
    complement: float = 0.35
    """Else: chance that the leaf is what goes with the last item's, not what the segment likes."""
    loyalty: float = 0.6
    """Chance that the item is of the last item's brand, where the leaf stocks that brand."""
    skew: float = 1.0
    """Zipf exponent of an item's popularity within its leaf: 0 (all alike) to 3."""


@dataclass(frozen=True)
class EncoderConfig:
    """How an item's text becomes a vector."""

    encoder: str = "wordllama"
    """`wordllama`, `sentence-transformers:MODEL`, `huggingface:MODEL` or `embeddings` (given)."""
    template: str | None = None
    """How columns become text (see `maskgr.items.text`); None: all columns, labelled."""
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
    """Which quantiser: see `maskgr.items.quantizers.QUANTIZERS`."""
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


@dataclass(frozen=True)
class TrainConfig:
    """What is trained, on which part of the histories."""

    model: str = "popularity"
    """One of `maskgr.models.registry.MODELS`."""
    leave_out: int = 1
    """Items held out at each history's end, for the test and again for the validation."""
    sparsify: float = 0.0
    """The share of each training sequence that is dropped (the paper's data-constrained study)."""
    history_limit: int = 20
    """How many of a user's most recent items the model sees when it recommends."""
    seed: int = 0
    """Fixes every random choice."""
