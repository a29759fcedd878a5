"""Mistakes in requests, in Python and in commands: one sentence, and nothing is written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from maskgr import Recommender
from maskgr.data.config import DataConfig
from maskgr.errors import MaskGRError
from maskgr.explain import explain
from maskgr.run import start_run
from maskgr.serving.batch import recommend_all, recommend_file
from tests.conftest import Outcome
from tests.models.test_all_models import short_config
from tests.models.tiny import shop

QUICK = ("fit.steps=2", "validations=1")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset, a run of maskgr and one of popularity, and a few bad files."""
    folder = tmp_path_factory.mktemp("runs")
    data = shop()
    data.save(folder / "shop")
    configs = {"maskgr": short_config("maskgr", *QUICK), "popularity": None}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("maskgr.training.fit._plot", lambda run: None)
        for name, config in configs.items():
            own = config or short_config_of_popularity()
            where = str(folder / "shop")
            start_run(folder / name, data, own, data=where, data_config=DataConfig())
    (folder / "in.jsonl").write_text('{"user_id": 1, "history": ["i01"]}\n')
    (folder / "ghost.jsonl").write_text('{"user_id": 1, "history": ["ghost"]}\n')
    (folder / "damaged.parquet").write_bytes(b"PAR1 nonsense")
    events = {"user_id": ["u1"], "item_id": ["i01"], "position": [1]}
    pl.DataFrame(events).write_parquet(folder / "events.parquet")
    pl.DataFrame(events | {"item_id": ["ghost"]}).write_parquet(folder / "ghost.parquet")
    pl.DataFrame({"item_id": ["n"], "titel": ["x"]}).write_parquet(folder / "misnamed.parquet")
    pl.DataFrame({"sku": ["n"]}).write_parquet(folder / "no-id.parquet")
    pl.DataFrame({"item_id": ["i01"]}).write_parquet(folder / "old.parquet")
    pl.DataFrame({"item_id": ["n"]}).write_parquet(folder / "new.parquet")
    return folder


def short_config_of_popularity() -> Any:
    from maskgr.models.base import train_config

    return train_config(model="popularity")


@pytest.fixture(scope="module")
def maskgr_run(runs: Path) -> Recommender:
    return Recommender.load(runs / "maskgr")


