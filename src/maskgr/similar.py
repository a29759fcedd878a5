"""Items like an item: by the cosine of learned vectors, or by semantic IDs."""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt

from maskgr.models.base import HasItemVectors
from maskgr.sids.semantic_ids import SemanticIds

Likeness = Literal["vectors", "sids"]

BLOCK = 65_536  # items whose vectors exist at a time

Floats = npt.NDArray[np.float32]


def cosines(model: HasItemVectors, item: int, n_items: int) -> Floats:
    """(items,) the cosine of each item's vector with that of `item`; 0 where one is zero."""
    own = model.item_vectors(np.array([item]))[0]
    own = own / (np.linalg.norm(own) or 1)
    found = np.empty(n_items, dtype=np.float32)
    for start in range(0, n_items, BLOCK):
        numbers = np.arange(start, min(start + BLOCK, n_items))
        vectors = model.item_vectors(numbers)
        lengths = np.sqrt(np.einsum("nd,nd->n", vectors, vectors))
        found[numbers] = vectors @ own / np.where(lengths > 0, lengths, 1)
    return found


def shared_digits(sids: SemanticIds, item: int, top: int, left: npt.NDArray[np.bool_]) -> Floats:
    """(items,) how many of `item`'s first digits each item has, plus a closeness below 1.

    The closeness is 1 / (2 + d), where d is the distance of the two items' reconstructions from
    their digits, divided by the length of `item`'s: it orders the items that share as many digits.
    A digit that only tells items with equal digits apart (the appended one) does not count. Only
    items that can be among the best `top` of those that are `left` (items,) have one.
    """
    levels = len(sids.quantizer.codebook_sizes)
    prefix = np.zeros(len(sids.digits), dtype=np.uint8)
    same = np.ones(len(prefix), dtype=bool)
    for level in range(levels):
        same &= sids.digits[:, level] == sids.digits[item, level]
        prefix += same
    at_least = np.bincount(prefix[left], minlength=levels + 1)[::-1].cumsum()[::-1]
    fewest = max(np.flatnonzero(at_least >= top), default=0)  # digits that the best share
    rows = np.flatnonzero(left & (prefix >= fewest))
    digits, found = sids.digits[:, :levels], prefix.astype(np.float32)
    own = sids.quantizer.decode(digits[item : item + 1])[0]
    scale = float(np.linalg.norm(own)) or 1.0
    for start in range(0, len(rows), BLOCK):
        part = rows[start : start + BLOCK]
        away = np.linalg.norm(sids.quantizer.decode(digits[part]) - own, axis=1) / scale
        found[part] += 1 / (2 + away)
    return found


def most_similar(scores: Floats, top: int, left: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """The `top` items with the highest scores among those that are `left` (items,); equal scores in
    the catalogue's order."""
    count = min(top, int(left.sum()))
    if not count:
        return np.empty(0, dtype=np.int64)
    masked = np.where(left, scores, -np.inf)
    least = np.partition(masked, len(masked) - count)[len(masked) - count]
    found = np.flatnonzero(masked >= least)
    return found[np.argsort(-masked[found], kind="stable")][:count]
