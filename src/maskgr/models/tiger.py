"""TIGER (Rajput et al., 2023): an encoder-decoder generates the next item's semantic ID.

The encoder reads the digits of a history's items, the decoder generates the digits of the next item
from left to right, each given those before it. It is trained in one of two ways. As published, the
encoder is bidirectional, and a sequence has one target a pass. In the compact form an item sees
itself and earlier items only, so that one pass encodes every prefix of a history, and every item of
a sequence is a target.

Where the published network is a T5, this one has rotary positions for relative position biases,
LayerNorm for RMSNorm and GELU for ReLU; a learned start token stands where T5X's inputs have the
hashed user ID, which a recommender that answers for any history does not have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from maskgr.data.sequences import Counts, Sequences
from maskgr.decoding.config import DecodingConfig, Retrieval
from maskgr.decoding.matching import distinct
from maskgr.errors import RequestError
from maskgr.models.base import TrainConfig
from maskgr.models.generative import Generative
from maskgr.nn.digit_tokens import DigitTokens
from maskgr.nn.encoder_decoder import (
    CrossGroup,
    Decoder,
    EncoderDecoderConfig,
    Past,
    history_mask,
    target_mask,
)
from maskgr.nn.transformer import Dropout, Encoder, Layout, causal_mask
from maskgr.sids.config import QuantizerConfig, SidsConfig
from maskgr.sids.semantic_ids import SemanticIds
from maskgr.training.batches import by_length
from maskgr.training.fit import Batch, FitConfig

TOKENS = 65_536  # that go through the network at once without a cache


@dataclass(frozen=True)
class TigerConfig:
    """An autoregressive encoder-decoder over semantic IDs."""

    sids: SidsConfig = field(default_factory=SidsConfig)
    network: EncoderDecoderConfig = field(default_factory=EncoderDecoderConfig)
    decoding: DecodingConfig = field(default_factory=lambda: DecodingConfig(order="left-to-right"))


class Encoded(NamedTuple):
    """Histories behind the encoder."""

    states: Tensor  # (tokens, width) of a start token and the digits of each history
    layout: Layout


class TargetItems(NamedTuple):
    """The items that a batch predicts, sequence after sequence."""

    numbers: Tensor  # (targets,)
    seen: Tensor  # (targets,) how many items of its sequence come before each
    weights: Tensor | None  # (targets,) factors on their losses; None: all 1


class Tiger(Generative):
    """The network, and the model: it is trained by `fit` and generates items."""

    about: ClassVar = "autoregressive encoder-decoder over semantic IDs"
    Config: ClassVar[type[Any]] = TigerConfig
    piece_tokens: int | None = 2048  # hidden states of this many tokens stay near a CPU
    retrievals: ClassVar[tuple[Retrieval, ...]] = ("generative",)  # the first is its own

    def __init__(self, config: TrainConfig, sids: SemanticIds, counts: Counts) -> None:
        super().__init__(config, sids, counts)
        own: EncoderDecoderConfig = config.model.network
        self.network = own
        self.tokens = DigitTokens(own.width, sids.codebook_sizes, others=2, logits=own.logits)
        self.dropout = Dropout(own.dropout)
        self.encoder = Encoder(own)
        self.decoder = Decoder(own)

    @property
    def history_start(self) -> int:
        """The token before every history."""
        return self.tokens.starts[-1]

    @property
    def target_start(self) -> int:
        """The token before the digits of every target."""
        return self.history_start + 1

    def digit_tokens(self) -> DigitTokens:
        return self.tokens

    # The network

    def encode(self, histories: Sequences) -> Encoded:
        """Histories, shortest first, each behind a start token."""
        layout = Layout.of((histories.lengths * self.levels + 1).tolist(), self.device)
        numbers = torch.from_numpy(histories.values).to(self.device).long()
        places = torch.from_numpy(histories.places).to(self.device)
        start = self.tokens.embed(torch.tensor([self.history_start], device=self.device))
        digits = self.embed_items(numbers, places).flatten(0, 1)
        is_digit = layout.positions > 0
        place = torch.where(is_digit, is_digit.cumsum(0), 0)
        embedded = torch.cat([start, digits]).index_select(0, place)
        masks: list[Tensor | None] = [None] * len(layout.groups)
        if self.network.attention == "causal":
            masks = [
                history_mask((length - 1) // self.levels, self.levels, self.device)
                for _, length in layout.groups
            ]
        states, _ = self.encoder(self.dropout(embedded), layout, masks)
        return Encoded(states, layout)

    def embed_items(self, numbers: Tensor, places: Tensor) -> Tensor:
        """(items, levels, width) of items `numbers` (items,) at `places` (items,) of histories."""
        return self.tokens.embed(self.tokens.numbers(self.codes[numbers]))

    def embed_targets(self, codes: Tensor) -> Tensor:
        """(targets, digits + 1, width) of a start token and the first digits (targets, digits)."""
        start = codes.new_full((len(codes), 1), self.target_start)
        return self.tokens.embed(torch.cat([start, self.tokens.numbers(codes)], 1))

    def predict(self, encoded: Encoded, targets: TargetItems) -> Tensor:
        """(targets, levels, width) hidden states, each of which predicts a digit from those before
        it and from the items before the target."""
        m, device = self.levels, self.device
        embedded = self.embed_targets(self.codes[targets.numbers][:, :-1])
        positions = 1 + targets.seen[:, None] * m + torch.arange(m, device=device)
        owners = torch.arange(len(positions), device=device).repeat_interleave(m)
        layout = Layout(((len(positions), m),), positions.flatten(), owners)
        hidden: Tensor = self.decoder(
            self.dropout(embedded.flatten(0, 1)),
            layout,
            [causal_mask(m, device)],
            self.decoder.remember(*encoded),
            [self._cross_group(*group) for group in encoded.layout.groups],
        )
        return hidden.view_as(embedded)

    def _cross_group(self, sequences: int, tokens: int) -> CrossGroup:
        """Sequences of one target each behind their history, or of a target at every place."""
        m = self.levels
        if self.network.attention == "full":
            return CrossGroup(sequences, m, tokens, None)
        n_targets = (tokens - 1) // m + 1
        mask = target_mask(n_targets, m, self.device)
        return CrossGroup(sequences, n_targets * m, tokens, mask)

    # Training

    def prepare(self, sequences: Sequences, generator: torch.Generator) -> Batch:
        """As published, one target a sequence: the item behind a random part of it, which is not
        empty unless the sequence has one item. The compact form predicts every item."""
        if self.network.attention == "full":
            draws = torch.rand(len(sequences), generator=generator).numpy()
            ends = 1 + (draws * (sequences.lengths - 1)).astype(np.int64)
            ends = np.minimum(ends, sequences.lengths - 1)
            kept = sequences.places <= np.repeat(ends, sequences.lengths)
            sequences = by_length(sequences.keep(kept))
            last = np.zeros(len(sequences.values), dtype=bool)
            last[sequences.offsets[1:] - 1] = True
            return Batch(sequences, sequences.keep(last).total_weight * self.levels)
        return Batch(sequences, sequences.total_weight * self.levels)

    def forward(self, batch: Batch) -> Tensor:
        """() the summed loss of the batch's targets."""
        if not len(batch.sequences):  # more processes than sequences
            return 0 * sum((p.sum() for p in self.parameters()), self.tokens.bias.sum())
        return self.loss(
            self.encode(batch.sequences.without_last()), self._targets(batch.sequences)
        )

    def _targets(self, sequences: Sequences) -> TargetItems:
        chosen = slice(None) if self.network.attention == "causal" else sequences.offsets[1:] - 1
        values, places = sequences.values[chosen], sequences.places[chosen]
        weights = None if sequences.weights is None else torch.from_numpy(sequences.weights[chosen])
        return TargetItems(
            torch.from_numpy(values).to(self.device).long(),
            torch.from_numpy(places).to(self.device),
            None if weights is None else weights.to(self.device),
        )

    def loss(self, encoded: Encoded, targets: TargetItems) -> Tensor:
        """() cross-entropy summed over the digits of the targets."""
        hidden = self.predict(encoded, targets)
        return self.tokens.cross_entropy(hidden, self.codes[targets.numbers], targets.weights)

    # Retrieval

    def resolved(self, decoding: DecodingConfig) -> DecodingConfig:
        name = self.config.name
        for setting in ("guidance", "remask"):
            if getattr(decoding, setting):
                raise RequestError(f"{name} has no {setting}; leave --{setting} out, or use maskgr")
        if decoding.order != "left-to-right":
            raise RequestError(
                f"{name} generates digits from left to right, not in {decoding.order} order; leave "
                "--order out"
            )
        if decoding.steps not in (0, self.levels):
            raise RequestError(
                f"{name} generates one digit a step, {self.levels} in all, not in "
                f"{decoding.steps}; leave --steps out"
            )
        kind = self.retrievals[0] if decoding.retrieval == "auto" else decoding.retrieval
        if kind not in self.retrievals:
            raise RequestError(
                f"{name} has no {kind} retrieval; leave --retrieval out, or train liger"
            )
        cache = "frozen" if decoding.cache == "auto" else decoding.cache
        return replace(decoding, retrieval=kind, cache=cache, steps=self.levels)

    def denoiser(self, histories: Sequences, decoding: DecodingConfig) -> LeftToRight:
        return LeftToRight(self, histories, cached=decoding.cache == "frozen")


