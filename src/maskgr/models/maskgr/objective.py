"""Equation 3 of the paper: the negative ELBO that training minimises and validation reports."""

from __future__ import annotations

import torch
from torch import Tensor

from maskgr.decoding.matching import CodeIndex, Filters, Remaining
from maskgr.models.maskgr.network import Denoised, Network
from maskgr.models.maskgr.noise import Noise
from maskgr.nn.softmax import weighted_sum
from maskgr.nn.transformer import Layout


def masked_rows(masked: Tensor, n_levels: int) -> tuple[Tensor, list[int]]:
    """(rows,) the masked tokens, level after level, and how many each level has.

    In this order the logits of a level are one product with that level's codebook.
    """
    by_level = masked.view(-1, n_levels).t()  # (levels, items)
    level, item = by_level.nonzero(as_tuple=True)
    return item * n_levels + level, by_level.sum(1).tolist()


def negative_elbo(
    network: Network,
    codes: Tensor,
    layout: Layout,
    noise: Noise,
    numbers: Tensor,
    index: CodeIndex | None = None,
    weights: Tensor | None = None,
) -> tuple[Tensor, Denoised]:
    """() sum over masked tokens of -log p(token | masked sequence) / noise level, in nats, and the
    hidden states that it was computed from.

    `codes` (items, levels) and `numbers` (items,) are the items of all sequences, in the layout's
    order. With an `index` a digit's softmax runs over the codes that some item with the revealed
    digits has. `weights` (items,): factors on the items' losses.
    """
    rows, counts = masked_rows(noise.masked, network.n_levels)
    denoised = network.denoise(codes, noise.masked, layout, rows, numbers)
    remaining = None
    if index is not None:
        users = torch.zeros_like(codes[:, 0])
        remaining = Remaining(index, Filters(), users, codes, ~noise.masked.view_as(codes))
    parts = zip(
        torch.split(denoised.digits, counts),
        torch.split(rows // network.n_levels, counts),
        strict=True,
    )
    scores = []
    for level, (hidden, items) in enumerate(parts):
        true = codes[items]  # (rows of the level, levels)
        allowed = None if remaining is None else remaining.allowed(level)[items]
        log_probs = network.tokens.log_probs(hidden, level, allowed)  # (rows of the level, codes)
        scores.append(log_probs.gather(1, true[:, level, None]).squeeze(1))
    own = None if weights is None else weights[rows // network.n_levels]
    return -weighted_sum(torch.cat(scores) / noise.levels[rows], own), denoised