API: list[tuple[Callable[[Recommender], Any], str]] = [
    (lambda r: r.recommend(["i01"], 2.5), "top is 2.5; give a whole number"),
    (lambda r: r.recommend(["i01"], "3"), "top is '3'; give a whole number"),
    (lambda r: r.recommend(["i01"], True), "top is True; give a whole number"),
    (lambda r: r.recommend(["i01"], None), "top is None; give a whole number"),
    (lambda r: r.recommend(["i01"], 0), "cannot give 0 items"),
    (lambda r: r.recommend(["i01"], 10**9), "cannot give 1000000000 items"),
    (lambda r: r.recommend("i01"), "the history is 'i01'; give a list of IDs"),
    (lambda r: r.recommend({"i01", "i02"}), "the history is a set, which has no order"),
    (lambda r: r.recommend({"i01": 1}), "give a list of IDs"),
    (lambda r: r.recommend(5), "the history is 5; give a list of IDs"),
    (lambda r: r.recommend(None), "the history is None; give a list of IDs"),
    (lambda r: r.recommend(np.array(3)), "give a list of IDs"),
    (lambda r: r.recommend([["i01"], "i02"]), "history 2 is 'i02'; give a list of IDs"),
    (lambda r: r.recommend([["i01"], {"i02"}]), "history 2 is a set, which has no order"),
    (lambda r: r.recommend([["i01"], None]), "history 2 is None"),
    (lambda r: r.recommend([{"a": 1}]), "of the history is not in the catalogue"),
    (lambda r: r.recommend([None]), "item None of the history is not in the catalogue"),
    (lambda r: r.recommend([2**80]), "the history"),
    (lambda r: r.recommend([[["i01"]]]), "IDs"),
    (lambda r: r.recommend(["ghost"]), "item 'ghost' of the history is not in the catalogue"),
    (lambda r: r.recommend(["i01"], unknown="x"), "unknown is 'x'; choose one of raise, skip"),
    (lambda r: r.recommend(["i01"], unknown=None), "unknown is None; choose one of raise, skip"),
    (lambda r: r.recommend(["i01"], exclude_seen="no"), "exclude_seen is 'no'; give True, False"),
    (lambda r: r.recommend(["i01"], deny="i02"), "the deny list is 'i02'; give a list of IDs"),
    (lambda r: r.recommend(["i01"], deny=["ghost"]), "item 'ghost' of the deny list"),
    (lambda r: r.recommend(["i01"], allow="i02"), "the allow list is 'i02'; give a list of IDs"),
    (lambda r: r.recommend(["i01"], allow=5), "the allow list is 5; give a list of IDs"),
    (lambda r: r.recommend(["i01"], allow=[]), "leave no item; allow more or deny fewer"),
    (lambda r: r.recommend(["i01"], where="price < 3"), "items have no column price; they have"),
    (lambda r: r.recommend(["i01"], where="item_id"), "not true or false; compare it"),
    (lambda r: r.recommend(["i01"], where="item_id = "), "write for example in_stock"),
    (lambda r: r.recommend(["i01"], where="item_id = 'z'"), "these filters leave no item"),
    (lambda r: r.recommend(["i01"], where=5), "where is a int; give SQL"),
    (lambda r: r.recommend(["i01"], retrieval="magic"), "retrieval is 'magic'; choose one of"),
    (lambda r: r.recommend(["i01"], retrieval="dense"), "maskgr has no dense retrieval"),
    (lambda r: r.recommend(["i01"], decoding={"steps": 1}), "give a DecodingConfig"),
    (lambda r: r.recommend(["i01"], decoding=5), "give a DecodingConfig"),
    (lambda r: r.decoding(colour="blue"), "decoding has no such setting"),
    (lambda r: r.decoding(steps=-1), "steps"),
    (lambda r: r.sessions(["i01"], 50), "a session of 50 items is impossible"),
    (lambda r: r.sessions(["i01"], 2), "was trained for sessions of 1, not of 2"),
    (lambda r: r.sessions(["i01"], 1.5), "items is 1.5; give a whole number"),
    (lambda r: r.sessions(["i01"], 1, 2.5), "top is 2.5; give a whole number"),
    (lambda r: r.sessions("i01", 1), "the history is 'i01'; give a list of IDs"),
    (lambda r: r.sessions(["i01"], 1, repeats="no"), "repeats is 'no'; give True, False or None"),
    (lambda r: r.sessions(["i01"], 1, decoding=5), "give a DecodingConfig"),
    (lambda r: r.sample("i01"), "the history is 'i01'; give a list of IDs"),
    (lambda r: r.sample(["i01"], 0), "0 samples in 0 steps"),
    (lambda r: r.sample(["i01"], 2.5), "count is 2.5; give a whole number"),
    (lambda r: r.sample(["i01"], temperature=0), "temperature 0 cannot be drawn at"),
    (lambda r: r.sample(["i01"], temperature="hot"), "temperature is 'hot'; give a number"),
    (lambda r: r.sample(["i01"], seed="x"), "seed is 'x'; give a whole number"),
    (lambda r: explain(r, "i01"), "the history is 'i01'; give a list of IDs"),
    (lambda r: explain(r, ["i01"], 2.5), "top is 2.5; give a whole number"),
    (lambda r: explain(r, ["i01"], where="a = 1"), "items have no column a"),
    (lambda r: explain(r, ["i01"], decoding=5), "give a DecodingConfig"),
    (lambda r: r.history_of("nobody"), "user 'nobody' has no history here"),
    (lambda r: r.history_of(None), "user None has no history here"),
    (lambda r: r.history_of(["u1"]), "has no history here"),
    (lambda r: r.recommend_users("u1"), "user_ids is 'u1'; give a list of IDs"),
    (lambda r: r.recommend_users(["u1", "nobody"]), "user 'nobody' has no history here"),
    (lambda r: r.recommend_users(["u1"], top=2.5), "top is 2.5; give a whole number"),
    (lambda r: r.similar_items("ghost"), "item 'ghost' of this request is not in the catalogue"),
    (lambda r: r.similar_items(["i01"]), "this request"),
    (lambda r: r.similar_items("i01", 2.5), "top is 2.5; give a whole number"),
    (lambda r: r.similar_items("i01", by="x"), "by is 'x'; choose one of vectors, sids"),
    (lambda r: r.similar_items("i01", where="x = 1"), "items have no column x"),
    (lambda r: r.digits_of("ghost"), "item 'ghost' of this request is not in the catalogue"),
    (lambda r: r.items_with_prefix([0] * 9), "a prefix has at most 3 digits, not 9"),
    (lambda r: r.items_with_prefix("01"), "the prefix is '01'; give a list"),
    (lambda r: r.items_with_prefix([0.5]), "a digit is 0.5; give a whole number"),
    (lambda r: r.evaluate(shop(repeats=True)), "not the dataset that the recommender was trained"),
    (lambda r: r.evaluate("shop"), "data is 'shop'; give a Dataset"),
    (lambda r: r.evaluate(shop(), split="train"), "there is no split 'train'"),
    (lambda r: r.evaluate(shop(), ks=()), "metrics at K =  are impossible; use K >= 1"),
    (lambda r: r.evaluate(shop(), ks=(0,)), "metrics at K = 0 are impossible; use K >= 1"),
    (lambda r: r.evaluate(shop(), ks=("5",)), "K is '5'; give a whole number"),
    (lambda r: r.evaluate(shop(), ks=5), "ks is 5; give a list"),
    (lambda r: r.evaluate(shop(), users=1.5), "users is 1.5; give a whole number"),
    (lambda r: r.evaluate(shop(), protocols=("some",)), "protocol is 'some'; choose one of all"),
    (lambda r: r.add_items(pl.DataFrame({"sku": ["n"]})), "the new items have no column item_id"),
    (
        lambda r: r.add_items(pl.DataFrame({"item_id": ["n"], "titel": ["x"]})),
        "a column titel that the catalogue does not have",
    ),
    (lambda r: r.add_items([1]), "give a polars or pandas data frame"),
    (lambda r: r.update([1]), "give a polars or pandas data frame"),
    (lambda r: Recommender.train("shop"), "data is 'shop'; give a Dataset"),
    (lambda r: Recommender.load("nowhere"), "there is no folder nowhere"),
]


