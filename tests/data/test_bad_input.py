"""Every kind of bad input raises one sentence: what is wrong, and what to do."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pytest

from maskgr import Dataset
from maskgr.data.config import DataConfig
from maskgr.errors import DataError, RequestError
from tests.conftest import Outcome

GOOD = "user_id,item_id,timestamp\nu,x,1\nu,y,2\nu,z,3\nv,x,4\n"
ITEMS = "item_id,title\nx,Ex\ny,Why\nz,Zed\n"


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    folder = tmp_path / "my shop"
    folder.mkdir()
    (folder / "interactions.csv").write_text(GOOD)
    (folder / "items.csv").write_text(ITEMS)
    return folder


def message(folder: Path, **config: Any) -> str:
    with pytest.raises(DataError) as caught:
        Dataset.load(folder, config=DataConfig(**config))
    text = str(caught.value)
    assert "\n" not in text
    assert "; " in text  # separates what is wrong from what to do
    return text


def test_raises_when_folder_or_interactions_file_is_missing(tmp_path: Path, shop: Path) -> None:
    assert message(tmp_path / "nowhere") == (
        f"there is no folder {tmp_path / 'nowhere'}; check the path"
    )
    (shop / "interactions.csv").unlink()
    assert message(shop).startswith(f"{shop} has no interactions file; put interactions.parquet")


def test_raises_when_one_table_has_two_files(shop: Path) -> None:
    (shop / "interactions.jsonl").write_text("{}")
    assert message(shop) == (
        f"{shop} has both interactions.csv and interactions.jsonl; keep one of them"
    )


@pytest.mark.parametrize("column", ["user_id", "item_id"])
def test_raises_when_id_column_is_missing(shop: Path, column: str) -> None:
    (shop / "interactions.csv").write_text(GOOD.replace(column, "who"))
    found = message(shop)
    assert f"interactions.csv has no column {column} (it has: " in found
    assert "who" in found


def test_raises_when_log_has_neither_position_nor_timestamp(shop: Path) -> None:
    (shop / "interactions.csv").write_text(GOOD.replace("timestamp", "when"))
    assert "has neither a position nor a timestamp column" in message(shop)


def test_raises_when_catalogue_has_no_item_id(shop: Path) -> None:
    (shop / "items.csv").write_text("sku,title\nx,Ex\n")
    assert "items.csv has no column item_id (it has: sku, title)" in message(shop)


def parquet(frame: pl.DataFrame, file: Path) -> bytes:
    frame.write_parquet(file)
    return file.read_bytes()


@pytest.mark.parametrize("damage", ["empty", "cut", "garbage"])
@pytest.mark.parametrize("form", ["parquet", "jsonl", "csv.gz", "npy"])
def test_raises_when_file_is_empty_cut_or_garbage(shop: Path, form: str, damage: str) -> None:
    frame = pl.read_csv(GOOD.encode())
    stem = "embeddings" if form == "npy" else "interactions"
    if form != "npy":
        (shop / "interactions.csv").unlink()
    file = shop / f"{stem}.{form}"
    if form == "parquet":
        whole = parquet(frame, file)
    elif form == "jsonl":
        whole = frame.write_ndjson().encode()
    elif form == "csv.gz":
        whole = gzip.compress(GOOD.encode())
    else:
        np.save(file, np.ones((3, 2), dtype=np.float32))
        whole = file.read_bytes()
    file.write_bytes({"empty": b"", "cut": whole[:-9], "garbage": b"\xff\x00 no\n" * 9}[damage])
    found = message(shop)
    assert found.startswith(f"cannot read {file}: ")
    assert found.endswith("write it again")
    assert ("it is empty" in found) == (damage == "empty")


def test_raises_when_csv_is_unreadable(shop: Path) -> None:
    for content in (b"", b'user_id,item_id,timestamp\nu,"x,1\n', "é".encode("latin-1") * 9):
        (shop / "interactions.csv").write_bytes(content)
        assert "interactions.csv" in message(shop)


def test_raises_rather_than_load_a_pickle(shop: Path) -> None:
    np.save(shop / "embeddings.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    assert "embeddings.npy: Object arrays cannot be loaded" in message(shop)


def test_raises_when_a_table_has_no_rows(shop: Path) -> None:
    (shop / "interactions.csv").write_text("user_id,item_id,timestamp\n")
    assert "interactions.csv has no rows; give at least one event" in message(shop)
    (shop / "interactions.csv").write_text(GOOD)
    (shop / "items.csv").write_text("item_id,title\n")
    assert "items.csv has no rows; give at least one item" in message(shop)


def test_raises_when_ids_are_null_or_empty(shop: Path) -> None:
    (shop / "interactions.csv").write_text(GOOD + ',y,5\n"",z,6\n')
    assert "interactions.csv has 2 rows without user_id (first: row 5)" in message(shop)
    (shop / "interactions.csv").write_text(GOOD)
    (shop / "items.csv").write_text(ITEMS + ",Nameless\n")
    assert "items.csv has 1 row without item_id (first: row 4)" in message(shop)
    log = pl.DataFrame({"user_id": [1.0, float("nan")], "item_id": [1, 2], "position": [0, 1]})
    with pytest.raises(DataError, match="1 row without user_id"):
        Dataset.from_frames(log)


def test_raises_when_ids_have_mixed_or_nested_types(shop: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"user_id": "u", "item_id": item, "timestamp": n} for n, item in enumerate(["1", "x", 1])
    ]
    (shop / "interactions.csv").unlink()
    (shop / "interactions.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert "interactions.jsonl, row 3: item_id is a number or another type" in message(shop)
    with pytest.raises(DataError, match="row 3: item_id is int where earlier rows have str"):
        Dataset.from_frames(pd.DataFrame(rows))
    nested = pl.DataFrame({"user_id": ["u"], "item_id": [["x"]], "position": [0]})
    with pytest.raises(DataError, match=r"item_id holds List\(String\), and an ID is one text"):
        Dataset.from_frames(nested)


def test_raises_when_timestamps_do_not_parse(shop: Path) -> None:
    (shop / "interactions.csv").write_text(GOOD.replace("u,y,2", "u,y,yesterday"))
    assert "1 row whose timestamp cannot be read (first: row 2, 'yesterday')" in message(shop)
    (shop / "interactions.csv").write_text(GOOD.replace("u,y,2", "u,y,"))
    assert "1 row whose timestamp cannot be read (first: row 2, None)" in message(shop)
    log = pl.DataFrame({"user_id": ["u"], "item_id": ["x"], "timestamp": [float("nan")]})
    with pytest.raises(DataError, match=r"first: row 1, nan\); give epoch numbers or ISO 8601"):
        Dataset.from_frames(log)
    with pytest.raises(DataError, match="number each user's events from 0"):
        Dataset.from_frames(log.rename({"timestamp": "position"}))
    with pytest.raises(DataError, match="timestamp cannot be read"):
        Dataset.from_frames(log.with_columns(timestamp=pl.lit(True)))


def test_unknown_items_raise_or_are_dropped_or_kept(shop: Path) -> None:
    (shop / "interactions.csv").write_text(GOOD + "v,ghost,5\n")
    assert "1 item of" in message(shop)
    assert "(first: 'ghost'); add them, or choose --unknown-items drop" in message(shop)
    dropped = Dataset.load(shop, config=DataConfig(unknown_items="drop"))
    assert len(dropped.histories.values) == 4
    kept = Dataset.load(shop, config=DataConfig(unknown_items="keep"))
    assert kept.items.row(-1) == ("ghost", None)
    assert len(kept.histories.values) == 5


def test_unused_items_are_kept_or_dropped_or_raise(shop: Path) -> None:
    (shop / "items.csv").write_text(ITEMS + "new,Novelty\n")
    assert "new" in Dataset.load(shop).item_ids
    assert "new" not in Dataset.load(shop, config=DataConfig(unused_items="drop")).item_ids
    found = message(shop, unused_items="error")
    assert "1 item of" in found
    assert "is in no event (first: 'new'); remove them" in found


def test_warns_of_users_with_too_few_items(shop: Path) -> None:
    notes = [str(note) for note in Dataset.load(shop).notes]
    assert notes == [
        f"1 user of {shop / 'interactions.csv'} has fewer than 3 items (first: 'v'); "
        "they are trained on but not evaluated; --k-core 3 or more removes them"
    ]


def test_raises_when_catalogue_lists_an_item_twice(shop: Path) -> None:
    (shop / "items.csv").write_text(ITEMS + "x,Ex again\n")
    assert "lists 1 item more than once (first: 'x', row 4); keep one row per item" in message(shop)


def nan_row(vectors: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    vectors[1, 0] = np.nan
    return vectors


@pytest.mark.parametrize(
    ("vectors", "expected"),
    [
        (np.ones((2, 4), np.float32), "has 2 rows for 3 items; give one row per item"),
        (np.ones(3, np.float32), "holds float32 of shape (3,); give floating-point"),
        (np.ones((3, 4), np.int64), "holds int64 of shape (3, 4)"),
        (
            nan_row(np.ones((3, 4), np.float16)),
            "has 1 NaN or infinite vector (first: row 2, item 'y')",
        ),
        (np.full((3, 4), np.inf), "has 3 NaN or infinite vectors (first: row 1, item 'x')"),
        (np.diag([1.0, 1, 0]), "has 1 all-zero vector (first: row 3, item 'z')"),
    ],
)
def test_raises_when_embeddings_are_bad(
    shop: Path, vectors: np.ndarray[Any, Any], expected: str
) -> None:
    np.save(shop / "embeddings.npy", vectors)
    assert expected in message(shop)


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"item_id": ["x", "y"], "v": [[1.0], [2.0]]}, "no vector for 1 item (first: 'z')"),
        ({"item_id": ["x", "x", "z"], "v": [[1.0]] * 3}, "lists item 'x' twice"),
        ({"item_id": ["x", "y", "z"], "v": [[1.0], [1.0, 2.0], [1.0]]}, "row 2: the vector has 2"),
        ({"item_id": [1, 2, 3], "v": [[1.0]] * 3}, "item_id is Int64 in"),
        ({"item_id": ["x", "y", "z"], "v": [1.0, 2.0, 3.0]}, "has the columns item_id, v"),
    ],
)
def test_raises_when_embeddings_by_id_are_bad(
    shop: Path, columns: dict[str, Any], expected: str
) -> None:
    pl.DataFrame(columns).write_parquet(shop / "embeddings.parquet")
    assert expected in message(shop)


def test_raises_when_filters_leave_no_item(shop: Path) -> None:
    assert message(shop, k_core=5) == (
        f"no user or item of {shop / 'interactions.csv'} is left in its 5-core; "
        "choose a smaller --k-core"
    )


def test_command_reports_the_error_in_one_line(shop: Path, maskgr: Callable[..., Outcome]) -> None:
    outcome = maskgr("train", shop, "--k-core", 5, "--out", shop / "run")
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.startswith("error: no user or item of ")
    assert outcome.err.count("\n") == 1
    assert not (shop / "run").exists()


def test_inspect_reports_all_problems_at_once(shop: Path, maskgr: Callable[..., Outcome]) -> None:
    (shop / "interactions.csv").write_text(GOOD + ",x,5\nw,ghost,6\nw,x,never\n")
    (shop / "items.csv").write_text(ITEMS + "x,Ex again\nnew,Novelty\n")
    np.save(shop / "embeddings.npy", np.zeros((4, 2)))
    outcome = maskgr("data", "inspect", shop, "--json")
    report = json.loads(outcome.out)
    assert outcome.code == 1
    assert not report["usable"]
    assert (report["users"], report["items"], report["interactions"]) == (2, 4, 4)
    errors = [p["message"] for p in report["problems"] if p["severity"] == "error"]
    for number, part in enumerate(
        ("timestamp cannot", "without user_id", "more than once", "not in", "all-zero")
    ):
        assert part in errors[number]
    assert all(problem["fix"] for problem in report["problems"])


def test_inspect_reports_an_unreadable_log(shop: Path, maskgr: Callable[..., Outcome]) -> None:
    (shop / "interactions.csv").write_text("what,ever\n1,2\n")
    outcome = maskgr("data", "inspect", shop, "--json")
    report = json.loads(outcome.out)
    assert outcome.code == 1
    assert report["users"] is None
    assert report["problems"][0]["fix"] == "rename or add it"
    assert "has no column user_id or item_id" in maskgr("data", "inspect", shop).out


def test_inspect_reports_a_changed_file_of_a_saved_folder(
    shop: Path, maskgr: Callable[..., Outcome], tmp_path: Path
) -> None:
    Dataset.load(shop).save(tmp_path / "saved")
    assert maskgr("data", "inspect", tmp_path / "saved").code == 0
    log = tmp_path / "saved" / "items.parquet"
    pl.read_parquet(log).with_columns(more=pl.lit(1)).write_parquet(log)
    outcome = maskgr("data", "inspect", tmp_path / "saved")
    assert outcome.code == 1
    assert "items.parquet" in outcome.out


LOG = "user_id,item_id,timestamp"
TYPED = "user_id,item_id,timestamp,event_type\nu,x,1,view\nu,y,2,cart\nu,z,3,buy\nu,x,4,buy\n"
WEIGHTED = "user_id,item_id,timestamp,weight\nu,x,1,{}\nu,y,2,1\nu,z,3,2\n"


def at(*times: str) -> str:
    """A log of one user whose events have these timestamps."""
    return "\n".join([LOG, *(f"u,{'xyz'[n % 3]},{time}" for n, time in enumerate(times)), ""])


# The log, the items (None: no file), the options of the command, and what the error says.
TABLE: list[tuple[str, str | None, tuple[str, ...], str]] = [
    # Timestamps
    (
        at("never", "ever"),
        ITEMS,
        (),
        "2 rows whose timestamp cannot be read (first: row 1, 'never')",
    ),
    (at("", ""), ITEMS, (), "2 rows whose timestamp cannot be read (first: row 1, None)"),
    (
        at("2024-13-01", "2024-01-01"),
        ITEMS,
        (),
        "1 row whose timestamp cannot be read (first: row 1",
    ),
    (
        at("2024-01-01", "1700000000"),
        ITEMS,
        (),
        "1 row whose timestamp cannot be read (first: row 1",
    ),
    (
        at("30.02.2024", "31.12.2024"),
        ITEMS,
        (),
        "1 row whose timestamp cannot be read (first: row 1",
    ),
    (at("01/02/2024", "03/04/2024"), ITEMS, (), "day and month cannot be told apart (first: row 1"),
    (at("31/12/2024", "12/31/2024"), ITEMS, (), "dates of both day and month first (row 1, '31/12"),
    (
        at("1700000000", "1700000000000"),
        ITEMS,
        (),
        "mixes timestamps in seconds (row 1, 1700000000)",
    ),
    (at("1700000000000000", "1700000000000"), ITEMS, (), "mixes timestamps in milliseconds (row 2"),
    (
        at("9999-12-31", "2024-01-01"),
        ITEMS,
        (),
        "not between the years 1900 and 2199 (first: row 1",
    ),
    (
        at("0001-01-01", "2024-01-01"),
        ITEMS,
        (),
        "not between the years 1900 and 2199 (first: row 1",
    ),
    (at("99999999999", "1"), ITEMS, (), "not between the years 1900 and 2199 (first: row 1"),
    (at("1e300", "1"), ITEMS, (), "not between the years 1900 and 2199 (first: row 1, 1e+300)"),
    (at("-1e13", "1"), ITEMS, (), "not between the years 1900 and 2199 (first: row 1"),
    (at("nan", "1"), ITEMS, (), "timestamp cannot be read (first: row 1, "),
    (at("true", "false"), ITEMS, (), "timestamp cannot be read (first: row 1, True)"),
    # Columns
    ("user_id,item_id,timestamp,timestamp\nu,x,1,2\n", ITEMS, (), "the column 'timestamp' twice"),
    ("user_id,user_id,item_id,timestamp\nu,v,x,1\n", ITEMS, (), "the column 'user_id' twice; re"),
    (GOOD, "item_id,title,title\nx,a,b\n", (), "items.csv has the column 'title' twice; rename"),
    (GOOD, ITEMS, ("--columns", "user_id=customer"), "no table has the column 'customer' that --c"),
    (
        GOOD,
        ITEMS,
        ("--columns", "item_id=sku"),
        "items.csv has item_id, title); check its spelling",
    ),
    (GOOD, ITEMS, ("--columns", "customer=user_id"), "maps 'customer', which is no column of ours"),
    (
        GOOD,
        ITEMS,
        ("--columns", "title=name"),
        "maps 'title', which is no column of ours; map user",
    ),
    (GOOD, ITEMS, ("--columns", "user_id"), "--columns user_id: 'user_id' is no pair; write for"),
    (GOOD, ITEMS, ("--columns", "user_id="), "--columns user_id=: 'user_id=' is no pair"),
    (GOOD, ITEMS, ("--columns", "user_id=a,item_id=a"), "columns maps one column twice; map each"),
    (GOOD, ITEMS, ("--columns", "user_id=a,user_id=b"), "user_id is there twice; give it once"),
    (GOOD, ITEMS, ("--columns", ""), "columns is {}; give your names by ours"),
    # Event types and weights
    (GOOD, ITEMS, ("--events", "buy=1"), "has no column event_type, which --events and --targets"),
    (GOOD, ITEMS, ("--targets", "buy"), "has no column event_type, which --events and --targets"),
    (TYPED, ITEMS, ("--events", "bye=1"), "type 'bye'; its types are buy (2), cart (1), view (1)"),
    (TYPED, ITEMS, ("--targets", "sale"), "has no event of the type 'sale'; its types are buy (2)"),
    (
        TYPED,
        ITEMS,
        ("--events", "buy=-1"),
        "the event type 'buy' has the weight -1.0; give a number",
    ),
    (
        TYPED,
        ITEMS,
        ("--events", "buy=nan"),
        "the event type 'buy' has the weight nan; give a number",
    ),
    (
        TYPED,
        ITEMS,
        ("--events", "buy=1e9"),
        "the event type 'buy' has the weight 1000000000.0; give",
    ),
    (TYPED, ITEMS, ("--events", "buy=much"), "--events buy=much: 'much' is not a number"),
    (TYPED, ITEMS, ("--events", "buy=1,buy=2"), "buy is there twice; give it once"),
    (TYPED, ITEMS, ("--events", "buy=0,view=0"), "every target has the weight 0; give one of them"),
    (TYPED, ITEMS, ("--events", ""), "events is {}; give weights by event type"),
    (
        TYPED,
        ITEMS,
        ("--events", "buy=1", "--targets", "cart"),
        "the target 'cart' is not among the",
    ),
    (TYPED, ITEMS, ("--targets", ""), "targets is (); give a list of names, each once"),
    (
        TYPED,
        ITEMS,
        ("--targets", "buy,buy"),
        "targets is ('buy', 'buy'); give a list of names, each",
    ),
    (
        WEIGHTED.format("-1"),
        ITEMS,
        (),
        "1 row whose weight is no number from 0 to 1,000,000 (first",
    ),
    (WEIGHTED.format("inf"), ITEMS, (), "1 row whose weight is no number from 0 to 1,000,000 (fir"),
    (
        WEIGHTED.format(""),
        ITEMS,
        (),
        "1 row whose weight is no number from 0 to 1,000,000 (first: ",
    ),
    (WEIGHTED.format("heavy"), ITEMS, (), "1 row whose weight is no number from 0 to 1,000,000"),
    (
        WEIGHTED.replace(",1\n", ",0\n").replace(",2\n", ",0\n").format("0"),
        ITEMS,
        (),
        "no event of",
    ),
    # Items
    (GOOD, ITEMS, ("--text", "brand"), "--text names 'brand', which is no column of"),
    (GOOD, ITEMS, ("--text", "item_id"), "--text names 'item_id', which is no column of"),
    (GOOD, ITEMS, ("--text", ""), "text is (); give a list of names, each once"),
    (GOOD, ITEMS, ("--text", "title,title"), "text is ('title', 'title'); give a list of names"),
    (GOOD, None, ("--text", "title"), "--text names 'title', but there is no items file; add one"),
    # Filters
    (GOOD, ITEMS, ("--k-core", "3"), "is left in its 3-core; choose a smaller --k-core"),
    (GOOD, ITEMS, ("--k-core", "1000001"), "k_core is 1000001; give a whole number from 0 to"),
    (
        GOOD.replace("timestamp", "position"),
        ITEMS,
        ("--repeats", "dedupe"),
        "has no timestamps, so",
    ),
]


@pytest.mark.parametrize(("log", "items", "options", "expected"), TABLE)
def test_bad_data_are_one_sentence_and_nothing_is_written(
    shop: Path,
    maskgr: Callable[..., Outcome],
    log: str,
    items: str | None,
    options: tuple[str, ...],
    expected: str,
) -> None:
    (shop / "interactions.csv").write_text(log)
    (shop / "items.csv").unlink()
    if items is not None:
        (shop / "items.csv").write_text(items)
    before = sorted(shop.iterdir())
    words = ("--model", "popularity", "--out", shop / "run", *options)
    outcome = maskgr("train", shop, *words)
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.startswith("error: ")
    assert outcome.err.count("\n") == 1
    assert expected in outcome.err
    assert sorted(shop.iterdir()) == before
    looked = maskgr("data", "inspect", shop, *options)  # never an internal error
    assert looked.code in (1, 2)
    assert expected in looked.out + looked.err


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"k_core": -3}, "k_core is -3; give a whole number from 0 to 1,000,000"),
        ({"k_core": 2.5}, "k_core is 2.5; give a whole number"),
        ({"k_core": None}, "k_core is None; give a whole number"),
        ({"k_core": True}, "k_core is True; give a whole number"),
        ({"repeats": "eat"}, "repeats is 'eat'; choose one of keep, drop, dedupe"),
        ({"unknown_items": 3}, "unknown_items is 3; choose one of error, drop, keep"),
        ({"unused_items": "sell"}, "unused_items is 'sell'; choose one of keep, drop, error"),
        ({"columns": "user_id=customer"}, "columns is 'user_id=customer'; give your names by ours"),
        ({"columns": {"user_id": 3}}, "columns maps user_id to 3; give the name of a column"),
        ({"events": ["buy"]}, "events is ['buy']; give weights by event type"),
        ({"events": {"buy": "1"}}, "the event type 'buy' has the weight '1'; give a number"),
        ({"events": {"buy": True}}, "the event type 'buy' has the weight True; give a number"),
        ({"targets": "buy"}, "targets is 'buy'; give a list of names, each once"),
        ({"targets": [1]}, "targets is [1]; give a list of names, each once"),
        ({"text": "title"}, "text is 'title'; give a list of names, each once"),
        ({"text": [""]}, "text is ['']; give a list of names, each once"),
    ],
)
def test_raises_when_a_data_setting_is_wrong(settings: dict[str, Any], expected: str) -> None:
    with pytest.raises(RequestError, match=re.escape(expected)):
        DataConfig(**settings)


@pytest.mark.parametrize(
    ("frame", "expected"),
    [
        (pd.DataFrame([["u", "x", 1, 2]], columns=["user_id", "item_id", "position", "position"]),
         "the given interactions has the column 'position' twice"),
        ({"user_id": ["u"]}, "the given interactions is a dict; give a polars or pandas data"),
        (pl.DataFrame({"user_id": ["u"], "item_id": ["x"], "position": ["first"]}),
         "1 row whose position cannot be read (first: row 1, 'first'); number each user's"),
        (pl.DataFrame({"user_id": ["u"], "item_id": ["x"], "position": [0], "weight": [[1]]}),
         "the given interactions: weight holds List(Int64); give numbers from 0 up"),
        (pl.DataFrame({"user_id": ["u"], "item_id": ["x"], "position": [0], "weight": [True]}),
         "the given interactions: weight holds Boolean; give numbers from 0 up"),
        (pl.DataFrame({"user_id": ["u"], "item_id": ["x"], "position": [0], "event_type": [["a"]]}),
         "the given interactions: event_type holds List(String); give one text per row"),
    ],
)  # fmt: skip
def test_raises_when_a_frame_is_wrong(frame: Any, expected: str) -> None:
    with pytest.raises(DataError, match=re.escape(expected)):
        Dataset.from_frames(frame)


def test_timestamps_out_of_range_become_nat(shop: Path) -> None:
    log = pl.DataFrame({"user_id": ["u"] * 3, "item_id": ["a", "b", "c"], "position": [0, 1, 2]})
    times = Dataset.from_frames(log.with_columns(timestamp=pl.Series([1e300, 1.0, 2.0]))).timestamps
    assert times is not None
    assert np.isnat(times).tolist() == [True, False, False]


LOG = pl.DataFrame({"user_id": ["u", "u"], "item_id": ["x", "y"], "position": [1, 2]})
SPANS = pl.Series([timedelta(days=1), timedelta(days=2)])


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        (SPANS.alias("user_id"), "user_id holds Duration"),
        (pl.Series("item_id", [b"x", b"y"]), "item_id holds Binary"),
        (pl.Series("weight", [b"1", b"2"]), "weight holds Binary"),
        (pl.Series("event_type", [b"a", b"b"]), "event_type holds Binary"),
    ],
)
def test_raises_for_columns_of_types_that_mean_nothing(column: pl.Series, expected: str) -> None:
    with pytest.raises(DataError, match=expected):
        Dataset.from_frames(LOG.with_columns(column))


def test_raises_when_ids_are_times_here_and_text_there() -> None:
    times = pl.Series("item_id", [datetime(2024, 5, 1), datetime(2024, 5, 2)])
    for log, items in ((LOG.with_columns(times), LOG), (LOG, LOG.with_columns(times))):
        with pytest.raises(DataError, match="and they cannot be matched; write them the same way"):
            Dataset.from_frames(log, items.select("item_id"))


@pytest.mark.parametrize(
    ("vectors", "expected"),
    [([None, [1.0]], "row 1 has no vector"), ([], "has no rows; give every item a vector")],
)
def test_raises_when_parquet_has_no_vector(shop: Path, vectors: list[Any], expected: str) -> None:
    column = pl.Series("v", vectors, dtype=pl.List(pl.Float32))
    ids = pl.Series("item_id", ["x", "y"][: len(vectors)], dtype=pl.String)
    pl.DataFrame([ids, column]).write_parquet(shop / "embeddings.parquet")
    assert expected in message(shop)


def test_raises_when_an_array_is_none_that_can_be_read(shop: Path) -> None:
    file = shop / "embeddings.npy"
    np.save(file, np.ones((3, 2), dtype=np.longdouble))
    assert "give floating-point numbers (float64 or less)" in message(shop)
    np.save(file, np.ones((3, 2), dtype=np.float32))
    whole = file.read_bytes()
    file.write_bytes(whole.replace(b"(3, 2), }", b"(3, 2), ("))  # the header is Python
    assert message(shop).startswith(f"cannot read {file}: ")
    np.savez(shop / "several", a=np.ones(3))
    (shop / "several.npz").rename(file)
    assert message(shop).startswith(f"cannot read {file}: ")


@pytest.mark.parametrize(
    ("time", "dtype", "year"),
    [
        (253_402_300_800_000_000, pl.Datetime("us"), "10000"),
        (2**62, pl.Datetime("ms", "Europe/Berlin"), "146140482"),
        (2**31 - 1, pl.Date, "5881581"),
    ],
)
def test_dates_that_python_does_not_have_are_refused_with_their_year(
    shop: Path, time: int, dtype: Any, year: str
) -> None:
    (shop / "interactions.csv").unlink()
    frame = pl.read_csv(GOOD.encode()).with_columns(
        timestamp=pl.Series([20_000, time, 20_000, 20_000]).cast(
            pl.Int32 if dtype == pl.Date else pl.Int64
        )
    )
    frame.with_columns(pl.col("timestamp").cast(dtype)).write_parquet(shop / "interactions.parquet")
    assert f"(first: row 2, about the year {year})" in message(shop)


def test_durations_longer_than_python_has_are_refused(shop: Path) -> None:
    (shop / "interactions.csv").unlink()
    long = pl.Series([2**62] * 4).cast(pl.Duration("ms"))
    frame = pl.read_csv(GOOD.encode()).with_columns(timestamp=long)
    frame.write_parquet(shop / "interactions.parquet")
    assert "cannot be read (first: row 1, a duration)" in message(shop)
