"""Each study end to end on a small shop, with models trained for seconds."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from maskgr.data.config import SyntheticConfig
from maskgr.data.dataset import Dataset
from maskgr.data.open import fetch
from maskgr.data.splits import leave_out
from maskgr.errors import RequestError
from maskgr.models.base import TrainConfig, train_config
from maskgr.recommender import Recommender
from maskgr.studies import cold_start, dense, recipe
from maskgr.studies.registry import STUDIES, run_study
from maskgr.studies.report import Asked, Report
from maskgr.studies.runner import Job, Runner
from tests.conftest import Outcome

QUICK = (
    "layers=2", "width=16", "heads=2", "levels=2", "codes=8", "fit.steps=40", "minutes=0",
    "token_budget=1500", "learning_rate=1e-2", "validations=1",
)  # fmt: skip
TRAINED: dict[tuple[TrainConfig, str], Path] = {}  # by several tests, once


@pytest.fixture
def asked(tmp_path: Path) -> Asked:
    fetch("synthetic", synthetic=SyntheticConfig(users=150, items=40)).save(tmp_path / "shop")
    return Asked(str(tmp_path / "shop"), tmp_path / "out")


@pytest.fixture
def configs(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> list[TrainConfig]:
    """Studies train small models in this process; what they asked for is listed here."""
    asked_for: list[TrainConfig] = []

    def quickly(runner: Runner, job: Job) -> Path:
        asked_for.append(job.config)
        config = replace(job, minutes=None, settings=(*job.settings, *QUICK)).config
        key = (config, runner.dataset.content)
        if key not in TRAINED:
            TRAINED[key] = tmp_path_factory.mktemp("trained") / job.model
            Recommender.train(runner.dataset, config=config).save(TRAINED[key])
        return TRAINED[key]

    monkeypatch.setattr(Runner, "train", quickly)
    return asked_for


def test_dense_ranks_in_three_ways_beside_the_paper(
    asked: Asked, configs: list[TrainConfig]
) -> None:
    found = run_study("dense", asked)
    ours = [row for row in found.rows if row[1] in ("all", "unseen")]
    assert [row[:2] for row in ours] == [(w, p) for w in dense.WAYS for p in ("all", "unseen")]
    assert len({row[3] for row in ours}) > 1
    assert ("unified", "paper, Beauty", 5.43, 8.59, 3.54, 4.47, "") in found.rows
    assert found.notes[0].startswith("maskgr-paper, preset paper with layers=4 ")
    json.dumps(found.to_dict())
    (config,) = configs
    assert (config.name, config.fit.minutes, config.fit.accumulate) == ("maskgr-paper", 30, 1)
    assert config.model.dense.head
    assert (config.model.network.layers, config.model.dense.layer) == (4, 2)


def test_dense_trains_a_preset_as_it_is_apart_from_the_head(
    asked: Asked, configs: list[TrainConfig]
) -> None:
    run_study("dense", replace(asked, preset="tiny-paper", minutes=7))
    head = ["dense.head=true", "dense.layer=1", "whole_item=0.2"]
    assert configs == [train_config("tiny-paper", head, minutes=7, seed=0)]


def test_dense_refuses_models_without_a_dense_head(asked: Asked) -> None:
    with pytest.raises(RequestError, match="sasrec has no dense head beside generation"):
        run_study("dense", replace(asked, model="sasrec"))


@pytest.mark.parametrize("model", ["maskgr", "maskgr-paper"])
def test_orders_has_a_row_for_each_order_and_number_of_steps(
    asked: Asked, configs: list[TrainConfig], model: str
) -> None:
    preset = "tiny-paper" if model == "maskgr-paper" else None
    found = run_study("orders", replace(asked, model=model, preset=preset, users=50))
    levels = 2 if model == "maskgr" else 3  # the paper appends a digit
    assert [row[:2] for row in found.rows] == [
        (order, steps)
        for order in ("random", "greedy", "left-to-right")
        for steps in range(1, levels + 1)
    ]
    assert len({row[2:4] for row in found.rows if row[1] == 1}) == 1  # one step has no order


def test_cold_start_compares_new_items_with_popularity_and_with_trained_items(
    asked: Asked, configs: list[TrainConfig]
) -> None:
    found = run_study("cold-start", asked)
    assert [row[0] for row in found.rows] == ["new"] * 3 + ["trained on"] * 3
    assert [row[2:4] for row in found.rows] == 2 * [
        ("maskgr", 1),
        ("maskgr", 2),
        ("popularity", ""),
    ]
    every = len(leave_out(Dataset.load(asked.data).histories).test.users)
    # Users whose history is too short without the new items are left out.
    assert 0.9 * every < sum({row[0]: int(row[1]) for row in found.rows}.values()) <= every


def test_recipe_trains_the_chosen_variants(asked: Asked, configs: list[TrainConfig]) -> None:
    found = run_study("recipe", replace(asked, only=("as it is", "no text"), users=40))
    assert [row[0] for row in found.rows] == ["as it is", "no text"]
    assert len(found.columns) == len(found.rows[0]) == 3 + 4
    assert [config.model.items for config in configs] == ["auto", "id"]


def test_recipe_raises_when_there_is_no_such_variant(asked: Asked) -> None:
    with pytest.raises(RequestError, match="there is no variant 'x'; the variants are as it is"):
        run_study("recipe", replace(asked, only=("x",)))


def test_recipe_refuses_a_model_without_its_settings_before_training(
    asked: Asked, configs: list[TrainConfig]
) -> None:
    only = ("as it is", "no neighbours")
    paper = replace(asked, model="maskgr-paper", preset="paper", only=only)
    with pytest.raises(RequestError, match="--set neighbours=0: there is no setting neighbours"):
        run_study("recipe", paper)
    assert not configs


def test_every_variant_changes_settings_that_exist() -> None:
    start = train_config("cpu")
    for name, settings in recipe.VARIANTS.items():
        changed = train_config("cpu", settings)
        assert (changed != start) == bool(settings), name


def test_cold_items_leave_the_dataset_and_come_last_in_the_test_cases(asked: Asked) -> None:
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


def test_raises_when_there_is_no_such_study(asked: Asked) -> None:
    with pytest.raises(RequestError, match="there is no study 'x'; the studies are dense, orders"):
        run_study("x", asked)


def test_raises_when_the_model_does_not_generate(asked: Asked) -> None:
    with pytest.raises(RequestError, match="popularity does not generate, and studies do"):
        run_study("orders", replace(asked, model="popularity"))


def test_command_prints_a_table_or_json(
    maskgr: Callable[..., Outcome], asked: Asked, configs: list[TrainConfig]
) -> None:
    words = ("study", "orders", "--data", asked.data, "--out", asked.out, "--users", 20)
    outcome = maskgr(*words)
    assert outcome.code == 0, outcome.err
    assert "left-to-right" in outcome.out
    report = json.loads(maskgr(*words, "--json").out)
    assert report["rows"][0]["order"] == "random"
    assert maskgr("study", "x", "--out", asked.out).code == 2
    listed = maskgr("study", "list").out
    assert all(name in listed for name in STUDIES)


def test_study_measures_nothing_twice(
    asked: Asked, configs: list[TrainConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = run_study("orders", replace(asked, users=30))
    monkeypatch.setattr("maskgr.studies.runner.evaluate", None)
    assert run_study("orders", replace(asked, users=30)) == first


def test_report_as_markdown() -> None:
    report = Report("Title", ("a|b", "count"), (("x", 12_345), ("y", 0.5)), ("a note",))
    assert report.to_markdown() == (
        "**Title**\n\n| a\\|b | count |\n| --- | --- |\n| x | 12,345 |\n| y | 0.5 |\n\n- a note\n"
    )
