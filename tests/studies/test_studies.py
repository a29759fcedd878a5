"""Each experiment end to end on a small shop, with a model trained for seconds."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from maskgr import Dataset, Recommender
from maskgr.config import DenseConfig, LoopConfig, NetworkConfig, TrainConfig
from maskgr.data.config import SyntheticConfig
from maskgr.data.open import fetch
from maskgr.data.splits import leave_out
from maskgr.errors import RequestError
from maskgr.settings import train_config
from maskgr.sids.config import QuantizerConfig
from maskgr.studies import cold_start, dense, orders, recipe
from maskgr.studies.registry import EXPERIMENTS, run_experiment
from maskgr.studies.report import Asked, trained
from tests.conftest import Outcome

CONFIG = TrainConfig(
    unique="reassign",
    quantizer=QuantizerConfig(levels=2, codes=8),
    network=NetworkConfig(
        layers=1,
        history_layers=1,
        width=16,
        heads=2,
        hidden=32,
        attention="causal",
        history="pooled",
    ),
    dense=DenseConfig(text_input=True, table="learned", hidden=0, temperature=0),
    loop=LoopConfig(steps=60, token_budget=1500, learning_rate=1e-2, validations=1),
)


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Asked:
    fetch("synthetic", synthetic=SyntheticConfig(users=150, items=40)).save(tmp_path / "shop")

    def quickly(
        request: Asked, data: str, name: str, settings: tuple[str, ...] = ()
    ) -> Recommender:
        return Recommender.train(Dataset.load(data), config=replace(CONFIG, seed=request.seed))

    for module in (cold_start, dense, orders, recipe):
        monkeypatch.setattr(module, "trained", quickly)
    return Asked(str(tmp_path / "shop"), tmp_path / "out")


def test_dense(asked: Asked) -> None:
    found = run_experiment("dense", asked)
    ours = [row for row in found.rows if row[1] in ("all", "unseen")]
    assert [row[:2] for row in ours] == [(w, p) for w in dense.WAYS for p in ("all", "unseen")]
    assert len({row[3] for row in ours}) > 1
    assert ("unified", "paper, Beauty", 5.43, 8.59, 3.54, 4.47, "") in found.rows
    json.dumps(found.to_dict())


def test_orders(asked: Asked) -> None:
    found = run_experiment("orders", replace(asked, users=50))
    assert [row[:2] for row in found.rows] == [
        (order, steps) for order in ("random", "greedy", "left-to-right") for steps in (1, 2)
    ]
    single = {row[2:4] for row in found.rows if row[1] == 1}
    assert len(single) == 1  # with one step there is no order


def test_cold_start(asked: Asked) -> None:
    found = run_experiment("cold-start", asked)
    assert {row[0] for row in found.rows} == {"new", "trained on"}
    new = [row for row in found.rows if row[0] == "new"]
    assert [row[3] for row in new] == [*dense.WAYS, ""]
    shop = Dataset.load(asked.data)
    # All but those who have too little without the new items, and were trained on to the last.
    every = len(leave_out(shop.histories).test.users)
    assert 0.9 * every < sum({row[0]: int(row[1]) for row in found.rows}.values()) <= every
    assert new[-1][2] == "popularity"


def test_recipe(asked: Asked) -> None:
    found = run_experiment("recipe", replace(asked, only=("as it is", "no text"), users=40))
    assert [row[0] for row in found.rows] == ["as it is", "no text"]
    assert len(found.columns) == len(found.rows[0]) == 3 + 6
    with pytest.raises(RequestError, match="there is no variant 'x'; the variants are as it is"):
        run_experiment("recipe", replace(asked, only=("x",)))


def test_every_variant_is_a_setting_that_exists() -> None:
    start = train_config("cpu")
    for name, settings in recipe.VARIANTS.items():
        changed = train_config("cpu", settings)
        assert (changed != start) == bool(settings), name


def test_nothing_of_the_cold_items_is_left(asked: Asked) -> None:
    shop = Dataset.load(asked.data)
    cold = np.zeros(len(shop.items), dtype=bool)
    cold[[3, 17]] = True
    warm = cold_start.without(shop, cold)
    ids = shop.item_ids.to_list()
    assert not {ids[3], ids[17]} & set(warm.item_ids.to_list())
    for before, after in zip(shop.histories, warm.histories, strict=True):
        kept = [ids[n] for n in before if n not in (3, 17)]
        assert [warm.item_ids[int(n)] for n in after] == kept
    test = leave_out(shop.histories).test
    moved = cold_start.renumbered(test, cold)
    order = [*warm.item_ids.to_list(), ids[3], ids[17]]
    for old, new in zip(test.histories, moved.histories, strict=True):
        assert [ids[n] for n in old] == [order[n] for n in new]
    assert [ids[n] for n in test.targets[:, 0]] == [order[n] for n in moved.targets[:, 0]]


def test_unknown_experiments_are_named(asked: Asked) -> None:
    with pytest.raises(RequestError, match="there is no experiment 'x'; the experiments are dense"):
        run_experiment("x", asked)


def test_the_command(maskgr: Callable[..., Outcome], asked: Asked) -> None:
    words = ("experiment", "orders", "--data", asked.data, "--out", asked.out, "--users", 20)
    outcome = maskgr(*words)
    assert outcome.code == 0, outcome.err
    assert "left-to-right" in outcome.out
    report = json.loads(maskgr(*words, "--json").out)
    assert report["rows"][0]["order"] == "random"
    assert maskgr("experiment", "x", "--out", asked.out).code == 2
    for name in EXPERIMENTS:
        assert name in maskgr("experiment", "--help").out


def test_training_that_fails_is_told(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="failed; the reason is above"):
        trained(Asked("nowhere", tmp_path), "nowhere", "run")


def test_a_run_that_was_asked_otherwise_is_not_used(tmp_path: Path) -> None:
    fetch("synthetic", synthetic=SyntheticConfig(users=60, items=40)).save(tmp_path / "shop")
    data = str(tmp_path / "shop")
    asked = Asked(data, tmp_path / "out", preset="tiny")
    quick = ("steps=1", "width=16", "codes=8", "network.layers=1")
    first = trained(asked, data, "run", quick)
    assert trained(asked, data, "run", quick).made == first.made
    with pytest.raises(RequestError, match="was started with another seed; use the settings"):
        trained(replace(asked, seed=1), data, "run", quick)
    fetch("synthetic", synthetic=SyntheticConfig(users=61, items=40)).save(tmp_path / "other")
    with pytest.raises(RequestError, match="was trained on other data"):
        trained(asked, str(tmp_path / "other"), "run", quick)
