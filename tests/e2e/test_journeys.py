"""Whole journeys through the command, as a user makes them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import polars as pl
import pytest

from maskgr.data.config import DataConfig, SyntheticConfig
from maskgr.data.open import fetch
from maskgr.models.base import train_config
from maskgr.models.maskgr.model import MaskGR
from maskgr.run import start_run
from tests.conftest import Outcome

COUNTS = {
    "beauty": (22_363, 12_101, 198_502),
    "toys": (19_412, 11_924, 167_597),
    "sports": (35_598, 18_357, 296_337),
    "ml-1m": (6_040, 3_416, 999_611),
}
BRIEF = ["fit.steps=10", "validations=1", "width=16", "heads=2", "levels=3", "codes=8"]
PRESETS = {"maskgr": "tiny", "maskgr-paper": "tiny-paper"}
OWN = {"maskgr": ["session=2"], "maskgr-paper": ["dense.head=true"]}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small shop, and a run of each model that generates."""
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MASKGR_CACHE", str(folder / "cache"))
        shop = fetch("synthetic", synthetic=SyntheticConfig(users=150, items=60))
        shop.save(folder / "shop")
        for model, preset in PRESETS.items():
            config = train_config(preset, [*BRIEF, *OWN[model], "leave_out=2"], model=model)
            data, out = str(folder / "shop"), folder / model
            start_run(out, shop, config, data=data, data_config=DataConfig())
    return folder


@pytest.mark.parametrize("name", COUNTS)
def test_the_real_datasets_have_the_published_counts(
    maskgr: Callable[..., Outcome], real_data: Callable[[str], Path], name: str
) -> None:
    outcome = maskgr("data", "inspect", real_data(name), "--json", "--k-core", 5)
    report = json.loads(outcome.out)
    assert outcome.code == 0
    assert (report["users"], report["items"], report["interactions"]) == COUNTS[name]
    assert report["usable"]


