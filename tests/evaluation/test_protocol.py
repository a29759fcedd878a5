from __future__ import annotations

import numpy as np
import polars as pl
import pytest

from maskgr import Dataset, Recommender
from maskgr.config import TrainConfig
from maskgr.data.config import SyntheticConfig
from maskgr.data.open import from_shop
from maskgr.data.splits import leave_out
from maskgr.data.synthetic import generate
from maskgr.errors import RequestError
from maskgr.evaluation.protocol import evaluate


def popular(dataset: Dataset) -> Recommender:
    return Recommender.train(dataset, config=TrainConfig(model="popularity"))


def small() -> Dataset:
    rows = {"u": "abcd", "v": "abdc", "w": "bacd"}
    log = [(user, item, n) for user, items in rows.items() for n, item in enumerate(items)]
    return Dataset.from_frames(
        pl.DataFrame(log, schema=["user_id", "item_id", "position"], orient="row")
    )


def test_unseen_removes_what_the_user_had_and_all_does_not() -> None:
    # Trained on ab, ab, ba: a and b lead everywhere, and every target is c or d.
    dataset = small()
    result = evaluate(popular(dataset), leave_out(dataset.histories).test, ks=(1, 2))
    assert result.users == 3
    assert result.metrics["all"]["recall@2"].mean == 0
    assert result.metrics["unseen"]["recall@1"].mean == 1
    flat = result.to_dict("unseen")
    assert flat["recall@2"] == 1
    assert flat["ndcg@1"] == 1
    assert flat["protocols"]["all"]["ndcg@2"]["mean"] == 0
    assert "oracle" not in flat


def test_the_oracle_is_the_best_and_popularity_is_below() -> None:
    shop = generate(SyntheticConfig(users=600, items=120))
    dataset = from_shop(shop)
    test = leave_out(dataset.histories).test
    result = evaluate(popular(dataset), test, shop=shop).to_dict("all")
    assert result["oracle"]["all"]["recall@10"]["mean"] > 1.5 * result["recall@10"]
    assert 0 < result["share_of_oracle"]["recall@10"] < 0.7
    # Seen items never count under `unseen`, for the oracle either.
    seen = [t in h for t, h in zip(test.targets[:, 0], test.histories, strict=True)]
    assert result["oracle"]["unseen"]["recall@10"]["mean"] <= 1 - np.mean(seen)


def test_impossible_cutoffs() -> None:
    dataset = small()
    with pytest.raises(RequestError, match="metrics at K = 0 are impossible; use K >= 1"):
        evaluate(popular(dataset), leave_out(dataset.histories).test, ks=(0,))


def test_a_cutoff_beyond_the_catalogue_is_answered() -> None:
    dataset = small()
    result = evaluate(popular(dataset), leave_out(dataset.histories).test, ks=(50,))
    assert result.metrics["all"]["recall@50"].mean == 1
