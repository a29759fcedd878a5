"""q(history, revealed) of a batch of users, as decoding asks for it."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from maskgr.data.sequences import Sequences
from maskgr.models.maskgr.bias import Bias
from maskgr.models.maskgr.denoiser import Denoiser, HistoryMemory
from maskgr.models.neighbours import Neighbours
from maskgr.models.sasrec import SASRec
from maskgr.nn.softmax import Bonus


class GenerativeModel(Protocol):
    """A model of which decoding asks queries."""

    history: SASRec
    denoiser: Denoiser
    neighbours: Neighbours | None
    bias: Bias

    @property
    def levels(self) -> int: ...


class Histories:
    """A batch of histories as a `maskgr.decoding.posterior.EnergyDenoiser`."""

    def __init__(
        self, model: GenerativeModel, histories: Sequences, guidance: float = 0.0, items: int = 1
    ) -> None:
        """`histories`: whole, in ascending order of what the model sees of them. `items`: how many
        next items are decoded together."""
        hidden, layout = model.history.encode(histories.last(model.history.history_limit))
        self.items, self.levels, self.guidance = items, model.levels, guidance
        self.memory = HistoryMemory(model.denoiser, hidden, layout)
        self.queries = model.history.queries(self.memory.last)  # (users, width)
        self.table = model.history.table()
        self.bonus: Bonus | None = model.bias.bonus(model.history, model.neighbours, histories)
        # Energies are linear in the query, so guidance moves the query itself. Training predicts
        # the first item of every sequence from an empty history.
        self.empty = Histories(model, Sequences.of([[]]), 0.0, items) if guidance else None

    @property
    def users(self) -> int:
        return len(self.queries)

    def first(self) -> Tensor:
        user = torch.arange(self.users, device=self.queries.device)
        nothing = torch.zeros(self.users, self.items, self.levels, device=user.device)
        return self(user, nothing.long(), nothing.bool())

    def __call__(self, user: Tensor, codes: Tensor, revealed: Tensor) -> Tensor:
        asked = [self._query(user, codes, revealed, place) for place in range(self.items)]
        queries = torch.stack(asked, 1)  # (rows, items, width)
        if self.empty is not None:
            unguided = self.empty(torch.zeros_like(user), codes, revealed)
            queries = queries + self.guidance * (queries - unguided)
        return queries

    def _query(self, user: Tensor, codes: Tensor, revealed: Tensor, place: int) -> Tensor:
        """(rows, width); while nothing is known, the history alone asks for the first item."""
        queries = self.queries[user]
        if place == 0 and not revealed.any():
            return queries
        change = self.memory.change(user, codes, revealed, place)
        if place == 0:
            change = change * revealed.flatten(1).any(1, keepdim=True)
        return queries + change
