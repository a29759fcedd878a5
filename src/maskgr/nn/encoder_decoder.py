"""An encoder-decoder over the digits of semantic IDs, without padding.

The encoder (`maskgr.nn.transformer.Encoder`) reads the digits of a history's items behind a start
token; the decoder reads the digits of a target item as far as they are known, and looks back at
the encoder's states. Positions go on from the history to its target: rotary embeddings tell the
decoder how long ago an item came.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from maskgr.nn.digit_tokens import Logits
from maskgr.nn.transformer import (
    Block,
    Layout,
    Memory,
    TransformerConfig,
    init_near_identity,
    rotary,
    rotate,
)
from maskgr.settings import require_choice, require_numbers

Attention = Literal["full", "causal"]


@dataclass(frozen=True)
class EncoderDecoderConfig(TransformerConfig):
    """The size of an encoder-decoder, and how it is trained."""

    decoder_layers: int = 2
    """Layers of the decoder; `layers` are those of the encoder."""
    head_width: int = 0
    """Entries of an attention head; 0 gives each an equal part of the width."""
    attention: Attention = "causal"
    """`full`: the encoder sees a whole history at once, and a sequence trains one target a pass
    (published); `causal`: an item sees itself and those before it, and every item of a sequence is
    a target."""
    logits: Logits = "level"
    """Probabilities run over the level's own codes, or over those of all levels (published)."""

    def __post_init__(self) -> None:
        require_numbers(self, decoder_layers=(1, 1000), head_width=(0, 65_536))
        require_choice("attention", self.attention, Attention)
        require_choice("logits", self.logits, Logits)
        super().__post_init__()

    @property
    def attention_width(self) -> int:
        return self.heads * self.head_width or self.width


@lru_cache(maxsize=1024)
def history_mask(n_items: int, n_levels: int, device: torch.device) -> Tensor:
    """(tokens, tokens) True where a query (row) may see a key (column): an item's digits see each
    other, earlier items and the start token."""
    item = _items(n_items, n_levels, device)
    return item[None, :] <= item[:, None]


@lru_cache(maxsize=1024)
def target_mask(n_targets: int, n_levels: int, device: torch.device) -> Tensor:
    """(targets x levels, tokens) True where a digit of a target may see a token of the history,
    where every item of a sequence is a target: the items before it and the start token."""
    item = _items(n_targets - 1, n_levels, device)
    target = torch.arange(n_targets, device=device).repeat_interleave(n_levels)
    return item[None, :] <= target[:, None]


def _items(n_items: int, n_levels: int, device: torch.device) -> Tensor:
    """(tokens,) the item of each token, from 1; 0 is the start token."""
    tokens = torch.arange(1 + n_items * n_levels, device=device)
    return (tokens + n_levels - 1) // n_levels


class CrossGroup(NamedTuple):
    """Neighbouring sequences with equally many tokens on both sides of a cross-attention."""

    sequences: int
    queries: int  # decoder tokens of each
    keys: int  # encoder tokens of each
    mask: Tensor | None  # (queries, keys) True where a query may see a key


class Past(NamedTuple):
    """Keys and values of the encoder's states for one layer of the decoder."""

    keys: Tensor  # (tokens, heads, width of a head)
    values: Tensor  # (tokens, heads, width of a head)


class DecoderBlock(Block):
    """Pre-norm self-attention, cross-attention and a feed-forward network: residual branches."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self.cross_norm = nn.LayerNorm(config.width)
        self.cross_queries = nn.Linear(config.width, config.attention_width)
        self.cross_keys_values = nn.Linear(config.width, 2 * config.attention_width)
        self.cross_out = nn.Linear(config.attention_width, config.width)

    def remember(self, states: Tensor, rotation: tuple[Tensor, Tensor]) -> Past:
        both = self.cross_keys_values(states).unflatten(1, (2, self.heads, -1))
        keys, values = both.split(1, dim=1)
        return Past(rotate(keys, rotation).squeeze(1), values.squeeze(1))

    def decode(
        self,
        x: Tensor,
        layout: Layout,
        rotation: tuple[Tensor, Tensor],
        masks: Sequence[Tensor | None],
        past: Past,
        groups: Sequence[CrossGroup],
        memory: Memory | None,
    ) -> Tensor:
        """(tokens, width)."""
        attended = self.attend(self.attention_norm(x), layout, rotation, masks, memory)
        x = x + self.dropout(self.out(attended))
        attended = self._look_back(self.cross_norm(x), rotation, past, groups)
        return self.feed_forward(x + self.dropout(self.cross_out(attended)))

    def _look_back(
        self,
        x: Tensor,
        rotation: tuple[Tensor, Tensor],
        past: Past,
        groups: Sequence[CrossGroup],
    ) -> Tensor:
        """(tokens, attention width) each token attends to its history."""
        queries = rotate(self.cross_queries(x).unflatten(1, (1, self.heads, -1)), rotation)
        tokens = [group.sequences * group.keys for group in groups]
        parts = zip(
            groups,
            torch.split(queries.squeeze(1), [group.sequences * group.queries for group in groups]),
            torch.split(past.keys, tokens),
            torch.split(past.values, tokens),
            strict=True,
        )
        gathered = []
        for group, *tensors in parts:
            # (sequences, heads, tokens, width of a head)
            q, k, v = (
                part.view(group.sequences, -1, *part.shape[1:]).transpose(1, 2) for part in tensors
            )
            attended = functional.scaled_dot_product_attention(q, k, v, group.mask)
            gathered.append(attended.transpose(1, 2).flatten(0, 1).flatten(1))
        return torch.cat(gathered)


class Decoder(nn.Module):
    """Blocks and a last norm."""

    def __init__(self, config: EncoderDecoderConfig) -> None:
        super().__init__()
        self.head_width = config.attention_width // config.heads
        blocks = [DecoderBlock(config) for _ in range(config.decoder_layers)]
        self.blocks = cast(Sequence[DecoderBlock], nn.ModuleList(blocks))  # which has no type
        self.norm = nn.LayerNorm(config.width)
        init_near_identity(self, depth=config.decoder_layers)

    def remember(self, states: Tensor, layout: Layout) -> list[Past]:
        """What each block needs to know of the encoder's `states` (tokens, width)."""
        rotation = rotary(layout.positions, self.head_width)
        return [block.remember(states, rotation) for block in self.blocks]

    def forward(
        self,
        x: Tensor,
        layout: Layout,
        masks: Sequence[Tensor | None],
        pasts: Sequence[Past],
        groups: Sequence[CrossGroup],
        memories: Sequence[Memory] | None = None,
    ) -> Tensor:
        """(tokens, width) hidden states of the targets' tokens.

        `layout`: a sequence a target; `masks`: one a group of it. `groups`: the same tokens, a
        sequence a history. `pasts` and `memories` (of the targets' own keys): one a block.
        """
        rotation = rotary(layout.positions, self.head_width)
        for i, (block, past) in enumerate(zip(self.blocks, pasts, strict=True)):
            memory = None if memories is None else memories[i]
            x = block.decode(x, layout, rotation, masks, past, groups, memory)
        out: Tensor = self.norm(x)
        return out
