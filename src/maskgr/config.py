"""Every setting and its default, as frozen dataclasses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from maskgr.errors import RequestError


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

    encoder: str = "auto"
    """`wordllama`, `sentence-transformers:MODEL`, `huggingface:MODEL` or `embeddings` (given);
    auto is `embeddings` where the dataset has some, else `wordllama`."""
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
class NetworkConfig:
    """The transformer that fills in masked digits."""

    layers: int = 4
    width: int = 128
    """Entries of a token's state."""
    heads: int = 4
    """Attention heads, each with an equal part of the width."""
    hidden: int = 512
    """Entries between the two linear maps of a layer."""
    dropout: float = 0.1
    """Share of entries dropped from the embeddings and from what each layer adds."""
    attention: Literal["full", "isolated", "causal"] = "full"
    """Who sees whom: everybody (paper), the history not the item being predicted, an item earlier
    ones only, with every item of a history predicted at once."""
    history: Literal["tokens", "pooled"] = "tokens"
    """What an item of the history is: its digits (paper), or one vector (causal attention only)."""
    history_layers: int = 0
    """Layers that the history passes alone before the masked digits join (causal attention)."""
    logits: Literal["level", "vocabulary"] = "level"
    """Over which tokens probabilities are normalised: the level's own, or all (paper)."""


@dataclass(frozen=True)
class DenseConfig:
    """Text as an input, and the head that predicts the next item's vector (paper, section 3.3)."""

    text_input: bool = False
    """The text embedding of an item that is wholly visible joins its digits."""
    table: Literal["off", "text", "learned"] = "off"
    """What items are ranked by: nothing, their text embeddings (paper), or vectors learned from
    digits, text and a part of their own."""
    layer: int = 0
    """The head reads the states after so many layers; 0 is the last."""
    hidden: int = 256
    """Entries between the two maps of the head; 0 is one linear map."""
    rank: int = 32
    """Of the head's maps, each kept as two factors; 0 is full rank."""
    similarity: Literal["product", "cosine"] = "product"
    """Of a prediction and an item: the plain product (paper), or that of normalised vectors."""
    temperature: float = 1.0
    """Similarities are divided by it; 0 takes the square root of the vectors' width."""
    learn_temperature: bool = False
    """Whether it is only where learning starts from."""
    negatives: int = 0
    """Items a batch that stand for the catalogue (log-q corrected sampled softmax); 0 takes all."""
    weight: float = 1.0
    """Of the dense loss beside the digits'."""
    repeat_bias: bool = False
    """Learn how much less, or more, likely the items of a history are to come again."""
    followers: int = 0
    """Items remembered with each item because they came soon after it, at most; those that followed
    a history's last items score higher, by a weight chosen on validation. 0 remembers none."""
    index: Literal["exact", "hnsw"] = "exact"
    """How the nearest items are searched; hnsw is approximate, for catalogues over a million."""


@dataclass(frozen=True)
class ObjectiveConfig:
    """What is masked in training, and what a masked digit may be."""

    masking: Literal["diffusion", "fixed"] = "diffusion"
    """A noise level drawn for each sequence (paper), or the same for all (BERT4Rec)."""
    fixed_ratio: float = 0.15
    """The noise level where masking is fixed."""
    last_item_share: float = 0.0
    """Share of sequences in which only digits of the last item are masked: what inference meets."""
    whole_item: float = 0.0
    """Share of the other sequences in which items are masked whole or not at all; with causal
    attention, of items that are masked whole."""
    copies: int = 1
    """Of each item, masked each in its own way behind the same history, which passes its own layers
    once (causal attention)."""
    catalogue_aware: bool = False
    """A digit's probabilities run over the codes that some item with the revealed digits has."""
    distil: float = 0.0
    """Share of the items to be filled in that are drawn from what the dense head expects, instead
    of those that came (causal attention, and a dense head trained on the whole catalogue)."""


@dataclass(frozen=True)
class LoopConfig:
    """How long and how a network is trained."""

    steps: int = 1000
    """Optimiser steps; the learning rate falls to zero over them."""
    minutes: float = 0.0
    """If set, a wall-clock budget instead of `steps`: the schedule is fitted to it."""
    token_budget: int = 16_384
    """Tokens of a batch, at most."""
    accumulate: int = 1
    """Batches an optimiser step."""
    learning_rate: float = 1e-3
    """Peak, after warm-up."""
    warmup: float = 0.05
    """Share of the steps over which the learning rate rises."""
    weight_decay: float = 1e-3
    """On matrices only."""
    clip: float = 1.0
    """Largest norm of the gradient."""
    ema: float = 0.999
    """Decay of the averaged weights, which are what is validated and kept; 0 keeps the last."""
    validations: int = 20
    """How often, evenly over the steps, recall@10 is measured on a fixed sample of users."""
    validation_users: int = 2000
    """Users of that sample."""
    patience: int = 0
    """Stop after so many validations without a better network; 0 never does."""
    checkpoint_minutes: float = 2.0
    """Between checkpoints, which are what an interrupted run resumes from."""
    device: str = "auto"
    """auto (cuda, else mps, else cpu) or a torch device."""


