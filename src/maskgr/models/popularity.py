"""The most popular items for everybody: what any recommender must beat."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt
import polars as pl
from safetensors.numpy import load_file, save_file

from maskgr.config import TrainConfig
from maskgr.data.dataset import Dataset
from maskgr.data.sequences import Sequences
from maskgr.data.splits import Split
from maskgr.decoding.config import DecodingConfig
from maskgr.errors import RequestError
from maskgr.models.base import Ranked, Workspace

CHUNK = 4096  # users at once, so that memory does not grow with their number


@dataclass(frozen=True)
class Popularity:
    shares_work: ClassVar[bool] = False
    counts: npt.NDArray[np.int64]  # (items,) training events

    @classmethod
    def train(cls, data: Dataset, split: Split, config: TrainConfig, work: Workspace) -> Self:
        return cls(np.bincount(split.train.values, minlength=len(data.items)).astype(np.int64))

    def rank(
        self,
        histories: Sequences,
        top: int,
        allowed: npt.NDArray[np.bool_],
        excluded: Sequences | None,
        decoding: DecodingConfig | None = None,
    ) -> Ranked:
        if decoding is not None:
            raise RequestError("popularity has nothing to decode; leave the decoding options out")
        order = np.argsort(-self.counts, kind="stable")  # ties: the earlier item of the catalogue
        order = order[allowed[order]]
        ranked = np.full((len(histories), top), -1, dtype=np.int32)
        if excluded is None:
            ranked[:, : len(order)] = order[:top]
        else:
            for start in range(0, len(histories), CHUNK):
                rows = np.arange(start, min(start + CHUNK, len(histories)))
                ranked[rows] = _without(order, excluded.select(rows), top, len(self.counts))
        scores = np.where(ranked < 0, -np.inf, self._log_probabilities()[ranked])
        return Ranked(ranked, scores.astype(np.float32))

    def _log_probabilities(self) -> npt.NDArray[np.float64]:
        smoothed = self.counts + 1  # an item nobody took yet is unlikely, not impossible
        probabilities: npt.NDArray[np.float64] = smoothed / smoothed.sum()
        return np.log(probabilities)

    def with_items(
        self, items: pl.DataFrame, embeddings: npt.NDArray[Any] | None = None
    ) -> Popularity:
        """New items, which nobody took yet."""
        return Popularity(np.concatenate([self.counts, np.zeros(len(items), dtype=np.int64)]))

    def save(self, folder: Path) -> None:
        save_file({"counts": self.counts}, folder / "model.safetensors")

    @classmethod
    def load(cls, folder: Path, config: TrainConfig) -> Self:
        return cls(load_file(folder / "model.safetensors")["counts"])


def _without(
    order: npt.NDArray[np.intp], excluded: Sequences, top: int, items: int
) -> npt.NDArray[np.int32]:
    """(users, top) the first items of `order` that are not the user's `excluded`."""
    # However many are excluded, the answer lies within this many first items.
    depth = min(len(order), top + int(excluded.lengths.max(initial=0)))
    place = np.full(items, depth, dtype=np.int64)
    place[order[:depth]] = np.arange(depth)
    barred = np.zeros((len(excluded), depth + 1), dtype=bool)  # the last column takes the rest
    barred[excluded.owners, place[excluded.values]] = True
    barred = barred[:, :depth]
    first = np.argsort(barred, axis=1, kind="stable")[:, :top]  # the unbarred, in order
    result = np.full((len(excluded), top), -1, dtype=np.int32)
    found = np.where(np.take_along_axis(barred, first, axis=1), -1, order[first])
    result[:, : found.shape[1]] = found
    return result
