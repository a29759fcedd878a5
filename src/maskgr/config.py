"""Every setting and its default, as frozen dataclasses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from maskgr.decoding.config import DecodingConfig
from maskgr.errors import RequestError
from maskgr.sids.config import EncoderConfig, QuantizerConfig


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
class TrainConfig:
    """All of a run: what is trained, on which part of the histories, and how."""

    model: str = "maskgr"
    """One of `maskgr.models.base.MODELS`."""
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
