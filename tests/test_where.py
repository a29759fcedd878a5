"""Conditions on items: SQL and polars expressions, and nothing but the items."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pytest

from maskgr.errors import RequestError
from maskgr.where import matching

ITEMS = pl.DataFrame(
    {
        "item_id": ["a", "b", "c", "d"],
        "price": [10.0, 40.0, None, 20.0],
        "in_stock": [True, True, True, None],
        "category": ["Hair", "Select", "Hair", None],
        "shelf no": [1, 2, 3, 4],
    }
)


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("in_stock and price < 30", "a"),
        ("price < 30", "ad"),
        ("category = 'Hair'", "ac"),
        ("category == 'Hair'", "ac"),
        ("category = 'Select'", "b"),  # a word in quotes is no query
        ("category in ('Hair', 'Select') and not price > 30", "a"),
        ("category like 'H%'", "ac"),
        ('"shelf no" between 2 and 3', "bc"),
        ("price is null or in_stock is null", "cd"),
        ("price < avg(price)", "ad"),
        ("true", "abcd"),
        (pl.col("price") < 30, "ad"),
        (pl.col("category").is_in(["Hair"]) & pl.col("in_stock"), "ac"),
    ],
)
def test_a_condition_keeps_the_items_that_fulfil_it(where: Any, expected: str) -> None:
    assert ITEMS.filter(matching(ITEMS, where))["item_id"].to_list() == list(expected)


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("colour = 'red'", "no column colour; they have item_id, price, in_stock, category"),
        (pl.col("colour") == "red", "no column colour; they have item_id"),
        ('category = "Hair"', "no column Hair"),
        ("price", "this is Float64 for each item, not true or false; compare it"),
        (pl.col("price") * 2, "not true or false; compare it"),
        ("in_stock and (", "unable to parse"),
        ("", "unable to parse"),
        ("price < 'cheap'", "cannot compare string with numeric type"),
        ("regexp_like(category, '(')", "regex"),
        ("item_id in (select item_id from items)", "select has no place in a condition"),
        ("price in (SELECT 1)", "SELECT has no place"),
        ("$$'$$ = category or price in (select 1) or 'x' = 'x'", "has no place in a condition"),
        ("price = 1 -- '\n or price in (select 1) -- '", "-- has no place"),
        (r"category = E'\' or price in (select 1) or category = '", "has no place"),
        ("in_stock; drop table items", "table has no place"),
        ("price = 1 or " * 500 + "in_stock", "where has 6,508 characters; use 2,000 at most"),
        (pl.all(), "where cs.all()"),
        (pl.col("price").head(2) > 1, "where"),
        (3, "where is a int; give SQL such as"),
        (["in_stock"], "where is a list"),
    ],
)
def test_raises_when_a_condition_is_impossible(where: Any, expected: str) -> None:
    with pytest.raises(RequestError) as error:
        matching(ITEMS, where)
    assert expected in str(error.value)
    assert "\n" not in str(error.value)


def test_a_condition_reads_no_file(tmp_path: Path) -> None:
    secret = tmp_path / "secret.csv"
    secret.write_text("password\nhunter2\n")
    for query in (
        f"category in (select password from read_csv('{secret}'))",
        f"category in (table read_csv('{secret}'))",
        f"category in (with x as (values (1)) select * from read_csv('{secret}'))",
        f"exists (select * from read_csv('{secret}'))",
        f"read_csv('{secret}') = 1",
    ):
        with pytest.raises(RequestError) as error:
            matching(ITEMS, query)
        assert "hunter2" not in str(error.value)
