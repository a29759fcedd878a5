"""What counts how much in retrieval (`maskgr.models.retrieval.Weights`): chosen at the end of
training, on validation users, one after the other.

By ndcg@10, which moves with every place that an item gains, and on many users: of two thousand as
many come or go by chance as by a weight.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from maskgr.data.sequences import Sequences
from maskgr.data.splits import Holdout, Split
from maskgr.evaluation.metrics import ndcg
from maskgr.models.retrieval import Weights

if TYPE_CHECKING:
    from maskgr.models.maskgr import MaskGR

USERS = 8000  # that are asked, at most
FUSION = (0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0, 5.0)
FOLLOW = (0.0, 0.3, 0.6, 0.8, 1.0, 1.2)
REPEAT = (1.0, 2.0, 4.0)
REPEAT_BEAMS = (0.0, *REPEAT)


def weigh(model: MaskGR, split: Split) -> Weights:
    """For a model with a dense head, and its followers if it has any."""
    sample = split.validation.sample(USERS, model.config.seed)
    if repeats := model.network.repeats != 0:
        model = _choose(model, "repeat", REPEAT, sample, "dense")
    if model.followers is not None:
        model = _choose(model, "follow", FOLLOW, sample, "dense")
    if repeats:
        model = _choose(model, "repeat_beams", REPEAT_BEAMS, sample, "generative")
    # Users are asked as `recommend` will ask: without what they had, if nobody takes an item twice.
    excluded = None if split.train.repeats().any() else sample.histories
    return replace(model.weights, fusion=_fusion(model, sample, excluded))


def _choose(
    model: MaskGR,
    name: str,
    values: Sequence[float],
    sample: Holdout,
    way: Literal["dense", "generative"],
) -> MaskGR:
    """The model with the best of the weight's `values`, the first of equals."""
    recent = sample.histories.last(model.config.history_limit)
    allowed = np.ones(len(model.sids.digits), dtype=bool)
    decoding = replace(model.config.decoding, retrieval=way)
    found, models = [], []
    for value in values:
        told = model.with_weights(replace(model.weights, **{name: value}))
        ranked = told.rank(recent, min(10, len(allowed)), allowed, None, decoding)
        found.append(float(ndcg(ranked.items, sample.targets, 10).mean()))
        models.append(told)
    best = int(np.argmax(found))
    print(
        f"{way} retrieval: weight of {name} {values[best]}, ndcg@10 {found[best]:.2%}; with "
        f"{values[0]} it is {found[0]:.2%}, on {len(sample.users):,} validation users",
        file=sys.stderr,
    )
    return models[best]


def _fusion(model: MaskGR, sample: Holdout, excluded: Sequences | None) -> float:
    histories = sample.histories.last(model.config.history_limit)
    allowed = np.ones(len(model.sids.digits), dtype=bool)
    gains = np.zeros(len(FUSION))
    for rows, both in model.pools(histories, 10, allowed, excluded):
        for number, weight in enumerate(FUSION):
            items, _ = both.ranked(weight, min(10, len(allowed)))
            gains[number] += ndcg(items, sample.targets[rows], 10).sum()
    best = FUSION[int(gains.argmax())]
    print(
        f"fused retrieval: dense + {best} x generative, ndcg@10 "
        f"{gains.max() / len(sample.users):.2%} on {len(sample.users):,} validation users",
        file=sys.stderr,
    )
    return best