@pytest.mark.parametrize(("ask", "expected"), API, ids=range(len(API)))
def test_mistakes_in_python_are_one_sentence(
    maskgr_run: Recommender, ask: Callable[[Recommender], Any], expected: str
) -> None:
    with pytest.raises(MaskGRError) as error:
        ask(maskgr_run)
    assert expected in str(error.value)
    assert "\n" not in str(error.value)


def test_none_denies_nothing(maskgr_run: Recommender) -> None:
    deny: Any = None
    assert maskgr_run.recommend(["i01"], 3, deny=deny) == maskgr_run.recommend(["i01"], 3)
    assert maskgr_run.recommend(["i01"], 3, deny={"i02"}) == maskgr_run.recommend(
        ["i01"], 3, deny=["i02"]
    )


COMMANDS: list[tuple[str, str]] = [
    ("recommend {maskgr} --history ghost", "item 'ghost' of the history"),
    ("recommend {maskgr} --user nobody", "user 'nobody' has no history here"),
    ("recommend {maskgr} --user u1 --history i01", "--history and --user ask for different"),
    ("recommend {maskgr} --user u1 --all-users --output {new}", "--user and --all-users ask"),
    ("recommend {maskgr} --input {in} --all-users --output {new}", "--input and --all-users ask"),
    ("recommend {maskgr} --all-users", "--input or --all-users goes with --output"),
    ("recommend {maskgr} --output {new}", "--input or --all-users goes with --output"),
    ("recommend {maskgr} --all-users --output {new} --json", "--input or --all-users goes with"),
    ("recommend {maskgr} --input {in} --output {in}", "is the input, which would be lost"),
    ("recommend {maskgr} --input {none} --output {new}", "there is no file"),
    ("recommend {maskgr} --input {ghost} --output {new} --top 3", "item 'ghost' of the history"),
    ("recommend {maskgr} --history i01 --where price<3", "items have no column price; they have"),
    ("recommend {maskgr} --history i01 --where item_id", "not true or false; compare it"),
    ("recommend {maskgr} --history i01 --where item_id=(", "write for example in_stock"),
    ("recommend {maskgr} --all-users --output {new} --where a=1", "items have no column a"),
    ("recommend {maskgr} --top 99", "cannot give 99 items of a catalogue of 14"),
    ("recommend {maskgr} --top x", "Invalid value for '--top'"),
    ("recommend {maskgr} --allow ghost", "item 'ghost' of the allow list"),
    ("recommend {popularity} --session 2", "Popularity cannot plan sessions"),
    ("recommend {shop}", "holds a dataset, not a recommender"),
    ("explain {maskgr} --user nobody", "user 'nobody' has no history here"),
    ("explain {maskgr} --user u1 --history i01", "--history and --user ask for different"),
    ("explain {maskgr} --where a=1", "items have no column a"),
    ("explain {popularity}", "Popularity cannot decode digits"),
    ("similar {maskgr} ghost", "item 'ghost' of this request"),
    ("similar {maskgr} i01 --by magic", "Invalid value for '--by'"),
    ("similar {maskgr} i01 --top 0", "cannot give 0 items"),
    ("similar {maskgr} i01 --where a=1", "items have no column a"),
    ("similar {popularity} i01", "Popularity cannot give item vectors; maskgr"),
    ("similar {popularity} i01 --by sids", "Popularity cannot give semantic IDs; maskgr"),
    ("embeddings {popularity} --out {new}.parquet", "Popularity cannot give item vectors"),
    ("embeddings {maskgr} --out {new}.csv", "does not end in .parquet"),
    ("embeddings {none} --out {new}.parquet", "there is no folder"),
    ("info {none}", "there is no folder"),
    ("info {shop}", "holds a dataset, not a recommender"),
    ("evaluate {maskgr} --data {none}", "is neither a folder nor a source"),
    ("evaluate {maskgr} --k 0", "metrics at K = 0 are impossible"),
    ("add-items {maskgr} {misnamed} --out {new}", "a column titel that the catalogue does not"),
    ("add-items {maskgr} {noid} --out {new}", "the new items have no column item_id"),
    ("add-items {maskgr} {old} --out {new}", "are old, repeated or without an ID"),
    ("add-items {maskgr} {damaged} --out {new}", "cannot read"),
    ("add-items {maskgr} {none} --out {new}", "no"),
    ("update {popularity} --events {events} --out {new}", "Popularity cannot be updated; maskgr"),
    ("update {maskgr} --events {none} --out {new}", "no"),
    ("update {maskgr} --events {damaged} --out {new}", "cannot read"),
    ("update {maskgr} --events {ghostevents} --out {new}", "ghost"),
    ("update {maskgr} --events {events} --out {maskgr}", "holds a training"),
    ("update {maskgr} --events {events} --out {popularity}", "holds a trained run"),
    ("update {maskgr} --events {events} --out {shop}", "is not a run folder"),
    ("update {maskgr} --events {events} --items {misnamed} --out {new}", "a column titel"),
    ("update {maskgr} --events {events} --embeddings {new} --out {new}", "give --items, too"),
    ("update {maskgr} --events {events} --out {new} --set width=8", "width"),
    ("update {maskgr} --events {events} --out {new} --set seed=8", "settings of fit alone"),
    ("update {maskgr} --events {events} --out {new} --resume", "has no training to resume"),
    ("update {none} --events {events} --out {new}", "there is no folder"),
    ("train {shop} --out {popularity} --model popularity", "holds a trained run; give another"),
    ("train {shop} --out {maskgr} --preset tiny", "holds a training; --resume"),
    ("train {shop} --out {new} --holdout none", "--holdout none and --like RUN go together"),
    ("train {shop} --out {new} --like {maskgr}", "--holdout none and --like RUN go together"),
    ("train {shop} --out {new} --holdout some", "Invalid value for '--holdout'"),
    (
        "train {shop} --out {new} --holdout none --like {maskgr} --preset tiny",
        "--like takes the settings of",
    ),
    (
        "train {shop} --out {new} --holdout none --like {maskgr} --set seed=1",
        "leave --set out",
    ),
    ("train {shop} --out {new} --holdout none --like {none}", "there is no folder"),
    ("train {shop} --out {new} --model popularity --resume", "has no training to resume"),
]


