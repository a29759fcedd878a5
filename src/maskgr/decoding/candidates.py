"""The best ways to fill in the digits that a step reveals (paper, Section 3.2, multi-token).

A candidate's score is the product of its digits' probabilities. The best candidates are found
exactly without forming the product of the codebooks. Unconstrained, each digit has a list of codes;
constrained, each item of the target has a list of the combinations of digits that occur in the
catalogue together with the revealed digits. The best sums of one entry per list are the candidates.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from maskgr.decoding.catalogue import Catalogue, Exclusions
from maskgr.decoding.denoiser import Targets, distinct

CELLS = 2**22  # (rows × combinations) scored in one pass: bounds memory


class Found(NamedTuple):
    """Candidates of each row, best first."""

    scores: Tensor  # (rows, width) float32, padded with -inf
    choices: Tensor  # (rows, width, lists) int64, decoded by `Candidates.fill`


class Candidates(Protocol):
    """Fills in the `chosen` (rows, items, m) digits of targets."""

    def best(
        self,
        log_probs: Tensor,
        chosen: Tensor,
        target: Targets,
        excluded: Exclusions | None,
        width: int,
    ) -> Found:
        """The best `width` candidates of each row; `log_probs` (rows, items, m, codes)."""
        ...

    def fill(self, choices: Tensor, chosen: Tensor) -> Tensor:
        """(rows, items, m) the digits where `chosen`, for one candidate per row (rows, lists)."""
        ...


class FreeCandidates:
    """All combinations of codes; every row must choose equally many digits."""

    def best(
        self,
        log_probs: Tensor,
        chosen: Tensor,
        target: Targets,
        excluded: Exclusions | None,
        width: int,
    ) -> Found:
        codes = log_probs.shape[-1]
        picked = log_probs[chosen].view(len(chosen), -1, codes)  # (rows, α, codes)
        tops = picked.topk(min(width, codes), dim=-1)
        return best_sums(
            [
                Found(scores, places.unsqueeze(-1))
                for scores, places in zip(
                    tops.values.unbind(1), tops.indices.unbind(1), strict=True
                )
            ],
            width,
        )

    def fill(self, choices: Tensor, chosen: Tensor) -> Tensor:
        digits = torch.zeros(chosen.shape, dtype=torch.int64, device=chosen.device)
        digits[chosen] = choices.flatten()
        return digits


@dataclass(frozen=True, eq=False)
class Projection:
    """The distinct combinations of digits that occur in the catalogue at some levels."""

    number: Tensor  # (items,) int32, the combination of each item
    items: Tensor  # (combinations,) int64, how many items have it
    example: Tensor  # (combinations,) int64, one of these items


class _Lists(NamedTuple):
    """Lists of combinations of digits; list r is from `offsets[r]` to `offsets[r + 1]`."""

    items: Tensor  # (total,) int64, an item that has the combination
    numbers: Tensor  # (total,) int64, its number in the `Projection`, ascending in a list
    offsets: Tensor  # (lists + 1,) int64


class CatalogueCandidates:
    """Combinations of digits that occur in the catalogue; one list for each item of the target.

    A choice is a code if one digit of the target's item is chosen, and an item of the catalogue
    that has the combination if several are.
    """

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue
        self._digits = catalogue.digits  # (m, items)
        self._projections: dict[tuple[bool, ...], Projection] = {}

    def best(
        self,
        log_probs: Tensor,
        chosen: Tensor,
        target: Targets,
        excluded: Exclusions | None,
        width: int,
    ) -> Found:
        lists = []
        for place in range(chosen.shape[1]):
            item = Targets(target.user, target.digits[:, place], target.revealed[:, place])
            own = log_probs[:, place].contiguous()
            lists.append(self._best_of_item(own, chosen[:, place], item, excluded, width))
        return best_sums(lists, width)

    def fill(self, choices: Tensor, chosen: Tensor) -> Tensor:
        several = chosen.sum(dim=-1, keepdim=True) > 1  # (rows, items, 1)
        item = torch.where(several.squeeze(-1), choices, 0)
        digits = self._digits[:, item].movedim(0, -1).long()  # (rows, items, m)
        return torch.where(several, digits, choices.unsqueeze(-1)) * chosen

    def _best_of_item(
        self,
        log_probs: Tensor,
        chosen: Tensor,
        item: Targets,
        excluded: Exclusions | None,
        width: int,
    ) -> Found:
        """The best combinations for one item; `log_probs` (rows, m, codes), `chosen` (rows, m)."""
        count = chosen.sum(dim=1)
        none, one = (count == 0).nonzero().squeeze(1), (count == 1).nonzero().squeeze(1)
        parts = []
        if len(none):
            nothing = torch.zeros((len(none), 1), device=chosen.device)
            parts.append((none, nothing, nothing.long()))
        if len(one):
            picked = log_probs[one, chosen[one].int().argmax(dim=1)]  # (rows, codes)
            parts.append((one, *picked.topk(min(width, picked.shape[1]))))
        for rows, union in self._several(chosen, item, count):
            part = Targets(item.user[rows], item.digits[rows], item.revealed[rows])
            own = None if excluded is None else excluded.items[part.user]
            projection = self._projection(union)
            for some, scores, choices in self._joint(
                log_probs, rows, chosen[rows], part, projection, own, width
            ):
                parts.append((rows[some], scores, choices))
        return _assemble(len(chosen), parts)

    def _several(
        self, chosen: Tensor, item: Targets, count: Tensor
    ) -> Iterator[tuple[Tensor, tuple[bool, ...]]]:
        """Rows that choose several digits, grouped by the levels known after the choice."""
        rows = (count > 1).nonzero().squeeze(1)
        if len(rows):
            unions, owner = torch.unique((chosen | item.revealed)[rows], dim=0, return_inverse=True)
            for number, union in enumerate(unions.tolist()):
                yield rows[owner == number], tuple(union)

    def _joint(
        self,
        log_probs: Tensor,
        rows: Tensor,
        chosen: Tensor,
        item: Targets,
        projection: Projection,
        excluded: Tensor | None,
        width: int,
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Groups of rows (some,) with their (some, width) scores and choices.

        Rows with the same known digits share a list of combinations. Lists whose lengths are within
        a factor of two are scored together, padded to the longest.
        """
        known = torch.where(item.revealed, item.digits + 1, 0)
        sizes = [size + 1 for size in self._catalogue.codebook_sizes]
        owner, first = distinct(known.unbind(1), sizes)
        lists = self._combinations(item.digits[first], item.revealed[first], projection)
        lengths = lists.offsets.diff()[owner]  # (rows,)
        scales = lengths.float().log2().ceil().long()
        for scale in torch.unique(scales).tolist():
            alike = (scales == scale).nonzero().squeeze(1)
            longest = int(lengths[alike].max())
            for some in torch.split(alike, max(1, CELLS // longest)):
                if len(first) == 1:
                    items, numbers = (own.expand(len(some), -1) for own in lists[:2])
                    scores = self._sums_of_one_list(log_probs[rows[some]], chosen[0], items[0])
                else:
                    items, numbers, missing = _pad(lists, owner[some], longest)
                    scores = self._sums(log_probs, rows[some], chosen[some], items)
                    scores = scores.masked_fill_(missing, -torch.inf)
                if excluded is not None:
                    _remove(scores, numbers.contiguous(), excluded[some], projection)
                top = scores.topk(min(width, longest))
                yield some, top.values, items.gather(1, top.indices)

    def _combinations(self, digits: Tensor, revealed: Tensor, projection: Projection) -> _Lists:
        """For each row the distinct combinations among the items with its revealed digits."""
        total = len(projection.items)
        if not revealed.any():  # then there is one row, with all combinations
            numbers = torch.arange(total, device=digits.device)
            return _Lists(projection.example, numbers, torch.tensor([0, total]).to(numbers))
        values, offsets = self._catalogue.items(digits, revealed)
        owner = torch.repeat_interleave(offsets.diff())
        keys, order = (owner * total + projection.number[values]).sort()
        new = torch.ones_like(keys, dtype=torch.bool)
        new[1:] = keys[1:] != keys[:-1]
        keys, values = keys[new], values[order[new]]
        bounds = torch.arange(len(digits) + 1, device=keys.device) * total
        return _Lists(values, keys % total, torch.searchsorted(keys, bounds))

    def _sums(self, log_probs: Tensor, rows: Tensor, chosen: Tensor, items: Tensor) -> Tensor:
        """(rows, items of each) the log-probability of an item's digits where `chosen`."""
        _, n_levels, codes = log_probs.shape
        flat = log_probs.view(-1)
        result = torch.zeros(items.shape, device=items.device)
        for level in chosen.any(dim=0).nonzero().squeeze(1).tolist():
            start = (rows * n_levels + level) * codes  # (rows,)
            values = flat[self._digits[level][items] + start.unsqueeze(1)]
            result += torch.where(chosen[:, level, None], values, 0.0)
        return result

    def _sums_of_one_list(self, log_probs: Tensor, chosen: Tensor, items: Tensor) -> Tensor:
        """The same if all rows have the same items (items,) and `chosen` (m,).

        The first step of every search over the whole catalogue: much faster as sums of columns.
        """
        rows, n_levels, codes = log_probs.shape
        columns = [
            self._digits[level][items].long() + level * codes
            for level in range(n_levels)
            if chosen[level]
        ]
        table = log_probs.reshape(rows, n_levels * codes).t().contiguous()
        sums = functional.embedding_bag(torch.stack(columns, dim=1), table, mode="sum")
        return sums.t().contiguous()

    def _projection(self, levels: tuple[bool, ...]) -> Projection:
        if levels not in self._projections:
            subset = [level for level, known in enumerate(levels) if known]
            members = self._catalogue.members
            groups = self._catalogue.groups(subset, self._digits[:, members].t())
            _, numbers, items = torch.unique(groups, return_inverse=True, return_counts=True)
            number = torch.zeros_like(self._digits[0], dtype=torch.int32)
            number[members] = numbers.int()
            example = torch.zeros_like(items).scatter_(0, numbers, members)
            self._projections[levels] = Projection(number, items, example)
        return self._projections[levels]


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


def _pad(lists: _Lists, which: Tensor, longest: int) -> tuple[Tensor, Tensor, Tensor]:
    """(which, longest) items and numbers of some lists, and whether an entry is padding."""
    column = torch.arange(longest, device=which.device)
    missing = column >= lists.offsets.diff()[which, None]
    place = (lists.offsets[which, None] + column).masked_fill_(missing, 0)
    numbers = lists.numbers[place].masked_fill_(missing, torch.iinfo(torch.int64).max)
    return lists.items[place], numbers, missing


def _remove(scores: Tensor, listed: Tensor, items: Tensor, projection: Projection) -> None:
    """Sets the scores of combinations to -inf if all of their items are excluded.

    `scores` and `listed` (rows, combinations), their numbers ascending; `items` (rows, excluded).
    """
    gone = projection.number[items.clamp(min=0)].long().masked_fill_(items < 0, -1)
    gone = gone.sort(dim=1).values
    before = torch.searchsorted(gone, gone)
    excluded = torch.searchsorted(gone, gone, right=True) - before  # items with the combination
    place = torch.searchsorted(listed, gone).clamp(max=listed.shape[1] - 1)
    here = (listed.gather(1, place) == gone) & (gone >= 0)
    row, column = (here & (excluded == projection.items[gone.clamp(min=0)])).nonzero(as_tuple=True)
    scores[row, place[row, column]] = -torch.inf
