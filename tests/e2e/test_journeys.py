"""Whole journeys through the command, as a user makes them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest

from maskgr.config import PRESETS
from tests.conftest import Outcome

COUNTS = {
    "beauty": (22_363, 12_101, 198_502),
    "toys": (19_412, 11_924, 167_597),
    "sports": (35_598, 18_357, 296_337),
    "ml-1m": (6_040, 3_416, 999_611),
}


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
    table = maskgr("evaluate", run, "--split", "validation").out
    assert "oracle" in table
    assert "of oracle" in table

    first = pl.read_parquet(shop / "items.parquet")["item_id"][0]
    rows = json.loads(maskgr("recommend", run, "--history", first, "--top", 3, "--json").out)
    assert len(rows) == 3
    assert set(rows[0]) == {
        "item_id", "score", "title", "brand", "categories", "description", "price",
    }  # fmt: skip
    assert rows[0]["title"] in maskgr("recommend", run, "--history", first).out


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
    tiny = PRESETS["tiny"]
    brief = replace(tiny, loop=replace(tiny.loop, steps=5, validations=1))
    monkeypatch.setitem(PRESETS, "tiny", brief)
    outcome = maskgr("demo", "--out", tmp_path / "demo")
    assert outcome.code == 0, outcome.err
    for part in ("1. A generated shop", "2. Semantic IDs", "of oracle", "items left", "Next: "):
        assert part in outcome.out
    assert maskgr("recommend", tmp_path / "demo" / "run").code == 0


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
