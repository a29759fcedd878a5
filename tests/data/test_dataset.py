"""Datasets from files and frames of every format: IDs, order, filters, saving."""

from __future__ import annotations

import gzip
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maskgr import Dataset
from maskgr.data.config import DataConfig
from maskgr.data.ingest import codes
from maskgr.errors import DataError

LOG = pl.DataFrame(
    {
        "user_id": ["ann", "bob", "ann", "bob", "ann"],
        "item_id": ["x", "y", "y", "x", "z"],
        "timestamp": [30, 20, 10, 10, 20],
    }
)
ITEMS = pl.DataFrame({"item_id": ["x", "y", "z"], "title": ["Ex", "Why", "Zed"]})


def histories_by_id(dataset: Dataset) -> dict[Any, list[Any]]:
    """User ID -> item IDs."""
    rows = zip(dataset.users, dataset.histories, strict=True)
    return {user: dataset.item_ids.gather(history).to_list() for user, history in rows}


def write(frame: pl.DataFrame, file: Path) -> None:
    plain = file.with_suffix("") if file.suffix == ".gz" else file
    {
        ".parquet": frame.write_parquet,
        ".csv": frame.write_csv,
        ".jsonl": frame.write_ndjson,
    }[plain.suffix](plain)
    if file.suffix == ".gz":
        file.write_bytes(gzip.compress(plain.read_bytes()))
        plain.unlink()


@pytest.mark.parametrize("gz", ["", ".gz"])
@pytest.mark.parametrize("form", ["parquet", "csv", "jsonl"])
def test_folder_of_any_format_loads(tmp_path: Path, form: str, gz: str) -> None:
    folder = tmp_path / "mein Laden – été"  # spaces and non-ASCII characters are allowed
    folder.mkdir()
    write(LOG, folder / f"interactions.{form}{gz}")
    write(ITEMS, folder / f"items.{form}{gz}")
    dataset = Dataset.load(folder)
    assert histories_by_id(dataset) == {"ann": ["y", "z", "x"], "bob": ["x", "y"]}
    assert dataset.items.equals(ITEMS)


def test_polars_and_pandas_frames_give_the_same_dataset() -> None:
    ours = Dataset.from_frames(LOG, ITEMS)
    theirs = Dataset.from_frames(LOG.to_pandas(), ITEMS.to_pandas())
    lazy = Dataset.from_frames(LOG.lazy(), ITEMS.lazy())
    assert ours.fingerprint == theirs.fingerprint == lazy.fingerprint
    with pytest.raises(DataError, match="is a dict; give a polars or pandas data frame"):
        Dataset.from_frames({"user_id": []})


@pytest.mark.parametrize(
    "ids",
    [
        ["b", "a", "b"],
        ["007", "7", "007"],
        [5, -3, 5],
        [2.5, 1.0, 2.5],
        [date(2024, 1, 2), date(2023, 1, 1), date(2024, 1, 2)],
        [True, False, True],
    ],
)
def test_ids_of_any_scalar_type_are_kept(ids: list[Any], tmp_path: Path) -> None:
    log = pl.DataFrame({"user_id": ids, "item_id": ids, "position": [0, 0, 1]})
    dataset = Dataset.from_frames(log)
    assert histories_by_id(dataset) == {ids[0]: [ids[0], ids[0]], ids[1]: [ids[1]]}
    dataset.save(tmp_path / "saved")
    assert histories_by_id(Dataset.load(tmp_path / "saved")) == histories_by_id(dataset)


@pytest.mark.parametrize(
    "ids", [["b", "a", "é", "z"], [7, 0, -3, 5], [date(2024, 1, n) for n in (3, 1, 2, 4)]]
)
def test_few_ids_are_numbered_as_many_are(ids: list[Any]) -> None:
    catalogue = pl.Series("item_id", ids[:3])
    asked = pl.Series("item_id", [ids[2], None, ids[3], ids[0], ids[2]], dtype=catalogue.dtype)
    few = pl.Series("item_id", [*ids[:3], *[None] * 200], dtype=catalogue.dtype)
    for index in (catalogue, few):  # the larger is scanned
        assert codes(asked, index).to_list() == [2, -1, -1, 0, 2]


