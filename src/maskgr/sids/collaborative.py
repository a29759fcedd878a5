"""Item vectors learned from what users did, to make semantic IDs of instead of text alone.

A new item has no behaviour: its vector is foretold from its text, by a ridge regression from the
texts to the vectors of the items that were there.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from maskgr.errors import DataError
from maskgr.sids.vectors import Floats

RIDGE = 0.01  # of the texts' mean variance: what keeps rare directions from being believed


@dataclass(frozen=True, eq=False)
class Collaborative:
    vectors: Floats  # (items, d)
    weights: Floats  # (text + 1, d): the map from text, its last row the constant

    @classmethod
    def of(cls, vectors: Floats, text: Floats) -> Collaborative:
        """`vectors` (items, d) of the items whose text embeddings are `text` (items, any)."""
        if len(vectors) != len(text):
            raise DataError(
                f"{len(vectors)} learned vectors do not go with {len(text)} text embeddings; give "
                "one of each for every item"
            )
        centre, middle = text.mean(0, dtype=np.float64), vectors.mean(0, dtype=np.float64)
        inputs = text - centre
        products = inputs.T @ inputs
        strength = RIDGE * np.trace(products) / len(products)
        slopes = np.linalg.solve(
            products + max(strength, 1e-12) * np.eye(len(products)), inputs.T @ (vectors - middle)
        )
        constant = middle - centre @ slopes
        weights = np.concatenate([slopes, constant[None]]).astype(np.float32)
        return cls(np.ascontiguousarray(vectors, dtype=np.float32), weights)

    def foretell(self, text: Floats) -> Floats:
        """(items, d) vectors of items that nobody had yet."""
        found: Floats = text.astype(np.float32) @ self.weights[:-1] + self.weights[-1]
        return found

    def joined(self, vectors: Floats) -> Collaborative:
        """With those of new items behind them."""
        return Collaborative(np.concatenate([self.vectors, vectors]), self.weights)
