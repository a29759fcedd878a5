"""The most popular items for everybody: the floor that any recommender must beat."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt
import polars as pl
from safetensors.numpy import load_file, save_file

from maskgr.data.sequences import Counts, Sequences
from maskgr.evaluation.ranking import Query, Ranked
from maskgr.models.base import TrainConfig, Training
from maskgr.training.fit import FitConfig

CHUNK = 4096  # users at once, so that memory does not grow with their number


@dataclass(frozen=True)
class PopularityConfig:
    """Nothing to set."""


@dataclass(frozen=True)
class Popularity:
    about: ClassVar = "the most popular items for everybody"
    needs: ClassVar = "nothing"
    Config: ClassVar[type[Any]] = PopularityConfig
    supports_ddp: ClassVar = False
    uses_sids: ClassVar = False
    presets: ClassVar[Mapping[str, TrainConfig]] = {
        "cpu": TrainConfig("popularity", PopularityConfig(), FitConfig())
    }
    counts: Counts  # (items,) training events, by weight

    @classmethod
    def learn(cls, training: Training) -> Self:
        return cls(training.counts)

    def rank(self, query: Query) -> Ranked:
        order = np.argsort(-self.counts, kind="stable")  # ties: the earlier item of the catalogue
        if query.allowed is not None:
            order = order[query.allowed[order]]
        users, top, excluded = len(query.histories), query.top, query.excluded
        ranked = np.full((users, top), -1, dtype=np.int32)
        if excluded is None:
            ranked[:, : len(order)] = order[:top]
        else:
            for start in range(0, users, CHUNK):
                rows = np.arange(start, min(start + CHUNK, users))
                ranked[rows] = _without(order, excluded.select(rows), top, len(self.counts))
        scores = np.where(ranked < 0, -np.inf, self.log_probs()[ranked])
        return Ranked(ranked, scores.astype(np.float32))

    def log_probs(self) -> npt.NDArray[np.float64]:
        """(items,) with one event more for each item: unseen is unlikely, not impossible."""
        smoothed = self.counts + 1
        probabilities: npt.NDArray[np.float64] = smoothed / smoothed.sum()
        return np.log(probabilities)

    def with_items(self, items: pl.DataFrame, embeddings: npt.NDArray[Any] | None) -> Popularity:
        """New items, which nobody took yet."""
        none = np.zeros(len(items), dtype=self.counts.dtype)
        return Popularity(np.concatenate([self.counts, none]))

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
