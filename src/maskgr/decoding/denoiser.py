"""What decoding asks of a network, and what the catalogue makes of the answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from maskgr.decoding.catalogue import Catalogue, Exclusions
from maskgr.errors import RequestError

FLOOR = -1e30  # the log-probability of what a model deems impossible but the catalogue has


class Denoiser(Protocol):
    """p(digit | history, revealed digits of the target) for a batch of users' histories.

    The target is the next `items` items, of which each has one digit a level.
    """

    @property
    def codebook_sizes(self) -> tuple[int, ...]: ...

    @property
    def users(self) -> int: ...

    @property
    def items(self) -> int: ...

    def first(self) -> Sequence[Tensor]:
        """Level by level (users, items, codes) log-probabilities with the whole target masked.

        Every beam of a user starts from these, so they are computed once.
        """
        ...

    def __call__(
        self, user: Tensor, digits: Tensor, revealed: Tensor, wanted: Tensor
    ) -> Sequence[Tensor]:
        """Level by level (wanted there, codes) log-probabilities, in float32.

        `user` (rows,) ascending; `digits`, `revealed` and `wanted` (rows, items, levels), where
        `digits` holds anything unless revealed. Only the masked digits that are `wanted` are
        answered for, in the order of `wanted[:, :, level].nonzero()`.
        """
        ...


@dataclass(frozen=True, eq=False)
class Targets:
    """Partly revealed targets, row by row."""

    user: Tensor  # (rows,) ascending, a row of the denoiser and of the exclusions
    digits: Tensor  # (rows, items, m) int64
    revealed: Tensor  # (rows, items, m) bool

    def __len__(self) -> int:
        return len(self.user)


def require_fit(denoiser: Denoiser, catalogue: Catalogue, excluded: Exclusions | None) -> None:
    """That a model, a catalogue and the users' exclusions belong together."""
    if tuple(denoiser.codebook_sizes) != catalogue.codebook_sizes:
        raise RequestError(
            f"the model has codebooks of {' × '.join(map(str, denoiser.codebook_sizes))} codes and "
            f"the catalogue of {' × '.join(map(str, catalogue.codebook_sizes))}; "
            f"use the semantic IDs that the model was trained with"
        )
    if excluded is not None and len(excluded.items) != denoiser.users:
        raise RequestError(
            f"{len(excluded.items)} rows of excluded items do not go with "
            f"{denoiser.users} users; give one row for each"
        )


def blank(user: Tensor, items: int, levels: int) -> Targets:
    """Targets of which nothing is revealed."""
    digits = torch.zeros((len(user), items, levels), dtype=torch.int64, device=user.device)
    return Targets(user, digits, torch.zeros_like(digits, dtype=torch.bool))


@dataclass(frozen=True, eq=False)
class Rules:
    """What the catalogue does to a model's probabilities, and for whom."""

    catalogue: Catalogue
    constrained: bool
    """Codes that no item with the revealed digits has get -inf; the others stay as they are."""
    renormalise: Catalogue | None
    """Probabilities run over the codes that some item of this catalogue with the revealed digits
    has: for a model trained so. It is the catalogue of training, whatever a request leaves out and
    whatever items came later, so that a score does not depend on what else may be recommended."""
    excluded: Exclusions | None

    def __post_init__(self) -> None:
        if self.renormalise is not None and not self.constrained:
            raise RequestError(
                "probabilities over the catalogue's codes alone are not defined outside it; "
                "search with the constraint, or without renormalising"
            )

    def apply(self, level: int, log_probs: Tensor, item: Targets) -> Tensor:
        """(rows, codes of `level`) the log-probabilities to search with; `item` has one item."""
        if self.renormalise is not None:
            codes = allowed_codes(self.renormalise, level, item, None)
            later = ~codes.any(dim=1, keepdim=True)  # only items since training have the digits
            if later.any():
                codes |= later & allowed_codes(self.catalogue, level, item, None)
            mass = log_probs.masked_fill(~codes, -torch.inf).logsumexp(dim=1, keepdim=True)
            log_probs = log_probs - mass
        # A code that only later items have is not in the mass, and may weigh more than all of it.
        log_probs = log_probs.clamp(min=FLOOR, max=0.0)
        if self.constrained:
            codes = allowed_codes(self.catalogue, level, item, self.excluded)
            log_probs = log_probs.masked_fill_(~codes, -torch.inf)
        return log_probs


def first_log_probs(first: Sequence[Tensor], rules: Rules, target: Targets) -> Tensor:
    """(rows, items, m, codes) from `Denoiser.first`, for targets of which nothing is revealed."""
    values = [level.index_select(0, target.user).flatten(0, 1) for level in first]
    return _spread(values, rules, target, ~target.revealed)


def next_log_probs(denoiser: Denoiser, rules: Rules, target: Targets, wanted: Tensor) -> Tensor:
    """(rows, items, m, codes) at the positions `wanted` (rows, items, m); elsewhere -inf."""
    values = denoiser(target.user, target.digits, target.revealed, wanted)
    return _spread(values, rules, target, wanted)


def _spread(values: Sequence[Tensor], rules: Rules, target: Targets, wanted: Tensor) -> Tensor:
    """Levels side by side, each under the rules; -inf beyond a smaller codebook's last code."""
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

    Beams of many users know the same digits, and the catalogue is asked once for all of them.
    Only rows that exclude an item with these digits are asked about by themselves.
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
    """(rows,) a number equal where all columns (rows,) are, and (numbers,) a row that has each.

    Exact however many columns: what would overflow is numbered anew before it does.
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
