"""The tokens of semantic IDs: one vector a digit, and the probabilities of digits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from maskgr.nn.softmax import weighted_sum

Logits = Literal["level", "vocabulary"]


class DigitTokens(nn.Module):
    """A token is (level, code), numbered level by level; tokens that are no digits come last.

    Embeddings are tied: the table that tokens enter a network through is the one that digits are
    scored with.
    """

    def __init__(
        self, width: int, sizes: Sequence[int], others: int = 0, logits: Logits = "level"
    ) -> None:
        """`sizes`: the codes of each level; `others`: how many tokens are no digits; `logits`:
        probabilities run over the level's own codes, or over those of all levels."""
        super().__init__()
        self.width, self.sizes, self.over = width, tuple(sizes), logits
        self.starts = (0, *accumulate(self.sizes))  # of each level's tokens, and of the others
        self.table = nn.Embedding(self.starts[-1] + others, width)
        self.bias = nn.Parameter(torch.zeros(self.starts[-1]))
        nn.init.normal_(self.table.weight, std=width**-0.5)

    def numbers(self, codes: Tensor) -> Tensor:
        """(rows, levels) the tokens of the first digits of IDs, all or fewer."""
        return codes + codes.new_tensor(self.starts[: codes.shape[1]])

    def embed(self, tokens: Tensor) -> Tensor:
        """(..., width). The table is small enough for logits, so its rows are scaled up here."""
        rows: Tensor = self.table(tokens)
        return rows * math.sqrt(self.width)

    def log_probs(self, hidden: Tensor, level: int, allowed: Tensor | None = None) -> Tensor:
        """(rows, codes) log-probabilities of `level`'s codes, in float32.

        Where the tokens of all levels share the mass, a level's codes have somewhat less than 1.
        With `allowed` (rows, codes) the softmax runs over these codes alone, and all others have
        -inf.
        """
        start, stop = self.starts[level], self.starts[level + 1]
        if allowed is None and self.over == "vocabulary":
            return self._logits(hidden, 0, self.starts[-1]).log_softmax(-1)[:, start:stop]
        logits = self._logits(hidden, start, stop)
        if allowed is not None:
            logits = logits.masked_fill(~allowed, -torch.inf)
        return logits.log_softmax(-1)

    def cross_entropy(self, hidden: Tensor, codes: Tensor, weights: Tensor | None = None) -> Tensor:
        """() summed over the digits `codes` (rows, levels), predicted by `hidden` (rows, levels,
        width), each times its row's weight (rows,) where there are weights."""
        if self.over == "vocabulary":
            logits = self._logits(hidden.flatten(0, 1), 0, self.starts[-1])
            losses = functional.cross_entropy(
                logits, self.numbers(codes).flatten(), reduction="none"
            )
            return weighted_sum(losses.view_as(codes).sum(1), weights)
        parts = [
            functional.cross_entropy(
                self._logits(states, *self.starts[level : level + 2]), digits, reduction="none"
            )
            for level, (states, digits) in enumerate(zip(hidden.unbind(1), codes.T, strict=True))
        ]
        return weighted_sum(torch.stack(parts).sum(0), weights)

    def _logits(self, hidden: Tensor, start: int, stop: int) -> Tensor:
        """(rows, stop - start) of these tokens. Autocast is off: a logit rounded to bfloat16 is
        off by up to 0.4 %, a large part of the difference between two codes."""
        table, bias = self.table.weight[start:stop], self.bias[start:stop]
        with torch.autocast(hidden.device.type, enabled=False):
            return functional.linear(hidden.float(), table.float(), bias.float())
