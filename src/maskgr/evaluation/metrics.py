"""Recall@K and NDCG@K of items over the whole catalogue, and session recall@K: one value a user."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


def relevant(ranked: npt.NDArray[Any], targets: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """(users, depth) whether each ranked item is one of the user's targets (users, k)."""
    found: npt.NDArray[np.bool_] = (ranked[:, :, None] == targets[:, None, :]).any(axis=2)
    return found


def distinct(targets: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """(users,) how many different targets each user has: one taken twice can be found once."""
    ordered = np.sort(targets, axis=1)
    changes: npt.NDArray[np.int64] = (np.diff(ordered, axis=1) != 0).sum(axis=1)
    return changes + 1


def recall(ranked: npt.NDArray[Any], targets: npt.NDArray[Any], k: int) -> Floats:
    """(users,) the share of the targets among the first `k`."""
    hits: Floats = relevant(ranked[:, :k], targets).sum(axis=1, dtype=np.float64)
    return hits / distinct(targets)


def ndcg(ranked: npt.NDArray[Any], targets: npt.NDArray[Any], k: int) -> Floats:
    """(users,) the discounted gain of the first `k`, as a share of the best possible."""
    discounts = 1 / np.log2(np.arange(k) + 2)
    hits = relevant(ranked[:, :k], targets)
    ideal: Floats = np.cumsum(discounts)[np.minimum(distinct(targets), k) - 1]
    gains: Floats = hits @ discounts[: hits.shape[1]]
    return gains / ideal


def session_recall(sessions: npt.NDArray[Any], targets: npt.NDArray[Any], k: int) -> Floats:
    """(users,) the share of positions at which one of the first `k` sessions has the target.

    sessions (users, depth, items), best first; targets (users, items) in the order they came.
    """
    found: npt.NDArray[np.bool_] = (sessions[:, :k] == targets[:, None, :]).any(axis=1)
    shares: Floats = found.mean(axis=1)
    return shares


@dataclass(frozen=True)
class Mean:
    """A mean over users with its 95 % confidence interval (normal approximation)."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Floats, most: float = 1.0) -> Mean:
        """`most`: what the mean cannot exceed."""
        mean = float(values.mean())
        spread = float(values.std(ddof=1)) if len(values) > 1 else 0.0
        margin = 1.96 * spread / np.sqrt(len(values))
        return cls(mean, max(0.0, mean - margin), min(most, mean + margin))

    def __str__(self) -> str:
        """In percent, with half of the interval."""
        return f"{100 * self.mean:.2f} ± {50 * (self.high - self.low):.2f}"


def user_metrics(
    ranked: npt.NDArray[Any], targets: npt.NDArray[Any], ks: Sequence[int]
) -> dict[str, Floats]:
    """(users,) `recall@K` and `ndcg@K` for each K."""
    result = {}
    for k in ks:
        result[f"recall@{k}"] = recall(ranked, targets, k)
        result[f"ndcg@{k}"] = ndcg(ranked, targets, k)
    return result


def means(values: Mapping[str, Floats]) -> dict[str, Mean]:
    """Each metric's mean over the users."""
    return {name: Mean.of(own) for name, own in values.items()}


def top_items(scores: npt.NDArray[Any], top: int) -> npt.NDArray[np.int64]:
    """(users, top) the best-scored items, best first; equal scores in the catalogue's order."""
    top = min(top, scores.shape[1])
    threshold = -np.partition(-scores, top - 1, axis=1)[:, top - 1, None]
    above, equal = scores > threshold, scores == threshold
    room = top - above.sum(axis=1, keepdims=True)
    chosen = above | (equal & (np.cumsum(equal, axis=1) <= room))
    items = np.nonzero(chosen)[1].reshape(len(scores), top)  # in the catalogue's order
    best = np.argsort(-np.take_along_axis(scores, items, axis=1), axis=1, kind="stable")
    return np.take_along_axis(items, best, axis=1)
