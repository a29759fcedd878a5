"""Reading small files in the Amazon format: gzipped JSON reviews, metadata as Python literals."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from maskgr.data.amazon import read_amazon
from maskgr.errors import DataError


def review(user: str, item: str, time: int) -> str:
    row = {"reviewerID": user, "asin": item, "overall": 5.0, "unixReviewTime": time}
    return json.dumps(row | {"reviewText": "Fine.\nReally."})


REVIEWS = [review("U2", "B00B", 30), review("U1", "B00A", 20), review("U1", "B00B", 10)]


def write(file: Path, lines: list[str]) -> Path:
    with gzip.open(file, "wt", encoding="utf-8") as stream:
        stream.writelines(line + "\n" for line in lines)
    return file


def read(folder: Path, reviews: list[str], meta: list[str]) -> tuple[pl.DataFrame, pl.DataFrame]:
    return read_amazon(
        write(folder / "reviews_Kites_5.json.gz", reviews),
        write(folder / "meta_Kites.json.gz", meta),
    )


def read_one(folder: Path, **fields: Any) -> dict[str, Any]:
    """The item read from one metadata line with `fields`."""
    _, items = read(folder, [review("U1", "B00A", 1)], [repr({"asin": "B00A", **fields})])
    return items.row(0, named=True)


def test_interactions_keep_file_order(tmp_path: Path) -> None:
    interactions, _ = read(tmp_path, REVIEWS, [])
    assert interactions.schema == {
        "user_id": pl.String,
        "item_id": pl.String,
        "timestamp": pl.Int64,
    }
    assert interactions.rows() == [("U2", "B00B", 30), ("U1", "B00A", 20), ("U1", "B00B", 10)]


def test_items_are_those_reviewed_in_order_of_first_appearance(tmp_path: Path) -> None:
    meta = [
        repr({"asin": "B00X", "title": "Nobody's kite"}),
        repr({"asin": "B00A", "title": "A kite", "brand": "Gale", "price": 12}),
        repr({"asin": "B00B", "title": "B kite", "description": 'It\'s a "kite".', "price": 3.5}),
    ]
    _, items = read(tmp_path, REVIEWS, meta)
    assert items.schema == {
        "item_id": pl.String,
        "title": pl.String,
        "brand": pl.String,
        "categories": pl.List(pl.String),
        "description": pl.String,
        "price": pl.Float64,
    }
    assert items.rows() == [
        ("B00B", "B kite", None, None, 'It\'s a "kite".', 3.5),
        ("B00A", "A kite", "Gale", None, None, 12.0),
    ]


def test_item_without_metadata_has_nulls(tmp_path: Path) -> None:
    _, items = read(tmp_path, REVIEWS, [repr({"asin": "B00A", "title": "A kite"})])
    assert items.row(0) == ("B00B", None, None, None, None, None)
    assert items.row(1)[:2] == ("B00A", "A kite")


def test_text_is_unescaped_and_put_on_one_line(tmp_path: Path) -> None:
    item = read_one(
        tmp_path,
        title=" Kites &amp; \n Strings&#39;s ",
        brand="  ",
        description="",
        categories=[["Toys &amp; Kites", " "]],
    )
    assert item == {
        "item_id": "B00A",
        "title": "Kites & Strings's",
        "brand": None,
        "categories": ["Toys & Kites"],
        "description": None,
        "price": None,
    }


def test_surrogate_pairs_become_one_character(tmp_path: Path) -> None:
    assert read_one(tmp_path, title="kite \ud83e\ude81, torn \ud83e")["title"] == "kite 🪁, torn �"


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        ([["Toys", "Kites", "Box"]], ["Toys", "Kites", "Box"]),
        (
            [["Toys", "Kites"], ["Toys", "Outdoor"], ["Gifts"]],
            ["Toys", "Kites", "Outdoor", "Gifts"],
        ),
        ([[]], None),
        ([], None),
        (None, None),
    ],
)
def test_category_paths_are_merged_into_one_list(
    tmp_path: Path, paths: list[list[str]] | None, expected: list[str] | None
) -> None:
    assert read_one(tmp_path, categories=paths)["categories"] == expected


def test_metadata_may_be_json(tmp_path: Path) -> None:
    meta = [json.dumps({"title": "A kite", "asin": "B00A", "brand": None, "price": float("nan")})]
    _, items = read(tmp_path, [review("U1", "B00A", 1)], meta)
    assert items.row(0) == ("B00A", "A kite", None, None, None, None)


def test_text_that_quotes_another_product_does_not_confuse_the_filter(tmp_path: Path) -> None:
    quoting = {"description": "compare 'asin': 'B00X'", "asin": "B00A", "title": "A kite"}
    other = {"asin": "B00X", "description": "compare 'asin': 'B00A'", "title": "X kite"}
    _, items = read(tmp_path, [review("U1", "B00A", 1)], [repr(other), repr(quoting)])
    assert items.select("item_id", "title").rows() == [("B00A", "A kite")]


def test_first_of_two_descriptions_is_used(tmp_path: Path) -> None:
    meta = [repr({"asin": "B00A", "title": title}) for title in ("first", "second")]
    _, items = read(tmp_path, [review("U1", "B00A", 1)], meta)
    assert items["title"].to_list() == ["first"]


def test_lines_of_unwanted_products_are_not_parsed(tmp_path: Path) -> None:
    broken = "{'asin': 'B00X', 'title': "
    _, items = read(tmp_path, [review("U1", "B00A", 1)], [broken])
    assert items["item_id"].to_list() == ["B00A"]


def test_code_in_metadata_is_never_executed(tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    line = f"{{'asin': 'B00A', 'title': open({str(trap)!r}, 'w').name}}"
    with pytest.raises(DataError, match="neither JSON nor a Python literal"):
        read(tmp_path, [review("U1", "B00A", 1)], [line])
    assert not trap.exists()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"reviewerID": "U1", "asin"', "neither JSON nor a Python literal"),
        ("[1, 2]", "not a record"),
        ("{[]: 1}", "neither JSON nor a Python literal"),
        ("[" * 100_000, "neither JSON nor a Python literal"),
        ('{"asin": "B", "unixReviewTime": 1}', "'reviewerID' is missing"),
        ('{"reviewerID": "U", "unixReviewTime": 1}', "'asin' is missing"),
        ('{"reviewerID": "U", "asin": "B"}', "'unixReviewTime' is missing"),
        ('{"reviewerID": "", "asin": "B", "unixReviewTime": 1}', "'reviewerID' is '', not an"),
        ('{"reviewerID": "U", "asin": 7, "unixReviewTime": 1}', "'asin' is 7, not an identifier"),
        ('{"reviewerID": "U", "asin": "\\ud800", "unixReviewTime": 1}', "not an identifier"),
        ('{"reviewerID": "U", "asin": "B", "unixReviewTime": 1.5}', "is 1.5, not whole seconds"),
        ('{"reviewerID": "U", "asin": "B", "unixReviewTime": true}', "is True, not whole seconds"),
        ('{"reviewerID": "U", "asin": "B", "unixReviewTime": 1e999}', "is inf, not whole"),
        (f'{{"reviewerID": "U", "asin": "B", "unixReviewTime": {2**63}}}', "not whole seconds"),
    ],
)
def test_raises_naming_file_and_line_of_a_bad_review(
    tmp_path: Path, line: str, message: str
) -> None:
    with pytest.raises(DataError) as caught:
        read(tmp_path, [REVIEWS[0], "", line], [])
    file = tmp_path / "reviews_Kites_5.json.gz"
    assert str(caught.value).startswith(f"{file}, line 3: ")
    assert message in str(caught.value)
    assert str(caught.value).endswith("; delete the file and fetch it again")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{'asin': 'B00A', 'title': ", "neither JSON nor a Python literal"),
        ("{'title': 'a kite of nobody'}", "'asin' is missing"),
        ("garbage", "neither JSON nor a Python literal"),
        ("{'asin': 'B00A', 'title': ['a']}", "['a'] is not text in the metadata of B00A"),
        ("{'asin': 'B00A', 'price': '$3'}", "'$3' is not a price in the metadata of B00A"),
        ("{'asin': 'B00A', 'price': True}", "True is not a price"),
        (f"{{'asin': 'B00A', 'price': {10**400}}}", "in the metadata of B00A"),
        ("{'asin': 'B00A', 'categories': ['Toys']}", "['Toys'] is not a list of category paths"),
        ("{'asin': 'B00A', 'categories': [[1]]}", "1 is not text"),
    ],
)
def test_raises_naming_file_and_line_of_bad_metadata(
    tmp_path: Path, line: str, message: str
) -> None:
    with pytest.raises(DataError) as caught:
        read(tmp_path, REVIEWS, [repr({"asin": "B00B"}), line])
    assert str(caught.value).startswith(f"{tmp_path / 'meta_Kites.json.gz'}, line 2: ")
    assert message in str(caught.value)


def test_raises_when_gzip_is_cut_short(tmp_path: Path) -> None:
    meta = write(tmp_path / "meta.json.gz", [])
    reviews = write(tmp_path / "reviews.json.gz", REVIEWS)
    reviews.write_bytes(reviews.read_bytes()[:-12])
    with pytest.raises(DataError, match=r"reviews\.json\.gz is cut short after line \d+; delete"):
        read_amazon(reviews, meta)


def test_raises_when_gzip_checksum_is_wrong(tmp_path: Path) -> None:
    meta = write(tmp_path / "meta.json.gz", [])
    reviews = write(tmp_path / "reviews.json.gz", REVIEWS)
    content = bytearray(reviews.read_bytes())
    content[-6] ^= 1  # the checksum of the gzip
    reviews.write_bytes(content)
    with pytest.raises(DataError, match=r"cannot be read after line \d+ \(CRC check failed"):
        read_amazon(reviews, meta)


def test_raises_when_file_is_not_gzip(tmp_path: Path) -> None:
    page = tmp_path / "reviews.json.gz"
    page.write_text("<html>please log in</html>")
    with pytest.raises(DataError, match=r"cannot be read after line 0 \(Not a gzipped file"):
        read_amazon(page, page)


def test_raises_naming_the_line_that_is_not_utf8(tmp_path: Path) -> None:
    reviews = tmp_path / "reviews.json.gz"
    reviews.write_bytes(gzip.compress(REVIEWS[0].encode() + b"\n" + b'{"asin": "\xff"}\n'))
    with pytest.raises(DataError, match=r"reviews\.json\.gz, line 2: not UTF-8; delete the file"):
        read_amazon(reviews, reviews)


def test_raises_when_file_is_missing(tmp_path: Path) -> None:
    missing = tmp_path / "reviews.json.gz"
    with pytest.raises(DataError, match=r"there is no file .*reviews\.json\.gz; fetch it first"):
        read_amazon(missing, missing)


def test_raises_when_there_are_no_reviews(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"reviews_Kites_5\.json\.gz holds no reviews"):
        read(tmp_path, [""], [])
