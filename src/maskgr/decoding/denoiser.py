"""The interface of a network to decoding, and its probabilities under the catalogue's rules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from maskgr.decoding.catalogue import Catalogue, Exclusions
from maskgr.errors import RequestError

FLOOR = -1e30  # finite log-probability of real items that the model gives probability 0


class Denoiser(Protocol):
    """p(digit | history, revealed digits of the target) for a batch of users' histories.

    The target is the next `items` items, each with one digit per level.
    """

    @property
    def codebook_sizes(self) -> tuple[int, ...]: ...

    @property
    def users(self) -> int: ...

    @property
    def items(self) -> int: ...

    def first(self) -> Sequence[Tensor]:
        """For each level (users, items, codes) log-probabilities with the whole target masked.

        All beams of a user share this first step.
        """
        ...

    def __call__(
        self, user: Tensor, digits: Tensor, revealed: Tensor, wanted: Tensor
    ) -> Sequence[Tensor]:
        """For each level (wanted at the level, codes) log-probabilities, in float32.

        `user` (rows,) ascending; `digits`, `revealed` and `wanted` (rows, items, m); digits that
        are not revealed are arbitrary. The answer has a row for each masked digit that is
        `wanted`, in the order of `wanted[:, :, level].nonzero()`.
        """
        ...


@dataclass(frozen=True, eq=False)
class Targets:
    """Partly revealed targets."""

    user: Tensor  # (rows,) ascending: a row of the denoiser and of the exclusions
    digits: Tensor  # (rows, items, m) int64
    revealed: Tensor  # (rows, items, m) bool

    def __len__(self) -> int:
        return len(self.user)


def check_fit(denoiser: Denoiser, catalogue: Catalogue, excluded: Exclusions | None) -> None:
    """Asserts that a model, a catalogue and the users' exclusions belong together."""
    assert tuple(denoiser.codebook_sizes) == catalogue.codebook_sizes
    assert excluded is None or len(excluded.items) == denoiser.users


def blank(user: Tensor, items: int, n_levels: int) -> Targets:
    """Targets with every digit masked."""
    digits = torch.zeros((len(user), items, n_levels), dtype=torch.int64, device=user.device)
    return Targets(user, digits, torch.zeros_like(digits, dtype=torch.bool))


@dataclass(frozen=True, eq=False)
class Rules:
    """How the catalogue changes a model's probabilities."""

    catalogue: Catalogue
    constrained: bool
    """Set codes that no item with the revealed digits has to -inf; leave the others as they are."""
    renormalise: Catalogue | None
    """Normalise over the codes of this catalogue's items with the revealed digits: for a model
    trained so. It is the catalogue of training, so a score does not depend on items added since."""
    whole: Catalogue
    """The catalogue before the request's filters, so a score does not depend on them either."""
    excluded: Exclusions | None

    def __post_init__(self) -> None:
        if self.renormalise is not None and not self.constrained:
            raise RequestError(
                "this model's probabilities are defined for real items only; "
                "search with the constraint"
            )

    def apply(self, level: int, log_probs: Tensor, item: Targets) -> Tensor:
        """(rows, codes of `level`) the log-probabilities to search with; `item` has one item."""
        if self.renormalise is not None:
            codes = allowed_codes(self.renormalise, level, item, None)
            later = ~codes.any(dim=1, keepdim=True)  # only items added since have the digits
            if later.any():
                codes |= later & allowed_codes(self.whole, level, item, None)
            mass = log_probs.masked_fill(~codes, -torch.inf).logsumexp(dim=1, keepdim=True)
            log_probs = log_probs - mass
        # A code that only added items have is not in the mass, and may have more weight than it.
        log_probs = log_probs.clamp(min=FLOOR, max=0.0)
        if self.constrained:
            codes = allowed_codes(self.catalogue, level, item, self.excluded)
            log_probs = log_probs.masked_fill_(~codes, -torch.inf)
        return log_probs


def first_log_probs(first: Sequence[Tensor], rules: Rules, target: Targets) -> Tensor:
    """(rows, items, m, codes) from `Denoiser.first`, for targets with every digit masked."""
    values = [level.index_select(0, target.user).flatten(0, 1) for level in first]
    return _spread(values, rules, target, ~target.revealed)


def next_log_probs(denoiser: Denoiser, rules: Rules, target: Targets, wanted: Tensor) -> Tensor:
    """(rows, items, m, codes) at the positions `wanted` (rows, items, m); elsewhere -inf."""
    values = denoiser(target.user, target.digits, target.revealed, wanted)
    return _spread(values, rules, target, wanted)


def _spread(values: Sequence[Tensor], rules: Rules, target: Targets, wanted: Tensor) -> Tensor:
    """All levels in one tensor, under the rules; smaller codebooks are padded with -inf."""
    sizes = rules.catalogue.codebook_sizes
    result = torch.full((*wanted.shape, max(sizes)), -torch.inf, device=wanted.device)
    for level, log_probs in enumerate(values):
        row, place = wanted[:, :, level].nonzero(as_tuple=True)
        if not len(row):
            continue
        digits, revealed = target.digits[row, place], target.revealed[row, place]
        item = Targets(target.user.index_select(0, row), digits, revealed)
        result[row, place, level, : sizes[level]] = rules.apply(level, log_probs.float(), item)
    return result


def allowed_codes(
    catalogue: Catalogue, level: int, item: Targets, excluded: Exclusions | None
) -> Tensor:
    """(rows, codes of `level`) bool: the codes of items with the row's revealed digits.

    Rows with the same revealed digits share one query, except for those that exclude an item with
    these digits.
    """
    own = torch.zeros_like(item.user)
    if excluded is not None:
        rows = excluded[item.user]
        fewer = catalogue.counts(item.digits, item.revealed, rows)
        own = torch.where(fewer < catalogue.counts(item.digits, item.revealed), item.user + 1, own)
    sizes = (*catalogue.codebook_sizes, int(own.max()))
    known = torch.where(item.revealed, item.digits + 1, 0)
    numbers, first = distinct([*known.unbind(1), own], [size + 1 for size in sizes])
    some = None if excluded is None else excluded[item.user[first]]
    codes = catalogue.allowed(level, item.digits[first], item.revealed[first], some)
    return codes.index_select(0, numbers)


def distinct(columns: Sequence[Tensor], sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
    """(rows,) numbers that are equal where all columns (rows,) are, and (numbers,) a row of each.

    Keys are renumbered before they could overflow, so any number of columns is exact.
    """
    key, limit = torch.zeros_like(columns[0], dtype=torch.int64), 1
    for column, size in zip(columns, sizes, strict=True):
        if limit * size >= 2**63:
            values, key = torch.unique(key, return_inverse=True)
            limit = len(values)
        key, limit = key * size + column, limit * size
    values, numbers = torch.unique(key, return_inverse=True)
    rows = torch.arange(len(key), device=key.device)
    return numbers, torch.zeros_like(values).scatter_(0, numbers, rows)