def test_csv_text_ids_match_numbers_of_a_parquet_catalogue(tmp_path: Path) -> None:
    (tmp_path / "interactions.csv").write_text("user_id,item_id,position\n007,1,0\n7,2,0\n")
    pl.DataFrame({"item_id": [1, 2]}).write_parquet(tmp_path / "items.parquet")
    assert histories_by_id(Dataset.load(tmp_path)) == {"007": [1], "7": [2]}
    (tmp_path / "interactions.csv").write_text("user_id,item_id,position\nu,01,0\n")
    with pytest.raises(DataError, match=r"item_id is String in .* and Int64 in .* the same way"):
        Dataset.load(tmp_path)


INSTANTS = [datetime(2024, 5, 1, 12, 30, tzinfo=UTC), datetime(2023, 5, 1, tzinfo=UTC)]


@pytest.mark.parametrize(
    "times",
    [
        [t.isoformat() for t in INSTANTS],
        ["2024-05-01T12:30:00Z", "2023-05-01"],
        ["2024-05-01 14:30:00.000+02:00", "2023-05-01T00:00"],
        [date(2024, 5, 1), date(2023, 5, 1)],
        [t.replace(tzinfo=None) for t in INSTANTS],
        INSTANTS,
        pl.Series(INSTANTS).dt.convert_time_zone("Pacific/Auckland"),  # the next day there
        [int(t.timestamp()) for t in INSTANTS],
        [t.timestamp() for t in INSTANTS],
        [str(int(t.timestamp())) for t in INSTANTS],
        [int(t.timestamp()) * 1_000 for t in INSTANTS],
        [int(t.timestamp()) * 1_000_000 for t in INSTANTS],
        [int(t.timestamp()) * 1_000_000_000 for t in INSTANTS],
        ["1.5.2024 12:30", "01.05.2023"],  # with dots the day comes first
        ["05/01/2024 12:30", "5/1/2023", "12/31/2024"],
        ["01/05/2024 12:30:01", "1/5/2023", "31/12/2024"],
        ["01-05-2024 1:30 PM", "1-5-2023 01:30:00 AM", "31-12-2024"],
        ["2024/05/01 12:30", "2023/5/1"],
        ["2024-05-01 12:30:00 UTC", "2023-05-01T12:30:00+0530"],
        [20240501, 20230501],
        ["20240501", "20230501"],
        [20240501123000, 20230501000000],
        pl.Series(["2024-05-01", "2023-05-01"], dtype=pl.Categorical),
    ],
)
def test_timestamps_of_common_forms_are_parsed(times: list[Any]) -> None:
    ids = ["late", "early", "last"][: len(times)]
    log = pl.DataFrame({"user_id": "u", "item_id": ids, "timestamp": times})
    dataset = Dataset.from_frames(log)
    assert histories_by_id(dataset)["u"][:2] == ["early", "late"]
    assert dataset.timestamps is not None
    days = dataset.timestamps.astype("datetime64[D]").astype(str).tolist()
    assert days[:2] == ["2023-05-01", "2024-05-01"]


def test_position_precedes_timestamp_and_ties_keep_file_order() -> None:
    log = pl.DataFrame(
        {
            "user_id": ["u"] * 4,
            "item_id": ["a", "b", "c", "d"],
            "timestamp": [1, 2, 3, None],
            "position": [2, 1, 1, 0],
        }
    )
    dataset = Dataset.from_frames(log)
    assert histories_by_id(dataset) == {"u": ["d", "b", "c", "a"]}
    assert [note.message for note in dataset.notes if "timestamp" in note.message] == [
        "the given interactions has 1 row without a readable timestamp"
    ]


@pytest.mark.parametrize("scale", [1, 2.0**0.5, 2**40])
def test_events_are_sorted_for_any_range_of_positions(scale: float) -> None:
    rng = np.random.default_rng(0)
    users, times = rng.integers(5, size=200), rng.integers(1000, size=200)
    log = pl.DataFrame({"user_id": users, "item_id": np.arange(200), "position": times * scale})
    for user, items in histories_by_id(Dataset.from_frames(log)).items():
        mine = np.flatnonzero(users == user)
        assert items == mine[np.argsort(times[mine], kind="stable")].tolist()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)), min_size=1), st.integers(1, 4))
