"""Item text by exact strings."""

from __future__ import annotations

import datetime as dt
import decimal

import polars as pl
import pytest

from maskgr.data.text_columns import text_columns
from maskgr.errors import DataError
from maskgr.sids.text import item_texts


def table(**columns: object) -> pl.DataFrame:
    height = len(next(iter(columns.values())))  # type: ignore[arg-type]
    return pl.DataFrame({"item_id": [f"i{n}" for n in range(height)], **columns})


def test_default_template_orders_labels_and_skips_what_is_missing() -> None:
    items = table(
        release_year=[1999, None],
        price=[12.0, float("nan")],
        categories=[["Beauty", "Makeup"], []],
        brand=["OPI", None],
        title=["Nail Lacquer", "Balm"],
    )
    assert item_texts(items, columns=items.columns[1:]) == [
        "Title: Nail Lacquer; Brand: OPI; Categories: Beauty > Makeup; Price: 12.00; "
        "Release year: 1999",
        "Title: Balm",
    ]


def test_default_template_leaves_out_the_id_and_what_is_no_text() -> None:
    items = table(title=["Balm"], rank=[{"Beauty": 3}], raw=[b"x"], nested=[[{"a": 1}]])
    assert item_texts(items) == item_texts(items, columns=items.columns[1:]) == ["Title: Balm"]
    assert item_texts(items.select("item_id", "rank")) == [""]


def test_text_columns_hold_strings_that_are_no_identifiers_addresses_flags_or_numbers() -> None:
    items = table(
        title=["A", "B"],
        tags=[["red"], []],
        colour=pl.Series(["red", "blue"], dtype=pl.Categorical),
        blank=["", None],
        price=[1.5, 2.0],
        in_stock=[True, False],
        sizes=[[1, 2], [3]],
        released=[dt.date(2024, 1, 1)] * 2,
        seller_id=["s1", "s2"],
        EAN=["4006381333931", "x"],
        picture=["https://shop/a.png", "www.shop/b.png"],
        image_url=["a", "b"],
        active=["yes", "No"],
        weight_in_grams=["12", " 3.5"],
    )
    assert text_columns(items) == ("title", "tags", "colour", "blank")
    assert item_texts(items)[0] == "Title: A; Tags: red; Colour: red"
    assert item_texts(items, columns=("price", "title")) == [
        "Title: A; Price: 1.50",
        "Title: B; Price: 2.00",
    ]


def test_a_text_column_that_new_items_lack_is_missing() -> None:
    assert item_texts(table(title=["A"]), columns=("title", "brand")) == ["Title: A"]
    assert item_texts(table(name=["A"]), columns=("title", "brand")) == [""]


def test_a_segment_with_a_missing_value_disappears_with_its_label() -> None:
    items = table(title=["A", None, "C", " "], brand=["X", "Y", None, ""])
    template = "Title: {title}; Brand: {brand}."
    assert item_texts(items, template) == ["Title: A; Brand: X.", "Brand: Y.", "Title: C", ""]


def test_a_segment_needs_all_its_values() -> None:
    items = table(title=["A", "B"], year=[1999, None], genre=["x", "y"])
    assert item_texts(items, "{title} ({year}); {genre}") == ["A (1999); x", "y"]


def test_a_bar_separates_segments_without_leaving_a_mark() -> None:
    items = table(title=["A", "B", None], year=[1999, None, 2001], genre=["x", "y", None])
    template = "{title} | ({year}); {genre}"
    assert item_texts(items, template) == ["A (1999); x", "B; y", "(2001)"]


def test_a_segment_without_a_column_stays_only_with_others() -> None:
    items = table(title=["A", None])
    assert item_texts(items, "For sale; {title};") == ["For sale; A", ""]


def test_doubled_characters_stand_for_themselves() -> None:
    items = table(title=["A"])
    assert item_texts(items, "{{{title}}} ;; || a") == ["{A} ; | a"]


