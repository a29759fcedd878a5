"""What is measured of a trained model, user by user, and how it is kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
from torch import nn

from maskgr.artefact import read_manifest, write_folder
from maskgr.data.config import SplitName
from maskgr.data.sequences import Sequences
from maskgr.data.splits import Holdout
from maskgr.evaluation.metrics import Floats
from maskgr.evaluation.protocol import (
    PROTOCOLS,
    SESSION_BEAMS,
    Evaluation,
    Protocol,
    evaluate,
    evaluate_sessions,
)
from maskgr.evaluation.ranking import Query, Ranker, SessionPlanner
from maskgr.models.base import Decodes, PlansSessions
from maskgr.recommender import Recommender
from maskgr.studies.costs import Costs, costs

KIND, SCHEMA = "evaluation", 2
USERS = "users.parquet"


@dataclass(frozen=True)
class Measure:
    """What to measure of a run."""

    split: SplitName = "test"
    users: int | None = None  # a random sample; None: all
    ks: tuple[int, ...] = (5, 10)
    protocols: tuple[Protocol, ...] = PROTOCOLS
    decoding: Mapping[str, Any] = field(default_factory=dict)  # changes to the model's own
    session: int = 0  # next items planned together; 0: the next item is ranked
    costs: bool = False  # also operations and the time of one user alone
    group: str = ""  # of users, where a study has groups


@dataclass(frozen=True, eq=False)
class Scores:
    """What was measured of a run, user by user, and facts about the run."""

    values: dict[Protocol, dict[str, Floats]]  # (users,)
    users_per_second: float
    invalid_share: float | None  # of beams that are no item, where beams may be so
    minutes: float  # of training, all in all
    parameters: int  # 0: it has no network
    decoding: dict[str, Any]  # as it was done; empty for models that do not decode
    config: dict[str, Any]  # everything that decided the training
    run: str  # its folder
    costs: Costs | None = None

    @property
    def users(self) -> int:
        return len(next(iter(next(iter(self.values.values())).values())))


@dataclass(frozen=True)
class ItemByItem:
    """Plans sessions with a model that predicts one item: each item continues the history.

    A beam search over items: `top` sessions are kept after each item, by the sum of the items'
    log-probabilities. This is how an autoregressive model plans a session.
    """

    ranker: Ranker
    repeats: bool  # whether a session may hold an item twice

    def sessions(self, query: Query, items: int) -> npt.NDArray[np.int64]:
        found = np.empty((len(query.histories), 1, 0), dtype=np.int64)
        scores = np.zeros(found.shape[:2], dtype=np.float64)
        for _ in range(items):
            found, scores = self._longer(query, found, scores)
        return found

    def _longer(
        self, query: Query, before: npt.NDArray[np.int64], scores: Floats
    ) -> tuple[npt.NDArray[np.int64], Floats]:
        """Sessions (users, top, items) with one item more, and their scores (users, top)."""
        users, beams, length = before.shape
        rows = np.repeat(np.arange(users), beams)
        chosen, made = query.select(rows), list(before.reshape(len(rows), length))
        taken = chosen.excluded
        if taken is None:
            taken = Sequences.of([[]] * len(rows))
        if not self.repeats:
            taken = _joined(taken, made)
        ranked = self.ranker.rank(
            replace(chosen, histories=_joined(chosen.histories, made), excluded=taken)
        )
        total = (scores.reshape(-1, 1) + ranked.scores).reshape(users, -1)
        best = np.argsort(-total, axis=1, kind="stable")[:, : query.top]  # (users, top)
        scores = np.take_along_axis(total, best, axis=1)
        parents = np.take_along_axis(before, (best // query.top)[:, :, None], axis=1)
        last = np.take_along_axis(ranked.items.reshape(users, -1), best, axis=1)
        longer = np.concatenate([parents, last[:, :, None]], axis=2)
        longer[np.isneginf(scores)] = -1  # there are no more
        return longer, scores


def _joined(sequences: Sequences, others: list[npt.NDArray[np.int64]]) -> Sequences:
    """Each sequence with the items that continue it; -1 is none."""
    pairs = zip(sequences, others, strict=True)
    return Sequences.of([np.append(own, other[other >= 0]) for own, other in pairs])


def measured(
    recommender: Recommender, holdout: Holdout, measure: Measure
) -> tuple[Evaluation, dict[str, Any]]:
    """The evaluation, and facts about the recommender."""
    changes = dict(measure.decoding)
    if measure.session and isinstance(recommender.model, Decodes):
        changes.setdefault("beams", SESSION_BEAMS)
    decoding = recommender.decoding(**changes) if changes else None
    ranker = recommender.ranker(decoding)
    if measure.session:
        planner: SessionPlanner = ItemByItem(ranker, recommender.repeats)
        if isinstance(recommender.model, PlansSessions):
            planner = recommender.planner(decoding)
        found = evaluate_sessions(
            planner, holdout, measure.session, ks=measure.ks, protocols=measure.protocols
        )
    else:
        found = evaluate(
            ranker,
            holdout,
            len(recommender.items),
            ks=measure.ks,
            protocols=measure.protocols,
        )
    return found, {
        "parameters": _parameters(recommender),
        "decoding": _decoding(recommender, changes, measure.session),
        "config": recommender.config.to_dict(),
        "costs": asdict(costs(ranker, holdout)) if measure.costs else None,
    }


def _parameters(recommender: Recommender) -> int:
    model = recommender.model
    return sum(p.numel() for p in model.parameters()) if isinstance(model, nn.Module) else 0


def _decoding(recommender: Recommender, changes: Mapping[str, Any], session: int) -> dict[str, Any]:
    model = recommender.model
    if not isinstance(model, Decodes):
        return {}
    asked = recommender.decoding(**changes)
    found = asdict(model.resolved(asked))
    if session:  # one step a digit, unless fewer were asked for
        planned = asked.steps if isinstance(model, PlansSessions) else 0
        found["steps"] = planned or session * model.levels
    return found


def write_scores(
    folder: Path, ids: pl.Series, found: Evaluation, facts: Mapping[str, Any], measure: Measure
) -> None:
    columns = [
        pl.Series(f"{protocol} {name}", own)
        for protocol, values in found.values.items()
        for name, own in values.items()
    ]
    speed = {"users_per_second": found.users_per_second, "invalid_share": found.invalid_share}
    kept = {**facts, **speed, "measure": asdict(measure)}
    with write_folder(folder, KIND, SCHEMA, kept) as draft:
        pl.DataFrame([ids.alias("user_id"), *columns]).write_parquet(draft / USERS)


def read_scores(folder: Path) -> Scores:
    config = read_manifest(folder, KIND, SCHEMA).config
    measure, cost = config.pop("measure"), config.pop("costs")
    frame = pl.read_parquet(folder / USERS)
    values: dict[Protocol, dict[str, Floats]] = {name: {} for name in measure["protocols"]}
    for column in frame.columns[1:]:
        protocol, _, name = column.partition(" ")
        values[protocol][name] = frame[column].to_numpy()  # type: ignore[index]
    return Scores(values, **config, costs=None if cost is None else Costs(**cost))
