"""Residual k-means: each level clusters the direction of what the levels above left over.

A level has two codebooks. `directions` are the centroids of the residuals scaled to length 1,
and decide the digit. `offsets` are the mean of the unscaled residuals that got each digit, and
are what the digit stands for: a vector is reconstructed as the sum of its offsets, and what is
left goes to the next level. The mean is the best single answer for its members, so over the
fitted vectors the error never rises from one level to the next.

In hundreds of dimensions four digits describe little of a vector, and items that differ in the
fine print get the same digits. Keeping the first principal components (`components`) spends the
digits on what varies most: fewer collisions, at the price of a reconstruction that lacks the rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from maskgr.sids.config import QuantizerConfig
from maskgr.sids.kmeans import k_means, nearest, sample_rows
from maskgr.sids.vectors import Digits, Floats, chunks, normalise, require_distinct, unit


@dataclass(frozen=True, eq=False)
class ResidualKMeans:
    """(k is the number of principal components, or d where all are kept)"""

    name: ClassVar[str] = "residual-kmeans"

    directions: Floats  # (levels, codes, k)
    offsets: Floats  # (levels, codes, k)
    mean: Floats  # (d,)
    basis: Floats  # (k, d) orthonormal rows; (0, d) where the vectors are taken as they are

    @classmethod
    def fit(
        cls, vectors: npt.ArrayLike, config: QuantizerConfig, *, progress: bool = False
    ) -> Self:
        rows = normalise(vectors)
        require_distinct(rows, config.codes)
        mean, basis = _principal_components(rows, config.components)
        residuals = _project(rows, mean, basis)
        del rows  # where nothing is projected, the residuals are these rows and change in place
        pairs = [_fit_level(residuals, config, level) for level in _levels(config.levels, progress)]
        directions, offsets = (np.stack(books) for books in zip(*pairs, strict=True))
        return cls(directions, offsets, mean, basis)

    @property
    def codebook_sizes(self) -> tuple[int, ...]:
        return (int(self.directions.shape[1]),) * len(self.directions)

    def encode(self, vectors: npt.ArrayLike) -> Digits:
        rows = normalise(vectors)
        digits = np.empty((len(rows), len(self.directions)), np.int32)
        for part in chunks(len(rows)):
            residuals = _project(rows[part], self.mean, self.basis)
            for level, (directions, offsets) in enumerate(
                zip(self.directions, self.offsets, strict=True)
            ):
                digits[part, level] = nearest(unit(residuals), directions)
                residuals -= offsets[digits[part, level]]
        return digits

    def decode(self, digits: Digits, levels: int | None = None) -> Floats:
        total = np.zeros((len(digits), self.offsets.shape[2]), np.float32)
        for level in range(len(self.offsets))[:levels]:
            total += self.offsets[level, digits[:, level]]
        return total @ self.basis + self.mean if len(self.basis) else total

    def state(self) -> tuple[dict[str, npt.NDArray[Any]], dict[str, Any]]:
        tensors = {
            "directions": self.directions,
            "offsets": self.offsets,
            "mean": self.mean,
            "basis": self.basis,
        }
        return tensors, {}

    @classmethod
    def from_state(cls, tensors: dict[str, npt.NDArray[Any]], settings: dict[str, Any]) -> Self:
        return cls(tensors["directions"], tensors["offsets"], tensors["mean"], tensors["basis"])


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


def _fit_level(residuals: Floats, config: QuantizerConfig, level: int) -> tuple[Floats, Floats]:
    """One level's directions and offsets; `residuals` (n, k) become what they leave over."""
    seed = config.seed + level  # else one start would be tried at all levels
    rows = sample_rows(len(residuals), config.codes * config.sample, seed)
    directions = k_means(unit(residuals[rows]), config.codes, restarts=config.restarts, seed=seed)
    digits = np.empty(len(residuals), np.int32)
    for part in chunks(len(residuals)):
        digits[part] = nearest(unit(residuals[part]), directions)
    offsets = _means(residuals, digits, config.codes)
    for part in chunks(len(residuals)):
        residuals[part] -= offsets[digits[part]]
    return directions, offsets


def _means(residuals: Floats, digits: npt.NDArray[np.int32], codes: int) -> Floats:
    """(codes, k) the mean residual of each code, zero for a code that nothing has."""
    from scipy.sparse import csr_array  # type: ignore[import-untyped]

    sums = np.zeros((codes, residuals.shape[1]))
    for part in chunks(len(residuals)):
        own = digits[part]
        members = csr_array(
            (np.ones(len(own)), (own, np.arange(len(own)))), shape=(codes, len(own))
        )
        sums += members @ residuals[part]
    counts = np.bincount(digits, minlength=codes)
    means: Floats = (sums / np.maximum(counts, 1)[:, None]).astype(np.float32)
    return means


def _levels(levels: int, progress: bool) -> Iterator[int]:
    from rich.console import Console
    from rich.progress import track

    yield from track(
        range(levels),
        "residual k-means",
        console=Console(stderr=True),
        disable=not progress,
    )
