"""Going on from a trained model, and training on everything."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from maskgr import Dataset, Recommender
from maskgr.data.config import DataConfig
from maskgr.errors import DataError, MaskGRError, RequestError
from maskgr.models.base import HasSids
from maskgr.update import prepare, update_split
from tests.models.test_all_models import NETWORKS, short_config
from tests.models.tiny import ITEMS, TEXT, shop

QUICK = ("fit.steps=4", "validations=2")
EVENTS = pl.DataFrame(
    [("u3", "i01", 1), ("u3", "i02", 2), ("new", "i05", 1), ("new", "i06", 2), ("new", "i07", 3)],
    schema=["user_id", "item_id", "position"],
    orient="row",
)
NEW_ITEMS = pl.DataFrame({"item_id": ["n0", "n1"]})
NEW_EVENTS = pl.DataFrame(
    {"user_id": ["u1"] * 2, "item_id": ["n0", "n1"], "position": [1, 2]},
)


@pytest.fixture(autouse=True, scope="module")
def _no_plots() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("maskgr.training.fit._plot", lambda run: None)
        yield


@pytest.fixture(scope="module")
def trained() -> dict[str, Recommender]:
    configs = {
        "maskgr": short_config("maskgr", *QUICK),
        "digits": short_config("maskgr", *QUICK, "vectors=digits"),
        "sasrec": short_config("sasrec", *QUICK),
        "sasrec-text": short_config("sasrec", *QUICK, "items=text"),
    }
    return {name: Recommender.train(shop(), config=own) for name, own in configs.items()}


def vectors(count: int) -> np.ndarray:
    return np.random.default_rng(7).normal(size=(count, TEXT)).astype(np.float32)


def test_new_events_come_behind_the_old_ones() -> None:
    rec = Recommender.train(shop(), model="popularity")
    rec = Recommender(rec.model, rec.items, short_config("sasrec"), False, rec.made, rec.users)
    log = Dataset.from_frames(EVENTS, rec.items)
    from maskgr.update import _joined

    users, changed = _joined(rec.users, log)
    assert users.ids.to_list() == [*shop().users.to_list(), "new"]
    assert changed.tolist() == [3, 24]
    before = shop().histories
    for user in range(24):
        expected = [*before[user].tolist(), *([1, 2] if user == 3 else [])]
        assert users.histories[user].tolist() == expected
    assert users.histories[24].tolist() == [5, 6, 7]


def test_weights_and_columns_of_the_first_events_hold_for_new_ones() -> None:
    log = shop().interactions().rename({"user_id": "customer"})
    kinds = pl.Series("event_type", ["buy", "view"]).gather(np.arange(len(log)) % 2)
    config = DataConfig(
        columns={"user_id": "customer"}, events={"buy": 1.0, "view": 0.5}, targets=("buy",)
    )
    data = Dataset.from_frames(log.with_columns(kinds), shop().items, config=config)
    made = {"data_config": json.loads(json.dumps(asdict(config)))}
    rec = Recommender.train(data, config=short_config("sasrec", *QUICK), made=made)
    new = EVENTS.rename({"user_id": "customer"})
    new = new.with_columns(event_type=pl.lit("buy"))
    update = prepare(rec, new)
    assert update.data.histories.weights is not None
    old = data.histories.weights
    assert old is not None
    assert set(old.tolist()) == {0.0, 1.0}
    assert update.data.histories.weights.sum() == old.sum() + len(new)
    for leave_out in (0, 1):
        split = update_split(update.data, update.changed, replace(rec.config, leave_out=leave_out))
        assert set(split.validation.users.tolist()) <= {3, 24}
        assert len(split.validation.users)


@pytest.mark.parametrize("name", ["maskgr", "digits", "sasrec", "sasrec-text"])
def test_an_update_knows_new_users_items_and_events(
    trained: dict[str, Recommender], name: str, tmp_path: Path
) -> None:
    rec = trained[name]
    before = rec.recommend([["i03"], ["i05"]], 5)
    given = None if name == "sasrec" else vectors(2)
    events = pl.concat([EVENTS, NEW_EVENTS])
    more = rec.update(events, NEW_ITEMS, embeddings=given, settings=["fit.steps=3"])
    assert more.items["item_id"].to_list() == [*rec.items["item_id"], "n0", "n1"]
    assert more.history_of("new") == ["i05", "i06", "i07"]
    assert more.history_of("u1")[-2:] == ["n0", "n1"]
    assert more.recommend(["i03"], 1, allow=["n1"])[0].item_id == "n1"
    assert more.made["updates"] == rec.made["fingerprint"]
    assert more.config == rec.config
    if isinstance(rec.model, HasSids) and isinstance(more.model, HasSids):
        old, new = rec.model.semantic_ids().digits, more.model.semantic_ids().digits
        assert np.array_equal(new[:ITEMS], old)
    # The first recommender is what it was.
    assert rec.recommend([["i03"], ["i05"]], 5) == before
    assert more.recommend([["i03"], ["i05"]], 5) != before
    more.save(tmp_path / "run")
    again = Recommender.load(tmp_path / "run")
    assert again.recommend_users(["new"], 5) == more.recommend_users(["new"], 5)
    # And it can be evaluated, and updated again.
    assert again.evaluate(again.dataset(), ks=(3,)).users == 25
    assert again.update(EVENTS, settings=["fit.steps=1"]).history_of("u3")[-2:] == ["i01", "i02"]


def test_an_update_starts_from_the_old_weights(trained: dict[str, Recommender]) -> None:
    rec = trained["sasrec"]
    still = rec.update(EVENTS, settings=["fit.steps=1", "fit.learning_rate=1e-12"])
    ask = [["i03"], ["i05", "i06"]]
    for one, other in zip(still.recommend(ask, 5), rec.recommend(ask, 5), strict=True):
        assert [r.item_id for r in one] == [r.item_id for r in other]
        np.testing.assert_allclose([r.score for r in one], [r.score for r in other], atol=1e-4)


def test_validation_asks_the_users_with_new_events(trained: dict[str, Recommender]) -> None:
    rec = trained["sasrec"]
    update = prepare(rec, EVENTS)
    split = update_split(update.data, update.changed, rec.config)
    assert split.validation.users.tolist() == [3, 24]
    assert split.validation.targets.tolist() == [[1], [6]]
    assert len(split.test.users) == 25
    whole = update_split(update.data, update.changed, replace(short_config("sasrec"), leave_out=0))
    assert whole.validation.targets.tolist() == [[2], [7]]
    assert len(whole.train.values) == len(update.data.histories.values) - 2
    assert not len(whole.test.users)


@pytest.mark.parametrize(
    ("events", "items", "expected"),
    [
        (EVENTS.clear(), None, "the new events have no rows"),
        (EVENTS.drop("item_id"), None, "item_id"),
        (EVENTS.with_columns(item_id=pl.lit("ghost")), None, "ghost"),
        (EVENTS, pl.DataFrame({"item_id": ["i01"]}), "are old, repeated or without an ID"),
        (EVENTS, pl.DataFrame({"sku": ["n0"]}), "the new items have no column item_id"),
        (EVENTS, pl.DataFrame({"item_id": ["n0"], "titel": ["x"]}), "a column titel that the cat"),
        ([1, 2], None, "give a polars or pandas data frame"),
    ],
)
def test_raises_when_an_update_is_impossible(
    trained: dict[str, Recommender], events: Any, items: Any, expected: str
) -> None:
    with pytest.raises(DataError, match=expected):
        trained["sasrec"].update(events, items, settings=["fit.steps=1"])


def test_raises_when_a_model_cannot_be_updated(trained: dict[str, Recommender]) -> None:
    popular = Recommender.train(shop(), model="popularity")
    with pytest.raises(RequestError, match="Popularity cannot be updated; maskgr, sasrec can"):
        popular.update(EVENTS)
    with pytest.raises(RequestError, match="an update changes settings of fit alone"):
        trained["sasrec"].update(EVENTS, settings=["transformer.width=8"])


@pytest.mark.parametrize("name", [*NETWORKS, "neighbours"])
def test_trains_on_everything_as_an_earlier_training_did(name: str, tmp_path: Path) -> None:
    if name == "neighbours":
        rec = Recommender.train(shop(), model=name)
    else:
        rec = Recommender.train(shop(), config=short_config(name, *QUICK))
    whole = Recommender.train(shop(), like=rec)
    assert whole.config.leave_out == 0
    for stage, fitted in whole.made["fits"].items():
        assert fitted["metrics"] == {}
        assert fitted["steps"] == rec.made["fits"][stage]["steps"]
        assert fitted["total"] == rec.made["fits"][stage]["total"]
    with pytest.raises(RequestError, match="was trained on everything, so there are no held-out"):
        whole.evaluate(shop())
    whole.save(tmp_path / "run")
    assert Recommender.load(tmp_path / "run").recommend(["i03"], 3) == whole.recommend(["i03"], 3)
    counts = getattr(whole.model, "counts", None)
    if counts is not None:
        assert counts.sum() == len(shop().histories.values)


def test_maskgr_trained_on_everything_has_the_chosen_biases() -> None:
    from maskgr.models.maskgr.bias import Bias
    from maskgr.models.maskgr.model import MaskGR

    rec = Recommender.train(shop(), config=short_config("maskgr", *QUICK))
    assert isinstance(rec.model, MaskGR)
    rec.model.bias = Bias(4.0, 0.3)
    whole = Recommender.train(shop(), like=rec)
    assert isinstance(whole.model, MaskGR)
    assert whole.model.bias == Bias(4.0, 0.3)


def test_raises_when_like_goes_with_other_settings() -> None:
    rec = Recommender.train(shop(), model="neighbours")
    with pytest.raises(MaskGRError, match="a training like another one has its settings"):
        Recommender.train(shop(), like=rec, config=short_config("sasrec"))