def test_popularity_on_beauty(
    maskgr: Callable[..., Outcome], real_data: Callable[[str], Path], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    trained = maskgr("train", real_data("beauty"), "--model", "popularity", "--out", run)
    assert trained.code == 0, trained.err
    report = json.loads(maskgr("evaluate", run, "--json").out)
    assert report["users"] == 22_363
    for name in ("recall@5", "ndcg@5", "recall@10", "ndcg@10"):
        assert 0 < report[name] < 0.02


def test_fetch_train_evaluate_recommend(maskgr: Callable[..., Outcome], tmp_path: Path) -> None:
    shop, run = tmp_path / "my shop", tmp_path / "my run"
    sizes = ("--set", "users=300", "--set", "items=80")
    fetched = maskgr("data", "fetch", "synthetic", *sizes, "--out", shop, "--json")
    assert json.loads(fetched.out)["users"] == 300
    assert maskgr("train", shop, "--model", "popularity", "--out", run).code == 0

    report = json.loads(
        maskgr("evaluate", run, "--json", "--protocol", "unseen", "--k", "5,20").out
    )
    assert report["recall@20"] >= report["recall@5"] > 0
    assert report["protocol"] == "unseen"
    assert report["retrieval"] == "ranking"
    assert report["order"] is report["steps"] is None
    table = maskgr("evaluate", run, "--split", "validation").out
    assert "popularity: retrieval ranking, order -, steps -; " in table
    assert "oracle" in table
    assert "of oracle" in table

    first = pl.read_parquet(shop / "items.parquet")["item_id"][0]
    rows = json.loads(maskgr("recommend", run, "--history", first, "--top", 3, "--json").out)
    assert len(rows) == 3
    assert set(rows[0]) == {
        "item_id", "score", "title", "brand", "categories", "description", "price",
    }  # fmt: skip
    assert rows[0]["title"] in maskgr("recommend", run, "--history", first).out
    for words in (["evaluate", run, "--steps", 1], ["explain", run, "--history", first]):
        outcome = maskgr(*words)
        assert outcome.code == 2
        assert (
            "Popularity cannot decode digits; maskgr, maskgr-paper, tiger, liger can" in outcome.err
        )


def test_a_result_names_the_decoding_that_produced_it(
    maskgr: Callable[..., Outcome], runs: Path
) -> None:
    report = json.loads(maskgr("evaluate", runs / "maskgr", "--users", 20, "--json").out)
    assert report["users"] == 20
    decoding = {"retrieval": "generative", "order": "greedy", "steps": 3, "beams": 20}
    assert {name: report[name] for name in decoding} == decoding
    assert "invalid_share" not in report
    shown = maskgr("evaluate", runs / "maskgr", "--users", 20, "--order", "random", "--steps", 2)
    assert "retrieval generative, order random, steps 2, beams 20" in shown.out
    report = json.loads(maskgr("evaluate", runs / "maskgr", "--steps", 1, "--json").out)
    assert report["steps"] == 1
    assert report["order"] is None  # it does not matter in one step
    assert "beams" not in report
    assert not {"remask", "guidance"} & set(report)  # they are off

    paper = runs / "maskgr-paper"
    report = json.loads(maskgr("evaluate", paper, "--users", 20, "--json").out)
    assert report["retrieval"] == "unified"
    words = ("--users", 20, "--retrieval", "generative", "--unconstrained")
    report = json.loads(maskgr("evaluate", paper, *words, "--json").out)
    assert report["invalid_share"] > 0
    assert "of the beams ended as no item" in maskgr("evaluate", paper, *words).out
    report = json.loads(maskgr("evaluate", paper, "--retrieval", "dense", "--json").out)
    assert report["retrieval"] == "dense"
    assert report["order"] is report["steps"] is None
    assert "beams" not in report


def test_remasking_and_guidance_are_named_where_they_are_used(
    maskgr: Callable[..., Outcome], runs: Path
) -> None:
    words = ("evaluate", runs / "maskgr", "--users", 5, "--remask", 1, "--guidance", 0.5)
    report = json.loads(maskgr(*words, "--json").out)
    assert (report["remask"], report["guidance"]) == (1, 0.5)
    assert "guidance 0.5, remask 1" in maskgr(*words).out
    report = json.loads(maskgr(*words, "--steps", 1, "--json").out)
    assert report["beams"] == 20  # what is revealed anew depends on them
    for option in ("--remask", "--guidance"):
        outcome = maskgr("evaluate", runs / "maskgr-paper", option, 1)
        assert outcome.code == 2
        assert outcome.err.startswith("error: maskgr-paper ")


@pytest.mark.parametrize("model", PRESETS)
def test_sessions_are_evaluated(maskgr: Callable[..., Outcome], runs: Path, model: str) -> None:
    words = ("evaluate", runs / model, "--session", 2, "--users", 30)
    report = json.loads(maskgr(*words, "--json").out)
    levels = 3 if model == "maskgr" else 4  # one digit is appended
    named = {"session": 2, "retrieval": "generative", "order": "greedy", "beams": 10}
    assert {name: report[name] for name in named} == named
    assert report["steps"] == 2 * levels
    assert 0 < report["session_recall@10"] < 1
    interval = report["protocols"]["unseen"]["session_recall@10"]
    assert interval["low"] <= interval["mean"] <= interval["high"]
    wider = ("--k", "5,20", "--beams", 20, "--order", "random", "--steps", 3)
    shown = maskgr(*words, *wider).out
    assert "session_recall@5" in shown
    assert "session 2, retrieval generative, order random, steps 3, beams 20" in shown


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--session", 3], "--session 3 needs 3 held-out items a user, and "),
        (["--session", 2, "--k", "10,20"], "session_recall@20 needs 20 beams, and the search has"),
        (["--session", 2, "--retrieval", "dense"], "sessions are generated, so --retrieval dense"),
        (["--session", 2, "--steps", 9], "9 steps cannot reveal 8 digits; give 1 to 8"),
        (["--session", 2, "--steps", 1, "--order", "random"], "--order has no effect on one step"),
    ],
)
def test_impossible_session_evaluations_are_refused(
    maskgr: Callable[..., Outcome], runs: Path, words: list[object], expected: str
) -> None:
    outcome = maskgr("evaluate", runs / "maskgr-paper", *words)
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.startswith(f"error: {expected}")