def test_lists_are_joined_flattened_and_cleaned() -> None:
    items = table(
        category_path=[[["Toys", "Games"], [None, "Dice"]], [[]]],
        tags=[["red", None, " ", "blue "], None],
    )
    assert item_texts(items) == ["Category path: Toys > Games > Dice; Tags: red, blue", ""]
    template = "{category_path: / }; {tags:; }"
    assert item_texts(items, template) == ["Toys / Games / Dice; red; blue", ""]


def test_arrays_are_lists_too() -> None:
    deep = pl.Series([[[["a"], ["b"]]]], dtype=pl.List(pl.Array(pl.List(pl.String), 2)))
    items = table(size=pl.Series([[1.5, 2.0]], dtype=pl.Array(pl.Float64, 2)), deep=deep)
    assert item_texts(items, columns=("size", "deep")) == ["Size: 1.5, 2; Deep: a, b"]


@pytest.mark.parametrize(
    ("column", "value", "text"),
    [
        ("price", 12.0, "12.00"),
        ("price", 3, "3.00"),
        ("price", 14.96, "14.96"),
        ("price", "$5", "$5"),
        ("price", decimal.Decimal("7.5"), "7.50"),
        ("price", -1.5, "-1.50"),
        ("sale_price", 0.5, "0.50"),
        ("size", 12.0, "12"),
        ("size", 2.50, "2.5"),
        ("size", float("inf"), ""),
        ("size", 1200, "1200"),
        ("size", decimal.Decimal("12.50"), "12.5"),
        ("size", decimal.Decimal("120"), "120"),
        ("size", decimal.Decimal("120.00"), "120"),
        ("made", dt.date(2020, 1, 2), "2020-01-02"),
        ("made", dt.datetime(2020, 1, 2), "2020-01-02"),
        ("made", dt.datetime(2020, 1, 2, 3, 4, 5), "2020-01-02T03:04:05"),
        ("made", dt.time(3, 4), "03:04:00"),
        ("length", dt.timedelta(hours=2), "PT2H"),
        ("vegan", True, "true"),
        ("text", " <b>a</b>\n\tb\u00a0 c  d ", "<b>a</b> b c d"),
        ("text", "a;b|{c}", "a;b|{c}"),
    ],
)
def test_values_are_written_plainly(column: str, value: object, text: str) -> None:
    assert item_texts(table(**{column: [value]}), f"{{{column}}}") == [text]


def test_every_price_is_written_to_the_cent() -> None:
    cents = range(100_000)
    items = table(price=[c / 100 for c in cents])
    assert item_texts(items, "{price}") == [f"{c // 100}.{c % 100:02}" for c in cents]


def test_categoricals_and_columns_of_nulls() -> None:
    items = table(
        colour=pl.Series(["red"], dtype=pl.Categorical), nothing=[None], empty=pl.Series([[]])
    )
    assert item_texts(items) == ["Colour: red"]


def test_a_column_may_have_a_colon_in_its_name() -> None:
    items = table(**{"dc:title": ["A"]})
    assert item_texts(items, "{dc:title}") == ["A"]


def test_no_items_give_no_texts() -> None:
    assert item_texts(table(title=["A"]).clear(), "{title}") == []


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{titel}", "names the column 'titel', which .* they have 'item_id', 'title', 'rank'"),
        ("Title {title", "'{' without its partner at character 7"),
        ("{title}}", "'}' without its partner at character 8"),
        ("{ti{tle}", "'{' without its partner at character 1"),
        ("{}", "names the column ''"),
        ("just words", "names no column"),
        ("{rank}", "column 'rank', whose type Struct"),
        ("{title: > }", "joiner ' > ' for the column 'title', which holds no lists"),
    ],
)
def test_raises_when_a_template_cannot_be_used(template: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        item_texts(table(title=["A"], rank=[{"a": 1}]), template)
