"""The catalogue-normalised denoiser: q(history, revealed), the query for what is still masked.

p(item | history, revealed digits) is a softmax of q(history, revealed) . v_item over the real items
that agree with what is revealed. The paper's digits are independent given the history, and a
product of marginals is no distribution over items (its Section 3.2); here a step that reveals
several digits has their exact joint. A query that knows some digits asks again: together the
queries are a mixture of softmaxes, which can ask for two unlike things at once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from maskgr.data.splits import Holdout
from maskgr.evaluation.metrics import ndcg
from maskgr.evaluation.ranking import Query, Ranked
from maskgr.nn.transformer import (
    Dropout,
    Layout,
    TransformerConfig,
    causal_mask,
    init_near_identity,
    rotary,
    rotate,
)
from maskgr.sids.vectors import chunks, code_means

CHANGE = (1.0, 0.5, 0.25, 0.0)  # shares of the learned change of queries that are tried
CHANGE_STEPS = 4  # steps of decoding in which they are tried, at most
CHANGE_USERS = 2000  # validation users on whom they are tried
SWEEPS = 5  # over the levels when codes are fitted; they hardly change after that


class Denoiser(nn.Module):
    """One block: the hidden state of the history, with the revealed digits added to it, attends to
    the history and gives a change of the query.

    The next `items` of a session are asked for one by one: the item at place 0, 1, ... knows its
    own revealed digits, and those of the others. With one item and nothing revealed the query is
    the history's, without a change.
    """

    def __init__(self, config: TransformerConfig, sizes: Sequence[int], items: int = 1) -> None:
        super().__init__()
        width = config.width
        self.heads, self.sizes, self.items = config.heads, tuple(sizes), items
        self.starts = (0, *accumulate(self.sizes))[:-1]
        self.codes = nn.Embedding(sum(self.sizes), width)
        self.query_norm = nn.LayerNorm(width)
        self.history_norm = nn.LayerNorm(width)
        self.q = nn.Linear(width, width)
        self.kv = nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, width)
        self.hidden_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, config.hidden)
        self.down = nn.Linear(config.hidden, width)
        self.last_norm = nn.LayerNorm(width)
        self.change = nn.Linear(width, width)
        self.dropout = Dropout(config.dropout)
        init_near_identity(self, depth=1)
        nn.init.zeros_(self.change.weight)
        if items > 1:
            self.places = nn.Embedding(items, width)
            self.others = nn.Linear(width, width, bias=False)
            nn.init.zeros_(self.places.weight)

    @torch.no_grad()
    def scale(self, factor: float) -> None:
        """Makes queries change by this much of what was learned."""
        self.change.weight.mul_(factor)
        self.change.bias.mul_(factor)

    def keys_values(self, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """(tokens, heads, d) twice, of the history's hidden states (tokens, width)."""
        both = self.kv(self.history_norm(hidden)).unflatten(1, (2, self.heads, -1))
        rotation = rotary(positions, both.shape[-1])
        return rotate(both[:, :1], rotation).squeeze(1), both[:, 1]

    def ask(
        self, hidden: Tensor, codes: Tensor, revealed: Tensor, place: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(rows, width) the state that asks, and (rows, heads, d) its attention queries.

        `hidden` (rows, width): the history's last state, and `positions` (rows,) its number of
        items; `codes`, `revealed` (rows, items, levels) of the session; `place` (rows,): the item
        that the row asks for.
        """
        tokens = codes + torch.tensor(self.starts, device=codes.device)
        parts = (self.codes(tokens) * revealed.unsqueeze(3)).sum(2)  # (rows, items, width)
        rows = torch.arange(codes.shape[0], device=codes.device)  # `len` is fixed in a graph
        x = hidden + parts[rows, place]
        if self.items > 1:
            known = revealed.any(2)
            known[rows, place] = False
            parts = parts + self.places.weight[: parts.shape[1]]
            x = x + self.places(place) + self.others((parts * known.unsqueeze(2)).sum(1))
        x = self.dropout(x)
        q = self.q(self.query_norm(x)).unflatten(1, (self.heads, -1))
        return x, rotate(q.unsqueeze(1), rotary(positions + place, q.shape[-1])).squeeze(1)

    def answer(self, x: Tensor, attended: Tensor) -> Tensor:
        """(rows, width) the change of the query, after the attention (rows, width)."""
        x = x + self.dropout(self.out(attended))
        x = x + self.dropout(self.down(functional.gelu(self.up(self.hidden_norm(x)))))
        out: Tensor = self.change(self.last_norm(x))
        return out

    def forward(
        self, hidden: Tensor, layout: Layout, codes: Tensor, revealed: Tensor, place: Tensor
    ) -> Tensor:
        """(tokens, width) the change at every token of every history, for the items after it.

        `codes`, `revealed` (tokens, items, levels) and `place` (tokens,) as in `ask`.
        """
        keys, values = self.keys_values(hidden, layout.positions)
        x, queries = self.ask(hidden, codes, revealed, place, layout.positions + 1)
        gathered = []
        parts = (torch.split(part, layout.sizes) for part in (queries, keys, values))
        for (count, length), *group in zip(layout.groups, *parts, strict=True):
            q, k, v = (part.view(count, length, self.heads, -1).transpose(1, 2) for part in group)
            mask = causal_mask(length, hidden.device)
            found = functional.scaled_dot_product_attention(q, k, v, mask)
            gathered.append(found.transpose(1, 2).reshape(count * length, -1))
        return self.answer(x, torch.cat(gathered))


class HistoryMemory:
    """The keys and values of a batch of histories, for beams that ask again and again."""

    def __init__(self, denoiser: Denoiser, hidden: Tensor, layout: Layout) -> None:
        """`hidden` (tokens, width): all states of the histories, in the layout's order."""
        self.denoiser = denoiser
        keys, values = denoiser.keys_values(hidden, layout.positions)
        users = int(layout.sequences[-1]) + 1
        self.lengths = torch.bincount(layout.sequences, minlength=users)  # (users,)
        longest = int(self.lengths.max())
        shape = (users, longest, *keys.shape[1:])
        self.keys, self.values = keys.new_zeros(shape), values.new_zeros(shape)
        self.keys[layout.sequences, layout.positions] = keys
        self.values[layout.sequences, layout.positions] = values
        self.last = hidden.index_select(0, self.lengths.cumsum(0) - 1)  # (users, width)

    def change(self, user: Tensor, codes: Tensor, revealed: Tensor, place: int = 0) -> Tensor:
        """(rows, width) the change of the query for the item at `place`; `user` (rows,) ascend.

        `codes`, `revealed` (rows, items, levels).
        """
        places = torch.full_like(user, place)
        x, queries = self.denoiser.ask(self.last[user], codes, revealed, places, self.lengths[user])
        users, place = torch.unique_consecutive(user, return_inverse=True)
        rank = torch.arange(len(user), device=user.device) - torch.searchsorted(user, user)
        asked = queries.new_zeros(len(users), int(rank.max()) + 1, *queries.shape[1:])
        asked[place, rank] = queries  # (users, rows of each, heads, d)
        seen = torch.arange(self.keys.shape[1], device=user.device) < self.lengths[users][:, None]
        found = functional.scaled_dot_product_attention(
            asked.transpose(1, 2),
            self.keys[users].transpose(1, 2),
            self.values[users].transpose(1, 2),
            seen[:, None, None],
        )
        return self.denoiser.answer(x, found.transpose(1, 2)[place, rank].flatten(1))


def choose_change(
    denoiser: Denoiser, rank: Callable[[Query], Ranked], holdout: Holdout, top: int = 10
) -> float:
    """The share of its change of queries with the best ndcg@10, to which the denoiser is scaled.

    The denoiser is trained on items that the history may have memorised, and can ask worse on
    others than the history alone; with no change every number of steps finds what one step finds.
    `rank` decodes in several steps.
    """
    learned = {name: part.clone() for name, part in denoiser.state_dict().items()}
    query, found = Query(holdout.histories, top), []
    for share in CHANGE:
        denoiser.scale(share)
        found.append(float(ndcg(rank(query).items, holdout.targets, 10).mean()))
        denoiser.load_state_dict(learned)
    best = int(np.argmax(found))
    denoiser.scale(CHANGE[best])
    print(
        f"denoiser: {CHANGE[best]} of its change of queries, ndcg@10 {found[best]:.2%}; with all "
        f"of it {found[0]:.2%}, with none {found[-1]:.2%}, on {len(holdout.users):,} validation "
        "users",
        file=sys.stderr,
    )
    return CHANGE[best]


def fit_codes(vectors: np.ndarray, codes: np.ndarray, sizes: Sequence[int]) -> np.ndarray:
    """(tokens, width) one vector a (level, code), such that an item's sum to its own vector as
    nearly as they can: each is the mean of what the others leave of its items, again and again."""
    starts = (0, *accumulate(sizes))[:-1]
    tokens = np.zeros((sum(sizes), vectors.shape[1]), dtype=np.float32)
    left = vectors.astype(np.float32)  # (items, width) what no level explains yet; a copy
    for _ in range(SWEEPS):
        for level, (start, size) in enumerate(zip(starts, sizes, strict=True)):
            own, token = codes[:, level], tokens[start : start + size]
            for part in chunks(len(left)):
                left[part] += token[own[part]]
            token[:] = code_means(left, own, size)
            for part in chunks(len(left)):
                left[part] -= token[own[part]]
    return tokens
