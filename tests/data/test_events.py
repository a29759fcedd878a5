"""Event types, weights, targets, mapped columns, duplicates and bursts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from maskgr import Dataset, Recommender
from maskgr.data.config import DataConfig
from maskgr.data.inspect import inspect_dataset
from maskgr.data.splits import leave_out
from maskgr.models.base import train_config
from tests.conftest import Outcome

LOG = pl.DataFrame(
    {
        "user_id": ["u", "u", "u", "u", "u", "v", "v", "v"],
        "item_id": ["a", "b", "b", "c", "d", "a", "c", "d"],
        "timestamp": [1, 2, 3, 4, 5, 1, 2, 3],
        "event_type": ["view", "view", "buy", "cart", "buy", "view", "wish", "buy"],
    }
)
WEIGHTS = {"buy": 1.0, "cart": 0.5, "view": 0.2}


def weights(dataset: Dataset) -> list[float] | None:
    found = dataset.histories.weights
    return None if found is None else [round(float(weight), 6) for weight in found]


def notes(dataset: Dataset) -> str:
    return "\n".join(map(str, dataset.notes))


def test_types_are_kept_with_their_weights_and_others_are_dropped_and_counted() -> None:
    data = Dataset.from_frames(LOG, config=DataConfig(events=WEIGHTS))
    assert [row.tolist() for row in data.histories] == [[0, 1, 1, 2, 3], [0, 3]]
    assert weights(data) == [0.2, 0.2, 1, 0.5, 1, 0.2, 1]
    assert "1 event of the given interactions are dropped, since --events does not name" in notes(
        data
    )
    assert "wish (1)" in notes(data)


def test_all_types_count_alike_unless_events_are_named_and_a_note_says_so() -> None:
    data = Dataset.from_frames(LOG)
    assert weights(data) is None
    assert "has the event types buy (3), view (3), cart (1), wish (1), which all count" in notes(
        data
    )
    assert (
        weights(Dataset.from_frames(LOG, config=DataConfig(events={"buy": 1, "view": 1}))) is None
    )


def test_targets_restrict_what_is_predicted_and_the_rest_is_context() -> None:
    data = Dataset.from_frames(LOG, config=DataConfig(targets=("buy",)))
    assert weights(data) == [0, 0, 1, 0, 1, 0, 0, 1]
    split = leave_out(data.histories)
    assert split.test.users.tolist() == [0]
    assert split.test.targets.tolist() == [[3]]
    assert split.test.histories[0].tolist() == [0, 1, 1, 2]
    assert split.validation.targets.tolist() == [[1]]
    assert split.validation.histories[0].tolist() == [0, 1]
    assert "fewer than two targets behind another event (first: 'v')" in notes(data)
    both = Dataset.from_frames(LOG, config=DataConfig(events=WEIGHTS, targets=("buy", "cart")))
    assert weights(both) == [0, 0, 1, 0.5, 1, 0, 1]
    assert "the weight of view counts nowhere, since only buy and cart" in notes(both)


def test_a_weight_column_multiplies_the_weight_of_the_type() -> None:
    log = LOG.with_columns(weight=pl.Series([1, 2, 3, 4, 0, 1, 1, 2]))
    assert weights(Dataset.from_frames(log.drop("event_type"))) == [1, 2, 3, 4, 0, 1, 1, 2]
    found = Dataset.from_frames(log, config=DataConfig(events=WEIGHTS))
    assert weights(found) == pytest.approx([0.2, 0.4, 3, 2, 0, 0.2, 2])
    text = log.drop("event_type").with_columns(pl.col("weight").cast(pl.String))
    assert weights(Dataset.from_frames(text)) == [1, 2, 3, 4, 0, 1, 1, 2]


def test_types_of_other_kinds_are_read_as_text_and_missing_ones_are_dropped() -> None:
    log = LOG.with_columns(event_type=pl.Series([1, 1, 2, None, 2, 1, 3, 2]))
    data = Dataset.from_frames(log, config=DataConfig(events={"1": 0, "2": 2}))
    assert weights(data) == [0, 0, 2, 2, 0, 2]
    assert "2 events of the given interactions are dropped" in notes(data)
    assert "(none) (1)" in notes(data)


def test_weights_are_saved_and_part_of_the_fingerprint(tmp_path: Path) -> None:
    data = Dataset.from_frames(LOG, config=DataConfig(events=WEIGHTS))
    data.save(tmp_path / "saved")
    again = Dataset.load(tmp_path / "saved")
    assert weights(again) == weights(data)
    assert again.fingerprint == data.fingerprint
    others = [
        DataConfig(events={**WEIGHTS, "cart": 0.6}),
        DataConfig(events=dict.fromkeys(WEIGHTS, 1)),
    ]
    prints = {Dataset.from_frames(LOG, config=own).fingerprint for own in others}
    assert len(prints | {data.fingerprint}) == 3


def test_options_of_a_command_say_what_the_settings_say(maskgr: Callable[..., Outcome]) -> None:
    config = DataConfig(
        3, "drop", "error", "dedupe", {"user_id": "customer"}, WEIGHTS, ("buy", "cart"), ("title",)
    )
    assert config.words() == [
        "--k-core", "3", "--unknown-items", "drop", "--unused-items", "error",
        "--repeats", "dedupe", "--columns", "user_id=customer",
        "--events", "buy=1.0,cart=0.5,view=0.2", "--targets", "buy,cart", "--text", "title",
    ]  # fmt: skip
    assert DataConfig(**json.loads(json.dumps(vars(config)))) == config


@pytest.mark.parametrize("form", ["csv", "parquet", "jsonl"])
def test_columns_are_mapped_in_events_and_items(
    tmp_path: Path, form: str, maskgr: Callable[..., Outcome]
) -> None:
    log = pl.DataFrame(
        {
            "customer": ["7", "7", "007"],
            "sku": ["1", "01", "1"],
            "item_id": [9, 9, 9],
            "at": [1, 2, 3],
        }
    )
    items = pl.DataFrame({"sku": ["1", "01"], "title": ["Ex", "Why"]})
    for frame, stem in ((log, "interactions"), (items, "items")):
        if form == "csv":
            frame.write_csv(tmp_path / f"{stem}.csv")
        elif form == "jsonl":
            frame.write_ndjson(tmp_path / f"{stem}.jsonl")
        else:
            frame.write_parquet(tmp_path / f"{stem}.parquet")
    vectors = pl.DataFrame({"sku": ["01", "1"], "v": [[2.0], [1.0]]})
    vectors.write_parquet(tmp_path / "embeddings.parquet")
    columns = {"user_id": "customer", "item_id": "sku", "timestamp": "at"}
    data = Dataset.load(tmp_path, config=DataConfig(columns=columns))
    assert data.users.to_list() == ["7", "007"]  # IDs stay as they are written
    assert data.items.columns == ["item_id", "title"]
    assert data.item_ids.to_list() == ["1", "01"]
    assert data.embeddings is not None
    assert data.embeddings.tolist() == [[1.0], [2.0]]
    frames = Dataset.from_frames(log, items, config=DataConfig(columns=columns))
    assert frames.fingerprint == data.fingerprint
    words = ("--columns", "user_id=customer, item_id=sku,timestamp=at", "--json")
    report = json.loads(maskgr("data", "inspect", tmp_path, *words).out)
    assert (report["users"], report["items"], report["interactions"]) == (2, 2, 3)


def hasty(times: list[Any], items: list[str] | None = None) -> Dataset:
    items = items or [f"i{n}" for n in range(len(times))]
    log = pl.DataFrame({"user_id": "u", "item_id": items, "timestamp": times})
    return Dataset.from_frames(log)


def test_duplicates_are_counted_named_and_dropped() -> None:
    log = pl.DataFrame(
        {
            "user_id": ["u", "u", "u", "u", "v", "u"],
            "item_id": ["a", "b", "a", "a", "a", "b"],
            "timestamp": [1000, 1000, 1000, 1001, 1000, 1000],
        }
    )
    report = inspect_dataset(Dataset.from_frames(log))
    assert report.duplicates == 2
    (problem,) = [str(p) for p in report.problems if "time of an earlier" in p.message]
    assert problem.startswith(
        "2 events have the user, item and time of an earlier one (first: user"
    )
    assert "'u', item 'a', 1970-01-01T00:16:40Z); the log may have been written twice" in problem
    deduped = Dataset.from_frames(log, config=DataConfig(repeats="dedupe"))
    assert [row.tolist() for row in deduped.histories] == [[0, 1, 0], [0]]
    assert inspect_dataset(deduped).duplicates == 0


def test_events_of_one_time_and_different_weight_are_no_duplicates() -> None:
    log = LOG.with_columns(timestamp=pl.lit(5), item_id=pl.lit("a"))
    config = DataConfig(events=WEIGHTS, repeats="dedupe")
    assert weights(Dataset.from_frames(log, config=config)) == [0.2, 1, 0.5, 0.2, 1]


def test_bursts_are_counted_and_named() -> None:
    calm = inspect_dataset(hasty([1000, 1000, 1000, 1000, 1001, 1002]))
    assert calm.bursts == 0
    report = inspect_dataset(hasty([1000.1, 1000.2, 1000.3, 1000.4, 1000.9, 1002, 2000]))
    assert (report.bursts, report.duplicates) == (1, 0)
    (problem,) = [str(p) for p in report.problems if "one second" in p.message]
    assert problem.startswith(
        "users have 5 events or more in one second 1 time, 5 events in all (mo"
    )
    assert "(most: 5, user 'u', item 'i0', 1970-01-01T00:16:40Z); their order is that of" in problem


def test_dates_without_a_time_of_day_are_no_bursts() -> None:
    assert inspect_dataset(hasty(["2024-01-01"] * 9)).bursts == 0


def test_text_columns_are_chosen_saved_and_shown(
    tmp_path: Path, maskgr: Callable[..., Outcome]
) -> None:
    items = pl.DataFrame(
        {
            "item_id": ["a", "b", "c", "d"],
            "title": ["A", "B", None, "D"],
            "price": [1.0, 2.0, 3.0, 4.0],
            "in_stock": [True, False, True, True],
            "link": ["https://x/1"] * 4,
        }
    )
    log = LOG.drop("event_type")
    data = Dataset.from_frames(log, items)
    assert data.text == ("title",)
    assert data.items.columns == items.columns  # the others remain, to filter by
    chosen = Dataset.from_frames(log, items, config=DataConfig(text=("price", "title")))
    assert chosen.text == ("price", "title")
    chosen.save(tmp_path / "saved")
    assert Dataset.load(tmp_path / "saved").text == ("price", "title")
    assert Dataset.load(tmp_path / "saved", config=DataConfig(text=("title",))).text == ("title",)
    report = json.loads(maskgr("data", "inspect", tmp_path / "saved", "--json").out)
    assert report["text"] == {"price": 1.0, "title": 0.75}
    assert list(report["columns"]) == ["title", "price", "in_stock", "link"]
    shown = maskgr("data", "inspect", tmp_path / "saved", "--text", "title").out
    assert "item text" in shown
    assert "price 100.0%, in_stock 100.0%" in shown


def test_content_tells_changed_texts_and_vectors_apart() -> None:
    log, items = (
        LOG.drop("event_type"),
        pl.DataFrame({"item_id": list("abcd"), "title": list("ABCD")}),
    )
    changed = items.with_columns(title=pl.lit("same"))
    sets = [
        Dataset.from_frames(log, items),
        Dataset.from_frames(log, changed),
        Dataset.from_frames(log, items, embeddings=np.eye(4)),
        Dataset.from_frames(log, items, embeddings=2 * np.eye(4)),
    ]
    assert len({data.fingerprint for data in sets}) == 1
    assert len({data.content for data in sets}) == 4
    assert Dataset.from_frames(log, items).content == sets[0].content
    bytes_too = items.with_columns(image=pl.lit(b"\xff"), nested=pl.lit(b"\xff").implode())
    assert Dataset.from_frames(log, bytes_too).content == sets[0].content


def test_resuming_with_changed_texts_is_refused(
    tmp_path: Path, maskgr: Callable[..., Outcome]
) -> None:
    shop, run = tmp_path / "shop", tmp_path / "run"
    shop.mkdir()
    LOG.drop("event_type").write_csv(shop / "interactions.csv")
    (shop / "items.csv").write_text("item_id,title\na,A\nb,B\nc,C\nd,D\n")
    words = ("train", shop, "--model", "popularity", "--out", run)
    assert maskgr(*words).code == 0
    assert maskgr(*words, "--resume").code == 0
    (shop / "items.csv").write_text("item_id,title\na,A\nb,B\nc,C\nd,Other\n")
    outcome = maskgr(*words, "--resume")
    assert outcome.code == 2
    assert "was started with other columns or embeddings of the items; use the same" in outcome.err


def test_targets_change_what_a_model_recommends() -> None:
    # Everybody views `seen` all the time and buys `bought` once.
    rows = [(f"u{n}", item, kind) for n in range(9) for item, kind in
            (("seen", "view"), ("other", "buy"), ("seen", "view"), ("bought", "buy"),
             ("seen", "view"), ("bought", "buy"), ("seen", "view"), ("other", "buy"))]  # fmt: skip
    log = pl.DataFrame(rows, schema=["user_id", "item_id", "event_type"], orient="row")
    log = log.with_columns(position=pl.int_range(pl.len()))
    config = train_config(model="popularity")
    plain = Recommender.train(Dataset.from_frames(log), config=config)
    assert plain.recommend(["other"], 1)[0].item_id == "seen"
    data = Dataset.from_frames(log, config=DataConfig(targets=("buy",)))
    bought = Recommender.train(data, config=config)
    assert bought.recommend(["seen"], 3, exclude_seen=False)[-1].item_id == "seen"


def test_a_run_with_event_types_is_evaluated_on_its_targets(
    tmp_path: Path, maskgr: Callable[..., Outcome]
) -> None:
    rng = np.random.default_rng(0)
    rows = [
        (f"u{user}", f"i{rng.integers(12)}", place, rng.choice(["view", "view", "buy"]))
        for user in range(20)
        for place in range(12)
    ]
    log = pl.DataFrame(rows, schema=["who", "item_id", "position", "event_type"], orient="row")
    (tmp_path / "shop").mkdir()
    log.write_parquet(tmp_path / "shop" / "interactions.parquet")
    words = ("--events", "buy=1,view=0.1", "--targets", "buy", "--columns", "user_id=who")
    out = tmp_path / "run"
    settings = ("--set", "fit.steps=5", "--set", "validations=1", "--preset", "tiny")
    train = ("train", tmp_path / "shop", "--model", "sasrec", "--out", out, *settings)
    assert maskgr(*train, *words).code == 0
    found = json.loads(maskgr("evaluate", out, "--json").out)
    config = DataConfig(
        events={"buy": 1, "view": 0.1}, targets=("buy",), columns={"user_id": "who"}
    )
    test = leave_out(Dataset.load(tmp_path / "shop", config=config).histories).test
    bought = {(row[0], row[1]) for row in rows if row[3] == "buy"}
    data = Dataset.load(tmp_path / "shop", config=config)
    for user, target in zip(test.users.tolist(), test.targets[:, 0].tolist(), strict=True):
        assert (data.users[user], data.item_ids[target]) in bought
    assert found["users"] == len(test.users)
