"""The paper's network f (Section 3.1): token embeddings, a bidirectional encoder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from maskgr.models.maskgr.config import DenseConfig, NetworkConfig
from maskgr.models.maskgr.dense import DenseHead, TextInput
from maskgr.nn.digit_tokens import DigitTokens
from maskgr.nn.transformer import Dropout, Encoder, Layout, Memory, Tap, isolated_mask


class Denoised(NamedTuple):
    """Hidden states of a noisy batch."""

    digits: Tensor  # (rows, width) of the masked digits that were asked for
    queries: Tensor | None  # (predicted, text width) of the dense head, where there is one
    predicted: Tensor | None  # (predicted,) the wholly masked items, which the queries are for


class Network(nn.Module):
    """Noisy token sequences in, hidden states of the masked digits out; `tokens` scores them.

    `[MASK]` is the last token.
    """

    def __init__(
        self,
        config: NetworkConfig,
        sizes: Sequence[int],
        dense: DenseConfig | None = None,
        embeddings: Tensor | None = None,
    ) -> None:
        """`sizes`: the codes of each level; `embeddings` (items, any): of the items' texts, which
        a dense head needs."""
        super().__init__()
        self.config, self.dense_config = config, dense or DenseConfig()
        self.tokens = DigitTokens(config.width, sizes, others=1, logits=config.logits)
        self.level: nn.Embedding | None = None
        if config.level_embedding:
            self.level = nn.Embedding(self.n_levels, config.width)
            nn.init.normal_(self.level.weight, std=0.5)  # tokens have a standard deviation of 1
        self.dropout = Dropout(config.dropout)
        self.encoder = Encoder(config)
        self.text: TextInput | None = None
        self.head: DenseHead | None = None
        if self.dense_config.head:
            assert embeddings is not None
            self.text = TextInput(config.width, self.n_levels, embeddings)
            self.head = DenseHead(self.dense_config, self._item_width, embeddings)

    @property
    def n_levels(self) -> int:
        return len(self.tokens.sizes)

    @property
    def _item_width(self) -> int:
        """Entries of the hidden states of an item's digits together."""
        return self.n_levels * self.config.width

    @property
    def mask_token(self) -> int:
        return self.tokens.starts[-1]

    @property
    def tap_layer(self) -> int:
        """The layer after which the dense head reads the hidden states."""
        return self.dense_config.layer or self.config.layers

    def embed_items(self, codes: Tensor, numbers: Tensor) -> Tensor:
        """(tokens, width) of wholly visible items, their text included."""
        embedded = self.tokens.embed(self.tokens.numbers(codes)).flatten(0, 1)
        return embedded if self.text is None else embedded + self.text(numbers)

    def denoise(
        self, codes: Tensor, masked: Tensor, layout: Layout, rows: Tensor, numbers: Tensor
    ) -> Denoised:
        """Hidden states of the tokens `rows` of a batch whose `masked` (tokens,) are hidden.

        `codes` (items, levels) and `numbers` (items,) are the items of all sequences, in order.
        """
        noisy = self.tokens.numbers(codes).flatten().masked_fill(masked, self.mask_token)
        embedded = self.tokens.embed(noisy)
        by_item = masked.view_as(codes)
        if self.text is not None:
            # A partly masked item must not leak its masked digits through its text.
            visible = (~by_item.any(1)).nonzero().squeeze(1)
            text = self.text(numbers[visible]).view(len(visible), self._item_width)
            spread = text.new_zeros(len(codes), self._item_width)
            embedded = embedded + spread.index_add(0, visible, text).view_as(embedded)
        if self.head is None:
            return Denoised(self.encode(embedded, layout, rows)[0], None, None)
        predicted = by_item.all(1).nonzero().squeeze(1)
        within = torch.arange(self.n_levels, device=codes.device)
        tap = Tap(self.tap_layer, (predicted[:, None] * self.n_levels + within).flatten())
        hidden, tapped = self.encode(embedded, layout, rows, tap=tap)
        assert tapped is not None
        queries = self.head(tapped.view(len(predicted), self._item_width))
        return Denoised(hidden, queries, predicted)

    def encode(
        self,
        embedded: Tensor,
        layout: Layout,
        rows: Tensor | None = None,
        target_items: int = 1,
        *,
        memories: Sequence[Memory] | None = None,
        past: Sequence[int] | None = None,
        tap: Tap | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """(tokens, width) hidden states, or (rows, width) of the tokens `rows` alone; and those
        that the tap asks for.

        With `isolated` attention the history does not see the last `target_items` items. With
        `memories` (one a block), `past` says how many cached tokens precede each group's.
        """
        if self.level is not None:
            embedded = embedded + self.level(layout.positions % self.n_levels)
        masks: list[Tensor | None] = [None] * len(layout.groups)
        if self.config.attention == "isolated":
            before = past or [0] * len(layout.groups)
            target = target_items * self.n_levels
            masks = [
                isolated_mask(skip + length, target, embedded.device)[skip:]
                for (_, length), skip in zip(layout.groups, before, strict=True)
            ]
        found: tuple[Tensor, Tensor | None] = self.encoder(
            self.dropout(embedded), layout, masks, rows, memories, tap
        )
        return found
