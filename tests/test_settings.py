from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import pytest

from maskgr.errors import RequestError
from maskgr.settings import apply_settings, setting_paths


@dataclass(frozen=True)
class Inner:
    size: int = 3
    rate: float = 0.5
    on: bool = False
    order: Literal["random", "greedy"] = "greedy"
    note: str | None = None


@dataclass(frozen=True)
class Range:
    low: int = 1
    high: int = 2

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise RequestError(f"low is {self.low}, above high")


@dataclass(frozen=True)
class Config:
    name: str = "x"
    seed: int = 0
    size: int = 1
    one: Inner = field(default_factory=Inner)
    two: Range = field(default_factory=Range)
    three: Range = field(default_factory=Range)


def test_values_take_the_type_of_the_setting() -> None:
    pairs = ["seed=4", "one.rate=2", "one.on=true", "one.order=random", "one.note=a=b"]
    expected = Config(seed=4, one=Inner(rate=2.0, on=True, order="random", note="a=b"))
    assert apply_settings(Config(), pairs) == expected
    assert isinstance(apply_settings(Config(), pairs).one.rate, float)
    assert apply_settings(Config(), []) == Config()


def test_the_ending_of_a_path_is_enough_where_it_names_one_setting() -> None:
    assert apply_settings(Config(), ["rate=2"]).one.rate == 2
    assert apply_settings(Config(), ["two.low=0"]).two.low == 0


def test_a_whole_path_wins_over_longer_paths_that_end_like_it() -> None:
    changed = apply_settings(Config(), ["size=7"])
    assert (changed.size, changed.one.size) == (7, 3)
    assert apply_settings(Config(), ["one.size=7"]).one.size == 7


def test_the_last_of_two_values_counts() -> None:
    assert apply_settings(Config(), ["seed=1", "seed=2"]).seed == 2


def test_settings_that_are_checked_together_are_changed_together() -> None:
    assert apply_settings(Config(), ["two.low=5", "two.high=6"]).two == Range(5, 6)
    with pytest.raises(RequestError, match="low is 5, above high"):
        apply_settings(Config(), ["two.low=5"])


def test_raises_with_the_full_names_when_a_key_is_ambiguous() -> None:
    with pytest.raises(RequestError, match=r"low is ambiguous; use one of two\.low, three\.low"):
        apply_settings(Config(), ["low=0"])


@pytest.mark.parametrize("pair", ["colour=blue", "one.colour=blue", "=3", "four.low=1", "one=2"])
def test_raises_with_all_settings_when_a_key_is_unknown(pair: str) -> None:
    message = f"--set {pair}: there is no setting {pair.split('=')[0]}; the settings are seed, size"
    with pytest.raises(RequestError, match=message):
        apply_settings(Config(), [pair])


def test_raises_when_the_equals_sign_is_missing() -> None:
    with pytest.raises(RequestError, match="--set seed is not KEY=VALUE"):
        apply_settings(Config(), ["seed"])


@pytest.mark.parametrize(
    ("pair", "expected"),
    [
        ("seed=1.5", "'1.5' is not a valid int"),
        ("rate=fast", "'fast' is not a valid float"),
        ("on=yes", "'yes' is neither true nor false"),
        ("order=sideways", "use one of random, greedy"),
    ],
)
def test_raises_when_a_value_does_not_fit(pair: str, expected: str) -> None:
    with pytest.raises(RequestError, match=f"--set {pair}: {expected}"):
        apply_settings(Config(), [pair])


def test_the_name_of_the_model_is_not_a_setting() -> None:
    assert ("name",) not in setting_paths(Config())
    with pytest.raises(RequestError, match="there is no setting name"):
        apply_settings(Config(), ["name=y"])
