from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from maskgr import Dataset, Recommender
from maskgr.artefact import sha256
from maskgr.errors import ArtefactError, DataError, RequestError
from maskgr.models.base import train_config
from tests.models import tiny

POPULARITY = train_config(model="popularity")


def dataset(ids: list[int] | str = "abcdef", repeat: bool = False) -> Dataset:
    """Two users who took everything but the last item; a leads, then b, and so on."""
    order = [*ids, *([ids[0]] if repeat else [])]
    log = [("u", item, n) for n, item in enumerate([*order, ids[-1], ids[-1]])]
    log += [("v", item, n) for n, item in enumerate(ids[:2])]
    frame = pl.DataFrame(log, schema=["user_id", "item_id", "position"], orient="row")
    items = pl.DataFrame({"item_id": list(ids), "title": [f"Item {i}" for i in ids]})
    return Dataset.from_frames(frame, items)


def test_recommends_for_one_history_or_many() -> None:
    rec = Recommender.train(dataset(), config=POPULARITY)
    assert [r.item_id for r in rec.recommend(["a"], top=2)] == ["b", "c"]
    many = rec.recommend([["a"], ["b", "c"], []], top=2)
    assert [[r.item_id for r in row] for row in many] == [["b", "c"], ["a", "d"], ["a", "b"]]
    assert rec.recommend(["a"], top=2)[0].score < 0
    assert rec.recommend([[]], top=1)[0][0].item_id == "a"
    assert rec.recommend([], top=1) == []  # no histories, no answers


def test_ids_keep_the_type_of_the_catalogue() -> None:
    rec = Recommender.train(dataset([10, 20, 30, 40]), config=POPULARITY)
    assert [r.item_id for r in rec.recommend([10], top=2)] == [20, 30]
    assert [r.item_id for r in rec.recommend(["10"], top=1)] == [20]  # as a command line has it


def test_seen_items_are_excluded_where_nobody_repeats() -> None:
    assert Recommender.train(dataset(), config=POPULARITY).recommend(["a"], 1)[0].item_id == "b"
    rec = Recommender.train(dataset(repeat=True), config=POPULARITY)
    assert rec.repeats
    assert rec.recommend(["a"], 1)[0].item_id == "a"
    assert rec.recommend(["a"], 1, exclude_seen=True)[0].item_id == "b"


def test_allow_and_deny_filter_the_items() -> None:
    rec = Recommender.train(dataset(), config=POPULARITY)
    assert [r.item_id for r in rec.recommend(["a"], 3, allow=["e", "c"])] == ["c", "e"]
    assert [r.item_id for r in rec.recommend(["a"], 2, deny=["b", "c"])] == ["d", "e"]
    assert rec.recommend(["a", "c"], 2, allow=["a", "c"]) == []  # all of them seen
    with pytest.raises(RequestError, match="leave no item; allow more or deny fewer"):
        rec.recommend(["a"], 1, allow=["b"], deny=["b"])


def test_unknown_items_raise_or_are_skipped() -> None:
    rec = Recommender.train(dataset(), config=POPULARITY)
    with pytest.raises(RequestError, match="item 'ghost' of the history is not in the catalogue"):
        rec.recommend(["a", "ghost"], 1)
    with pytest.raises(RequestError, match="item 'x' of the deny list"):
        rec.recommend(["a"], 1, deny=["x"])
    assert rec.recommend(["a", "ghost"], 1, unknown="skip")[0].item_id == "b"


@pytest.mark.parametrize("top", [0, -1, 7])
def test_raises_when_top_is_out_of_range(top: int) -> None:
    with pytest.raises(RequestError, match=f"cannot give {top} items of a catalogue of 6; ask for"):
        Recommender.train(dataset(), config=POPULARITY).recommend(["a"], top)


