"""Product quantisation: a digit for each block of the vector, after a learnt rotation or none.

Unlike residual levels, blocks are equals: the first digit is no coarser than the last. The
rotation of OPQ (Ge et al., 2013) spreads what varies over the blocks before they are cut.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import faiss
import numpy as np
import numpy.typing as npt

from maskgr.errors import DataError
from maskgr.sids.config import QuantizerConfig
from maskgr.sids.kmeans import k_means, nearest, sample_rows
from maskgr.sids.vectors import Digits, Floats, normalise, require_distinct


@dataclass(frozen=True, eq=False)
class ProductQuantizer:
    """(w is the width of a block; d is padded with zeros to levels * w)"""

    name: ClassVar[str] = "pq"

    codebooks: Floats  # (levels, codes, w)
    means: Floats  # (levels, w) what a block is taken for while its digit is not known
    rotation: Floats  # (levels * w, d), applied to the vector before it is cut

    @classmethod
    def fit(
        cls, vectors: npt.ArrayLike, config: QuantizerConfig, *, progress: bool = False
    ) -> Self:
        rows = normalise(vectors)
        require_distinct(rows, config.codes)
        if config.levels > rows.shape[1]:
            raise DataError(
                f"{config.levels} levels need as many dimensions and the embeddings have "
                f"{rows.shape[1]}; lower --levels"
            )
        rows = rows[sample_rows(len(rows), config.codes * config.sample, config.seed)]
        rotation = cls._learn_rotation(rows, config)
        blocks = _cut(rows @ rotation.T, config.levels)  # (levels, n, w)
        codebooks = [
            k_means(blocks[level], config.codes, restarts=config.restarts, seed=config.seed + level)
            for level in _levels(cls.name, config.levels, progress)
        ]
        return cls(np.stack(codebooks), blocks.mean(axis=1), rotation)

    @classmethod
    def _learn_rotation(cls, rows: Floats, config: QuantizerConfig) -> Floats:
        return _padding(rows.shape[1], config.levels)

    @property
    def codebook_sizes(self) -> tuple[int, ...]:
        return (int(self.codebooks.shape[1]),) * len(self.codebooks)

    def encode(self, vectors: npt.ArrayLike) -> Digits:
        blocks = _cut(normalise(vectors) @ self.rotation.T, len(self.codebooks))
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
        return tensors, {}

    @classmethod
    def from_state(cls, tensors: dict[str, npt.NDArray[Any]], settings: dict[str, Any]) -> Self:
        return cls(tensors["codebooks"], tensors["means"], tensors["rotation"])


@dataclass(frozen=True, eq=False)
class OptimizedProductQuantizer(ProductQuantizer):
    """Product quantisation after the rotation that suits it best."""

    name: ClassVar[str] = "opq"

    @classmethod
    def _learn_rotation(cls, rows: Floats, config: QuantizerConfig) -> Floats:
        padding = _padding(rows.shape[1], config.levels)
        width = len(padding)
        # faiss alternates between rotation and codebooks, whose sizes it wants to be powers of two;
        # the codebooks are only a means here, so the next smaller power does.
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


def _levels(name: str, levels: int, progress: bool) -> Iterator[int]:
    from rich.console import Console
    from rich.progress import track

    yield from track(range(levels), name, console=Console(stderr=True), disable=not progress)