@pytest.mark.parametrize(("line", "expected"), COMMANDS)
def test_mistakes_in_commands_are_one_sentence_and_write_nothing(
    maskgr: Callable[..., Outcome], runs: Path, tmp_path: Path, line: str, expected: str
) -> None:
    files = {
        "shop": runs / "shop",
        "maskgr": runs / "maskgr",
        "popularity": runs / "popularity",
        "in": runs / "in.jsonl",
        "ghost": runs / "ghost.jsonl",
        "ghostevents": runs / "ghost.parquet",
        "misnamed": runs / "misnamed.parquet",
        "noid": runs / "no-id.parquet",
        "old": runs / "old.parquet",
        "damaged": runs / "damaged.parquet",
        "events": runs / "events.parquet",
        "none": tmp_path / "nothing.parquet",
        "new": tmp_path / "new",
    }
    before = {file: file.stat().st_mtime_ns for file in runs.rglob("*")}
    outcome = maskgr(*(word.format(**files) for word in line.split()))
    assert outcome.code == 2, outcome.err
    assert outcome.out == ""
    assert outcome.err.startswith("error: ")
    assert expected in outcome.err
    assert outcome.err.count("\n") == 1
    assert [own.name for own in tmp_path.rglob("*") if not own.name.endswith(".part")] == []
    assert {file: file.stat().st_mtime_ns for file in runs.rglob("*")} == before


