"""Residual k-means: each level clusters the residuals that the levels above left.

A level has two codebooks. `centroids` decide the digit: with `normalise` they are clusters of the
residuals' directions (residuals scaled to length 1), without it of the residuals themselves.
`offsets` are the mean of the unscaled residuals that got each digit, and are what the digit decodes
to: a vector is reconstructed as the sum of its offsets, and the rest goes to the next level. The
mean is the best single answer for its members, so over the fitted vectors the error never rises
from one level to the next.

In hundreds of dimensions four digits describe little of a vector, and items that differ in the
fine print get the same digits. Keeping the first principal components (`components`) spends the
digits on what varies most: fewer collisions, at the price of a reconstruction that lacks the rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from maskgr.sids.config import FitOptions, QuantizerConfig
from maskgr.sids.kmeans import k_means, nearest
from maskgr.sids.progress import steps
from maskgr.sids.vectors import (
    Digits,
    Floats,
    chunks,
    code_means,
    fillable_codes,
    prepare,
    prepared_parts,
    sample_rows,
    unit,
)


@dataclass(frozen=True, eq=False)
class ResidualKMeans:
    """Codebooks of k entries per code: k principal components, or all d dimensions."""

    name: ClassVar[str] = "residual-kmeans"

    centroids: Floats  # (levels, codes, k)
    offsets: Floats  # (levels, codes, k)
    mean: Floats  # (d,)
    basis: Floats  # (k, d) orthonormal rows; (0, d) where vectors are not projected
    normalise: bool

    @classmethod
    def fit(cls, vectors: npt.ArrayLike, config: QuantizerConfig, options: FitOptions) -> Self:
        rows = prepare(vectors, normalise=options.normalise)
        codes = fillable_codes(rows, config.codes)
        mean, basis = _principal_components(rows, config.components)
        residuals = _project(rows, mean, basis)
        del rows  # where nothing is projected, the residuals are these rows and change in place
        pairs = [
            # Another seed per level, or all levels would start from the same items.
            _fit_level(residuals, codes, options.normalise, options.seed + level)
            for level in steps(config.levels, cls.name, shown=options.progress)
        ]
        centroids, offsets = (np.stack(books) for books in zip(*pairs, strict=True))
        return cls(centroids, offsets, mean, basis, options.normalise)

    @property
    def codebook_sizes(self) -> tuple[int, ...]:
        return (int(self.centroids.shape[1]),) * len(self.centroids)

    def encode(self, vectors: npt.ArrayLike) -> Digits:
        vectors = np.asarray(vectors)
        digits = np.empty((len(vectors), len(self.centroids)), np.int32)
        for part, rows in prepared_parts(vectors, normalise=self.normalise):
            residuals = _project(rows, self.mean, self.basis)
            for level, (centroids, offsets) in enumerate(
                zip(self.centroids, self.offsets, strict=True)
            ):
                digits[part, level] = _assign(residuals, centroids, self.normalise)
                residuals -= offsets[digits[part, level]]
        return digits

    def decode(self, digits: Digits, levels: int | None = None) -> Floats:
        total = np.zeros((len(digits), self.offsets.shape[2]), np.float32)
        for level in range(len(self.offsets))[:levels]:
            total += self.offsets[level, digits[:, level]]
        return total @ self.basis + self.mean if len(self.basis) else total

    def state(self) -> tuple[dict[str, npt.NDArray[Any]], dict[str, Any]]:
        tensors = {
            "centroids": self.centroids,
            "offsets": self.offsets,
            "mean": self.mean,
            "basis": self.basis,
        }
        return tensors, {"normalise": self.normalise}

    @classmethod
    def from_state(cls, tensors: dict[str, npt.NDArray[Any]], settings: dict[str, Any]) -> Self:
        return cls(**tensors, normalise=settings["normalise"])


def _principal_components(rows: Floats, components: int) -> tuple[Floats, Floats]:
    """The mean and the `components` orthonormal directions of most variance around it."""
    dimensions = rows.shape[1]
    if not components:
        return np.zeros(dimensions, np.float32), np.zeros((0, dimensions), np.float32)
    mean = rows.mean(axis=0, dtype=np.float64)  # (d,)
    covariance = -np.outer(mean, mean)  # (d, d)
    for part in chunks(len(rows)):
        covariance += (rows[part].T @ rows[part]) / len(rows)
    _, vectors = np.linalg.eigh(covariance)  # columns, by ascending variance
    basis = vectors[:, ::-1][:, :components].T
    return mean.astype(np.float32), np.ascontiguousarray(basis, dtype=np.float32)


def _project(rows: Floats, mean: Floats, basis: Floats) -> Floats:
    return np.asarray((rows - mean) @ basis.T, np.float32) if len(basis) else rows


def _fit_level(residuals: Floats, codes: int, normalise: bool, seed: int) -> tuple[Floats, Floats]:
    """Centroids and offsets of one level; subtracts the latter from `residuals` (n, k) in place."""
    sample = residuals[sample_rows(len(residuals), codes, seed)]
    centroids = k_means(unit(sample) if normalise else sample, codes, seed=seed)
    digits = np.empty(len(residuals), np.int32)
    for part in chunks(len(residuals)):
        digits[part] = _assign(residuals[part], centroids, normalise)
    offsets = code_means(residuals, digits, codes)
    for part in chunks(len(residuals)):
        residuals[part] -= offsets[digits[part]]
    return centroids, offsets


def _assign(residuals: Floats, centroids: Floats, normalise: bool) -> npt.NDArray[np.int32]:
    return nearest(unit(residuals) if normalise else residuals, centroids)