@dataclass(frozen=True)
class DecodingConfig:
    """How the next item is found."""

    retrieval: Literal["auto", "generative", "dense", "unified", "fused"] = "auto"
    """By unmasking its digits, by the dense head, by the dense head among the beams, by the sum of
    both scores; auto is fused, or the one of the two that there is or that has all the weight."""
    order: Literal["greedy", "left-to-right", "random"] = "greedy"
    """Which digits come first: the surest (paper), from the left, any."""
    steps: int = 0
    """Evaluations of the network; 0 is one for every digit, 1 scores the whole catalogue."""
    beams: int = 20
    """Partly unmasked items kept after each step; at least as many as are asked for."""
    cache: Literal["auto", "off", "frozen"] = "auto"
    """Whether the history is encoded once (frozen) or for every beam and step (off); auto is
    frozen where that is exact."""
    constrained: bool = True
    """Only digits that some item of the catalogue has."""
    seed: int = 0
    """Of the random order."""


@dataclass(frozen=True)
class TrainConfig:
    """All of a run: what is trained, on which part of the histories, and how."""

    model: str = "maskgr"
    """One of `maskgr.models.registry.MODELS`."""
    leave_out: int = 1
    """Items held out at each history's end, for the test and again for the validation."""
    sparsify: float = 0.0
    """The share of each training sequence that is dropped (the paper's data-constrained study)."""
    history_limit: int = 20
    """How many of a user's most recent items the model sees when it recommends."""
    seed: int = 0
    """Fixes every random choice."""
    unique: Literal["append", "reassign", "share"] = "append"
    """What happens to items with equal digits."""
    collaborative: float = 0.0
    """Share of the training that goes to the dense head alone, whose item vectors semantic IDs are
    then made of; 0 leaves them made of text. IDs that are given are used as they are."""
    encoder: EncoderConfig = field(default_factory=EncoderConfig)
    quantizer: QuantizerConfig = field(default_factory=QuantizerConfig)
    network: NetworkConfig = field(default_factory=NetworkConfig)
    dense: DenseConfig = field(default_factory=DenseConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    loop: LoopConfig = field(default_factory=LoopConfig)
    decoding: DecodingConfig = field(default_factory=DecodingConfig)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TrainConfig:
        """The inverse of `dataclasses.asdict`, also after a way through JSON."""
        parts = {
            f.name: type(f.default_factory()) for f in fields(cls) if callable(f.default_factory)
        }
        return cls(**{k: _of(parts[k], v) if k in parts else v for k, v in values.items()})


def _of(kind: type[Any], values: Mapping[str, Any]) -> Any:
    # JSON has lists where the dataclasses have tuples.
    return kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})


PRESETS = {
    # Seconds to minutes: for tests and the demo.
    "tiny": TrainConfig(
        quantizer=QuantizerConfig(levels=3, codes=64),
        network=NetworkConfig(layers=2, width=64, heads=2, hidden=256),
        loop=LoopConfig(steps=600, token_budget=8192, learning_rate=3e-3, validations=6),
    ),
    # A laptop, over lunch. Every item is predicted from the clean history before it, which is what
    # inference meets; no capacity goes into learning which tuples exist; a dense head is trained
    # first, and then left as it is; semantic IDs are made of what it learned of the items, and it
    # teaches the digits what else might have come. Which single item follows which is
    # remembered beside.
    "cpu": TrainConfig(
        unique="reassign",
        collaborative=0.3,
        network=NetworkConfig(
            layers=1, history_layers=2, width=256, dropout=0.3, attention="causal", history="pooled"
        ),
        dense=DenseConfig(
            text_input=True,
            table="learned",
            hidden=0,
            rank=0,
            temperature=0.0,
            repeat_bias=True,
            followers=128,
        ),
        objective=ObjectiveConfig(catalogue_aware=True, distil=0.8, copies=2),
        loop=LoopConfig(minutes=30, token_budget=6400, learning_rate=2e-3),
        decoding=DecodingConfig(steps=1),
    ),
    # As published: Section 4.1 and the appendix. Its batch of 8,192 histories is 17 budgets.
    "paper": TrainConfig(
        network=NetworkConfig(
            layers=8, width=128, heads=8, hidden=3072, dropout=0.25, logits="vocabulary"
        ),
        quantizer=QuantizerConfig(components=0),
        loop=LoopConfig(steps=20_000, accumulate=17, learning_rate=5e-3, ema=0.0),
    ),
}


def preset_config(name: str) -> TrainConfig:
    if name not in PRESETS:
        raise RequestError(f"there is no preset {name!r}; the presets are {', '.join(PRESETS)}")
    return PRESETS[name]
