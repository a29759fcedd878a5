"""A question to a model and its answers: what evaluation knows of models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from maskgr.data.sequences import Sequences


@dataclass(frozen=True, eq=False)
class Query:
    """Users' histories, and which items they may get."""

    histories: Sequences  # item numbers, oldest first
    top: int
    allowed: npt.NDArray[np.bool_] | None = None  # (items,) for all users; None: every item
    excluded: Sequences | None = None  # (users,) items that each must not get

    def select(self, rows: npt.NDArray[np.int64]) -> Query:
        """The same for some of the users."""
        excluded = None if self.excluded is None else self.excluded.select(rows)
        return Query(self.histories.select(rows), self.top, self.allowed, excluded)


class Ranked(NamedTuple):
    """Best first; -1 and -inf where there are no more."""

    items: npt.NDArray[np.int32]  # (users, top)
    scores: npt.NDArray[np.float32]  # (users, top) log-probabilities
    invalid_share: float | None = None  # share of beams that are no item, where beams may be so


class Ranker(Protocol):
    """Anything that answers queries."""

    def rank(self, query: Query) -> Ranked: ...


class SessionPlanner(Protocol):
    """Anything that answers queries with sessions: several next items, in the order they come."""

    def sessions(self, query: Query, items: int) -> npt.NDArray[np.int64]:
        """(users, top, items) item numbers, the best session first; -1 where there are no more."""
        ...
