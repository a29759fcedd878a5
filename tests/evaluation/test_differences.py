"""Paired differences against closed forms, brute force and simulated truths."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy import stats

from maskgr.evaluation.differences import (
    Difference,
    holm,
    mean_over_seeds,
    paired_difference,
    share_of,
)
from maskgr.evaluation.metrics import Mean

RNG = np.random.default_rng(0)


def test_one_seed_is_the_paired_t_test() -> None:
    ours, theirs = RNG.random((1, 40)), RNG.random((1, 40))
    found = paired_difference(ours, theirs)
    expected = stats.ttest_rel(ours[0], theirs[0])
    interval = expected.confidence_interval(0.95)
    assert found.mean == pytest.approx((ours - theirs).mean())
    assert found.p == pytest.approx(expected.pvalue)
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high))


def test_standard_error_is_that_of_all_samples_of_the_users() -> None:
    # Per-user differences of recall are -1, 0 or 1. All 7^7 samples of seven users, enumerated.
    each = np.array([1, 0, 1, 0, 0, -1, 1.0])
    found = paired_difference(np.maximum(each, 0)[None], np.maximum(-each, 0)[None])
    samples = each[np.array(list(itertools.product(range(7), repeat=7)))].mean(axis=1)
    error = (found.high - found.mean) / stats.t.ppf(0.975, 6)
    assert error == pytest.approx(samples.std() * (7 / 6) ** 0.5)  # the spread is estimated


def test_two_seeds_of_each_by_hand() -> None:
    ours = np.array([[0.0, 1.0, 1.0, 0.0], [0.0, 1.0, 0.0, 0.0]])
    theirs = np.array([[0.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0]])
    found = paired_difference(ours, theirs)
    each = np.array([0, 0.5, 0.5, 0])
    users = each.var(ddof=1) / 4
    seeds = np.var([0.5, 0.25], ddof=1) / 2, np.var([0, 0.25], ddof=1) / 2
    variance = users + sum(seeds)
    degrees = variance**2 / (users**2 / 3 + seeds[0] ** 2 / 1 + seeds[1] ** 2 / 1)
    assert found.mean == 0.25
    assert found.p == pytest.approx(2 * stats.t.sf(0.25 / variance**0.5, degrees))
    assert found.high == pytest.approx(0.25 + stats.t.ppf(0.975, degrees) * variance**0.5)


def test_pairing_makes_the_interval_narrower_where_users_are_alike_for_both() -> None:
    hard = RNG.random(500)
    ours = (RNG.random(500) < hard)[None].astype(float)
    theirs = np.where(RNG.random((1, 500)) < 0.9, ours, 0)
    found, alone = paired_difference(ours, theirs), mean_over_seeds(ours)
    assert found.high - found.low < 0.8 * (alone.high - alone.low)


def test_difference_is_antisymmetric() -> None:
    ours, theirs = RNG.random((3, 50)), RNG.random((2, 50))
    one, two = paired_difference(ours, theirs), paired_difference(theirs, ours)
    assert (one.mean, one.low, one.high) == pytest.approx((-two.mean, -two.high, -two.low))
    assert one.p == pytest.approx(two.p)


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        ([[0, 1, 1]], [[0, 1, 1]], Difference(0, 0, 0, 1)),  # the same answers
        ([[1, 1, 1]], [[0, 0, 0]], Difference(1, 1, 1, 0)),
        ([[1]], [[0]], Difference(1, -1, 1, 1)),  # one user says nothing about others
    ],
)
def test_samples_without_spread(
    ours: list[list[float]], theirs: list[list[float]], expected: Difference
) -> None:
    assert paired_difference(np.array(ours, float), np.array(theirs, float)) == expected


def test_mean_of_one_seed_is_that_of_an_evaluation() -> None:
    values = (RNG.random((1, 300)) < 0.1).astype(float)
    assert mean_over_seeds(values) == Mean.of(values[0])


def test_interval_of_seeds_that_disagree_is_that_of_the_seeds() -> None:
    # Every user is alike, so that all the spread is between the three seeds.
    values = np.repeat([[0.2], [0.3], [0.4]], 100, axis=1)
    found = mean_over_seeds(values)
    margin = stats.t.ppf(0.975, 2) * 0.1 / 3**0.5
    assert (found.mean, found.low, found.high) == pytest.approx((0.3, 0.3 - margin, 0.3 + margin))


@pytest.mark.parametrize(("seeds", "spread"), [(1, 0.0), (2, 0.0), (2, 0.03), (4, 0.03)])
def test_intervals_cover_the_truth_at_least_as_often_as_they_say(seeds: int, spread: float) -> None:
    # Two models that are equally good on average; each seed moves a model by `spread`, which one
    # seed cannot know about.
    rng = np.random.default_rng(seeds)
    covered, significant = 0, 0
    for _ in range(600):
        taste = rng.uniform(0.1, 0.5, size=400)
        ours, theirs = (
            (rng.random((seeds, 400)) < taste + spread * rng.standard_normal((seeds, 1))).astype(
                float
            )
            for _ in range(2)
        )
        found = paired_difference(ours, theirs)
        covered += found.low <= 0 <= found.high
        significant += found.p < 0.05
    assert covered + significant == 600
    assert covered / 600 > 0.93


def test_holm_by_hand_and_by_its_definition() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []
    p = RNG.random(12) ** 3
    for row, adjusted in enumerate(holm(list(p))):
        worst = max(min(1, p[o] * (p >= p[o]).sum()) for o in range(12) if p[o] <= p[row])
        assert adjusted == pytest.approx(worst)


def test_share_of_another_mean_has_the_interval_of_the_ratio() -> None:
    rng = np.random.default_rng(3)
    whole = (rng.random((1, 4000)) < 0.3).astype(float)
    part = whole * (rng.random((1, 4000)) < 0.8)
    found = mean_over_seeds(share_of(part, whole), np.inf)
    assert found.mean == pytest.approx(part.mean() / whole.mean())
    rows = rng.integers(0, 4000, (2000, 4000))  # samples of the users
    ratios = part[0][rows].mean(1) / whole[0][rows].mean(1)
    assert found.high - found.mean == pytest.approx(1.96 * ratios.std(), rel=0.05)
    itself = mean_over_seeds(share_of(whole, whole), np.inf)
    assert (itself.low, itself.mean, itself.high) == pytest.approx((1, 1, 1))
    more = mean_over_seeds(share_of(np.ones((1, 4000)), whole), np.inf)
    assert more.high > more.mean > 1
