"""The best ways to fill in the digits that a step reveals (paper, Section 3.2, multi-token).

A candidate's score is the product of its digits' probabilities. The best candidates are found
exactly without forming the product of the codebooks. Unconstrained, each digit has a list of codes;
constrained, each item of the target has a list of the combinations of digits that occur in the
catalogue together with the revealed digits. The best sums of one entry per list are the candidates.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from maskgr.decoding.denoiser import Targets, best_first, ranks
from maskgr.decoding.matching import CodeIndex, Filters, Remaining, distinct

CELLS = 2**22  # (rows × combinations) scored in one pass: bounds memory


class Found(NamedTuple):
    """Candidates of each row, best first."""

    scores: Tensor  # (rows, width) float32, padded with -inf
    choices: Tensor  # (rows, width, lists) int64, decoded by `Candidates.fill`


class Candidates(Protocol):
    """Fills in the `chosen` (rows, items, m) digits of targets."""

    def best(
        self, log_probs: Tensor, chosen: Tensor, target: Targets, filters: Filters, width: int
    ) -> Found:
        """The best `width` candidates of each row; `log_probs` (rows, items, m, codes)."""
        ...

    def fill(self, choices: Tensor, chosen: Tensor) -> Tensor:
        """(rows, items, m) the digits where `chosen`, for one candidate per row (rows, lists)."""
        ...


class FreeCandidates:
    """All combinations of codes; every row must choose equally many digits."""

    def best(
        self, log_probs: Tensor, chosen: Tensor, target: Targets, filters: Filters, width: int
    ) -> Found:
        codes = log_probs.shape[-1]
        picked = log_probs[chosen].view(len(chosen), -1, codes)  # (rows, α, codes)
        tops = picked.topk(min(width, codes), dim=-1)
        lists = zip(tops.values.unbind(1), tops.indices.unbind(1), strict=True)
        return best_sums([Found(scores, places[..., None]) for scores, places in lists], width)

    def fill(self, choices: Tensor, chosen: Tensor) -> Tensor:
        digits = torch.zeros(chosen.shape, dtype=torch.int64, device=chosen.device)
        digits[chosen] = choices.flatten()
        return digits


class CatalogueCandidates:
    """Combinations of digits that occur in the catalogue; one list for each item of the target.

    A choice is a code if one digit of the target's item is chosen, and an item of the catalogue
    that has the combination if several are.
    """

    def __init__(self, index: CodeIndex) -> None:
        self._index = index

    def best(
        self, log_probs: Tensor, chosen: Tensor, target: Targets, filters: Filters, width: int
    ) -> Found:
        lists = []
        for place in range(chosen.shape[1]):
            item = Targets(target.user, target.digits[:, place], target.revealed[:, place])
            own = log_probs[:, place].contiguous()
            lists.append(self._best_of_item(own, chosen[:, place], item, filters, width))
        return best_sums(lists, width)

    def fill(self, choices: Tensor, chosen: Tensor) -> Tensor:
        several = chosen.sum(dim=-1, keepdim=True) > 1  # (rows, items, 1)
        digits = self._index.codes[torch.where(several.squeeze(-1), choices, 0)]
        return torch.where(several, digits, choices.unsqueeze(-1)) * chosen

    def _best_of_item(
        self, log_probs: Tensor, chosen: Tensor, item: Targets, filters: Filters, width: int
    ) -> Found:
        """The candidates of one item: `log_probs` (rows, m, codes), `chosen` (rows, m)."""
        count = chosen.sum(dim=1)
        none, one = (count == 0).nonzero().squeeze(1), (count == 1).nonzero().squeeze(1)
        fresh = ~item.revealed.any(1)
        parts = []
        if len(none):
            nothing = torch.zeros((len(none), 1), device=chosen.device)
            parts.append((none, nothing, nothing.long()))
        if len(one):
            picked = log_probs[one, chosen[one].int().argmax(dim=1)]  # (rows, codes)
            parts.append((one, *picked.topk(min(width, picked.shape[1]))))
        first = ((count > 1) & fresh).nonzero().squeeze(1)
        sets, owner = torch.unique(chosen[first], dim=0, return_inverse=True)
        for number, levels in enumerate(sets):
            rows = first[owner == number]
            parts += self._of_catalogue(log_probs, rows, levels, item.user, filters, width)
        later = ((count > 1) & ~fresh).nonzero().squeeze(1)
        if len(later):
            own = Targets(item.user[later], item.digits[later], item.revealed[later])
            found = self._of_remaining(log_probs[later], chosen[later], own, filters, width)
            parts.append((later, *found))
        return _assemble(len(chosen), parts)

    def _of_catalogue(
        self,
        log_probs: Tensor,
        rows: Tensor,
        levels: Tensor,
        user: Tensor,
        filters: Filters,
        width: int,
    ) -> list[tuple[Tensor, Tensor, Tensor]]:
        """The best combinations at `levels` (m,) over all items, for rows with nothing revealed."""
        codes = self._index.codes
        subset = levels.nonzero().squeeze(1).tolist()
        group, example = self._index.groups(tuple(subset))
        allowed = filters.sizes(group, len(example))
        width_of_codes = log_probs.shape[2]
        columns = torch.stack([codes[example, j] + j * width_of_codes for j in subset], dim=1)
        parts = []
        for some in torch.split(rows, max(1, CELLS // len(example))):
            table = log_probs[some].flatten(1).t().contiguous()  # (m × codes, rows)
            scores = functional.embedding_bag(columns, table, mode="sum").t()
            users, place = torch.unique_consecutive(user[some], return_inverse=True)
            left = filters.without(users, group, allowed)[place]
            scores = scores.masked_fill(left == 0, -torch.inf)
            top = scores.topk(min(width, len(example)))
            parts.append((some, top.values, example[top.indices]))
        return parts

    def _of_remaining(
        self, log_probs: Tensor, chosen: Tensor, item: Targets, filters: Filters, width: int
    ) -> tuple[Tensor, Tensor]:
        """(rows, width) scores and items: the best combinations among the remaining items."""
        remaining = Remaining(self._index, filters, item.user, item.digits, item.revealed)
        items, owners = remaining.matches
        codes = self._index.codes[items]  # (pairs, m)
        shown = torch.where(chosen[owners], codes + 1, 0)
        sizes = [len(chosen), *(size + 1 for size in self._index.sizes)]
        _, example = distinct([owners, *shown.unbind(1)], sizes)
        items, owners, codes = items[example], owners[example], codes[example]
        values = log_probs[owners].gather(2, codes.unsqueeze(2)).squeeze(2)  # (pairs, m)
        scores = torch.where(chosen[owners], values, 0.0).sum(1)
        order = best_first(owners, scores)
        place = ranks(owners[order])
        order, place = order[place < width], place[place < width]
        shape = (len(chosen), 1 + (int(place.max()) if len(place) else 0))
        best = torch.full(shape, -torch.inf, device=scores.device)
        choices = torch.zeros(shape, dtype=torch.int64, device=scores.device)
        best[owners[order], place] = scores[order]
        choices[owners[order], place] = items[order]
        return best, choices


def best_sums(lists: list[Found], width: int) -> Found:
    """The `width` largest sums of one entry from each list, best first, exactly.

    Entries i and j of two sorted lists make a pair that is no better than (i + 1)(j + 1) - 1 other
    pairs, so pairs with (i + 1)(j + 1) > width are skipped: about width × log(width) remain.
    """
    scores, choices = lists[0]
    for other in lists[1:]:
        lefts = torch.arange(min(scores.shape[1], width), device=scores.device)
        partners = (width // (lefts + 1)).clamp(max=other.scores.shape[1])
        left = torch.repeat_interleave(partners)  # (pairs,)
        right = torch.arange(len(left), device=left.device)
        right -= (partners.cumsum(0) - partners)[left]
        top = (scores[:, left] + other.scores[:, right]).topk(min(width, len(left)))
        scores = top.values
        choices = torch.cat(
            [_pick(choices, left[top.indices]), _pick(other.choices, right[top.indices])], dim=2
        )
    return Found(scores[:, :width], choices[:, :width])


def _pick(choices: Tensor, places: Tensor) -> Tensor:
    """(rows, width, lists) the entries at `places` (rows, width)."""
    return choices.gather(1, places.unsqueeze(-1).expand(-1, -1, choices.shape[2]))


def _assemble(rows: int, parts: list[tuple[Tensor, Tensor, Tensor]]) -> Found:
    """One list from parts: (part,) row numbers, (part, width) scores, (part, width) choices."""
    width = max(scores.shape[1] for _, scores, _ in parts)
    if len(parts) == 1 and len(parts[0][0]) == rows:
        where, scores, choices = parts[0]
        order = where.argsort()
        return Found(scores[order], choices[order].unsqueeze(-1))
    result = parts[0][1].new_full((rows, width), -torch.inf)
    taken = parts[0][2].new_zeros((rows, width, 1))
    for where, scores, choices in parts:
        result[where, : scores.shape[1]] = scores
        taken[where, : scores.shape[1], 0] = choices
    return Found(result, taken)