@pytest.mark.parametrize("model", PRESETS)
def test_sessions_are_recommended(
    maskgr: Callable[..., Outcome], runs: Path, tmp_path: Path, model: str
) -> None:
    words = ("recommend", runs / model, "--session", 2, "--top", 3)
    one = (*words, "--history", "SKU-00001,SKU-00007", "--deny", "SKU-00002")
    rows = json.loads(maskgr(*one, "--json").out)
    assert [len(row["items"]) for row in rows] == [2, 2, 2]
    assert {"item_id", "title"} <= set(rows[0]["items"][0])
    shown = maskgr(*one).out
    for row in rows:
        for item in row["items"]:
            assert item["item_id"] in shown
            assert item["item_id"] != "SKU-00002"
    (tmp_path / "in.jsonl").write_text('{"user_id": 7, "history": ["SKU-00001", "SKU-00007"]}\n')
    files = ("--input", tmp_path / "in.jsonl", "--output", tmp_path / "out.jsonl")
    assert maskgr(*words, *files).code == 0
    found = json.loads((tmp_path / "out.jsonl").read_text())
    assert [len(session) for session in found["sessions"]] == [2, 2, 2]
    outcome = maskgr("recommend", runs / model, "--session", 50)
    assert outcome.code == 2
    assert outcome.err.startswith("error: a session of 50 items is impossible with a model that")


@pytest.mark.parametrize(
    ("model", "words", "expected"),
    [
        ("maskgr", ["--retrieval", "dense"], "maskgr has no dense retrieval of its own"),
        ("maskgr", ["--unconstrained"], "maskgr generates real items only"),
        ("maskgr", ["--cache", "off"], "maskgr encodes a history once"),
        ("maskgr", ["--steps", 1, "--order", "random"], "--order has no effect on one step"),
        ("maskgr", ["--steps", 1, "--beams", 5], "--beams has no effect on one step"),
        ("maskgr", ["--steps", 9], "9 steps cannot reveal 3 digits"),
        ("maskgr-paper", ["--retrieval", "dense", "--steps", 2], "--steps has no effect on dense"),
    ],
)
def test_impossible_and_ineffective_decoding_is_refused(
    maskgr: Callable[..., Outcome], runs: Path, model: str, words: list[object], expected: str
) -> None:
    outcome = maskgr("evaluate", runs / model, *words)
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.splitlines()[-1].startswith(f"error: {expected}")


@pytest.mark.parametrize("model", PRESETS)
def test_explanations_show_the_steps(
    maskgr: Callable[..., Outcome], runs: Path, model: str
) -> None:
    words = ("explain", runs / model, "--history", "SKU-00001,SKU-00007", "--top", 2)
    shown = maskgr(*words, "--steps", 2).out
    assert "items left" in shown
    assert "step 2" in shown
    assert "step 3" not in shown
    found = json.loads(maskgr(*words, "--json").out)
    assert len(found["steps"]) == (3 if model == "maskgr" else 4)  # one digit is appended
    assert len(found["results"]) == 2


@pytest.mark.parametrize("model", PRESETS)
def test_explanations_have_the_results_of_recommend(
    maskgr: Callable[..., Outcome], runs: Path, model: str
) -> None:
    asked = (runs / model, "--history", "SKU-00001", "--top", 4, "--json")
    for words in ((), ("--steps", 1), ("--beams", 2, "--deny", "SKU-00003", "--exclude-seen")):
        found = json.loads(maskgr("explain", *asked, *words).out)
        rows = json.loads(maskgr("recommend", *asked, *words).out)
        results = [(row["item_id"], row["score"]) for row in found["results"]]
        assert results == [(row["item_id"], row["score"]) for row in rows]
    assert found["searched"] == 2


def test_explanations_say_what_steps_do_not_show(
    maskgr: Callable[..., Outcome], runs: Path
) -> None:
    paper = ("explain", runs / "maskgr-paper", "--history", "SKU-00001")
    dense = maskgr(*paper, "--retrieval", "dense").out
    assert dense.startswith("Dense retrieval scores every item at once")
    assert "ranks the items of the beams by their dense score" in maskgr(*paper).out
    words = ("explain", runs / "maskgr", "--history", "SKU-00001", "--beams", 2)
    assert "The items after the first 2 are beyond the beams of these steps." in maskgr(*words).out
    shown = maskgr(*words[:-2], "--steps", 1).out
    assert "step 1" in shown
    assert "digit 3 = " in shown
    assert "beyond the beams" not in shown


def test_recommendations_for_a_file(
    maskgr: Callable[..., Outcome], runs: Path, tmp_path: Path
) -> None:
    (tmp_path / "in.jsonl").write_text('{"user_id": 7, "history": ["SKU-00001"]}\n')
    files = ("--input", tmp_path / "in.jsonl", "--output", tmp_path / "out.jsonl")
    outcome = maskgr("recommend", runs / "maskgr", *files, "--top", 4)
    assert outcome.code == 0, outcome.err
    assert len(json.loads((tmp_path / "out.jsonl").read_text())["items"]) == 4


