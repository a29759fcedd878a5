"""The settings of MaskGR's two forms: ours, and the paper's."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from maskgr.decoding.config import DecodingConfig
from maskgr.errors import RequestError
from maskgr.nn.transformer import TransformerConfig
from maskgr.settings import require_choice, require_numbers
from maskgr.sids.config import SidsConfig


@dataclass(frozen=True)
class MaskGRConfig:
    """MaskGR as we have it: a catalogue-normalised denoiser on top of a SASRec."""

    transformer: TransformerConfig = field(default_factory=TransformerConfig)
    """The history's encoder."""
    vectors: Literal["learned", "digits"] = "learned"
    """An item's vector is learned from its text and its own ID, or, after the semantic IDs are
    made, it is the sum of one vector a digit: then no item has a vector of its own."""
    items: Literal["auto", "id", "text", "both"] = "auto"
    """Learned vectors are made of IDs, of texts with IDs on top, or of both side by side (see
    `maskgr.nn.item_vectors`). `auto` trains one history encoder with `text` and one with `both`,
    and keeps the better on validation; without texts it is `id`."""
    session: int = 1
    """Next items that can be generated together, at most; the denoiser is trained for it."""
    repeat_bias: bool = True
    """Learn how much more, or less, likely the items of a history are to come again."""
    neighbours: int = 128
    """Neighbours kept of each item, which score higher after it; 0 keeps none."""
    loss: Literal["softmax", "sampled"] = "softmax"
    """Cross-entropy over all items (up to 100,000 on a CPU), or over sampled ones."""
    negatives: int = 1024
    """Items that a batch is contrasted with where the loss is `sampled`."""
    denoiser_share: float = 0.2
    """Share of the training that goes to the denoiser, after the history's encoder; semantic IDs
    are made of the item vectors in between."""
    sids: SidsConfig = field(default_factory=SidsConfig)
    decoding: DecodingConfig = field(default_factory=DecodingConfig)

    def __post_init__(self) -> None:
        require_choice("vectors", self.vectors, Literal["learned", "digits"])
        require_choice("items", self.items, Literal["auto", "id", "text", "both"])
        require_choice("loss", self.loss, Literal["softmax", "sampled"])
        require_numbers(
            self,
            session=(1, 100),
            neighbours=(0, 100_000),
            negatives=(1, 10**8),
            denoiser_share=(0.001, 0.999),
        )
        if self.repeat_bias and self.loss != "softmax":
            raise RequestError(
                f"repeat_bias goes with loss=softmax, not with {self.loss}; leave one out"
            )
        levels = self.sids.quantizer.levels + (self.sids.unique == "append")
        if self.decoding.steps > levels:
            raise RequestError(
                f"decoding.steps is {self.decoding.steps}, but semantic IDs have {levels} digits; "
                f"give 0 to {levels}"
            )


@dataclass(frozen=True)
class NetworkConfig(TransformerConfig):
    """The paper's bidirectional encoder (Section 3.1)."""

    attention: Literal["full", "isolated"] = "full"
    """Everything sees everything (paper), or the history does not see the item being predicted:
    then its keys and values can be cached exactly."""
    logits: Literal["level", "vocabulary"] = "level"
    """Probabilities run over the level's own codes, or over those of all levels (paper)."""
    level_embedding: bool = False
    """Add a learned vector of its level to every token. The paper has one [MASK] and relative
    positions alone: masked digits then have to learn from their neighbours which level they are,
    and until then every level is predicted alike."""


@dataclass(frozen=True)
class DenseConfig:
    """Text as an input, and the head that predicts the next item's embedding (Section 3.3)."""

    head: bool = False
    """Whether there is one."""
    layer: int = 0
    """The head reads the hidden states after this many layers; 0 is the last."""
    hidden: int = 256
    """Entries between the two maps of the head."""
    rank: int = 32
    """Rank of each map, kept as two factors; 0 is full rank."""

    def __post_init__(self) -> None:
        require_numbers(self, "dense.", layer=(0, 1000), hidden=(1, 1_000_000), rank=(0, 65_536))


@dataclass(frozen=True)
class ObjectiveConfig:
    """Which tokens are masked in training, and what a masked digit may be (Section 3.1)."""

    masking: Literal["diffusion", "fixed"] = "diffusion"
    """A noise level drawn for each sequence (paper), or the same for all (BERT4Rec)."""
    fixed_ratio: float = 0.15
    """The noise level where masking is fixed."""
    last_item_share: float = 0.0
    """Share of sequences in which only digits of the last item are masked: what inference meets."""
    whole_item: float = 0.0
    """Share of the other sequences in which items are masked whole or not at all (the paper's
    beta, where there is a dense head)."""
    catalogue_aware: bool = False
    """A digit's softmax runs over the codes that some item with the revealed digits has."""

    def __post_init__(self) -> None:
        require_choice("objective.masking", self.masking, Literal["diffusion", "fixed"])
        require_numbers(
            self,
            "objective.",
            fixed_ratio=(0.001, 1),
            last_item_share=(0, 1),
            whole_item=(0, 1),
        )


@dataclass(frozen=True)
class PaperConfig:
    """MaskGR as in the paper: a bidirectional encoder, independent digits."""

    sids: SidsConfig = field(default_factory=SidsConfig)
    network: NetworkConfig = field(default_factory=NetworkConfig)
    dense: DenseConfig = field(default_factory=DenseConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    decoding: DecodingConfig = field(default_factory=DecodingConfig)

    def __post_init__(self) -> None:
        if self.dense.layer > self.network.layers:
            raise RequestError(
                f"dense.layer is {self.dense.layer} in a network of {self.network.layers} layers; "
                f"use 0 to {self.network.layers}"
            )
