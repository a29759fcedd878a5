"""The generated shop, and the exactness of its next-item probabilities."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
import pytest

from maskgr.data import synthetic
from maskgr.data.config import SyntheticConfig
from maskgr.data.sequences import Sequences
from maskgr.data.synthetic import Shop, generate
from maskgr.errors import DataError, RequestError

DEFAULT = SyntheticConfig()
TINY = SyntheticConfig(users=30, items=10, segments=3)


@pytest.fixture(scope="module")
def shop() -> Shop:
    return generate(DEFAULT)


def histories_of(shop: Shop) -> Sequences:
    """Each user's item indices in order of time."""
    rows = shop.items.select("item_id").with_row_index("row")
    events = shop.interactions.join(rows, on="item_id", how="left", maintain_order="left")
    users = events.group_by("user_id").agg("row").sort("user_id")
    return Sequences.of(users["row"].to_list())


def leave_one_out(shop: Shop) -> tuple[Sequences, npt.NDArray[np.int32]]:
    everything = histories_of(shop)
    final = everything.places == np.repeat(everything.lengths - 1, everything.lengths)
    return everything.keep(~final), everything.values[final]


def recall_at_10(scores: npt.NDArray[np.float64], target: npt.NDArray[np.int32]) -> float:
    own = np.take_along_axis(scores, target[:, None].astype(np.int64), axis=1)
    return float(((scores > own).sum(axis=1) < 10).mean())


def test_same_seed_gives_the_same_shop(shop: Shop) -> None:
    again = generate(DEFAULT)
    assert again.interactions.equals(shop.interactions)
    assert again.items.equals(shop.items)


def test_different_seed_gives_a_different_shop(shop: Shop) -> None:
    other = generate(replace(DEFAULT, seed=1))
    assert not other.interactions.equals(shop.interactions)
    assert not other.items["title"].equals(shop.items["title"])


def test_sizes_are_as_configured(shop: Shop) -> None:
    lengths = shop.interactions.group_by("user_id").len()["len"].to_numpy()
    assert shop.items.height == shop.items["item_id"].n_unique() == 1000
    assert len(lengths) == 4000
    assert lengths.min() >= 5
    assert lengths.max() <= 40
    assert lengths.mean() == pytest.approx(12, abs=4 * lengths.std() / np.sqrt(4000))


@pytest.mark.parametrize("mean", [3, 3.5, 6])
def test_mean_length_may_equal_min_or_max(mean: float) -> None:
    config = replace(DEFAULT, users=2000, min_length=3, mean_length=mean, max_length=6)
    lengths = generate(config).interactions.group_by("user_id").len()["len"].to_numpy()
    assert lengths.mean() == pytest.approx(mean, abs=4 * lengths.std() / np.sqrt(2000))


@pytest.mark.parametrize(("users", "items"), [(30, 10), (1, 1), (5, 2), (20, 170)])
def test_small_shops_work(users: int, items: int) -> None:
    small = generate(replace(DEFAULT, users=users, items=items))
    assert small.interactions["user_id"].n_unique() == users
    assert small.items.height == items
    chances = small.next_item_probabilities(histories_of(small))
    assert chances.sum(axis=1) == pytest.approx(np.ones(users), abs=1e-12)


def test_log_has_sorted_times_in_sessions(shop: Shop) -> None:
    log = shop.interactions
    assert log.schema == {"user_id": pl.String, "item_id": pl.String, "timestamp": pl.Int64}
    assert log["timestamp"].is_sorted()
    assert log.null_count().sum_horizontal().item() == 0
    gaps = log.select(pl.col("timestamp").diff().over("user_id").drop_nulls()).to_series()
    assert gaps.min() > 0  # type: ignore[operator]
    assert 0.2 < (gaps > 6 * 3600).mean() < 0.4  # type: ignore[operator]
    arrivals = log.group_by("user_id").agg(pl.col("timestamp").min())["timestamp"].to_numpy()
    assert np.ptp(arrivals) > 300 * 86400
    assert log["user_id"].str.contains(r"^u\d{5}$").all()
    assert log["item_id"].is_in(shop.items["item_id"].to_list()).all()


def test_titles_name_brand_and_leaf_and_are_distinct(shop: Shop) -> None:
    items = shop.items
    assert items.columns == ["item_id", "title", "brand", "categories", "description", "price"]
    assert items.schema["categories"] == pl.List(pl.String)
    assert (items["categories"].list.len() == 3).all()
    assert items["categories"].list.last().n_unique() == 60
    assert items["categories"].list.first().n_unique() == 5
    leaf, brand = pl.col("categories").list.last(), pl.col("brand")
    named = pl.col("title").str.contains(leaf, literal=True) & pl.col("title").str.starts_with(
        brand
    )
    assert items.select(named.all()).item()
    assert items["title"].n_unique() > 0.9 * items.height
    assert (items["price"] > 0).all()


def test_titles_are_distinct_in_a_large_shop() -> None:
    crowded = generate(replace(DEFAULT, users=1, items=100_000))
    assert crowded.items["title"].n_unique() == 100_000