@pytest.mark.parametrize("model", PRESETS)
def test_new_items_are_added_and_recommended(
    maskgr: Callable[..., Outcome], runs: Path, tmp_path: Path, model: str
) -> None:
    items = pl.read_parquet(runs / "shop" / "items.parquet")
    new = items.head(2).with_columns(item_id=pl.Series(["new-1", "new-2"]))
    new.write_parquet(tmp_path / "new.parquet")
    words = ("add-items", runs / model, tmp_path / "new.parquet", "--out", tmp_path / "run")
    added = maskgr(*words)
    assert added.out.startswith("2 new items, 62 in all; saved to"), added.err
    asked = ("recommend", tmp_path / "run", "--allow", "new-2", "--top", 1, "--json")
    assert [row["item_id"] for row in json.loads(maskgr(*asked).out)] == ["new-2"]
    again = maskgr("add-items", tmp_path / "run", tmp_path / "new.parquet")
    assert again.code == 2
    assert "2 of the new items are old" in again.err


def test_a_run_is_resumed_with_its_own_settings_only(
    maskgr: Callable[..., Outcome], runs: Path, tmp_path: Path
) -> None:
    words = ("train", runs / "shop", "--model", "popularity", "--out", tmp_path / "run")
    missing = maskgr(*words, "--resume")
    assert missing.code == 2
    assert "has no training to resume; leave --resume out" in missing.err
    assert maskgr(*words).code == 0
    assert maskgr(*words, "--resume").code == 0
    other = maskgr(*words, "--resume", "--seed", 5)
    assert other.code == 2
    assert "was started with another seed; use the settings it was" in other.err


def test_a_run_is_evaluated_on_its_own_data_only(
    maskgr: Callable[..., Outcome], tmp_path: Path
) -> None:
    for seed in (1, 2):
        sizes = ("--set", "users=50", "--set", "items=20", "--set", f"seed={seed}")
        maskgr("data", "fetch", "synthetic", *sizes, "--out", tmp_path / f"shop{seed}")
    maskgr("train", tmp_path / "shop1", "--model", "popularity", "--out", tmp_path / "run")
    (tmp_path / "shop1").rename(tmp_path / "moved")
    lost = maskgr("evaluate", tmp_path / "run")
    assert lost.code == 2
    assert "shop1" in lost.err
    assert maskgr("evaluate", tmp_path / "run", "--data", tmp_path / "moved").code == 0
    other = maskgr("evaluate", tmp_path / "run", "--data", tmp_path / "shop2")
    assert other.code == 2
    assert "is not what" in other.err


def test_same_seed_same_result(maskgr: Callable[..., Outcome], tmp_path: Path) -> None:
    for name in ("one", "two"):
        words = ("--model", "popularity", "--set", "sparsify=0.5", "--seed", 7)
        assert maskgr("train", "synthetic", *words, "--out", tmp_path / name).code == 0
    one, two = (
        (tmp_path / n / "recommender" / "model.safetensors").read_bytes() for n in ("one", "two")
    )
    assert one == two


def test_demo(
    maskgr: Callable[..., Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = MaskGR.presets["tiny"]
    brief = replace(tiny, fit=replace(tiny.fit, steps=5, validations=1))
    monkeypatch.setattr(MaskGR, "presets", {**MaskGR.presets, "tiny": brief})
    small = partial(SyntheticConfig, users=200, items=80)
    monkeypatch.setattr("maskgr.data.config.SyntheticConfig", small)
    outcome = maskgr("demo", "--out", tmp_path / "demo")
    assert outcome.code == 0, outcome.err
    for part in (
        "1. A generated shop", "3. The semantic IDs", "neighbours", "of oracle", "items left",
    ):  # fmt: skip
        assert part in outcome.out
    follow = [line.split("maskgr ")[1].split() for line in outcome.out.splitlines()[-3:]]
    for words in follow[:2]:
        assert maskgr(*words).code == 0


def test_offline_fetch_says_where_to_put_the_file(
    maskgr: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    def offline(*_: object, **__: object) -> None:
        raise OSError("Name or service not known")

    monkeypatch.setattr("socket.create_connection", offline)
    outcome = maskgr("data", "fetch", "ml-1m")
    assert outcome.code == 2
    assert "cannot download https://files.grouplens.org" in outcome.err
    assert "put it at " in outcome.err