def test_saved_and_loaded_answers_the_same(tmp_path: Path) -> None:
    config = train_config("cpu", ["sparsify=0.25"], model="popularity", seed=3)
    rec = Recommender.train(dataset(), config=config, made={"data": "x"})
    rec.save(tmp_path / "run")
    again = Recommender.load(tmp_path / "run")
    assert again.recommend(["a"], 6) == rec.recommend(["a"], 6)
    assert again.config == rec.config
    assert again.items.equals(rec.items)
    assert again.made == rec.made
    kept = {"data", "fingerprint", "provenance", "counts", "fits", "seconds", "versions"}
    assert set(again.made) == kept


def test_raises_when_a_saved_folder_is_damaged(tmp_path: Path) -> None:
    run = tmp_path / "run"
    Recommender.train(dataset(), config=POPULARITY).save(run)
    model = (run / "model.safetensors").read_bytes()
    (run / "model.safetensors").write_bytes(model[:-1])
    with pytest.raises(ArtefactError, match=r"model\.safetensors has .* bytes where"):
        Recommender.load(run)
    (run / "model.safetensors").write_bytes(model)
    manifest = json.loads((run / "maskgr.json").read_text())
    manifest["config"]["train"]["colour"] = "blue"
    (run / "maskgr.json").write_text(json.dumps(manifest))
    with pytest.raises(ArtefactError, match=r"maskgr\.json has changed since it was written"):
        Recommender.load(run)
    (run / "maskgr.sha256").write_text(sha256(run / "maskgr.json"))
    with pytest.raises(ArtefactError, match=r"is damaged .*colour.*; train it again"):
        Recommender.load(run)


def test_raises_when_model_preset_or_history_limit_is_impossible() -> None:
    with pytest.raises(RequestError, match="there is no model 'magic'; the models are maskgr"):
        Recommender.train(dataset(), model="magic")
    with pytest.raises(RequestError, match="popularity has no preset 'paper'; its presets are cpu"):
        Recommender.train(dataset(), model="popularity", preset="paper")
    with pytest.raises(RequestError, match="there is no preset 'huge'; the presets are cpu"):
        Recommender.train(dataset(), preset="huge")
    with pytest.raises(RequestError, match="history_limit is 0; use 1 or more"):
        train_config("cpu", ["history_limit=0"])


@pytest.mark.parametrize(
    ("ask", "what"),
    [
        (lambda rec: rec.recommend(["a"], 1, retrieval="generative"), "decode digits"),
        (lambda rec: rec.decoding(steps=1), "decode digits"),
        (lambda rec: rec.sample(["a"]), "sample"),
        (lambda rec: rec.sessions(["a"]), "plan sessions"),
    ],
)
def test_raises_when_the_model_cannot_do_it(ask: Callable[[Recommender], Any], what: str) -> None:
    rec = Recommender.train(dataset(), config=POPULARITY)
    with pytest.raises(RequestError, match=f"Popularity cannot {what}; maskgr.* can: train one"):
        ask(rec)


SESSIONS = train_config(
    "tiny-paper",
    [
        "fit.steps=2",
        "validations=1",
        "width=16",
        "heads=2",
        "levels=2",
        "codes=4",
        "history_limit=5",
    ],
    model="maskgr-paper",
)


@pytest.fixture(scope="module")
def planner() -> Recommender:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("maskgr.training.fit._plot", lambda run: None)
        return Recommender.train(tiny.shop(), config=SESSIONS)


def test_sessions_for_one_history_or_many(planner: Recommender) -> None:
    found = planner.sessions(["i03"], 2, top=4)
    assert len(found) == 4
    assert all(len(session.item_ids) == 2 for session in found)
    assert [s.score for s in found] == sorted((s.score for s in found), reverse=True)
    many = planner.sessions([["i03"], ["i01", "i02"]], 2, top=4)
    assert [s.item_ids for s in many[0]] == [s.item_ids for s in found]
    assert len(many[1]) == 4