def test_popularity_is_skewed_and_independent_of_the_item_index(shop: Shop) -> None:
    counts = np.bincount(histories_of(shop).values, minlength=1000)
    assert 0.38 < np.sort(counts)[-100:].sum() / counts.sum() < 0.5
    assert abs(np.corrcoef(counts, np.arange(1000))[0, 1]) < 4 / np.sqrt(1000)


def test_every_item_can_be_first(shop: Shop) -> None:
    first = shop.next_item_probabilities(Sequences.of([[]]))
    assert first.shape == (1, 1000)
    assert first.sum() == pytest.approx(1, abs=1e-12)
    assert (first > 0).all()


def test_probabilities_are_nonnegative_and_sum_to_one(shop: Shop) -> None:
    history, _ = leave_one_out(shop)
    chances = shop.next_item_probabilities(history)
    assert chances.shape == (4000, 1000)
    assert (chances >= 0).all()
    assert chances.sum(axis=1) == pytest.approx(np.ones(4000), abs=1e-12)


def naive_next(shop: Shop, history: list[int]) -> list[float]:
    """p(next | history) from the definition alone, one segment and one item at a time."""
    process, config = shop.process, shop.config
    leaf, brand = process.leaf.tolist(), process.brand.tolist()
    weight: list[float] = process.popularity.tolist()
    items = range(len(weight))

    def given_segment(item: int, past: list[int], segment: int) -> float:
        shelf = [i for i in items if leaf[i] == leaf[item]]
        any_brand = weight[item] / sum(weight[i] for i in shelf)
        taste = float(process.taste[segment, leaf[item]])
        if not past:
            return taste * any_brand
        last = past[-1]
        own = [i for i in shelf if brand[i] == brand[last]]
        chance = any_brand
        if own:
            of_brand = weight[item] / sum(weight[i] for i in own) if item in own else 0.0
            chance = config.loyalty * of_brand + (1 - config.loyalty) * any_brand
        after = float(process.complements[leaf[last], leaf[item]])
        chance *= config.complement * after + (1 - config.complement) * taste
        ages = [config.recency**age for age in range(len(past))]
        again = sum(w for w, i in zip(ages, reversed(past), strict=True) if i == item) / sum(ages)
        return config.repeat * again + (1 - config.repeat) * chance

    joint = process.prior.tolist()
    for place, item in enumerate(history):
        joint = [p * given_segment(item, history[:place], s) for s, p in enumerate(joint)]
    belief = [p / sum(joint) for p in joint]
    return [sum(p * given_segment(i, history, s) for s, p in enumerate(belief)) for i in items]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"items": 25, "segments": 5},
        {"repeat": 0.0, "loyalty": 0.0},
        {"complement": 0.0, "recency": 1.0},
        {"repeat": 0.9, "recency": 0.0, "skew": 0.0},
        {"segments": 1},
    ],
)
def test_probabilities_equal_enumeration(changes: dict[str, Any]) -> None:
    tiny = generate(replace(TINY, **changes))
    lists = [[], [0], [3, 3], [1, 4, 1, 8], *(h.tolist() for h in histories_of(tiny))]
    expected = [naive_next(tiny, history) for history in lists]
    np.testing.assert_allclose(
        tiny.next_item_probabilities(Sequences.of(lists)), expected, rtol=0, atol=1e-12
    )


