from __future__ import annotations

from dataclasses import dataclass

import pytest

from maskgr.errors import RequestError
from maskgr.settings import parse_settings, split_settings


@dataclass(frozen=True)
class One:
    size: int = 3
    rate: float = 0.5
    name: str = "x"
    on: bool = False
    widths: tuple[int, ...] = (1, 2)
    note: str | None = None


@dataclass(frozen=True)
class Two:
    depth: int = 1


def test_values_take_the_type_of_the_default() -> None:
    pairs = ["size=4", "rate=2", "name=a=b", "on=true", "widths=5,6", "note=hi"]
    assert One(**parse_settings(One, pairs)) == One(4, 2.0, "a=b", True, (5, 6), "hi")
    assert split_settings(["depth=2", "size=1"], One, Two) == [{"size": 1}, {"depth": 2}]


@pytest.mark.parametrize("pair", ["colour=blue", "size", "=3"])
def test_unknown_keys_list_those_that_exist(pair: str) -> None:
    with pytest.raises(
        RequestError, match=f"--set {pair} is not key=value with a key of size, rate"
    ):
        parse_settings(One, [pair])


@pytest.mark.parametrize("pair", ["size=1.5", "rate=fast", "on=yes", "widths=1,x"])
def test_wrong_types(pair: str) -> None:
    with pytest.raises(RequestError, match=f"--set {pair}: "):
        parse_settings(One, [pair])
