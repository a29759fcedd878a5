"""Collaborative semantic IDs: of what users did, not of text alone.

First the dense head is trained by itself, with the IDs made from text. The item vectors that it
learned are quantised into new IDs, by what tells the items' scores apart, and the network goes on
with these: what it knows of histories and items stays, and the tokens start as the parts that item
vectors are made of. What a state asks of the digits one by one is then, before anything is learned
of them, what it asks of the item.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from maskgr.config import TrainConfig
from maskgr.errors import RequestError
from maskgr.models.network import Network

SWEEPS = 5  # over the levels; the tokens hardly change after that


def check_collaborative(config: TrainConfig) -> None:
    if not 0 <= config.collaborative < 1:
        raise RequestError(
            f"collaborative is {config.collaborative}; it is a share of the training, from 0 to "
            "below 1"
        )
    if config.collaborative and (
        config.network.history != "pooled" or config.dense.table != "learned"
    ):
        # A history of digits would be another once the digits are.
        raise RequestError(
            "collaborative semantic IDs are made of what a dense head learned of pooled histories; "
            "set network.attention=causal, network.history=pooled and dense.table=learned, or "
            "collaborative=0"
        )


def score_space(vectors: np.ndarray, queries: np.ndarray) -> np.ndarray:
    """(items, width) `vectors` stretched along what the `queries` (any, width) ask for, such that a
    squared distance is the mean squared difference of two items' scores.

    Much of what vectors say no query ever asks about; digits are not to be spent on it.
    """
    asked = queries.astype(np.float64)
    values, directions = np.linalg.eigh(asked.T @ asked / len(asked))
    stretched = vectors @ (directions * np.sqrt(values.clip(min=0)))
    return np.ascontiguousarray(stretched, dtype=np.float32)


@torch.no_grad()
def carry_over(old: Network, old_digits: Tensor, new: Network, new_digits: Tensor) -> None:
    """Starts `new`, whose items have other digits (items, m), from all that `old` has learned.

    Every item's vector is the same before and after: what the tokens do not say of it, the part
    of its own does.
    """
    before, after = old.items.own, new.items.own
    assert before is not None
    assert after is not None
    of_tokens = ("tokens.weight", "codes.weight", "bias")
    kept = {k: v for k, v in old.state_dict().items() if k not in of_tokens}
    new.load_state_dict(kept, strict=False)
    whole = old.joined(old_digits) + before.weight  # (items, width)
    spread = fit_tokens(whole.cpu().numpy(), new_digits.cpu().numpy(), new.sizes)
    scale = (new.digits / new.config.width) ** 0.5  # `joined` scales sums up by its inverse
    new.tokens.weight.copy_(torch.from_numpy(spread).to(whole) * scale)
    after.weight.copy_(whole - new.joined(new_digits))
    vectors = old.item_vectors(old_digits)  # their text included
    parts = fit_tokens(vectors.cpu().numpy(), new_digits.cpu().numpy(), new.sizes)
    new.codes.weight[: new.mask_token] = (
        torch.from_numpy(parts).to(vectors) * new.config.width**-0.5
    )


def fit_tokens(vectors: np.ndarray, digits: np.ndarray, sizes: tuple[int, ...]) -> np.ndarray:
    """(tokens, width) one vector a token, such that an item's sum to its own vector, as nearly as
    they can: each token is the mean of what the others leave of its items, over and over."""
    starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    tokens = np.zeros((sum(sizes), vectors.shape[1]), dtype=np.float32)
    left = vectors.astype(np.float32).copy()  # (items, width) what is not yet said
    for _ in range(SWEEPS):
        for level, (start, size) in enumerate(zip(starts, sizes, strict=True)):
            own = digits[:, level]
            left += tokens[start + own]
            sums = np.zeros((size, vectors.shape[1]), dtype=np.float32)
            np.add.at(sums, own, left)
            counts = np.maximum(np.bincount(own, minlength=size), 1)[:, None]
            tokens[start : start + size] = sums / counts
            left -= tokens[start + own]
    return tokens