class _Kept(NamedTuple):
    """Keys and values of the tokens of partly generated targets, the start token first."""

    user: Tensor  # (rows,)
    digits: Tensor  # (rows, digits)
    layers: list[tuple[Tensor, Tensor]]  # (rows, heads, digits + 1, width of a head) of each block

    def at(self, rows: Tensor) -> list[tuple[Tensor, Tensor]]:
        return [
            (keys.index_select(0, rows), values.index_select(0, rows))
            for keys, values in self.layers
        ]


class _Extend:
    """A block's memory: puts the cached keys and values before the new ones, and keeps both."""

    def __init__(self, cached: tuple[Tensor, Tensor] | None) -> None:
        self.cached = cached

    def __call__(self, group: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        if self.cached is not None:
            keys = torch.cat([self.cached[0], keys], 2)
            values = torch.cat([self.cached[1], values], 2)
        self.cached = keys, values
        return keys, values


class LeftToRight:
    """Users' histories, shortest first, as a `maskgr.decoding.denoiser.Denoiser` that knows the
    next digit of a target whose first digits are revealed.

    With a cache, histories are encoded once, and a step computes one token of each beam: the keys
    and values of those before it are the ones of the beam that it continues, which is found among
    the targets of the step before by its user and digits.
    """

    items = 1

    def __init__(self, model: Tiger, histories: Sequences, *, cached: bool) -> None:
        self.model, self.histories, self.cached = model, histories, cached
        lengths = torch.from_numpy(histories.lengths).to(model.device) * model.levels + 1
        self.lengths, self.offsets = lengths, lengths.cumsum(0) - lengths  # (users,) in tokens
        self._start: _Kept | None = None  # of targets without a digit
        self._last: _Kept | None = None  # of the targets of the step before

    @property
    def codebook_sizes(self) -> tuple[int, ...]:
        return self.model.tokens.sizes

    @property
    def users(self) -> int:
        return len(self.lengths)

    @cached_property
    def encoded(self) -> Encoded:
        return self.model.encode(self.histories)

    @cached_property
    def _pasts(self) -> list[Past]:
        return self.model.decoder.remember(*self.encoded)

    @torch.no_grad()
    def first(self) -> list[Tensor]:
        """Log-probabilities of the first level; the order asks for no other."""
        user = torch.arange(self.users, device=self.lengths.device)
        found = self._next(user, user.new_empty((self.users, 0)))
        others = [found.new_zeros(()).expand(self.users, 1, n) for n in self.codebook_sizes[1:]]
        return [found[:, None], *others]

    @torch.no_grad()
    def __call__(
        self, user: Tensor, digits: Tensor, revealed: Tensor, wanted: Tensor
    ) -> list[Tensor]:
        level = int(revealed[0].sum())
        levels = torch.arange(self.model.levels, device=user.device)
        assert (revealed == (levels < level)).all()
        assert (wanted == (levels == level)).all()
        found = self._next(user, digits[:, 0, :level])
        return [
            found if place == level else found.new_empty((0, size))
            for place, size in enumerate(self.codebook_sizes)
        ]

    def _next(self, user: Tensor, digits: Tensor) -> Tensor:
        """(rows, codes) log-probabilities of the level behind the first `digits` (rows, any)."""
        level = digits.shape[1]
        if not self.cached:
            return self.model.tokens.log_probs(self._one_by_one(user, digits), level)
        known = self._parents(user, digits)
        hidden, kept = self._decode(user, digits, known)
        if level == 0:
            self._start = kept
        else:
            self._last = kept
        return self.model.tokens.log_probs(hidden, level)

    def _parents(self, user: Tensor, digits: Tensor) -> list[tuple[Tensor, Tensor]] | None:
        """The cached keys and values of each row's user and digits but the last; None where some
        are not known."""
        level = digits.shape[1]
        known = self._start if level == 1 else self._last
        if known is None or known.digits.shape[1] != level - 1:
            return None
        pairs = zip(known.digits.unbind(1), digits[:, :-1].unbind(1), strict=True)
        columns = [torch.cat([known.user, user]), *(torch.cat(pair) for pair in pairs)]
        numbers, _ = distinct(columns, [self.users, *self.codebook_sizes[: level - 1]])
        before, own = torch.split(numbers, [len(known.user), len(user)])
        row = torch.full_like(numbers, -1)
        row[before] = torch.arange(len(before), device=user.device)
        parents = row[own]
        return None if (parents < 0).any() else known.at(parents)

    def _decode(
        self, user: Tensor, digits: Tensor, cached: Sequence[tuple[Tensor, Tensor]] | None
    ) -> tuple[Tensor, _Kept]:
        """(rows, width) hidden states behind `digits` (rows, any); with the `cached` keys and
        values of all tokens but the last, that one alone is computed."""
        embedded = self.model.embed_targets(digits)
        level, new = digits.shape[1], 1 if cached else embedded.shape[1]
        within = torch.arange(level + 1 - new, level + 1, device=user.device)
        layout = Layout(
            ((len(user), new),),
            (self.lengths[user][:, None] + within).flatten(),
            torch.arange(len(user), device=user.device).repeat_interleave(new),
        )
        memories = [_Extend(own) for own in cached or (None,) * len(self._pasts)]
        hidden = self.model.decoder(
            embedded[:, -new:].flatten(0, 1),
            layout,
            [None if cached else causal_mask(new, user.device)],
            *self._histories_of(user, new),
            memories,
        )
        layers = [memory.cached for memory in memories if memory.cached is not None]
        return hidden.view(len(user), new, -1)[:, -1], _Kept(user, digits, layers)

    def _histories_of(self, user: Tensor, tokens: int) -> tuple[list[Past], list[CrossGroup]]:
        """What rows of `tokens` each look back at. All beams of a user share one history."""
        users, beams = torch.unique_consecutive(user, return_counts=True)
        lengths = self.lengths[users].tolist()
        runs = groupby(zip(beams.tolist(), lengths, strict=True))
        groups = [
            CrossGroup(len(list(run)), n_beams * tokens, length, None)
            for (n_beams, length), run in runs
        ]
        if len(users) == self.users:
            return self._pasts, groups
        layout = Layout.of(lengths, user.device)
        index = self.offsets[users][layout.sequences] + layout.positions
        return [
            Past(*(part.index_select(0, index) for part in past)) for past in self._pasts
        ], groups

    def _one_by_one(self, user: Tensor, digits: Tensor) -> Tensor:
        """The hidden states of `_decode` where every row encodes its history anew."""
        step = max(1, TOKENS // (int(self.lengths.max()) + digits.shape[1] + 1))
        parts = []
        for rows in torch.split(torch.arange(len(user), device=user.device), step):
            histories = self.histories.select(user[rows].cpu().numpy())
            own = LeftToRight(self.model, histories, cached=False)
            parts.append(own._decode(rows - rows[0], digits[rows], None)[0])
        return torch.cat(parts)


TINY = EncoderDecoderConfig(layers=1, width=64, heads=2, hidden=128, decoder_layers=1)
CPU = EncoderDecoderConfig(layers=2, width=128, heads=4, hidden=512, dropout=0.2)
# Rajput et al., Section 4 and Appendix: 4 + 4 layers, 6 heads of 64, ReLU, 1,024, dropout 0.1.
PUBLISHED = EncoderDecoderConfig(
    layers=4,
    width=128,
    heads=6,
    hidden=1024,
    decoder_layers=4,
    head_width=64,
    attention="full",
    logits="vocabulary",
)
# Three digits of an RQ-VAE on the texts, and a fourth that tells items with equal digits apart.
PUBLISHED_SIDS = SidsConfig(quantizer=QuantizerConfig(quantizer="rqvae", levels=3))
# 256 sequences a batch, 200,000 steps with Adafactor at 0.01 and inverse square root decay. Public
# re-implementations reach the same in 30,000 steps with AdamW, warm-up and cosine decay.
PUBLISHED_FIT = FitConfig(
    steps=30_000, token_budget=7168, learning_rate=1e-3, ema=0.0, validations=30
)
TINY_SIDS = SidsConfig(quantizer=QuantizerConfig(levels=3, codes=64), unique="reassign")
TINY_FIT = FitConfig(steps=200, token_budget=3072, learning_rate=3e-3, validations=4)
CPU_SIDS = SidsConfig(quantizer=QuantizerConfig(levels=3))  # and the digit that is appended
CPU_FIT = FitConfig(minutes=40, token_budget=1600, learning_rate=2e-3)

Tiger.presets = {
    "tiny": TrainConfig("tiger", TigerConfig(TINY_SIDS, TINY), TINY_FIT),
    # Compact: a history is encoded once, and every item of a sequence is a target.
    "cpu": TrainConfig("tiger", TigerConfig(CPU_SIDS, CPU), CPU_FIT),
    # An estimate: fifteen hours on two cores.
    "published": TrainConfig("tiger", TigerConfig(PUBLISHED_SIDS, PUBLISHED), PUBLISHED_FIT),
}
