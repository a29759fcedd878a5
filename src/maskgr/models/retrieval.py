"""Four ways from a history to ranked items (paper, sections 3.2 and 3.3).

- `generative`: beam search over the digits (`maskgr.decoding.decoder`).
- `dense`: the items whose vectors have the largest product with the predicted one.
- `unified`: the beams of the search, ranked anew by the dense score.
- `fused`: what either finds, ranked by dense + weight × generative log-probability.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from maskgr.data.sequences import Sequences
from maskgr.decoding.catalogue import Exclusions
from maskgr.decoding.decoder import Decoder, Ranking, Search
from maskgr.models.followers import Followers
from maskgr.models.history import Histories
from maskgr.models.network import Network
from maskgr.nn.nearest import Lifted, Nearest
from maskgr.nn.softmax import Bonus, log_normaliser


@dataclass(frozen=True)
class Weights:
    """Of what tells items apart, chosen on validation (`maskgr.models.weighing`).

    A repeat bias stops to be learned when repeats are rare enough to cost nothing, which is before
    they are rare enough never to be among the best.
    """

    fusion: float = 0.0
    """Of the generative log-probability in `fused` retrieval."""
    follow: float = 0.0
    """Of followers in dense scores."""
    repeat: float = 1.0
    """Of the learned repeat bias in dense scores."""
    repeat_beams: float = 0.0
    """Of the same in the scores of beams."""


@dataclass(frozen=True, eq=False)
class Asked:
    """Users, and what they may get."""

    own: Histories
    seen: Sequences  # their items
    allowed: npt.NDArray[np.bool_]  # (items of the catalogue,)
    excluded: Sequences | None  # what each must not get


class Pool(NamedTuple):
    """Candidates of each user with both of their log-probabilities; -1 and -inf fill up."""

    items: npt.NDArray[np.int32]  # (users, width)
    dense: npt.NDArray[np.float32]  # (users, width)
    generative: npt.NDArray[np.float32]  # (users, width)

    def ranked(
        self, weight: float, top: int
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
        """(users, top) the best by dense + weight × generative."""
        generative = self.generative if weight else np.where(self.items >= 0, 0.0, -np.inf)
        total = self.dense + (weight or 1.0) * generative.astype(np.float32)
        return _best(self.items, total, top)


@dataclass(frozen=True, eq=False)
class Question:
    """What users ask of the dense head's catalogue."""

    queries: Tensor  # (users, width)
    bonus: Bonus | None  # what some items' scores get beside the product
    normaliser: npt.NDArray[np.float32]  # (users, 1) what makes scores log-probabilities


