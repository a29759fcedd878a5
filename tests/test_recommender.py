from __future__ import annotations

import json
from pathlib import Path

import polars as pl
import pytest

from maskgr import Dataset, Recommender
from maskgr.config import TrainConfig
from maskgr.errors import ArtefactError, RequestError

POPULARITY = TrainConfig(model="popularity")


def dataset(ids: list[int] | str = "abcdef", repeat: bool = False) -> Dataset:
    """Two users who took everything but the last item; a leads, then b, and so on."""
    order = [*ids, *([ids[0]] if repeat else [])]
    log = [("u", item, n) for n, item in enumerate([*order, ids[-1], ids[-1]])]
    log += [("v", item, n) for n, item in enumerate(ids[:2])]
    frame = pl.DataFrame(log, schema=["user_id", "item_id", "position"], orient="row")
    items = pl.DataFrame({"item_id": list(ids), "title": [f"Item {i}" for i in ids]})
    return Dataset.from_frames(frame, items)


def test_one_history_and_many() -> None:
    rec = Recommender.train(dataset(), config=POPULARITY)
    assert [r.item_id for r in rec.recommend(["a"], top=2)] == ["b", "c"]
    many = rec.recommend([["a"], ["b", "c"], []], top=2)
    assert [[r.item_id for r in row] for row in many] == [["b", "c"], ["a", "d"], ["a", "b"]]
    assert rec.recommend(["a"], top=2)[0].score < 0
    assert rec.recommend([], top=1)[0].item_id == "a"


def test_integer_ids() -> None:
    rec = Recommender.train(dataset([10, 20, 30, 40]), config=POPULARITY)
    assert [r.item_id for r in rec.recommend([10], top=2)] == [20, 30]
    assert [r.item_id for r in rec.recommend(["10"], top=1)] == [20]  # as a command line has it


def test_seen_items_go_where_nobody_repeats() -> None:
    assert Recommender.train(dataset(), config=POPULARITY).recommend(["a"], 1)[0].item_id == "b"
    rec = Recommender.train(dataset(repeat=True), config=POPULARITY)
    assert rec.repeats
    assert rec.recommend(["a"], 1)[0].item_id == "a"
    assert rec.recommend(["a"], 1, exclude_seen=True)[0].item_id == "b"


def test_allow_and_deny() -> None:
    rec = Recommender.train(dataset(), config=POPULARITY)
    assert [r.item_id for r in rec.recommend(["a"], 3, allow=["e", "c"])] == ["c", "e"]
    assert [r.item_id for r in rec.recommend(["a"], 2, deny=["b", "c"])] == ["d", "e"]
    assert rec.recommend(["a", "c"], 2, allow=["a", "c"]) == []  # all of them seen
    with pytest.raises(RequestError, match="leave no item; allow more or deny fewer"):
        rec.recommend(["a"], 1, allow=["b"], deny=["b"])


def test_unknown_items() -> None:
    rec = Recommender.train(dataset(), config=POPULARITY)
    with pytest.raises(RequestError, match="item 'ghost' of the history is not in the catalogue"):
        rec.recommend(["a", "ghost"], 1)
    with pytest.raises(RequestError, match="item 'x' of the deny list"):
        rec.recommend(["a"], 1, deny=["x"])
    assert rec.recommend(["a", "ghost"], 1, unknown="skip")[0].item_id == "b"


@pytest.mark.parametrize("top", [0, -1, 7])
def test_top_out_of_range(top: int) -> None:
    with pytest.raises(RequestError, match=f"cannot give {top} items of a catalogue of 6; ask for"):
        Recommender.train(dataset(), config=POPULARITY).recommend(["a"], top)


def test_saved_and_loaded_answers_the_same(tmp_path: Path) -> None:
    rec = Recommender.train(
        dataset(), config=TrainConfig(model="popularity", sparsify=0.25, seed=3), made={"data": "x"}
    )
    rec.save(tmp_path / "run")
    again = Recommender.load(tmp_path / "run")
    assert again.recommend(["a"], 6) == rec.recommend(["a"], 6)
    assert again.config == rec.config
    assert again.items.equals(rec.items)
    assert again.made == rec.made
    assert set(again.made) == {"data", "fingerprint", "provenance", "seconds", "versions"}


def test_damaged_runs_are_named(tmp_path: Path) -> None:
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
    with pytest.raises(ArtefactError, match=r"is damaged .*colour.*; train it again"):
        Recommender.load(run)


def test_unknown_model_and_empty_limit() -> None:
    with pytest.raises(RequestError, match="there is no model 'magic'; the models are maskgr"):
        Recommender.train(dataset(), config=TrainConfig(model="magic"))
    with pytest.raises(RequestError, match="a history limit of 0 shows the model nothing"):
        Recommender.train(dataset(), config=TrainConfig(history_limit=0))
