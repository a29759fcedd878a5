"""A ranker's answers to held-out questions, measured under named protocols.

`all` ranks the whole catalogue; `unseen` removes the items of the user's history. Published figures
differ in which they use, and by up to a third in the result: a number names its protocol.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from maskgr.data.sequences import Sequences
from maskgr.data.splits import Holdout
from maskgr.data.synthetic import Shop
from maskgr.errors import RequestError
from maskgr.evaluation.config import PROTOCOLS as PROTOCOLS
from maskgr.evaluation.config import Protocol as Protocol
from maskgr.evaluation.metrics import Floats, Mean, means, session_recall, top_items, user_metrics
from maskgr.evaluation.ranking import Query, Ranker, SessionPlanner

BATCH = 1024  # users ranked at once
SESSION_BEAMS = 10  # of a search for sessions, as in the paper


@dataclass(frozen=True)
class Evaluation:
    """Metrics under each protocol; `oracle` where the data's true probabilities are known."""

    users: int
    metrics: dict[Protocol, dict[str, Mean]]
    users_per_second: float
    invalid_share: float | None = None  # share of beams that are no item, where beams may be so
    oracle: dict[Protocol, dict[str, Mean]] | None = None
    # What models that train in seconds reach on the same questions.
    floors: Mapping[str, Evaluation] = field(default_factory=dict)
    # (users,) what the means are of, in the order of the questions.
    values: dict[Protocol, dict[str, Floats]] = field(default_factory=dict, repr=False)

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
        if self.invalid_share is not None:
            result["invalid_share"] = self.invalid_share
        if self.floors:
            result["floors"] = {
                name: {"users_per_second": own.users_per_second, "protocols": _nested(own.metrics)}
                for name, own in self.floors.items()
            }
        return result


def evaluate(
    ranker: Ranker,
    holdout: Holdout,
    n_items: int,
    *,
    ks: Sequence[int] = (5, 10),
    shop: Shop | None = None,
    protocols: Sequence[Protocol] = PROTOCOLS,
) -> Evaluation:
    """Answers every question of `holdout` from a catalogue of `n_items` under each protocol."""
    _require_cutoffs(ks)
    depth = min(max(ks), n_items)
    found: dict[Protocol, dict[str, Floats]] = {}
    shares: list[float] = []
    start = time.perf_counter()
    for protocol in protocols:
        ranked = ranker.rank(_query(holdout, depth, protocol))
        found[protocol] = user_metrics(ranked.items, holdout.targets, ks)
        if ranked.invalid_share is not None:
            shares.append(ranked.invalid_share)
    seconds = time.perf_counter() - start
    questions = len(holdout.users)
    return Evaluation(
        users=questions,
        metrics={protocol: means(values) for protocol, values in found.items()},
        users_per_second=len(protocols) * questions / max(seconds, 1e-9),
        invalid_share=float(np.mean(shares)) if shares else None,
        oracle=None if shop is None else _oracle(shop, holdout, ks),
        values=found,
    )


def evaluate_sessions(
    planner: SessionPlanner,
    holdout: Holdout,
    items: int,
    *,
    ks: Sequence[int] = (10,),
    beams: int = SESSION_BEAMS,
    protocols: Sequence[Protocol] = PROTOCOLS,
) -> Evaluation:
    """The average session recall@K: the next `items` items of each user, planned together.

    beams: sessions that the search ends with. A wider search finds other sessions, so all cut-offs
        are measured on the results of one and the same search.
    """
    _require_cutoffs(ks)
    if max(ks) > beams:
        raise RequestError(
            f"session_recall@{max(ks)} needs {max(ks)} beams, and the search has {beams}; give "
            f"--beams {max(ks)}"
        )
    held_out = holdout.targets.shape[1]
    if not 1 <= items <= held_out:
        raise RequestError(
            f"a session of {items} does not fit the {held_out} held-out items of each user; ask "
            f"for 1 to {held_out}, or hold out more"
        )
    found: dict[Protocol, dict[str, Floats]] = {}
    start = time.perf_counter()
    for protocol in protocols:
        sessions = planner.sessions(_query(holdout, beams, protocol), items)
        found[protocol] = {
            f"session_recall@{k}": session_recall(sessions, holdout.targets[:, :items], k)
            for k in ks
        }
    seconds = time.perf_counter() - start
    questions = len(holdout.users)
    return Evaluation(
        users=questions,
        metrics={protocol: means(values) for protocol, values in found.items()},
        users_per_second=len(protocols) * questions / max(seconds, 1e-9),
        values=found,
    )


def _require_cutoffs(ks: Sequence[int]) -> None:
    if not ks or min(ks) < 1:
        raise RequestError(f"metrics at K = {', '.join(map(str, ks))} are impossible; use K >= 1")


def _query(holdout: Holdout, top: int, protocol: Protocol) -> Query:
    """The questions of `holdout` under a protocol."""
    seen = holdout.histories if protocol == "unseen" else None
    return Query(holdout.histories, top, excluded=seen)


def _oracle(shop: Shop, holdout: Holdout, ks: Sequence[int]) -> dict[Protocol, dict[str, Mean]]:
    """The best possible result for a ranker that sees the histories: by true probabilities."""
    result: dict[Protocol, dict[str, Mean]] = {}
    depth = min(max(ks), len(shop.items))
    for protocol in PROTOCOLS:
        batches = [
            _oracle_ranking(shop, holdout.histories.select(rows), depth, protocol)
            for rows in np.array_split(
                np.arange(len(holdout.users)), -(-len(holdout.users) // BATCH)
            )
        ]
        result[protocol] = means(user_metrics(np.concatenate(batches), holdout.targets, ks))
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
