"""Models that train in seconds: what any other model must beat."""

from __future__ import annotations

from maskgr.data.sequences import Sequences
from maskgr.evaluation.ranking import Ranker
from maskgr.models.neighbours import Neighbours, NeighboursConfig
from maskgr.models.popularity import Popularity


def floors(train: Sequences, n_items: int) -> dict[str, Ranker]:
    """Popularity and neighbours, learned from the training histories."""
    return {
        "popularity": Popularity(train.counts(n_items)),
        "neighbours": Neighbours.count(train, n_items, NeighboursConfig.most),
    }
