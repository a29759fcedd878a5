from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from maskgr import Recommender
from maskgr.data.config import SyntheticConfig
from maskgr.data.dataset import Dataset
from maskgr.data.open import fetch
from maskgr.data.splits import Split, leave_out
from maskgr.evaluation.metrics import ndcg
from maskgr.models.maskgr import MaskGR
from maskgr.models.retrieval import Weights
from maskgr.models.weighing import FOLLOW, FUSION, REPEAT, REPEAT_BEAMS, weigh
from tests.models.test_retrieval import CONFIG


@pytest.fixture(scope="module")
def shop() -> Dataset:
    return fetch("synthetic", synthetic=SyntheticConfig(users=200, items=40))


@pytest.fixture(scope="module")
def model(shop: Dataset) -> MaskGR:
    model = Recommender.train(shop, config=CONFIG).model
    assert isinstance(model, MaskGR)
    return model


def best(model: MaskGR, split: Split, name: str, values: tuple[float, ...], way: Any) -> Weights:
    """Every value tried, the first of equals."""
    found = []
    for value in values:
        model.weights = replace(model.weights, **{name: value})
        model.forget()
        recent = split.validation.histories.last(CONFIG.history_limit)
        decoding = replace(CONFIG.decoding, retrieval=way)
        items = model.rank(recent, 10, np.ones(40, dtype=bool), None, decoding).items
        found.append(ndcg(items, split.validation.targets, 10).mean())
    return replace(model.weights, **{name: values[found.index(max(found))]})


def test_weights_are_the_best_one_by_one(shop: Dataset, model: MaskGR) -> None:
    split = leave_out(shop.histories)
    assert split.train.repeats().any()
    model.weights = Weights()
    model.forget()
    chosen = weigh(model, split)
    assert model.weights == Weights(), "the model that is asked stays as it is"
    model.weights = best(model, split, "repeat", REPEAT, "dense")
    model.weights = best(model, split, "follow", FOLLOW, "dense")
    model.weights = best(model, split, "repeat_beams", REPEAT_BEAMS, "generative")
    assert chosen == best(model, split, "fusion", FUSION, "fused")
