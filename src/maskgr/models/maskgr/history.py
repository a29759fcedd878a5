"""The paper's network as decoding asks for it: with or without a cache of the history.

With `cache="off"` each beam and step encodes the whole sequence: exact for every network. With
`cache="frozen"` the history's keys and values are kept from the first step, when the target was all
masked, and later steps compute the target's few tokens alone. That is exact for a network trained
with `isolated` attention, whose history never looks at the target; for one trained with `full`
attention it is an approximation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from maskgr.data.sequences import Sequences
from maskgr.models.maskgr.network import Network
from maskgr.nn.transformer import Layout, Tap

Cache = Literal["off", "frozen"]
TOKENS = 65_536  # that go through the network at once


class _Keep:
    """A block's memory that keeps the history's keys and values, group by group."""

    def __init__(self, target: int) -> None:
        self.target = target
        self.groups: list[tuple[Tensor, Tensor]] = []

    def __call__(self, group: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        end = keys.shape[2] - self.target
        self.groups.append((keys[:, :, :end], values[:, :, :end]))
        return keys, values


class _Recall:
    """A block's memory that puts the cached history of each row before the row's own tokens."""

    def __init__(self, kept: _Keep, picks: Sequence[tuple[int, Tensor]]) -> None:
        self.kept, self.picks = kept, picks

    def __call__(self, group: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        where, rows = self.picks[group]
        past_keys, past_values = self.kept.groups[where]
        return (
            torch.cat([past_keys.index_select(0, rows), keys], dim=2),
            torch.cat([past_values.index_select(0, rows), values], dim=2),
        )


class Histories:
    """A batch of users' histories, shortest first, as a `maskgr.decoding.denoiser.Denoiser`."""

    def __init__(
        self, network: Network, histories: Sequences, codes: Tensor, *, items: int, cache: Cache
    ) -> None:
        """`codes` (items of the catalogue, levels); `items`: how many are predicted together."""
        self.network, self.items, self.cache = network, items, cache
        device = codes.device
        numbers = torch.from_numpy(histories.values).to(device).long()
        with torch.no_grad():
            self.past = network.embed_items(codes[numbers], numbers)  # (tokens, width)
        self.lengths = torch.from_numpy(histories.lengths).to(device) * network.n_levels  # (users,)
        self.offsets = torch.from_numpy(histories.offsets).to(device) * network.n_levels
        self.counts = np.unique(histories.lengths, return_counts=True)[1].tolist()
        self.kept: list[_Keep] = []
        self.tapped: Tensor | None = None  # (users × levels, width) what the dense head reads
        self.started: list[Tensor] | None = None

    @property
    def codebook_sizes(self) -> tuple[int, ...]:
        return self.network.tokens.sizes

    @property
    def users(self) -> int:
        return len(self.lengths)

    @property
    def _target(self) -> int:
        """Tokens of the items being predicted."""
        return self.items * self.network.n_levels

    @torch.no_grad()
    def first(self) -> list[Tensor]:
        if self.started is None:  # computed once, also for another search of the same users
            users = torch.arange(self.users, device=self.lengths.device)
            shape = (self.users, self.items, self.network.n_levels)
            masked = torch.full(shape, self.network.mask_token, device=users.device)
            everything = torch.ones(shape, dtype=torch.bool, device=users.device)
            if self.cache == "frozen":
                self.kept = [_Keep(self._target) for _ in self.network.encoder.blocks]
            answers = self._whole(users, masked, everything, self.kept or None, tap=True)
            self.started = [answer.view(self.users, self.items, -1) for answer in answers]
        return self.started

    @torch.no_grad()
    def queries(self) -> Tensor:
        """(users, text width) the dense head's prediction of the next item."""
        self.first()
        assert self.tapped is not None
        assert self.network.head is not None
        found: Tensor = self.network.head(self.tapped.view(self.users, -1))
        return found

    @torch.no_grad()
    def __call__(
        self, user: Tensor, digits: Tensor, revealed: Tensor, wanted: Tensor
    ) -> list[Tensor]:
        starts = digits.new_tensor(self.network.tokens.starts[:-1])
        tokens = torch.where(revealed, digits + starts, self.network.mask_token)
        answer = self._cached if self.kept else self._whole
        parts = [answer(user[rows], tokens[rows], wanted[rows]) for rows in self._portions(user)]
        return [torch.cat(level) for level in zip(*parts, strict=True)]

    def _portions(self, user: Tensor) -> Iterator[slice]:
        """Rows that fit the token budget together; users ascend, and so do lengths."""
        past = int(self.lengths.max())
        # With a cache each row copies the history's keys and values: about a quarter of a token.
        step = max(1, TOKENS // (self._target + (past // 4 if self.kept else past)))
        return (slice(start, start + step) for start in range(0, len(user), step))

    def _whole(
        self,
        user: Tensor,
        target: Tensor,
        wanted: Tensor,
        memories: list[_Keep] | None = None,
        *,
        tap: bool = False,
    ) -> list[Tensor]:
        """Level by level (wanted there, codes): histories and targets encoded together."""
        lengths = self.lengths[user] + self._target
        layout = Layout.of(lengths.tolist(), user.device)
        ends = lengths.cumsum(0)
        place = (ends - self._target)[:, None] + torch.arange(self._target, device=user.device)
        in_target = torch.zeros(len(layout.positions), dtype=torch.bool, device=user.device)
        in_target[place.flatten()] = True
        shift = self.offsets[user] - (ends - lengths)  # from the batch to the histories' tokens
        past = (~in_target).nonzero().squeeze(1)
        embedded = self.past.new_empty((len(in_target), self.network.config.width))
        embedded[place.flatten()] = self.network.tokens.embed(target.flatten())
        embedded[past] = self.past[past + shift[layout.sequences[past]]]
        tapped = None
        if tap and self.network.head is not None:
            tapped = place[:, : self.network.n_levels].flatten()  # of the first item
        return self._answer(embedded, layout, place.view_as(target), wanted, memories, tapped)

    def _cached(self, user: Tensor, target: Tensor, wanted: Tensor) -> list[Tensor]:
        """The same from the targets alone and the cached keys and values of the histories."""
        group = torch.repeat_interleave(torch.tensor(self.counts)).to(user.device)  # (users,)
        first = torch.tensor([0, *np.cumsum(self.counts)[:-1]], device=user.device)
        present, counts = torch.unique_consecutive(group[user], return_counts=True)
        rows = torch.split(user - first[group[user]], counts.tolist())
        picks = list(zip(present.tolist(), rows, strict=True))
        within = torch.arange(self._target, device=user.device)
        layout = Layout(
            tuple((count, self._target) for count in counts.tolist()),
            (self.lengths[user][:, None] + within).flatten(),
            torch.arange(len(user), device=user.device).repeat_interleave(self._target),
        )
        place = torch.arange(target.numel(), device=user.device).view_as(target)
        memories = [_Recall(kept, picks) for kept in self.kept]
        embedded = self.network.tokens.embed(target.flatten())
        return self._answer(embedded, layout, place, wanted, memories)

    def _answer(
        self,
        embedded: Tensor,
        layout: Layout,
        place: Tensor,
        wanted: Tensor,
        memories: Sequence[_Keep] | Sequence[_Recall] | None,
        tapped: Tensor | None = None,
    ) -> list[Tensor]:
        """Level by level log-probabilities at the `place` (rows, items, m) of the digits wanted."""
        n_levels = self.network.n_levels
        rows = [place[:, :, level][wanted[:, :, level]] for level in range(n_levels)]
        past = [0] * len(layout.groups)
        if memories and isinstance(memories[0], _Recall):
            past = [self.kept[0].groups[where][0].shape[2] for where, _ in memories[0].picks]
        tap = None if tapped is None else Tap(self.network.tap_layer, tapped)
        hidden, found = self.network.encode(
            embedded, layout, torch.cat(rows), self.items, memories=memories, past=past, tap=tap
        )
        if tap is not None:
            self.tapped = found
        counts = [len(part) for part in rows]
        return [
            self.network.tokens.log_probs(states, level)
            for level, states in enumerate(torch.split(hidden, counts))
        ]
