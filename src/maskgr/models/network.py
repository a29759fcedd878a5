"""The network f of the paper's section 3.1: token table, mask, encoder, logits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn
from torch.nn import functional

from maskgr.config import NetworkConfig
from maskgr.diffusion.layout import Layout
from maskgr.models.transformer import Encoder, Memory, attention_mask


class Network(nn.Module):
    """Noisy token sequences in, probabilities of the masked digits out.

    A token is (level, code), numbered level by level; `[MASK]` is the last number. The table
    that tokens enter through is the one that they are scored with.
    """

    def __init__(self, config: NetworkConfig, sizes: Sequence[int]) -> None:
        """`sizes`: the codes of each level; an item has one token a level."""
        super().__init__()
        self.config = config
        self.sizes = tuple(sizes)
        self.starts = (0, *accumulate(self.sizes))  # of each level's tokens, and of [MASK]
        self.tokens = nn.Embedding(self.mask_token + 1, config.width)
        self.bias = nn.Parameter(torch.zeros(self.mask_token))
        self.encoder = Encoder(config)
        nn.init.normal_(self.tokens.weight, std=config.width**-0.5)

    @property
    def digits(self) -> int:
        return len(self.sizes)

    @property
    def mask_token(self) -> int:
        return self.starts[-1]

    def tokenise(self, digits: Tensor) -> Tensor:
        """(items, digits) codes -> (tokens,) token numbers, item after item."""
        starts = torch.tensor(self.starts[:-1], device=digits.device)
        return (digits + starts).flatten()

    def embed(self, tokens: Tensor) -> Tensor:
        """(tokens, width) the table's rows, scaled up: small enough there to be logits' weights,
        and here as large as what the blocks add."""
        rows: Tensor = self.tokens(tokens)
        return rows * math.sqrt(self.config.width)

    def encode(
        self,
        embedded: Tensor,
        layout: Layout,
        rows: Tensor | None = None,
        target_items: int = 1,
        *,
        memories: Sequence[Memory] | None = None,
        past: Sequence[int] | None = None,
    ) -> Tensor:
        """(tokens, width) states, or (rows, width) those of the tokens `rows` alone.

        In the `isolated` attention the history does not see the last `target_items` items. With
        `memories` (one a block) `past` says how many remembered tokens precede each group's.
        """
        kind, target = self.config.attention, target_items * self.digits
        masks = []
        for (_, length), before in zip(
            layout.groups, past or [0] * len(layout.groups), strict=True
        ):
            mask = attention_mask(kind, before + length, self.digits, target, embedded.device)
            masks.append(mask if mask is None else mask[before:])
        states: Tensor = self.encoder(embedded, layout, masks, rows, memories)
        return states

    def hidden(
        self,
        tokens: Tensor,
        layout: Layout,
        rows: Tensor | None = None,
        target_items: int = 1,
        *,
        memories: Sequence[Memory] | None = None,
        past: Sequence[int] | None = None,
    ) -> Tensor:
        """`encode` of the tokens' own embeddings."""
        embedded = self.embed(tokens)
        return self.encode(embedded, layout, rows, target_items, memories=memories, past=past)

    def log_probs(self, hidden: Tensor, level: int, allowed: Tensor | None = None) -> Tensor:
        """(rows, codes) log-probabilities of `level`'s codes, in float32.

        With logits = "vocabulary" (the paper) the tokens of all levels share the mass, so a
        level's codes have somewhat less than 1 of it. `allowed` (rows, codes) leaves the softmax
        to these codes alone, and everything else has -inf.
        """
        start, stop = self.starts[level], self.starts[level + 1]
        if allowed is None and self.config.logits == "vocabulary":
            return self._scores(hidden, 0, self.mask_token).log_softmax(-1)[:, start:stop]
        scores = self._scores(hidden, start, stop)
        if allowed is not None:
            scores = scores.masked_fill(~allowed, -torch.inf)
        return scores.log_softmax(-1)

    def _scores(self, hidden: Tensor, start: int, stop: int) -> Tensor:
        """(rows, stop - start) logits of these tokens; float32 even where products are not."""
        table, bias = self.tokens.weight[start:stop], self.bias[start:stop]
        return functional.linear(hidden, table, bias).float()


def flops_per_token(
    config: NetworkConfig, sizes: Sequence[int], length: float, masked_share: float = 0.5
) -> float:
    """Floating-point operations that training spends on a token in products of matrices.

    The backward pass takes twice what the forward pass takes. `length`: the tokens of a sequence,
    averaged over tokens. What is skipped, because only the masked tokens need it, is not counted.
    """
    width = config.width
    attention = 2 * 3 * width**2 + 4 * length * width  # qkv, scores and their use
    after = 2 * width**2 + 4 * width * config.hidden  # projection, up, down
    codes = sum(sizes) / (1 if config.logits == "vocabulary" else len(sizes))
    logits = 2 * width * codes * masked_share
    return 3 * (config.layers * attention + (config.layers - 1 + masked_share) * after + logits)