def test_k_core_equals_removal_one_by_one(pairs: list[tuple[int, int]], k: int) -> None:
    left = list(pairs)
    while True:
        users = [u for u, _ in left]
        items = [i for _, i in left]
        weak = [p for p in left if users.count(p[0]) < k or items.count(p[1]) < k]
        if not weak:
            break
        left.remove(weak[0])
    log = pl.DataFrame(pairs, schema=["user_id", "item_id"], orient="row").with_row_index(
        "position"
    )
    if not left:
        with pytest.raises(DataError, match=f"left in its {k}-core; choose a smaller --k-core"):
            Dataset.from_frames(log, config=DataConfig(k_core=k))
        return
    dataset = Dataset.from_frames(log, config=DataConfig(k_core=k))
    assert sorted(zip(*dataset.interactions()["user_id", "item_id"], strict=True)) == sorted(left)
    assert set(dataset.item_ids) == {item for _, item in left}


def test_repeats_are_kept_by_default_and_dropped_on_request() -> None:
    log = pl.DataFrame({"user_id": "u", "item_id": list("abab"), "position": [0, 1, 2, 3]})
    assert histories_by_id(Dataset.from_frames(log)) == {"u": ["a", "b", "a", "b"]}
    assert histories_by_id(Dataset.from_frames(log, config=DataConfig(repeats="drop"))) == {
        "u": ["a", "b"]
    }


def test_embeddings_stay_with_their_items(tmp_path: Path) -> None:
    vectors = np.arange(1, 7, dtype=np.float32).reshape(3, 2)
    filtered = Dataset.from_frames(
        LOG.filter(pl.col("item_id") != "y"),
        ITEMS,
        embeddings=vectors,
        config=DataConfig(unused_items="drop"),
    )
    assert filtered.embeddings is not None
    assert filtered.item_ids.to_list() == ["x", "z"]
    assert filtered.embeddings.tolist() == [[1, 2], [5, 6]]

    write(LOG, tmp_path / "interactions.csv")
    write(ITEMS, tmp_path / "items.csv")
    shuffled = pl.DataFrame({"item_id": ["z", "x", "y"], "vector": vectors[[2, 0, 1]].tolist()})
    shuffled.write_parquet(tmp_path / "embeddings.parquet")
    by_id = Dataset.load(tmp_path).embeddings
    assert by_id is not None
    assert by_id.tolist() == vectors.tolist()


def test_save_and_load_round_trip(tmp_path: Path) -> None:
    items = ITEMS.with_columns(categories=pl.Series([["a", "b"], [], None]), price=1.5)
    dataset = Dataset.from_frames(LOG, items, embeddings=np.eye(3, dtype=np.float16))
    dataset.save(tmp_path / "a folder/ünïcode")
    again = Dataset.load(tmp_path / "a folder/ünïcode")
    assert again.fingerprint == dataset.fingerprint
    assert again.items.equals(dataset.items)
    assert again.histories == dataset.histories
    assert again.timestamps is not None
    assert again.timestamps.tolist() == dataset.timestamps.tolist()  # type: ignore[union-attr]
    assert np.array_equal(again.embeddings, dataset.embeddings)  # type: ignore[arg-type]


def test_histories_are_flat_arrays() -> None:
    dataset = Dataset.from_frames(LOG, ITEMS)
    assert dataset.histories.values.dtype == np.int32
    assert dataset.histories.offsets.dtype == np.int64
    assert len(dataset.histories.values) == len(LOG)


def test_fingerprint_changes_with_ids_and_order() -> None:
    seen = {
        Dataset.from_frames(LOG, ITEMS).fingerprint,
        Dataset.from_frames(LOG.head(4), ITEMS).fingerprint,
        Dataset.from_frames(LOG.with_columns(timestamp=-pl.col("timestamp")), ITEMS).fingerprint,
        Dataset.from_frames(LOG.with_columns(user_id="u" + pl.col("user_id")), ITEMS).fingerprint,
        Dataset.from_frames(LOG, ITEMS.reverse()).fingerprint,
    }
    assert len(seen) == 5


def test_pandas_nulls_and_lists_are_kept() -> None:
    items = pd.DataFrame({"item_id": ["x", "y", "z"], "tags": [["a"], None, []]})
    assert Dataset.from_frames(LOG, items).items["tags"].to_list() == [["a"], None, []]