def test_sessions_hold_only_what_the_filters_leave(planner: Recommender) -> None:
    def ask(**filters: Any) -> set[tuple[str, ...]]:
        # As many beams as there are sessions: all of them are found.
        decoding = planner.decoding(beams=200)
        found = planner.sessions(["i03"], 2, top=182, decoding=decoding, **filters)
        sessions = {session.item_ids for session in found}
        assert len(sessions) == len(found)
        return sessions

    ids = planner.items["item_id"].to_list()
    assert not planner.repeats
    assert ask(exclude_seen=False) == set(itertools.permutations(ids, 2))
    unseen = [item for item in ids if item != "i03"]
    assert ask() == set(itertools.permutations(unseen, 2))
    allow, left = ["i03", "i04", "i05", "i06"], ["i04", "i06"]
    assert ask(allow=allow, deny=["i05"]) == set(itertools.permutations(left, 2))
    assert ask(allow=allow, deny=["i05"], repeats=True) == set(itertools.product(left, repeat=2))
    assert ask(allow=["i03", "i04"]) == set()  # one of them seen, and two are needed


@pytest.mark.parametrize(
    ("items", "top", "lists", "expected"),
    [
        (0, 1, {}, "a session of 0 items is impossible with a model that sees 5 items at once"),
        (-1, 1, {}, "a session of -1 items is impossible"),
        (50, 1, {}, "a session of 50 items is impossible .* sees 5 items at once; ask for 1 to 5"),
        (2, 0, {}, "cannot give 0 sessions of 2 items from a catalogue of 14; ask for 1 or more"),
        (2, 183, {}, "cannot give 183 sessions of 2 items .* of 14; ask for 1 to 182"),
        (3, 1, {"allow": ["i00", "i01"]}, "lists leave 2 items, too few for a session of 3; allow"),
    ],
)
def test_raises_when_sessions_are_impossible(
    planner: Recommender, items: int, top: int, lists: dict[str, Any], expected: str
) -> None:
    with pytest.raises(RequestError, match=expected):
        planner.sessions(["i03"], items, top, **lists)


def test_raises_when_a_session_is_longer_than_the_catalogue(planner: Recommender) -> None:
    small = replace(planner, config=replace(planner.config, history_limit=20))
    with pytest.raises(RequestError, match="of 15 items is impossible with a catalogue of 14; ask"):
        small.sessions(["i03"], 15)


def test_new_items_are_recommended_without_training() -> None:
    rec = Recommender.train(dataset(), config=POPULARITY)
    more = rec.add_items(pl.DataFrame({"item_id": ["g", "h"], "title": ["Item g", "Item h"]}))
    assert len(more.items) == 8
    assert more.recommend(["a"], 1, allow=["h"])[0].item_id == "h"
    with pytest.raises(DataError, match=r"1 of the new items are old, .*\(first: 'a'\)"):
        rec.add_items(pl.DataFrame({"item_id": ["a", "g"]}))
    with pytest.raises(DataError, match="the new items have no column item_id"):
        rec.add_items(pl.DataFrame({"id": ["g"]}))


@pytest.mark.parametrize("name", ["popularity", "neighbours", "sasrec"])
def test_raises_when_a_model_has_no_use_for_semantic_ids(name: str) -> None:
    sids = object()
    with pytest.raises(RequestError, match=f"{name} has no use for semantic IDs; leave --sids out"):
        Recommender.train(dataset(), model=name, sids=sids)  # type: ignore[arg-type]


def test_evaluates_beside_popularity_and_neighbours() -> None:
    data = tiny.shop()
    rec = Recommender.train(data, model="neighbours")
    found = rec.evaluate(data, ks=(3,))
    assert found.users == tiny.USERS
    assert list(found.floors) == ["popularity", "neighbours"]
    assert found.floors["neighbours"].metrics == found.metrics
    popular = Recommender.train(data, model="popularity").evaluate(data, ks=(3,))
    assert found.floors["popularity"].metrics == popular.metrics
    assert found.to_dict("all")["floors"]["popularity"]["protocols"].keys() == {"all", "unseen"}
    few = rec.evaluate(data, split="validation", ks=[1], protocols=["unseen"], users=5)
    assert few.users == 5
    assert list(few.metrics) == ["unseen"]
    with pytest.raises(RequestError, match="not the dataset that the recommender was trained on"):
        rec.evaluate(tiny.shop(repeats=True))
    with pytest.raises(RequestError, match="users is 0; use 1 or more"):
        rec.evaluate(data, users=0)
