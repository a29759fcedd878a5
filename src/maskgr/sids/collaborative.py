"""Item vectors learned from user behaviour, quantised to semantic IDs in place of the text.

A new item has no behaviour yet: its vector is predicted from its text, by a ridge regression from
text embeddings to learned vectors that is fitted on the old items.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from maskgr.errors import DataError
from maskgr.sids.vectors import Floats, chunks

RIDGE = 0.01  # relative to the texts' mean variance; keeps rare directions from being overfitted


@dataclass(frozen=True, eq=False)
class Collaborative:
    """Learned vectors of the items, and a linear map from text embeddings to such vectors."""

    vectors: Floats  # (items, d)
    weights: Floats  # (text + 1, d); the last row is the intercept

    @classmethod
    def fit(cls, vectors: Floats, text: Floats) -> Collaborative:
        """Fits the map from `text` (items, any) to `vectors` (items, d) of the same items."""
        if len(vectors) != len(text):
            raise DataError(
                f"{len(vectors)} learned vectors do not go with {len(text)} text embeddings; give "
                "one of each for every item"
            )
        text_mean, mean = text.mean(0, dtype=np.float64), vectors.mean(0, dtype=np.float64)
        products = np.zeros((text.shape[1], text.shape[1]))  # (text, text)
        outputs = np.zeros((text.shape[1], vectors.shape[1]))  # (text, d)
        for part in chunks(len(text)):  # doubles of all would be four times the texts
            inputs = text[part] - text_mean
            products += inputs.T @ inputs
            outputs += inputs.T @ (vectors[part] - mean)
        strength = RIDGE * np.trace(products) / len(products)
        slopes = np.linalg.solve(products + max(strength, 1e-12) * np.eye(len(products)), outputs)
        intercept = mean - text_mean @ slopes
        weights = np.concatenate([slopes, intercept[None]]).astype(np.float32)
        return cls(np.ascontiguousarray(vectors, dtype=np.float32), weights)

    def predict_from_text(self, text: Floats) -> Floats:
        """(items, d) predicted vectors of items with the text embeddings `text` (items, any)."""
        predicted: Floats = text.astype(np.float32) @ self.weights[:-1] + self.weights[-1]
        return predicted

    def extended(self, vectors: Floats) -> Collaborative:
        """A copy with the `vectors` of new items behind the old ones."""
        return Collaborative(np.concatenate([self.vectors, vectors]), self.weights)