def test_chunk_size_does_not_change_the_probabilities(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = generate(TINY)
    whole = tiny.next_item_probabilities(histories_of(tiny))
    monkeypatch.setattr(synthetic, "CHUNK", 40)  # four histories of ten items
    np.testing.assert_allclose(tiny.next_item_probabilities(histories_of(tiny)), whole, atol=1e-15)


def test_impossible_history_still_gives_probabilities() -> None:
    strict = generate(replace(TINY, repeat=0.0, complement=1.0, loyalty=1.0))
    lists = [list(pair) for pair in itertools.product(range(10), repeat=2)]
    chances = strict.next_item_probabilities(Sequences.of(lists))
    assert chances.sum(axis=1) == pytest.approx(np.ones(100), abs=1e-12)


@pytest.mark.parametrize("item", [-1, 10])
def test_raises_when_history_has_unknown_items(item: int) -> None:
    with pytest.raises(DataError, match="0 to 9"):
        generate(TINY).next_item_probabilities(Sequences.of([[0, item]]))


def item_sets(shop: Shop, past: npt.NDArray[np.int32]) -> Iterator[npt.NDArray[np.bool_]]:
    """Sets of next items, (users, items) each, that cover every part of the process."""
    items, (users, length) = np.arange(shop.items.height), past.shape
    leaf, brand = shop.process.leaf[:-1], shop.process.brand[:-1]
    yield from (np.tile(items == item, (users, 1)) for item in items)
    if not length:
        return
    yield from (past[:, [place]] == items for place in range(length))
    yield (past[:, :, None] == items).any(axis=1)
    yield brand[past[:, [-1]]] == brand
    for before, after in itertools.product(np.unique(leaf), repeat=2):
        yield (leaf[past[:, [-1]]] == before) & (leaf == after)


@pytest.mark.parametrize("length", [0, 1, 2, 3])
def test_event_frequencies_match_the_probabilities(length: int) -> None:
    """How often the next item is in a set, compared with the expected number."""
    config = replace(TINY, users=40_000, min_length=4, mean_length=4, max_length=4, repeat=0.3)
    crowd = generate(config)
    walks = histories_of(crowd).values.reshape(-1, 4)
    past, actual = walks[:, :length], walks[:, length]
    chances = crowd.next_item_probabilities(Sequences.of(past))
    for among in item_sets(crowd, past):
        chance = (chances * among).sum(axis=1)  # (users,)
        happened = among[np.arange(len(actual)), actual].sum()
        assert abs(happened - chance.sum()) <= 4 * np.sqrt((chance * (1 - chance)).sum()) + 1e-6


def test_top_probability_is_calibrated(shop: Shop) -> None:
    history, target = leave_one_out(shop)
    chances = shop.next_item_probabilities(history)
    top, hit = chances.max(axis=1), chances.argmax(axis=1) == target
    error = np.sqrt((top * (1 - top)).sum())
    assert abs(hit.sum() - top.sum()) < 4 * error


def test_oracle_beats_markov_chain_and_popularity(shop: Shop) -> None:
    """The oracle is far above popularity, and a first-order Markov chain lies between."""
    history, target = leave_one_out(shop)
    oracle = shop.next_item_probabilities(history)
    counts = np.bincount(history.values, minlength=1000) + 1.0
    popular = np.tile(counts / counts.sum(), (len(target), 1))
    own = np.arange(len(target)), target
    assert np.log(oracle[own]).mean() > np.log(popular[own]).mean() + 1

    pairs = np.diff(history.owners) == 0
    follows = np.tile(counts / counts.sum(), (1000, 1))
    np.add.at(follows, (history.values[:-1][pairs], history.values[1:][pairs]), 1.0)
    markov = follows[history.values[history.offsets[1:] - 1]]
    best, middle, worst = (recall_at_10(x, target) for x in (oracle, markov, popular))
    assert 0.35 < best < 0.5
    assert worst < best / 4
    assert worst + 0.1 < middle < best - 0.1


def test_full_history_predicts_better_than_last_item(shop: Shop) -> None:
    """The full history tells more about the segment than the last item alone."""
    history, target = leave_one_out(shop)
    full, last = (
        recall_at_10(shop.next_item_probabilities(seen), target)
        for seen in (history, history.last(1))
    )
    assert full > last + 0.05


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"users": 0}, "users is 0; give a whole number from 1 to "),
        ({"users": 2.5}, "users is 2.5; give a whole number from 1 to "),
        ({"items": True}, "items is True; give a whole number from 1 to "),
        ({"seed": -1}, "seed is -1; give a whole number from 0 to "),
        ({"segments": 0}, "segments is 0; give a whole number from 1 to "),
        ({"min_length": 0}, "min_length is 0; give a whole number from 1 to "),
        ({"max_length": 4}, "max_length is 4; give a whole number from 5 to "),
        ({"mean_length": 41}, "mean_length is 41; give a number from 5 to 40"),
        ({"mean_length": float("nan")}, "mean_length is nan; give a number from 5 to 40"),
        ({"repeat": 1.1}, "repeat is 1.1; give a number from 0 to 1"),
        ({"recency": -0.1}, "recency is -0.1; give a number from 0 to 1"),
        ({"complement": float("nan")}, "complement is nan; give a number from 0 to 1"),
        ({"loyalty": "high"}, "loyalty is 'high'; give a number from 0 to 1"),
        ({"focus": float("inf")}, "focus is inf; give a number from 0 to 8"),
        ({"skew": -1}, "skew is -1; give a number from 0 to 3"),
    ],
)
def test_raises_naming_the_bad_setting(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=f"^{message}"):
        generate(replace(DEFAULT, **changes))


@pytest.mark.parametrize("value", [0.0, 1.0])
@pytest.mark.parametrize("key", ["repeat", "recency", "complement", "loyalty"])
def test_probabilities_of_zero_and_one_are_allowed(key: str, value: float) -> None:
    sure = generate(replace(TINY, **{key: value}))  # type: ignore[arg-type]
    chances = sure.next_item_probabilities(histories_of(sure))
    assert chances.sum(axis=1) == pytest.approx(np.ones(30), abs=1e-12)


@pytest.mark.parametrize(("focus", "skew"), [(0, 0), (8, 3)])
def test_extremes_of_focus_and_skew_work(focus: float, skew: float) -> None:
    odd = generate(replace(DEFAULT, users=50, focus=focus, skew=skew))
    chances = odd.next_item_probabilities(histories_of(odd))
    assert chances.sum(axis=1) == pytest.approx(np.ones(50), abs=1e-12)
