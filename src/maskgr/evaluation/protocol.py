"""A recommender's answers to a holdout's questions, measured under named protocols.

`all` ranks the whole catalogue; `unseen` removes what the user had before. Published figures differ
in which they use, and the result by up to a third: so a number without its protocol says little.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from maskgr.data.sequences import Sequences
from maskgr.data.splits import Holdout
from maskgr.data.synthetic import Shop
from maskgr.decoding.config import DecodingConfig
from maskgr.errors import RequestError
from maskgr.evaluation.metrics import Mean, metrics, top_items
from maskgr.recommender import Recommender

Protocol = Literal["all", "unseen"]
PROTOCOLS: tuple[Protocol, ...] = ("all", "unseen")
BATCH = 1024  # users ranked at once


@dataclass(frozen=True)
class Evaluation:
    """Metrics under each protocol; `oracle` where the data's true probabilities are known."""

    users: int
    metrics: dict[Protocol, dict[str, Mean]]
    users_per_second: float
    invalid_share: float = 0.0  # of the beams that ended as no item, without the constraint
    oracle: dict[Protocol, dict[str, Mean]] | None = None

    def to_dict(self, protocol: Protocol) -> dict[str, Any]:
        """Flat means under `protocol`, and everything under `protocols`."""
        chosen = {name: value.mean for name, value in self.metrics[protocol].items()}
        result: dict[str, Any] = {"users": self.users, "protocol": protocol, **chosen}
        result["protocols"] = _nested(self.metrics)
        if self.oracle is not None:
            result["oracle"] = _nested(self.oracle)
            result["share_of_oracle"] = {
                name: value / best.mean if (best := self.oracle[protocol][name]).mean else None
                for name, value in chosen.items()
            }
        result["users_per_second"] = self.users_per_second
        result["invalid_share"] = self.invalid_share
        return result


def evaluate(
    recommender: Recommender,
    holdout: Holdout,
    *,
    ks: Sequence[int] = (5, 10),
    shop: Shop | None = None,
    decoding: DecodingConfig | None = None,
    protocols: Sequence[Protocol] = PROTOCOLS,
) -> Evaluation:
    """Every question of `holdout`, under both protocols unless told otherwise."""
    if not ks or min(ks) < 1:
        raise RequestError(f"metrics at K = {', '.join(map(str, ks))} are impossible; use K >= 1")
    depth = min(max(ks), len(recommender.items))
    found: dict[Protocol, dict[str, Mean]] = {}
    start = time.perf_counter()
    invalid = 0.0
    for protocol in protocols:
        ranked = recommender.rank(
            holdout.histories, depth, exclude_seen=protocol == "unseen", decoding=decoding
        )
        found[protocol] = metrics(ranked.items, holdout.targets, ks)
        invalid += ranked.invalid_share / len(protocols)
    seconds = time.perf_counter() - start
    questions = len(holdout.users)
    return Evaluation(
        users=questions,
        metrics=found,
        users_per_second=len(protocols) * questions / max(seconds, 1e-9),
        invalid_share=invalid,
        oracle=None if shop is None else _oracle(shop, holdout, ks),
    )


def _oracle(shop: Shop, holdout: Holdout, ks: Sequence[int]) -> dict[Protocol, dict[str, Mean]]:
    """The best that anybody could do who sees the histories: ranking by the true probabilities."""
    result: dict[Protocol, dict[str, Mean]] = {}
    depth = min(max(ks), len(shop.items))
    for protocol in PROTOCOLS:
        batches = [
            _oracle_ranking(shop, holdout.histories.select(rows), depth, protocol)
            for rows in np.array_split(
                np.arange(len(holdout.users)), -(-len(holdout.users) // BATCH)
            )
        ]
        result[protocol] = metrics(np.concatenate(batches), holdout.targets, ks)
    return result


def _oracle_ranking(
    shop: Shop, histories: Sequences, depth: int, protocol: Protocol
) -> npt.NDArray[np.int64]:
    scores = shop.next_item_probabilities(histories)
    if protocol == "unseen":
        scores[histories.owners, histories.values] = -1
    return top_items(scores, depth)


def _nested(found: dict[Protocol, dict[str, Mean]]) -> dict[str, Any]:
    return {
        protocol: {name: vars(value) for name, value in values.items()}
        for protocol, values in found.items()
    }