@dataclass(frozen=True, eq=False)
class Dense:
    """The dense head with the whole catalogue's vectors."""

    network: Network
    table: Tensor  # (items, width)
    nearest: Nearest
    followers: Followers | None
    weights: Weights

    @classmethod
    @torch.no_grad()
    def of(
        cls, network: Network, digits: Tensor, followers: Followers | None, weights: Weights
    ) -> Dense:
        """`digits`: (items, m) of the catalogue."""
        network.eval()
        table = network.table(digits)
        nearest = Nearest(table.cpu().numpy(), network.dense_config.index)
        return cls(network, table, nearest, followers, weights)

    def question(self, asked: Asked) -> Question:
        """With what takes longest: the normaliser, the product with the whole catalogue. An
        approximate search is there to save that, and no order depends on it: with one, scores
        stay as they are."""
        queries, bonus = asked.own.queries(), self._bonus(asked)
        normaliser = torch.zeros(len(queries))
        if self.network.dense_config.index == "exact":
            normaliser = log_normaliser(queries, self.table, bonus=bonus)
        return Question(queries, bonus, normaliser.cpu().numpy()[:, None])

    def rank(
        self, asked: Asked, top: int, question: Question | None = None
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
        """(users, top) items and log-probabilities."""
        question = question or self.question(asked)
        bonus, lifted = question.bonus, None
        if bonus is not None:
            lengths = bonus.rows.bincount(minlength=len(question.queries)).cpu().numpy()
            special = Sequences.from_lengths(bonus.items.int().cpu().numpy(), lengths)
            lifted = Lifted(special, bonus.values.cpu().numpy())
        items, scores = self.nearest.search(
            question.queries.cpu().numpy(),
            top,
            allowed=None if asked.allowed.all() else asked.allowed,
            excluded=asked.excluded,
            lifted=lifted,
        )
        return items, scores - question.normaliser

    def score(self, question: Question, items: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
        """(users, width) log-probabilities of given `items` (users, width)."""
        queries, bonus = question.queries, question.bonus
        scores = self.nearest.scores(queries.cpu().numpy(), items)
        if bonus is not None:
            numbers = torch.from_numpy(items).to(queries.device).long()
            rows = torch.arange(len(numbers), device=queries.device)[:, None].expand_as(numbers)
            scores += bonus.at(rows, numbers).cpu().numpy()
        return scores - question.normaliser

    def _bonus(self, asked: Asked) -> Bonus | None:
        """What some items' scores get beside the product: those that a user has, and others that
        followed them."""
        size, device = len(self.table), self.table.device
        had = asked.seen.keep(~asked.seen.repeats())
        keys = had.owners * size + had.values
        repeat = self.weights.repeat * self.network.repeats
        values = np.full(len(keys), repeat, dtype=np.float32)
        if self.weights.follow and self.followers is not None:
            found, strengths = self.followers.after(asked.seen)
            others = found.owners * size + found.values
            new = ~np.isin(others, keys)
            keys = np.concatenate([keys, others[new]])
            values = np.concatenate([values, np.float32(self.weights.follow) * strengths[new]])
        elif not repeat:
            return None
        order = np.argsort(keys)
        rows, items = (torch.from_numpy(part).to(device) for part in np.divmod(keys[order], size))
        return Bonus(rows, items, torch.from_numpy(values[order]).to(device))


def generative(
    decoder: Decoder, asked: Asked, how: Search, top: int, seed: int, repeat: float = 0.0
) -> Ranking:
    """The next items by unmasking their digits.

    `repeat`: what the scores of the beams that a user has get beside. Digits are shared by many
    items, and cannot well say of single ones that they do not come again.
    """
    biased = bool(repeat) and asked.excluded is None
    found = decoder.next_items(
        asked.own,
        min(max(top, how.beams) if biased else top, int(asked.allowed.sum())),
        how,
        excluded=exclusions(decoder, asked),
        generator=torch.Generator().manual_seed(seed),
    )
    if not biased:
        return found
    scores = found.scores + repeat * taken(asked, found.items)
    scores, order = scores.sort(dim=1, descending=True, stable=True)
    return replace(found, items=found.items.gather(1, order)[:, :top], scores=scores[:, :top])


def exclusions(decoder: Decoder, asked: Asked) -> Exclusions | None:
    """What each user must not get, as the catalogue wants it."""
    if asked.excluded is None:
        return None
    return decoder.catalogue.exclusions(padded(asked.excluded, decoder.catalogue.device))


def unified(
    dense: Dense, decoder: Decoder, asked: Asked, how: Search, top: int, seed: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    """All beams, by their dense log-probabilities."""
    beams = generative(decoder, asked, how, max(top, how.beams), seed)
    items = beams.items.int().cpu().numpy()
    return _best(items, dense.score(dense.question(asked), items), top)


def pool(
    dense: Dense,
    decoder: Decoder,
    asked: Asked,
    how: Search,
    width: int,
    seed: int,
    digits: Tensor,
) -> Pool:
    """What the search and the dense head each find, `width` at least of both, with both scores."""
    beams = generative(decoder, asked, how, width, seed)
    found = beams.items.int().cpu().numpy()
    question = dense.question(asked)
    near, near_scores = dense.rank(asked, width, question)
    users = np.arange(len(near))[:, None] * (len(digits) + 1)
    near = np.where(np.isin(users + near, users + found), -1, near)  # each once
    items = np.concatenate([found, near], axis=1)
    scores = np.concatenate(
        [dense.score(question, found), np.where(near >= 0, near_scores, -np.inf)], axis=1
    )
    others = torch.from_numpy(near).to(digits.device).long()
    missing = decoder.score(
        asked.own,
        others,
        digits[others.clamp(min=0)],
        how,
        excluded=exclusions(decoder, asked),
        generator=torch.Generator().manual_seed(seed),
    )
    both = np.concatenate([beams.scores.cpu().numpy(), missing.cpu().numpy()], axis=1)
    return Pool(items, scores.astype(np.float32), both)


def _best(
    items: npt.NDArray[np.int32], scores: npt.NDArray[np.float32], top: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    """(rows, top) best first, the lower item number among equals; -1 and -inf fill up."""
    scores = np.where(items >= 0, scores, -np.inf).astype(np.float32)
    order = np.lexsort((items, -scores), axis=1)[:, :top]
    best, values = np.take_along_axis(items, order, 1), np.take_along_axis(scores, order, 1)
    missing = top - best.shape[1]
    if missing > 0:
        best = np.pad(best, ((0, 0), (0, missing)), constant_values=-1)
        values = np.pad(values, ((0, 0), (0, missing)), constant_values=-np.inf)
    return best.astype(np.int32), values


def taken(asked: Asked, items: Tensor) -> Tensor:
    """(users, width) which of `items` (users, width) a user has."""
    own = padded(asked.seen, items.device)  # (users, longest)
    return (items[:, :, None] == own[:, None, :]).any(2) & (items >= 0)


def padded(sequences: Sequences, device: torch.device) -> Tensor:
    """(sequences, longest) the values, -1 behind the last."""
    rows = torch.full((len(sequences), int(sequences.lengths.max(initial=1))), -1)
    rows[torch.from_numpy(sequences.owners), torch.from_numpy(sequences.places)] = torch.from_numpy(
        sequences.values
    ).long()
    return rows.to(device)
