"""The built-in dataset: a generated shop whose users follow a known random process.

Each user belongs to a hidden segment. With probability `repeat` the next item is drawn from the
user's own history, recent items more often. Otherwise a leaf category is drawn: with probability
`complement` one that complements the last item's leaf, else one by the segment's taste. Then, with
probability `loyalty`, the item is of the last item's brand (if the leaf has it), else any item of
the leaf; both are drawn by popularity.

Only the segment is hidden, so the best possible prediction can be computed exactly:
p(next | history) = Σ_s p(s | history) p(next | history, s), by Bayes' rule over the segments.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import polars as pl

from maskgr.data.config import SyntheticConfig
from maskgr.data.sequences import Sequences
from maskgr.data.vocabulary import (
    BRANDS,
    CATEGORY,
    DEPARTMENT,
    DEPARTMENTS,
    FEATURES,
    LEAVES,
    LINES,
    NAME,
    PRICE,
    VARIANTS,
)
from maskgr.errors import DataError

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


ITEMS_PER_LEAF = 3  # on average, at least; a small shop has fewer leaves instead
COMPLEMENTS = (0.6, 0.25, 0.15)  # next leaf of the category, one of the department, any
TASTE_FLOOR = 0.02  # spread over all leaves, so that every user can reach every item
NEW_SESSION = 0.3  # probability that an event starts a new session
OPENING = 1_704_067_200  # 1 January 2024; users arrive during the year after it
CHUNK = 2**21  # entries of (histories, items) that are computed at once


@dataclass(frozen=True, eq=False)
class Process:
    """The probabilities that `generate` draws from and `next_item` sums over.

    Before a user's first event, the last item is the index `no_item`, whose leaf and brand are also
    one past the last.
    """

    config: SyntheticConfig
    prior: Floats  # (segments,)
    taste: Floats  # (segments, leaves)
    complements: Floats  # (leaves, leaves) row: the last item's leaf
    leaf: Ints  # (items + 1,)
    brand: Ints  # (items + 1,)
    popularity: Floats  # (items,) unnormalised

    @property
    def no_item(self) -> int:
        return len(self.popularity)

    @cached_property
    def leaf_chance(self) -> Floats:
        """(segments, leaves + 1, leaves) p(next leaf | segment, the last item's leaf)."""
        share = self.config.complement
        mixed = share * self.complements + (1 - share) * self.taste[:, None, :]
        return np.concatenate([mixed, self.taste[:, None, :]], axis=1)

    @cached_property
    def loyal_chance(self) -> Floats:
        """(leaves, brands + 1) p(the item keeps the last item's brand | its leaf, that brand)."""
        stocked = np.zeros((self.taste.shape[1], BRANDS.size + 1))
        stocked[self.leaf[:-1], self.brand[:-1]] = 1.0
        return self.config.loyalty * stocked

    @cached_property
    def in_leaf(self) -> Floats:
        """(items,) p(item | its leaf)."""
        return self._share(self.leaf[:-1])

    @cached_property
    def in_brand(self) -> Floats:
        """(items,) p(item | its leaf and brand)."""
        return self._share(self.leaf[:-1] * BRANDS.size + self.brand[:-1])

    def _share(self, group: Ints) -> Floats:
        total = np.bincount(group, self.popularity).astype(np.float64)
        return self.popularity / total[group]

    def item_chance(self, item: Ints, last: Ints) -> Floats:
        """p(item | its leaf, the last item); the arguments broadcast."""
        loyal = self.loyal_chance[self.leaf[item], self.brand[last]]
        own = np.where(self.brand[item] == self.brand[last], self.in_brand[item], 0.0)
        chance: Floats = (1 - loyal) * self.in_leaf[item] + loyal * own
        return chance

    def age_weight(self, age: Ints) -> Floats:
        """Weight by which a repeat draws the event that is `age` events before the last."""
        return np.power(self.config.recency, age, dtype=np.float64)

    def beliefs(self, histories: Sequences) -> Floats:
        """(histories, segments) p(segment | history)."""
        belief = np.tile(self.prior, (len(histories), 1))
        for step in range(int(histories.lengths.max(initial=0))):
            rows = np.flatnonzero(histories.lengths > step)
            joint = belief[rows] * self._evidence(histories, rows, step)
            total = joint.sum(axis=1, keepdims=True)
            # An event that is impossible in every segment leaves the belief unchanged.
            belief[rows] = np.divide(joint, total, out=belief[rows], where=total > 0)
        return belief

    def _evidence(self, histories: Sequences, rows: Ints, step: int) -> Floats:
        """(rows, segments) p(event at `step` | events before it, segment)."""
        starts = histories.offsets[rows]
        past = histories.values[starts[:, None] + np.arange(step)]  # (rows, step)
        item = histories.values[starts + step].astype(np.int64)
        last = past[:, -1].astype(np.int64) if step else np.full(len(rows), self.no_item)
        leaf = self.leaf_chance[:, self.leaf[last], self.leaf[item]].T
        fresh = leaf * self.item_chance(item, last)[:, None]
        if not step:
            return fresh
        weight = self.age_weight(np.arange(step)[::-1])
        again: Floats = (past == item[:, None]) @ weight / weight.sum()
        return self.config.repeat * again[:, None] + (1 - self.config.repeat) * fresh

    def next_item(self, histories: Sequences) -> Floats:
        """(histories, items) p(next item | history)."""
        lengths, rows = histories.lengths, np.flatnonzero(histories.lengths)
        last = np.full(len(histories), self.no_item)
        last[rows] = histories.values[histories.offsets[1:][rows] - 1]
        by_segment = self.leaf_chance[:, self.leaf[last]]  # (segments, histories, leaves)
        leaf = np.einsum("hs,shl->hl", self.beliefs(histories), by_segment)
        chance = self.item_chance(np.arange(self.no_item)[None, :], last[:, None])
        chance *= leaf[:, self.leaf[:-1]]
        chance[rows] *= 1 - self.config.repeat
        owners = histories.owners
        weight = self.age_weight(lengths[owners] - 1 - histories.places)
        again = weight / np.bincount(owners, weight, len(histories))[owners]
        np.add.at(chance, (owners, histories.values), self.config.repeat * again)
        return chance


@dataclass(frozen=True, eq=False)
class Shop:
    """A generated shop: the log, the catalogue, and the true next-item probabilities."""

    config: SyntheticConfig
    interactions: pl.DataFrame
    """user_id, item_id, timestamp (seconds since 1970), in order of time."""
    items: pl.DataFrame
    """item_id, title, brand, categories (root first), description, price."""
    process: Process = field(repr=False)

    def next_item_probabilities(self, histories: Sequences) -> Floats:
        """(histories, items) p(next | history); the histories hold row indices of `items`.

        Exact given the process and the history, without the segment: no model can have a better
        expected log-likelihood. An empty history gives the probabilities of the first item.
        """
        values, items = histories.values, self.process.no_item
        if len(values) and not 0 <= values.min() <= values.max() < items:
            raise DataError(f"a history names an item outside the shop's rows, 0 to {items - 1}")
        chances = np.empty((len(histories), items))
        rows = max(1, CHUNK // items)
        for start in range(0, len(histories), rows):
            part = np.arange(start, min(start + rows, len(histories)))
            chances[part] = self.process.next_item(histories.select(part))
        return chances


def generate(config: SyntheticConfig) -> Shop:
    """Generates a shop; the same config gives the same shop on every machine."""
    # Only uniform draws are used below: numpy may change how it draws other distributions.
    stock, laws, walks, clock = np.random.default_rng(config.seed).spawn(4)
    process = _process(config, stock, laws)
    histories = _walks(process, _lengths(config, clock), walks)
    items = _catalogue(process, stock)
    return Shop(config, _log(histories, items["item_id"], clock), items, process)


def _process(
    config: SyntheticConfig, stock: np.random.Generator, laws: np.random.Generator
) -> Process:
    leaves = min(len(LEAVES), max(1, config.items // ITEMS_PER_LEAF))
    size = 0.5 + stock.random(leaves)  # a leaf has up to three times the items of another
    extra = _Categorical.of(size).draw(0, leaves, stock.random(config.items - leaves))
    leaf = np.concatenate([np.arange(leaves), extra])
    popularity = np.power(1 + _ranks(leaf), -config.skew, dtype=np.float64)
    # Shuffled, so that an item's index tells neither its leaf nor its popularity.
    order = np.argsort(stock.random(config.items), kind="stable")
    choice = (stock.random(config.items) * BRANDS.shape[1]).astype(np.int64)
    brand = DEPARTMENT[leaf[order]] * BRANDS.shape[1] + choice
    return Process(
        config,
        prior=_normalised(0.5 + laws.random(config.segments)),
        taste=_taste(config, DEPARTMENT[:leaves], laws),
        complements=_complements(leaves, laws),
        leaf=np.append(leaf[order], leaves),
        brand=np.append(brand, BRANDS.size),
        popularity=popularity[order],
    )


def _taste(config: SyntheticConfig, departments: Ints, rng: np.random.Generator) -> Floats:
    """(segments, leaves) p(leaf | segment): department preferences times leaf preferences."""
    shape = (config.segments, len(DEPARTMENTS)), (config.segments, len(departments))
    by_department, by_leaf = (-np.log1p(-rng.random(size)) for size in shape)  # exponential
    preference = _normalised((by_department[:, departments] * by_leaf) ** config.focus)
    return TASTE_FLOOR / len(departments) + (1 - TASTE_FLOOR) * preference


def _complements(leaves: int, rng: np.random.Generator) -> Floats:
    """(leaves, leaves) p(next leaf | leaf), a mixture of three leaves weighted by `COMPLEMENTS`."""
    rows = np.zeros((leaves, leaves))
    for leaf in range(leaves):
        category = np.flatnonzero(CATEGORY[:leaves] == CATEGORY[leaf])
        following = category[(np.searchsorted(category, leaf) + 1) % len(category)]
        department = np.flatnonzero(DEPARTMENT[:leaves] == DEPARTMENT[leaf])
        related = department[int(rng.random() * len(department))]
        other = int(rng.random() * leaves)
        np.add.at(rows[leaf], [following, related, other], COMPLEMENTS)
    return _normalised(rows)


class _Categorical(NamedTuple):
    """Draws indices by weight, from all or from a range, with a binary search per draw."""

    edges: Floats  # (weights + 1,) cumulative

    @classmethod
    def of(cls, weights: Floats) -> _Categorical:
        return cls(np.concatenate([[0.0], np.cumsum(weights)]))

    def draw(self, low: int | Ints, high: int | Ints, uniform: Floats) -> Ints:
        """Indices from `low` to `high` (excluded), in proportion to their weights."""
        point = self.edges[low] + uniform * (self.edges[high] - self.edges[low])
        return np.clip(np.searchsorted(self.edges, point, side="right") - 1, low, high - 1)


class _ItemSampler:
    """Draws items by leaf and brand; items are sorted so that each group is a range."""

    def __init__(self, process: Process) -> None:
        group = process.leaf[:-1] * BRANDS.size + process.brand[:-1]
        leaves = process.taste.shape[1]
        self.process = process
        self.order = np.argsort(group, kind="stable")  # (items,)
        self.starts = np.searchsorted(group[self.order], np.arange(leaves * BRANDS.size + 1))
        self.leaves = _Categorical.of(process.leaf_chance.ravel())
        self.leaf_items = _Categorical.of(process.in_leaf[self.order])
        self.brand_items = _Categorical.of(process.in_brand[self.order])

    def draw(self, segment: Ints, last: Ints, rng: np.random.Generator) -> Ints:
        """(users,) the next item of each user if it is not a repeat."""
        process, (_, rows, leaves) = self.process, self.process.leaf_chance.shape
        low = (segment * rows + process.leaf[last]) * leaves
        leaf = self.leaves.draw(low, low + leaves, rng.random(len(last))) - low
        loyal = rng.random(len(last)) < process.loyal_chance[leaf, process.brand[last]]
        uniform = rng.random(len(last))
        first = leaf * BRANDS.size
        place = self.leaf_items.draw(self.starts[first], self.starts[first + BRANDS.size], uniform)
        own = (first + process.brand[last])[loyal]
        place[loyal] = self.brand_items.draw(self.starts[own], self.starts[own + 1], uniform[loyal])
        return self.order[place]


def _walks(process: Process, lengths: Ints, rng: np.random.Generator) -> Sequences:
    """Histories of all users, drawn step by step for all users at once."""
    histories = Sequences.from_lengths(np.empty(lengths.sum(), np.int32), lengths)
    sampler = _ItemSampler(process)
    ages = _Categorical.of(process.age_weight(np.arange(lengths.max())))
    segment = _Categorical.of(process.prior).draw(0, len(process.prior), rng.random(len(lengths)))
    last = np.full(len(lengths), process.no_item)
    for step in range(int(lengths.max())):
        rows = np.flatnonzero(lengths > step)
        here = histories.offsets[rows] + step
        item = sampler.draw(segment[rows], last[rows], rng)
        if step:
            again = rng.random(len(rows)) < process.config.repeat
            age = ages.draw(0, step, rng.random(len(rows)))
            item = np.where(again, histories.values[here - 1 - age], item)
        histories.values[here] = last[rows] = item
    return histories


def _lengths(config: SyntheticConfig, rng: np.random.Generator) -> Ints:
    """(users,) history lengths: min + (max - min) * Beta(1, b), with the b that gives the mean."""
    low, mean, high = config.min_length, config.mean_length, config.max_length
    inverse_b = (mean - low) / (high - mean) if mean < high else math.inf
    span = (high - low) * (1 - (1 - rng.random(config.users)) ** inverse_b)
    lengths = low + (span + rng.random(config.users)).astype(np.int64)  # keeps the mean
    return np.minimum(lengths, high)


def _log(histories: Sequences, item_ids: pl.Series, rng: np.random.Generator) -> pl.DataFrame:
    """The events in order of time: minutes apart in a session, days between sessions."""
    events = len(histories.values)
    pause = -np.log1p(-rng.random(events))  # exponential with mean 1
    days = rng.random(events) < NEW_SESSION
    gap = np.where(days, 6 * 3600 + pause * 5 * 86400, 15 + pause * 180).astype(np.int64)
    first = histories.offsets[:-1]
    gap[first] = (rng.random(len(histories)) * 365 * 86400).astype(np.int64)
    clock = np.cumsum(gap)
    before = np.repeat(clock[first] - gap[first], histories.lengths)
    times = OPENING + clock - before
    order = np.lexsort((histories.owners, times))  # (events,)
    return pl.DataFrame(
        {
            "user_id": _names("u", len(histories)).gather(histories.owners[order]),
            "item_id": item_ids.gather(histories.values[order]),
            "timestamp": times[order],
        }
    )


def _catalogue(process: Process, rng: np.random.Generator) -> pl.DataFrame:
    """Texts and prices of the items; titles are distinct up to 768 items per leaf and brand."""
    leaf, brand = process.leaf[:-1], process.brand[:-1]
    department, lines = DEPARTMENT[leaf], np.array(LINES.split())
    radix = (FEATURES.shape[1], VARIANTS.shape[1], len(lines))
    group = leaf * BRANDS.size + brand
    start = (rng.random(int(group.max()) + 1) * math.prod(radix)).astype(np.int64)
    # Steps of 325, which has no factor in common with 768, visit every combination once.
    code = (start[group] + 325 * _ranks(group)) % math.prod(radix)
    feature, variant, line = np.unravel_index(code, radix)
    tier, spread = 0.7 + 0.8 * rng.random(BRANDS.size), 0.8 + 0.4 * rng.random(len(leaf))
    price = PRICE.astype(np.int64)[leaf] * tier[brand] * spread
    words = pl.DataFrame(
        {
            "brand": BRANDS.ravel()[brand],
            "line": lines[line],
            "leaf": NAME[leaf],
            "feature": FEATURES[department, feature],
            "variant": VARIANTS[department, variant],
            "category": CATEGORY[leaf],
            "department": DEPARTMENTS[department],
        }
    )
    small = [pl.col(name).str.to_lowercase() for name in ("leaf", "variant", "category")]
    about = "{} {} in {} from the {} {} line, for {}."
    return words.select(
        _names("SKU-", len(leaf)).alias("item_id"),
        pl.format("{} {} {}, {}, {}", "brand", "line", "leaf", "feature", "variant").alias("title"),
        "brand",
        pl.concat_list("department", "category", "leaf").alias("categories"),
        pl.format(about, "feature", *small[:2], "brand", "line", small[2]).alias("description"),
        pl.Series("price", np.round(np.maximum(np.round(price), 1) - 0.01, 2)),
    )


def _names(prefix: str, count: int) -> pl.Series:
    """IDs u00000, u00001, …, padded so that they sort as text."""
    width = max(5, len(str(count - 1)))
    return prefix + pl.Series(np.arange(count)).cast(pl.String).str.zfill(width)


def _normalised(weights: Floats) -> Floats:
    total: Floats = weights.sum(axis=-1, keepdims=True)
    return weights / total


def _ranks(groups: Ints) -> Ints:
    """(members,) the rank of each member within its group, in the given order."""
    order = np.argsort(groups, kind="stable")
    sizes = np.bincount(groups)
    ranks = np.empty(len(groups), np.int64)
    ranks[order] = np.arange(len(groups)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return ranks
