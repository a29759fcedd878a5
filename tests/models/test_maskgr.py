"""MaskGR as a recommender: trained small, searched exactly, explained."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from maskgr import Dataset, Recommender
from maskgr.config import PRESETS, LoopConfig, NetworkConfig, ObjectiveConfig, TrainConfig
from maskgr.data.config import SyntheticConfig
from maskgr.data.open import fetch
from maskgr.data.sequences import Sequences
from maskgr.data.splits import leave_out
from maskgr.errors import RequestError
from maskgr.evaluation.protocol import evaluate
from maskgr.explain import explain
from maskgr.models.maskgr import MaskGR
from maskgr.sids.config import QuantizerConfig
from tests.conftest import Outcome

ITEMS = 40
CONFIG = TrainConfig(
    quantizer=QuantizerConfig(levels=2, codes=8),
    network=NetworkConfig(layers=1, width=16, heads=2, hidden=32),
    loop=LoopConfig(steps=60, token_budget=1500, learning_rate=1e-2, validations=2),
)


@pytest.fixture(scope="module")
def shop() -> Dataset:
    return fetch("synthetic", synthetic=SyntheticConfig(users=200, items=ITEMS))


@pytest.fixture(scope="module")
def trained(shop: Dataset) -> Recommender:
    return Recommender.train(shop, config=CONFIG)


@pytest.fixture(scope="module")
def aware(shop: Dataset) -> Recommender:
    config = replace(
        CONFIG,
        network=replace(CONFIG.network, attention="isolated"),
        objective=ObjectiveConfig(last_item_share=0.5, catalogue_aware=True),
    )
    return Recommender.train(shop, config=config)


def histories(shop: Dataset, count: int = 12) -> Sequences:
    return leave_out(shop.histories).test.histories.select(np.arange(count))


def test_presets_are_what_they_say() -> None:
    assert PRESETS["paper"].objective == ObjectiveConfig()  # every option off
    assert PRESETS["paper"].quantizer.components == 0
    for config in PRESETS.values():
        as_json = json.loads(json.dumps(_plain(config)))
        assert TrainConfig.from_dict(as_json) == config


def _plain(config: TrainConfig) -> dict[str, object]:
    from dataclasses import asdict

    return asdict(config)


def test_every_order_and_schedule_gives_the_asked_number_of_distinct_items(
    shop: Dataset, trained: Recommender
) -> None:
    asked = histories(shop)
    for order in ("greedy", "left-to-right", "random"):
        for steps in (1, 2, 3):
            how = trained.decoding(order=order, steps=steps, beams=4)
            ranked = trained.rank(asked, 10, exclude_seen=False, decoding=how)
            for row in ranked.items.tolist():
                assert len(set(row)) == 10
                assert min(row) >= 0
            assert (np.diff(ranked.scores, axis=1) <= 0).all()


def test_probabilities_of_all_items_sum_to_one_when_the_likelihood_is_the_catalogues(
    shop: Dataset, aware: Recommender
) -> None:
    asked = histories(shop)
    how = aware.decoding(order="left-to-right", beams=ITEMS)
    ranked = aware.rank(asked, ITEMS, exclude_seen=False, decoding=how)
    assert sorted(ranked.items[0].tolist()) == list(range(ITEMS))
    total = np.exp(ranked.scores.astype(np.float64)).sum(axis=1)
    assert total == pytest.approx(np.ones(len(asked)), abs=1e-4)


def test_sessions(shop: Dataset, trained: Recommender) -> None:
    ids = shop.item_ids.to_list()
    history = [ids[n] for n in histories(shop)[0]]
    for steps in (1, 3, 0):
        found = trained.sessions(history, 2, top=8, decoding=trained.decoding(steps=steps))
        assert len(found) == len({s.item_ids for s in found}) == 8
        assert all(len(set(s.item_ids)) == 2 for s in found)
        assert [s.score for s in found] == sorted((s.score for s in found), reverse=True)
    unseen = trained.sessions(history, 2, top=8, exclude_seen=True)
    assert not {i for s in unseen for i in s.item_ids} & set(history)
    with pytest.raises(RequestError, match="a session of 0 items is empty"):
        trained.sessions(history, 0)


def test_samples_follow_the_probabilities(shop: Dataset, aware: Recommender) -> None:
    ids = shop.item_ids.to_list()
    history = [ids[n] for n in histories(shop)[0]]
    drawn = aware.sample(history, 3000, exclude_seen=False)
    assert len(drawn) == 3000
    assert drawn == aware.sample(history, 3000, exclude_seen=False)
    assert drawn != aware.sample(history, 3000, exclude_seen=False, seed=1)
    cold = aware.sample(history, 200, exclude_seen=False, temperature=0.05)
    assert len(set(cold)) < len(set(drawn[:200]))


def test_frozen_equals_off_on_an_isolated_model(shop: Dataset, aware: Recommender) -> None:
    asked = histories(shop)
    answers = [
        aware.rank(asked, 10, exclude_seen=True, decoding=aware.decoding(cache=cache))
        for cache in ("off", "frozen")
    ]
    assert np.array_equal(answers[0].items, answers[1].items)
    assert answers[0].scores == pytest.approx(answers[1].scores, abs=1e-4)


def test_filters(shop: Dataset, trained: Recommender) -> None:
    ids = shop.item_ids.to_list()
    history = [ids[n] for n in histories(shop)[0]]
    seen = {r.item_id for r in trained.recommend(history, 20, exclude_seen=True)}
    assert not seen & set(history)
    only = trained.recommend(history, 3, allow=ids[:5], exclude_seen=False)
    assert {r.item_id for r in only} <= set(ids[:5])
    few = trained.recommend(history, 10, allow=ids[:5], exclude_seen=False)
    assert len(few) == 5  # no more are left
    none = trained.recommend(history, 20, deny=ids[:10], exclude_seen=False)
    assert not {r.item_id for r in none} & set(ids[:10])


def test_an_empty_history_and_a_long_one(shop: Dataset, trained: Recommender) -> None:
    ids = shop.item_ids.to_list()
    assert len(trained.recommend([], 5)) == 5
    long = [ids[n % ITEMS] for n in range(90)]
    limit = trained.config.history_limit
    assert trained.recommend(long, 5, exclude_seen=False) == trained.recommend(
        long[-limit:], 5, exclude_seen=False
    )


def test_unconstrained_reports_what_is_no_item(shop: Dataset, trained: Recommender) -> None:
    how = trained.decoding(constrained=False, beams=40)
    found = trained.rank(histories(shop), 10, exclude_seen=False, decoding=how)
    assert 0 < found.invalid_share < 1
    assert trained.rank(histories(shop), 10, exclude_seen=False).invalid_share == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 9}, "steps"),
        ({"order": "alphabetical"}, "there is no order 'alphabetical'; choose one of"),
        ({"beams": 0}, "0 beams find nothing"),
        ({"colour": 1}, "decoding has no such setting"),
    ],
)
def test_bad_requests(trained: Recommender, changes: dict[str, object], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        trained.recommend([], 5, decoding=trained.decoding(**changes))


def test_saved_and_loaded_answers_the_same(
    shop: Dataset, trained: Recommender, tmp_path: Path
) -> None:
    trained.save(tmp_path / "run")
    again = Recommender.load(tmp_path / "run")
    asked = histories(shop)
    one, two = (r.rank(asked, 10, exclude_seen=True) for r in (trained, again))
    assert np.array_equal(one.items, two.items)
    assert np.array_equal(one.scores, two.scores)
    assert again.config == trained.config


def test_training_beats_an_untrained_network(shop: Dataset, trained: Recommender) -> None:
    fresh = Recommender.train(
        shop, config=replace(CONFIG, loop=replace(CONFIG.loop, steps=1, learning_rate=0.0))
    )
    test = leave_out(shop.histories).test
    recalls = [evaluate(r, test).metrics["all"]["recall@10"].mean for r in (fresh, trained)]
    assert recalls[1] > recalls[0] + 0.05


def test_explained(shop: Dataset, trained: Recommender) -> None:
    ids = shop.item_ids.to_list()
    history = [ids[n] for n in histories(shop)[0]]
    how = trained.decoding(order="greedy", beams=6)
    found = explain(trained, history, top=3, decoding=how)
    model = trained.model
    assert isinstance(model, MaskGR)
    levels = model.network.digits
    assert len(found.steps) == levels
    for number, step in enumerate(found.steps, 1):
        for beam in step:
            assert sum(digit is not None for digit in beam.digits) == number
            assert beam.remaining >= 1
            before = found.steps[number - 2][beam.parent].score if number > 1 else 0.0
            gained = sum(math.log(r.probability) for r in beam.revealed)
            assert beam.score == pytest.approx(before + gained, abs=1e-3)
    assert list(found.results) == trained.recommend(history, 3, decoding=how)
    best = model.sids.digits[trained.numbers([found.results[0].item_id], "", "raise")[0]]
    assert found.steps[-1][0].digits == tuple(best.tolist())
    popularity = Recommender.train(shop, config=TrainConfig(model="popularity"))
    with pytest.raises(RequestError, match="popularity does not unmask anything"):
        explain(popularity, history)
    with pytest.raises(RequestError, match="popularity has nothing to decode"):
        popularity.recommend(history, 3, decoding=how)


def test_the_commands(
    maskgr: Callable[..., Outcome], shop: Dataset, trained: Recommender, tmp_path: Path
) -> None:
    shop.save(tmp_path / "shop")
    trained.save(tmp_path / "run")
    ids = shop.item_ids.to_list()
    data, history = ("--data", tmp_path / "shop"), ("--history", f"{ids[0]},{ids[1]}")
    for words in ([], ["--order", "random", "--steps", 2, "--beams", 10], ["--unconstrained"]):
        outcome = maskgr("evaluate", tmp_path / "run", *data, *words, "--json")
        assert outcome.code == 0, outcome.err
        report = json.loads(outcome.out)
        assert report["users_per_second"] > 0
        assert (report["invalid_share"] > 0) == ("--unconstrained" in words)
    explained = maskgr("explain", tmp_path / "run", *history, "--steps", 2)
    assert "items left" in explained.out
    assert "step 2" in explained.out
    as_json = json.loads(maskgr("explain", tmp_path / "run", *history, "--json").out)
    assert len(as_json["results"]) == 5
    (tmp_path / "in.jsonl").write_text('{"user_id": 7, "history": []}\n')
    files = ("--input", tmp_path / "in.jsonl", "--output", tmp_path / "out.jsonl")
    assert maskgr("recommend", tmp_path / "run", *files, "--top", 4).code == 0
    assert len(json.loads((tmp_path / "out.jsonl").read_text())["items"]) == 4
    for words, expected in (
        (["--steps", 0], "--steps 0 evaluates nothing"),
        (["--cache", "warm"], "--cache warm is not a choice"),
        (["--input", "x"], "--input and --output go together"),
    ):
        outcome = maskgr("recommend", tmp_path / "run", *words)
        assert outcome.code == 2
        assert expected in outcome.err