def test_the_commands_of_a_day(maskgr: Callable[..., Outcome], runs: Path, tmp_path: Path) -> None:
    run = runs / "maskgr"
    one = json.loads(maskgr("recommend", run, "--user", "u1", "--top", 3, "--json").out)
    assert [row["item_id"] for row in one] == [
        r.item_id for r in Recommender.load(run).recommend_users(["u1"], 3)[0]
    ]
    some = maskgr("recommend", run, "--history", "i01", "--where", "item_id < 'i04'", "--json")
    assert {row["item_id"] for row in json.loads(some.out)} == {"i00", "i02", "i03"}
    output = tmp_path / "all.parquet"
    done = maskgr("recommend", run, "--all-users", "--output", output, "--top", 2)
    assert done.out == f"24 users; saved to {output}\n"
    assert pl.read_parquet(output)["items"].list.len().to_list() == [2] * 24
    like = json.loads(maskgr("similar", run, "i01", "--top", 2, "--json").out)
    assert [row["item_id"] for row in like] == [
        r.item_id for r in Recommender.load(run).similar_items("i01", 2)
    ]
    assert maskgr("embeddings", run, "--out", tmp_path / "v.parquet").code == 0
    assert pl.read_parquet(tmp_path / "v.parquet").height == 14
    about = json.loads(maskgr("info", run, "--json").out)
    assert (about["users"], about["items"]) == (24, 14)
    assert about["made"]["fits"]["."]["metrics"]
    shown = maskgr("info", run)
    assert shown.code == 0
    assert "validation recall@10" in shown.out
    report = json.loads(maskgr("evaluate", run, "--json").out)
    assert list(report["floors"]) == ["popularity", "neighbours"]
    table = maskgr("evaluate", run).out
    assert "\npopularity" in table
    assert "\nneighbours" in table


def test_update_and_training_on_everything_in_the_command(
    maskgr: Callable[..., Outcome],
    runs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("maskgr.training.fit._plot", lambda run: None)
    more, whole = tmp_path / "more", tmp_path / "whole"
    words = ("--events", runs / "events.parquet", "--out", more, "--processes", 1)
    updated = maskgr("update", runs / "maskgr", *words, "--set", "fit.steps=2")
    assert updated.code == 0, updated.err
    assert updated.out.startswith("1 users with new events and 0 new items in ")
    assert maskgr("evaluate", more, "--json").code == 0  # its events are in the run
    assert "update of" in maskgr("info", more).out
    again = maskgr("update", runs / "maskgr", *words, "--set", "fit.steps=2", "--resume")
    assert again.code == 0, again.err
    like = ("--holdout", "none", "--like", runs / "maskgr", "--processes", 1)
    trained = maskgr("train", runs / "shop", "--out", whole, *like)
    assert trained.code == 0, trained.err
    assert "nothing was held out, so it has no figures of its own" in trained.out
    assert "nothing: no figures of its own" in maskgr("info", whole).out
    refused = maskgr("evaluate", whole)
    assert refused.code == 2
    assert "trained on everything, so there are no held-out items" in refused.err


def test_files_of_batches_are_checked_in_python(
    maskgr_run: Recommender, runs: Path, tmp_path: Path
) -> None:
    with pytest.raises(MaskGRError, match="items have no column a"):
        recommend_all(maskgr_run, tmp_path / "o.parquet", 3, where="a = 1")
    with pytest.raises(MaskGRError, match=r"top is 2\.5"):
        recommend_file(maskgr_run, runs / "in.jsonl", tmp_path / "o", 2.5)  # type: ignore[arg-type]
