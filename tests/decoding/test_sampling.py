"""Ancestral sampling against the exact distribution, summed over all that can happen."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from maskgr.decoding import sampling as sampling_module
from maskgr.decoding.sampling import Samples, posterior, reverse_step, sample
from maskgr.errors import RequestError
from tests.decoding.toy import Toy, consistent, excluding, index

SIZES = (2, 3)
DIGITS = [[0, 0], [0, 2], [1, 1], [1, 2], [1, 2]]
DRAWS = 20_000


def draw(toy: Toy, steps: int, seed: int = 0, **options: object) -> Samples:
    settings = {"count": DRAWS, "temperature": 1.0, "constrained": True, **options}
    return sample(
        toy,
        index(DIGITS, SIZES),
        steps=steps,
        generator=torch.Generator().manual_seed(seed),
        **settings,  # type: ignore[arg-type]
    )


def exact(
    toy: Toy, user: int, digits: list[list[int]], steps: int, temperature: float, constrained: bool
) -> dict[tuple[int | None, ...], float]:
    """The probability of each tuple of digits."""
    items = [tuple(own) for own in digits]
    states: dict[tuple[int | None, ...], float] = {(None, None): 1.0}
    for number in range(steps):
        t, s = 1 - number / steps, 1 - (number + 1) / steps
        after: dict[tuple[int | None, ...], float] = defaultdict(float)
        for (state, chance), now in product(states.items(), product([True, False], repeat=2)):
            if any(n and d is not None for n, d in zip(now, state, strict=True)):
                continue
            for n, d in zip(now, state, strict=True):
                if d is None:
                    chance *= 1 - s / t if n else s / t
            values = toy.at(user, state)
            paths = [(state, chance)]
            for level in range(2):
                if not now[level]:
                    continue
                grown = []
                for known, p in paths:
                    codes = list(range(SIZES[level]))
                    if constrained:
                        codes = sorted({own[level] for own in consistent(items, known)})
                    weights = [math.exp(float(values[level][c]) / temperature) for c in codes]
                    for code, weight in zip(codes, weights, strict=True):
                        filled = (*known[:level], code, *known[level + 1 :])
                        grown.append((filled, p * weight / sum(weights)))
                paths = grown
            for known, p in paths:
                after[known] += p
        states = after
    return {state: p for state, p in states.items() if p > 0}


@given(st.floats(0.05, 1), st.floats(0, 1))
def test_posterior_is_bayes_rule(t: float, fraction: float) -> None:
    # The forward process masks a token at a uniform moment: p(masked at s) = s, and what is masked
    # at s is masked at t > s. Bayes: p(masked at s | masked at t) = p(t | s) p(s) / p(t).
    s = fraction * t
    masked_at_t_given_clean_at_s = (t - s) / (1 - s) if s < 1 else 0.0
    stays = 1 * s / t
    reveals = masked_at_t_given_clean_at_s * (1 - s) / t
    assert posterior(s, t) == (pytest.approx(stays), pytest.approx(reveals, abs=1e-12))


def test_reverse_steps_undo_the_forward_process() -> None:
    source = torch.Generator().manual_seed(0)
    masked = torch.rand(40_000, generator=source) < 0.8
    at_half = reverse_step(masked, 0.5, 0.8, source)
    assert not (at_half & ~masked).any()
    assert at_half.double().mean().item() == pytest.approx(0.5, abs=5 * 0.5 / 200)
    assert not reverse_step(at_half, 0.0, 0.5, source).any()


@pytest.mark.parametrize("constrained", [True, False])
@pytest.mark.parametrize(("steps", "temperature"), [(1, 1.0), (2, 1.0), (5, 0.5), (3, 3.0)])
def test_frequencies_equal_the_exact_distribution(
    steps: int, temperature: float, constrained: bool
) -> None:
    toy = Toy(SIZES)
    found = draw(toy, steps, temperature=temperature, constrained=constrained)
    for user in range(toy.users):
        expected = exact(toy, user, DIGITS, steps, temperature, constrained)
        assert sum(expected.values()) == pytest.approx(1)
        counts = Counter(tuple(own) for own in found.digits[user, :, 0].tolist())
        assert set(counts) <= set(expected)
        for state, p in expected.items():
            assert abs(counts[state] - DRAWS * p) <= 4 * math.sqrt(DRAWS * p * (1 - p)) + 1


def test_every_draw_is_an_item() -> None:
    for steps in (1, 2, 3):
        found = draw(Toy(SIZES), steps)
        assert (found.items >= 0).all()
        assert torch.equal(torch.tensor(DIGITS)[found.items], found.digits)
        assert set(found.items.flatten().tolist()) == {0, 1, 2, 3, 4}  # also 3 and 4, equal digits
    free = draw(Toy(SIZES), 2, constrained=False)
    real = [list(own) in DIGITS for own in free.digits.view(-1, 2).tolist()]
    assert (free.items.flatten() >= 0).tolist() == real
    assert not all(real)


def test_excluded_items_are_not_drawn() -> None:
    toy = Toy(SIZES, users=3)
    seen = excluding([[0, 3], [0, 1, 2, 3, 4], []])
    found = draw(toy, 2, count=500, filters=seen)
    drawn = [set(own) for own in found.items.flatten(1).tolist()]
    assert drawn == [{1, 2, 4}, {-1}, {0, 1, 2, 3, 4}]


def test_low_temperature_draws_the_most_likely_codes() -> None:
    toy = Toy(SIZES)
    found = draw(toy, 1, count=50, temperature=1e-12, constrained=False)
    first = [level.argmax(dim=2) for level in toy.first()]  # (users, 1)
    expected = torch.stack(first, dim=2).unsqueeze(1).expand(-1, 50, -1, -1)
    assert torch.equal(found.digits, expected)


def test_sessions_are_real_items_and_follow_the_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    toy = Toy(SIZES, items=2)
    found = draw(toy, 3, count=40)
    assert found.items.shape == (2, 40, 2)
    assert torch.equal(torch.tensor(DIGITS)[found.items], found.digits)
    assert torch.equal(draw(toy, 3, count=40).digits, found.digits)
    assert not torch.equal(draw(toy, 3, seed=1, count=40).digits, found.digits)
    monkeypatch.setattr(sampling_module, "CELLS", 1)
    assert torch.equal(
        torch.tensor(DIGITS)[draw(toy, 3, count=40).items], draw(toy, 3, count=40).digits
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "5 samples in 0 steps; give at least 1 of each"),
        ({"steps": 2, "count": 0}, "0 samples in 2 steps"),
        ({"steps": 2, "temperature": 0.0}, "temperature 0.0 is not positive"),
        ({"steps": 2, "temperature": math.nan}, "temperature nan is not positive"),
    ],
)
def test_raises_when_count_steps_or_temperature_are_not_positive(
    options: dict[str, float], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        draw(Toy(SIZES), **{"count": 5, **options})  # type: ignore[arg-type]
