"""Product quantisation: one digit per block of the vector, optionally after a learnt rotation.

Unlike residual levels, blocks are equals: the first digit is no coarser than the last. The
rotation of OPQ (Ge et al., 2013) spreads the variance over the blocks before they are cut.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import faiss
import numpy as np
import numpy.typing as npt

from maskgr.errors import DataError
from maskgr.sids.config import FitOptions, QuantizerConfig
from maskgr.sids.kmeans import k_means, nearest
from maskgr.sids.progress import steps
from maskgr.sids.vectors import Digits, Floats, fillable_codes, prepare, sample_rows


@dataclass(frozen=True, eq=False)
class ProductQuantizer:
    """Blocks of width w; vectors are padded with zeros from d to levels * w."""

    name: ClassVar[str] = "pq"

    codebooks: Floats  # (levels, codes, w)
    means: Floats  # (levels, w) what a block decodes to while its digit is unknown
    rotation: Floats  # (levels * w, d), applied to the vector before it is cut
    normalise: bool

    @classmethod
    def fit(cls, vectors: npt.ArrayLike, config: QuantizerConfig, options: FitOptions) -> Self:
        rows = prepare(vectors, normalise=options.normalise)
        config = replace(config, codes=max(2, fillable_codes(rows, config.codes)))
        if config.levels > rows.shape[1]:
            raise DataError(
                f"{config.levels} levels need as many dimensions and the embeddings have "
                f"{rows.shape[1]}; lower --levels"
            )
        rows = rows[sample_rows(len(rows), config.codes, options.seed)]
        rotation = cls._learn_rotation(rows, config)
        blocks = _cut(rows @ rotation.T, config.levels)  # (levels, n, w)
        codebooks = [
            k_means(blocks[level], config.codes, seed=options.seed + level)
            for level in steps(config.levels, cls.name, shown=options.progress)
        ]
        return cls(np.stack(codebooks), blocks.mean(axis=1), rotation, options.normalise)

    @classmethod
    def _learn_rotation(cls, rows: Floats, config: QuantizerConfig) -> Floats:
        return _padding(rows.shape[1], config.levels)

    @property
    def codebook_sizes(self) -> tuple[int, ...]:
        return (int(self.codebooks.shape[1]),) * len(self.codebooks)

    def encode(self, vectors: npt.ArrayLike) -> Digits:
        rows = prepare(vectors, normalise=self.normalise)
        blocks = _cut(rows @ self.rotation.T, len(self.codebooks))
        digits = [nearest(b, book) for b, book in zip(blocks, self.codebooks, strict=True)]
        return np.stack(digits, axis=1)

    def decode(self, digits: Digits, levels: int | None = None) -> Floats:
        count, width = self.means.shape
        blocks = np.tile(self.means, (len(digits), 1, 1))  # (n, levels, w)
        for level in range(count)[:levels]:
            blocks[:, level] = self.codebooks[level, digits[:, level]]
        return blocks.reshape(len(digits), count * width) @ self.rotation

    def state(self) -> tuple[dict[str, npt.NDArray[Any]], dict[str, Any]]:
        tensors = {"codebooks": self.codebooks, "means": self.means, "rotation": self.rotation}
        return tensors, {"normalise": self.normalise}

    @classmethod
    def from_state(cls, tensors: dict[str, npt.NDArray[Any]], settings: dict[str, Any]) -> Self:
        return cls(**tensors, normalise=settings["normalise"])


@dataclass(frozen=True, eq=False)
class OptimizedProductQuantizer(ProductQuantizer):
    """Product quantisation after a rotation learnt together with the codebooks."""

    name: ClassVar[str] = "opq"

    @classmethod
    def _learn_rotation(cls, rows: Floats, config: QuantizerConfig) -> Floats:
        padding = _padding(rows.shape[1], config.levels)
        width = len(padding)
        # faiss alternates between rotation and codebooks, and requires codebook sizes that are
        # powers of two. Only the rotation is kept, so the next smaller power does.
        inner = faiss.ProductQuantizer(width, config.levels, config.codes.bit_length() - 1)
        inner.cp.min_points_per_centroid = 1  # silences a warning
        learner = faiss.OPQMatrix(width, config.levels)
        learner.pq = inner
        learner.train(np.ascontiguousarray(rows @ padding.T))
        rotation: Floats = faiss.vector_to_array(learner.A).reshape(width, width)
        return np.ascontiguousarray(rotation @ padding)


def _padding(dimensions: int, levels: int) -> Floats:
    """(levels * w, d) the identity, with rows of zeros until `levels` divides their number."""
    width = -(-dimensions // levels)
    return np.eye(levels * width, dimensions, dtype=np.float32)


def _cut(rows: Floats, levels: int) -> Floats:
    """(n, levels * w) to (levels, n, w)"""
    return np.ascontiguousarray(rows.reshape(len(rows), levels, -1).swapaxes(0, 1))
