"""Three policies for items that get the same digits, and the placement of new items under each.

- `append`: one more digit counts the items of a tuple. No distortion, and the digits above stay
  as the quantiser gave them; costs one more token per item, whose value says nothing about it.
- `reassign`: colliding items move to other codes of the last level. No more tokens; costs some
  distortion at the last level, and an item's last digit is no longer its nearest code.
- `share`: items stay together under one tuple. No cost here; a decoded tuple stands for several
  items, which have to be ranked.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from maskgr.errors import DataError
from maskgr.sids.config import Policy
from maskgr.sids.quantizers import Quantizer
from maskgr.sids.vectors import Digits, Floats, prepare

Rows = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Collisions:
    """The number of items under each tuple in use."""

    group_sizes: npt.NDArray[np.int64]  # (distinct tuples,)

    @property
    def items(self) -> int:
        return int(self.group_sizes.sum())

    @property
    def unique_share(self) -> float:
        """The share of items that have their tuple to themselves."""
        return float((self.group_sizes == 1).sum() / self.items)


def collisions(digits: Digits) -> Collisions:
    order, starts = _ordered(digits)
    return Collisions(np.diff(np.append(starts, len(order))))


def make_unique(
    policy: Policy, digits: Digits, vectors: npt.ArrayLike, quantizer: Quantizer
) -> Digits:
    """The digits under `policy`."""
    if policy == "append":
        return append(digits)
    if policy == "reassign":
        return reassign(digits, vectors, quantizer)
    return digits


def fitting_policy(policy: Policy, items: int, sizes: tuple[int, ...]) -> Policy:
    """The policy, or `append`, with a warning, where digits to reassign are too few for all."""
    if policy != "reassign" or items <= _capacity(sizes):
        return policy
    warnings.warn(
        f"{items:,} items cannot have different IDs of {len(sizes)} digits with {sizes[0]:,} "
        "codes; a digit is appended instead",
        stacklevel=2,
    )
    return "append"


def append(digits: Digits) -> Digits:
    """(n, m + 1): the last digit is 0 for the first item of a tuple in item order, then 1, 2, …

    Its codebook is as large as the largest group of colliding items. Where nothing collides, the
    digit would always be 0 and is left out: (n, m).
    """
    if collisions(digits).unique_share == 1:
        return digits
    order, starts = _ordered(digits)
    sizes = np.diff(np.append(starts, len(order)))
    last = np.empty(len(digits), np.int32)
    last[order] = np.arange(len(order)) - np.repeat(starts, sizes)
    return np.column_stack([digits, last])


def reassign(digits: Digits, vectors: npt.ArrayLike, quantizer: Quantizer) -> Digits:
    """(n, m) distinct digits; only colliding items move, and where possible only at the last level.

    Among the items that share all digits but the last, those alone under their code keep it. The
    others are assigned to the remaining codes of that level, one each, so that the sum of squared
    distances between vectors and reconstructions is least. Where items outnumber codes, those
    that fit worst go to the nearest free tuple under another prefix (see `FreeTuples`).
    """
    _require_capacity(len(digits), quantizer.codebook_sizes)
    rows = prepare(vectors, normalise=quantizer.normalise)
    result = digits.copy()
    left: list[int] = []
    for family in _groups(digits[:, :-1]):
        left += _settle(result, family, rows, quantizer)
    if left:
        free = FreeTuples(np.delete(result, left, axis=0), quantizer.codebook_sizes, quantizer)
        for item in left:
            result[item] = free.claim(rows[item], digits[item])
    return result


def place_new(
    policy: Policy,
    old: Digits,
    codebook_sizes: tuple[int, ...],
    vectors: npt.ArrayLike,
    quantizer: Quantizer,
) -> Digits:
    """Digits for the new items in `vectors`, while the `old` digits stay as they are.

    `old` (n, m) and `codebook_sizes` are those after the policy, with the appended digit if any.
    A trained network has these codebooks and no larger ones, so no digit exceeds them: an item
    whose tuple is taken (for `append`: whose tuple has no appended digit left) gets the nearest
    free one. Items whose own tuple is free get it before any other new item may move there.
    """
    digits = quantizer.encode(vectors)
    if policy == "share":
        return digits
    _require_capacity(len(old) + len(digits), codebook_sizes)
    free = FreeTuples(old, codebook_sizes, quantizer)
    placed = np.zeros((len(digits), len(codebook_sizes)), np.int32)
    waiting = [
        item for item in range(len(digits)) if not free.claim_own(digits[item], placed[item])
    ]
    rows = prepare(vectors, normalise=quantizer.normalise)
    for item in waiting:
        placed[item] = free.claim(rows[item], digits[item])
    return placed


class FreeTuples:
    """The tuples that no item has, searched for the one nearest to a vector.

    The search is greedy: it keeps the longest prefix of the wanted digits under which a tuple is
    free; each next digit is the one that decodes closest to the vector among those under which a
    tuple is still free. A digit beyond the quantiser's levels (the appended one) is the lowest
    that is free.
    """

    def __init__(self, taken: Digits, sizes: tuple[int, ...], quantizer: Quantizer) -> None:
        self._sizes = sizes
        self._quantizer = quantizer
        self._sorted = taken[np.lexsort(taken.T[::-1])]  # so that a prefix is one run of rows
        self._claimed: defaultdict[tuple[int, ...], Counter[int]] = defaultdict(Counter)

    def claim_own(self, wanted: Digits, out: Digits) -> bool:
        """Takes the tuple `wanted` and writes it to `out`; returns False if it is not free."""
        prefix = tuple(int(digit) for digit in wanted)
        if len(prefix) < len(self._sizes):
            open_digits = self._open(prefix)
            if not len(open_digits):
                return False
            prefix += (int(open_digits[0]),)
        elif prefix[-1] not in self._open(prefix[:-1]):
            return False
        self._take(prefix)
        out[:] = prefix
        return True

    def claim(self, row: Floats, wanted: Digits) -> tuple[int, ...]:
        """Takes the free tuple nearest to `row` (d,), starting from the digits `wanted`."""
        prefix = tuple(int(digit) for digit in wanted[: len(self._sizes) - 1])
        while not len(self._open(prefix)):
            if not prefix:
                raise DataError(f"all tuples of {self._sizes} codes are taken; raise --codes")
            prefix = prefix[:-1]
        while len(prefix) < len(self._sizes):
            prefix += (self._closest(row, prefix, self._open(prefix)),)
        self._take(prefix)
        return prefix

    def _open(self, prefix: tuple[int, ...]) -> npt.NDArray[np.int64]:
        """The next digits under which some tuple is free."""
        level = len(prefix)
        run = self._sorted
        for place, digit in enumerate(prefix):
            start, end = np.searchsorted(run[:, place], [digit, digit + 1])
            run = run[start:end]
        counts = np.bincount(run[:, level], minlength=self._sizes[level])
        for digit, claimed in self._claimed.get(prefix, Counter()).items():
            counts[digit] += claimed
        return np.flatnonzero(counts < _capacity(self._sizes[level + 1 :]))

    def _closest(self, row: Floats, prefix: tuple[int, ...], options: npt.NDArray[np.int64]) -> int:
        if len(prefix) == len(self._quantizer.codebook_sizes):
            return int(options[0])
        return int(options[_distortions(row[None], prefix, options, self._quantizer)[0].argmin()])

    def _take(self, digits: tuple[int, ...]) -> None:
        for level, digit in enumerate(digits):
            self._claimed[digits[:level]][digit] += 1


def _settle(result: Digits, family: Rows, rows: Floats, quantizer: Quantizer) -> list[int]:
    """Gives the items of one prefix different last digits; returns the items left over."""
    from scipy.optimize import linear_sum_assignment  # type: ignore[import-untyped]

    last = result[family, -1]
    holders = np.bincount(last, minlength=quantizer.codebook_sizes[-1])
    colliding = family[holders[last] > 1]
    if not len(colliding):
        return []
    codes = np.flatnonzero(holders != 1)  # free, or contested
    prefix = tuple(int(digit) for digit in result[family[0], :-1])
    costs = _distortions(rows[colliding], prefix, codes, quantizer)
    chosen, places = linear_sum_assignment(costs)
    result[colliding[chosen], -1] = codes[places]
    return [int(item) for item in np.delete(colliding, chosen)]


def _distortions(
    rows: Floats, prefix: tuple[int, ...], codes: npt.NDArray[np.int64], quantizer: Quantizer
) -> npt.NDArray[np.float64]:
    """(rows, codes) squared distances to the reconstruction from `prefix` and each code."""
    from scipy.spatial.distance import cdist  # type: ignore[import-untyped]

    options = np.zeros((len(codes), len(quantizer.codebook_sizes)), np.int32)
    options[:, : len(prefix)] = prefix
    options[:, len(prefix)] = codes
    decoded = quantizer.decode(options, levels=len(prefix) + 1)
    distances: npt.NDArray[np.float64] = cdist(rows, decoded, "sqeuclidean")
    return distances


def _groups(digits: Digits) -> Iterator[Rows]:
    """The row numbers that share a tuple, a group at a time, each in ascending order."""
    order, starts = _ordered(digits)
    return iter(np.split(order, starts[1:]))


def _ordered(digits: Digits) -> tuple[Rows, Rows]:
    """(n,) the rows by tuple, ascending among equals, and (tuples,) where each tuple's start."""
    count, levels = digits.shape
    order = np.lexsort(digits.T[::-1]) if levels else np.arange(count)
    ordered = digits[order]
    changes = np.flatnonzero((ordered[1:] != ordered[:-1]).any(axis=1)) + 1
    return order, np.append(0, changes)


def _capacity(sizes: tuple[int, ...]) -> int:
    return min(math.prod(sizes), 2**62)  # counts are 64-bit integers


def _require_capacity(items: int, sizes: tuple[int, ...]) -> None:
    if items > _capacity(sizes):
        raise DataError(
            f"{items} items cannot have different IDs of {len(sizes)} digits with "
            f"{' × '.join(map(str, sizes))} codes; raise --codes or --levels"
        )
