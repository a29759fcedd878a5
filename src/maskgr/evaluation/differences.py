"""How sure a comparison is: means over seeds, and differences of two models on the same users.

Users are a sample, and so are the seeds of a training. The variance of a mean over both is the sum
of two parts: that over users (of each user's mean over the seeds) and that over seeds (of each
seed's mean over the users). The sum counts what a user owes to one seed alone in both parts, so it
errs on the wide side. Quantiles are those of Student's t with the degrees of freedom of Welch and
Satterthwaite: two seeds say little about a third, and the interval shows it. With one seed only
the users' part is known, and the interval says nothing about another seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import stdtr, stdtrit  # type: ignore[import-untyped]

from maskgr.evaluation.metrics import Floats, Mean

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Difference:
    """A difference of means with its 95 % interval and the two-sided p-value of no difference."""

    mean: float
    low: float
    high: float
    p: float


def mean_over_seeds(values: Floats, most: float = 1.0) -> Mean:
    """The mean of `values` (seeds, users), `most` at most, with its 95 % interval."""
    if len(values) == 1:
        return Mean.of(values[0], most)
    center = float(values.mean())
    low, high, _ = _interval(center, [_part(values.mean(axis=0)), _part(values.mean(axis=1))])
    return Mean(center, max(0.0, low), min(most, high))


def paired_difference(ours: Floats, theirs: Floats) -> Difference:
    """The mean of `ours` (seeds, users) less that of `theirs` (other seeds, the same users).

    Paired by user: a user whose next item is hard to guess is hard for both. Seeds are not paired:
    a seed means nothing to another model. With one seed each this is the paired t-test.
    """
    assert ours.shape[1] == theirs.shape[1]
    each = ours.mean(axis=0) - theirs.mean(axis=0)  # (users,)
    center = float(each.mean())
    if len(each) < 2:  # nothing is known about other users
        return Difference(center, -1.0, 1.0, 1.0)
    seeds = [_part(own.mean(axis=1)) for own in (ours, theirs) if len(own) > 1]
    low, high, p = _interval(center, [_part(each), *seeds])
    return Difference(center, max(-1.0, low), min(1.0, high), p)


def share_of(values: Floats, whole: Floats) -> Floats:
    """(seeds, users) values whose mean is that of `values` over that of `whole`, and which spread
    as this ratio does (delta method): their intervals and paired differences are the ratio's.

    The seeds of `whole` (other seeds, the same users) are taken as they are, without an error.
    """
    base, own = whole.mean(axis=0), float(whole.mean())
    ratio = float(values.mean()) / own
    found: Floats = values / own - ratio * (base - own) / own
    return found


def holm(p_values: Sequence[float]) -> list[float]:
    """The p-values adjusted for their number (Holm 1979): calling significant what is below 0.05
    is wrong about any of them in one table of twenty."""
    p = np.asarray(p_values, dtype=np.float64)
    order = np.argsort(p, kind="stable")
    steps = np.maximum.accumulate(p[order] * (len(p) - np.arange(len(p))))
    adjusted = np.empty_like(p)
    adjusted[order] = np.minimum(steps, 1.0)
    return [float(value) for value in adjusted]


def _part(sample: Floats) -> tuple[float, int]:
    """The variance of a sample's mean, and its degrees of freedom."""
    degrees = len(sample) - 1
    return (float(sample.var(ddof=1)) / len(sample) if degrees else 0.0), degrees


def _interval(center: float, parts: Sequence[tuple[float, int]]) -> tuple[float, float, float]:
    """The ends of the interval around `center`, and the p-value of 0."""
    variance = sum(part for part, _ in parts)
    if variance == 0:
        return center, center, float(center == 0)
    degrees = variance**2 / sum(part**2 / own for part, own in parts if part)
    error = variance**0.5
    margin = float(stdtrit(degrees, (1 + CONFIDENCE) / 2)) * error
    p = 2 * float(stdtr(degrees, -abs(center) / error))
    return center - margin, center + margin, p
