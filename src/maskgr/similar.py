"""Items like an item: by the cosine of learned vectors, or by semantic IDs."""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt

from maskgr.evaluation.metrics import top_items
from maskgr.models.base import HasItemVectors
from maskgr.sids.semantic_ids import SemanticIds

Likeness = Literal["vectors", "sids"]

BLOCK = 65_536  # items whose vectors exist at a time

Floats = npt.NDArray[np.float32]


def cosines(model: HasItemVectors, item: int, n_items: int) -> Floats:
    """(items,) the cosine of each item's vector with that of `item`; 0 where one is zero."""
    own = _unit(model.item_vectors(np.array([item])))[0]
    found = np.empty(n_items, dtype=np.float32)
    for start in range(0, n_items, BLOCK):
        numbers = np.arange(start, min(start + BLOCK, n_items))
        found[numbers] = _unit(model.item_vectors(numbers)) @ own
    return found


def _unit(vectors: Floats) -> Floats:
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    unit: Floats = (vectors / np.where(lengths > 0, lengths, 1)).astype(np.float32)
    return unit


def shared_digits(sids: SemanticIds, item: int) -> Floats:
    """(items,) how many of `item`'s first digits each item has, plus a closeness below 1.

    The closeness is 1 / (2 + d), where d is the distance of the two items' reconstructions from
    their digits, divided by the length of `item`'s: it orders the items that share as many digits.
    A digit that only tells items with equal digits apart (the appended one) does not count.
    """
    levels = len(sids.quantizer.codebook_sizes)
    digits = sids.digits[:, :levels]
    prefix = np.cumprod(digits == digits[item], axis=1).sum(axis=1)
    own = sids.quantizer.decode(digits[item : item + 1])[0]
    scale = float(np.linalg.norm(own)) or 1.0
    found = np.empty(len(digits), dtype=np.float32)
    for start in range(0, len(digits), BLOCK):
        part = slice(start, start + BLOCK)
        away = np.linalg.norm(sids.quantizer.decode(digits[part]) - own, axis=1) / scale
        found[part] = prefix[part] + 1 / (2 + away)
    return found


def most_similar(
    scores: Floats, item: int, top: int, allowed: npt.NDArray[np.bool_] | None
) -> npt.NDArray[np.int64]:
    """The `top` items with the highest scores, `item` itself left out; fewer where fewer are
    allowed."""
    left = np.ones(len(scores), dtype=bool) if allowed is None else allowed.copy()
    left[item] = False
    masked = np.where(left, scores, -np.inf)
    return top_items(masked[None], min(top, int(left.sum())))[0] if left.any() else np.empty(0, int)
