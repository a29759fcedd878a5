"""Settings of decoding are checked where they are made."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from maskgr.decoding.config import DecodingConfig
from maskgr.errors import RequestError


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"beams": 0}, "decoding.beams is 0; give a whole number from 1 to "),
        ({"beams": 2.5}, "decoding.beams is 2.5; give a whole number"),
        ({"remask": -1}, "decoding.remask is -1; give a whole number from 0 to "),
        ({"steps": -1}, "decoding.steps is -1; give a whole number from 0 to "),
        (
            {"order": "best"},
            "decoding.order is 'best'; choose one of random, greedy, left-to-right",
        ),
        ({"retrieval": "fused"}, "decoding.retrieval is 'fused'; choose one of auto, generative"),
        ({"cache": "on"}, "decoding.cache is 'on'; choose one of auto, off, frozen"),
    ],
)
def test_raises_when_a_value_is_wrong(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        DecodingConfig(**changes)
    with pytest.raises(RequestError, match=message):
        replace(DecodingConfig(), **changes)


def test_accepts_the_smallest_values() -> None:
    assert DecodingConfig(beams=1, steps=0, order="random", cache="off").beams == 1
