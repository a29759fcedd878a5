"""Dense retrieval's search: the items whose vectors have the largest inner product with a query."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, get_args

import faiss as _faiss
import numpy as np
import numpy.typing as npt

from maskgr.data.sequences import Sequences
from maskgr.errors import RequestError

faiss: Any = _faiss  # its type stubs lag behind it
Index = Literal["exact", "hnsw"]
Floats = npt.NDArray[np.float32]
Mask = npt.NDArray[np.bool_]
Numbers = npt.NDArray[np.int64]

PAIRS = 1 << 20  # (query, item) pairs at once, so that memory does not grow with the queries
GATHERED = 1 << 20  # numbers gathered at once to score pairs: what a cache holds
FEW = 8  # queries, below which skipping the items not allowed beats copying those that are

LINKS = 32  # of an item in the graph
BUILD_DEPTH = 200
SEARCH_DEPTH = 64  # at least; twice what is fetched where that is more
STRICT = 10  # the graph is of no use where fewer than one item in so many is allowed


class Found(NamedTuple):
    """Best first; -1 and -inf where there are no more."""

    items: npt.NDArray[np.int32]  # (queries, top)
    scores: Floats  # (queries, top)


class Lifted(NamedTuple):
    """Items whose scores get something beside the product."""

    items: Sequences  # a row a query, none of them twice in a row
    bonus: Floats  # (values of `items`,)


class Nearest:
    """The catalogue's vectors, searchable by inner product.

    Equal scores are ordered by item number. Only where scores are equal (to rounding) at the cut
    is it left open which of those items are found. With `hnsw` a better item may be missed, but
    there are never fewer than asked for, and the scores are true.
    """

    def __init__(self, vectors: Floats, index: Index = "exact") -> None:
        if index not in get_args(Index):
            raise RequestError(f"there is no index {index!r}; use {' or '.join(get_args(Index))}")
        vectors = _usable(vectors, "vectors")
        self._flat = faiss.IndexFlatIP(vectors.shape[1])
        self._flat.add(vectors)
        # (items, d) the index's own copy: the only one, whatever becomes of the caller's
        self._vectors: Floats = faiss.rev_swig_ptr(self._flat.get_xb(), vectors.size)
        self._vectors = self._vectors.reshape(vectors.shape)
        self._graph: Any = _graph(vectors) if index == "hnsw" and len(vectors) else None

    def search(
        self,
        queries: Floats,
        top: int,
        *,
        allowed: Mask | None = None,
        excluded: Sequences | None = None,
        lifted: Lifted | None = None,
    ) -> Found:
        """The best `top` items of each query (queries, d).

        `allowed` (items,) holds for all queries. `excluded` has a row a query: they are never
        found, even if they are `lifted`.
        """
        queries = self._queries(queries)
        if top < 1:
            raise RequestError(f"the top {top} items are none; ask for at least 1")
        allowed = self._allowed(allowed)
        barred, special = self._special(len(queries), allowed, excluded, lifted)
        found = Found(
            np.full((len(queries), top), -1, dtype=np.int32),
            np.full((len(queries), top), -np.inf, dtype=np.float32),
        )
        pool = len(self._vectors) if allowed is None else int(allowed.sum())
        reach = min(top, pool)
        widths = (reach + barred.lengths) * (self._spread(pool) or 1) + special.items.lengths
        for rows in _batches(widths):
            some = queries[rows]
            plain = self._plain(some, reach, pool, allowed, barred.select(rows))
            here = special.items.select(rows)
            plain = self._without(plain, None, here)
            items = np.concatenate([plain, _padded(here)], axis=1)  # (rows, plain + special)
            scores = self._scores(some, items)
            first = special.items.offsets[:-1][rows]
            bonus = special.bonus[first[here.owners] + here.places]
            scores[here.owners, plain.shape[1] + here.places] += bonus
            order = np.lexsort((items, -scores))[:, :top]
            found.items[rows, : order.shape[1]] = np.take_along_axis(items, order, axis=1)
            found.scores[rows, : order.shape[1]] = np.take_along_axis(scores, order, axis=1)
        return found

    def scores(self, queries: Floats, items: npt.NDArray[np.integer]) -> Floats:
        """(queries, width) inner products with `items` (queries, width); -inf where one is -1."""
        queries, items = self._queries(queries), np.asarray(items)
        if items.ndim != 2 or len(items) != len(queries):
            raise RequestError(
                f"items of shape {items.shape} do not fit {len(queries)} queries; "
                "give a row of items for each query"
            )
        self._check_items(items, np.arange(items.size) // max(items.shape[1], 1), "items", -1)
        return self._scores(queries, items)

    def _scores(self, queries: Floats, items: npt.NDArray[np.integer]) -> Floats:
        """One pair is scored like any other, so that equal vectors have equal scores: matrix
        products, faiss's among them, round by where a row happens to lie."""
        result = np.full(items.size, -np.inf, dtype=np.float32)
        numbers = items.ravel()
        there = np.flatnonzero(numbers >= 0)
        step = max(1, GATHERED // queries.shape[1])
        for start in range(0, len(there), step):
            pairs = there[start : start + step]
            left, right = queries[pairs // items.shape[1]], self._vectors[numbers[pairs]]
            result[pairs] = np.einsum("pd,pd->p", left, right)
        return result.reshape(items.shape)

    def _plain(
        self, queries: Floats, reach: int, pool: int, allowed: Mask | None, barred: Sequences
    ) -> Numbers:
        """(queries, width) the best items by inner product alone, in any order, -1 for none.

        Every query finds `reach` that are allowed and not `barred`, unless fewer are left."""
        # However many are barred, the answer lies within this many first items.
        fetch = min(pool, reach + int(barred.lengths.max(initial=0)))
        if fetch == 0:
            return np.empty((len(queries), 0), dtype=np.int64)
        spread = self._spread(pool)
        if spread is None or 2 * fetch * spread >= len(self._vectors):
            return self._without(self._exact(queries, fetch, allowed), None, barred)
        found = self._without(self._approximate(queries, fetch * spread), allowed, barred)
        wanted = np.minimum(reach, pool - barred.lengths)
        short = np.flatnonzero((found >= 0).sum(axis=1) < wanted)
        if len(short):
            exact = self._exact(queries[short], fetch, allowed)
            found[short] = -1
            found[short, :fetch] = self._without(exact, None, barred.select(short))
        return found

    def _exact(self, queries: Floats, count: int, allowed: Mask | None) -> Numbers:
        """(queries, count) the best of the allowed items, of which there are as many."""
        found: Numbers
        if allowed is None:
            _, found = self._flat.search(queries, count)
        elif len(queries) < FEW:
            bits = np.packbits(allowed, bitorder="little")
            chosen = faiss.SearchParameters(sel=faiss.IDSelectorBitmap(bits))
            _, found = self._flat.search(queries, count, params=chosen)
        else:
            numbers = np.flatnonzero(allowed)
            vectors = self._vectors[numbers]  # (allowed, d)
            _, found = faiss.knn(queries, vectors, count, faiss.METRIC_INNER_PRODUCT)
            found = numbers[found]
        return found

    def _spread(self, pool: int) -> int | None:
        """How many items to fetch from the graph for one that is allowed; None: do without it."""
        items = len(self._vectors)
        if self._graph is None or pool * STRICT < items:
            return None
        # The allowed lie unevenly: if just as many as expected came, half the queries fell short.
        return 1 if pool == items else -(-2 * items // pool)

    def _approximate(self, queries: Floats, count: int) -> Numbers:
        """(queries, count) about the best items, -1 where the graph leads to no more."""
        depth = faiss.SearchParametersHNSW(efSearch=max(SEARCH_DEPTH, 2 * count))
        found: Numbers
        _, found = self._graph.search(queries, count, params=depth)
        return found

    def _without(self, found: Numbers, allowed: Mask | None, barred: Sequences) -> Numbers:
        """`found` with -1 for what is not allowed or barred."""
        if len(barred.values):
            keys = np.arange(len(found))[:, None] * len(self._vectors) + found
            found = np.where(np.isin(keys, self._keys(barred)), -1, found)
        return found if allowed is None else np.where(allowed[found], found, -1)

    def _special(
        self,
        queries: int,
        allowed: Mask | None,
        excluded: Sequences | None,
        lifted: Lifted | None,
    ) -> tuple[Sequences, Lifted]:
        """(barred from the plain search, to be scored one by one): a row a query, none twice.

        What is raised need not be barred: all that it displaces there ranks behind it anyway."""
        items, bonus = _usable_lifted(lifted, queries)
        out = self._distinct(queries, allowed, excluded, "excluded")
        scored = np.setdiff1d(self._distinct(queries, allowed, items, "lifted"), out)
        keys = self._keys(items)
        order = np.argsort(keys, kind="stable")
        bonus = bonus[order[np.searchsorted(keys[order], scored)]]
        barred = np.union1d(out, scored[bonus < 0])
        count = max(len(self._vectors), 1)
        rows = []
        for keys in (barred, scored):
            lengths = np.bincount(keys // count, minlength=queries)
            rows.append(Sequences.from_lengths((keys % count).astype(np.int32), lengths))
        return rows[0], Lifted(rows[1], bonus)

    def _distinct(
        self, queries: int, allowed: Mask | None, rows: Sequences | None, name: str
    ) -> Numbers:
        """The keys of the allowed items in `rows`, ascending, each once."""
        if rows is None:
            return np.empty(0, dtype=np.int64)
        if len(rows) != queries:
            raise RequestError(
                f"{name} has {len(rows)} rows for {queries} queries; give one row for each query"
            )
        self._check_items(rows.values, rows.owners, name, 0)
        if allowed is not None:
            rows = rows.keep(allowed[rows.values])
        return np.unique(self._keys(rows))

    def _keys(self, rows: Sequences) -> Numbers:
        """(interactions,) one number for a row and an item."""
        return rows.owners * len(self._vectors) + rows.values

    def _queries(self, queries: Floats) -> Floats:
        queries = _usable(queries, "queries")
        width = self._vectors.shape[1]
        if queries.shape[1] != width:
            raise RequestError(
                f"queries {queries.shape[1]} wide do not fit vectors {width} wide; "
                "use queries from the model that made the vectors"
            )
        return queries

    def _allowed(self, allowed: Mask | None) -> Mask | None:
        """None if everything is allowed: nothing to filter."""
        if allowed is None:
            return None
        allowed = np.asarray(allowed)
        if allowed.shape != (len(self._vectors),) or allowed.dtype != np.bool_:
            raise RequestError(
                f"allowed is {allowed.dtype} of shape {allowed.shape}; "
                f"give a truth value for each of the {len(self._vectors)} items"
            )
        return None if allowed.all() else allowed

    def _check_items(
        self, items: npt.NDArray[np.integer], rows: Numbers, name: str, lowest: int
    ) -> None:
        wrong = np.flatnonzero((items.ravel() < lowest) | (items.ravel() >= len(self._vectors)))
        if len(wrong):
            raise RequestError(
                f"row {rows[wrong[0]]} of {name} has item {items.ravel()[wrong[0]]}; "
                f"use the numbers of the {len(self._vectors)} items, from 0"
            )


def _usable(vectors: Floats, name: str) -> Floats:
    """Contiguous float32, in which no inner product can overflow or be NaN."""
    with np.errstate(all="ignore"):
        result = np.ascontiguousarray(vectors, dtype=np.float32)
        if np.ndim(vectors) != 2 or result.shape[1] == 0:
            raise RequestError(f"{name} of shape {np.shape(vectors)} are no rows; give (rows, d)")
        # An inner product is at most the larger of the two squared norms.
        wrong = np.flatnonzero(~np.isfinite(np.einsum("nd,nd->n", result, result)))
    if len(wrong):
        raise RequestError(
            f"row {wrong[0]} of the {name} "
            "is NaN, infinite or too large; mend that row or leave it out"
        )
    return result


def _usable_lifted(lifted: Lifted | None, queries: int) -> Lifted:
    if lifted is None:
        return Lifted(Sequences.of([[]] * queries), np.empty(0, np.float32))
    bonus = np.asarray(lifted.bonus, dtype=np.float32)
    if bonus.shape != lifted.items.values.shape:
        raise RequestError(
            f"a bonus of shape {bonus.shape} does not fit {len(lifted.items.values)} lifted items; "
            "give one for each"
        )
    wrong = np.flatnonzero(~np.isfinite(bonus))
    if len(wrong):
        raise RequestError(f"a bonus of {bonus[wrong[0]]} is no score; give finite numbers")
    return Lifted(lifted.items, bonus)


def _graph(vectors: Floats) -> Any:
    """A graph of neighbours: IndexHNSWFlat over the vectors less their mean.

    The mean adds the same to all scores of a query and so changes no order, but a graph by inner
    product goes wrong along a direction that all vectors share. The usual cure for norms that
    differ, √(longest² - norm²) as one more dimension, finds far less: it crowds the short vectors
    at a pole that is at right angles to every query (recall@10 of 0.2 instead of 0.99 on 5,000
    normal vectors of log-normal norms).
    """
    vectors = vectors - vectors.mean(axis=0, dtype=np.float64).astype(np.float32)
    graph = faiss.IndexHNSWFlat(vectors.shape[1], LINKS, faiss.METRIC_INNER_PRODUCT)
    graph.hnsw.efConstruction = BUILD_DEPTH
    graph.add(vectors)
    return graph


def _padded(rows: Sequences) -> Numbers:
    """(rows, longest) with -1 behind the shorter ones."""
    result = np.full((len(rows), int(rows.lengths.max(initial=0))), -1, dtype=np.int64)
    result[rows.owners, rows.places] = rows.values
    return result


def _batches(widths: Numbers) -> Iterator[Numbers]:
    """Rows whose lists are about equally wide, `PAIRS` in all: a long one burdens few others."""
    order = np.argsort(widths, kind="stable")
    widths = np.maximum(widths[order], 1)
    start = 0
    while start < len(order):
        ahead = widths[start : start + max(1, PAIRS // int(widths[start]))]
        totals = np.arange(1, len(ahead) + 1) * ahead  # as wide as the widest, which is the last
        stop = start + max(1, int(np.searchsorted(totals, PAIRS, side="right")))
        yield order[start:stop]
        start = stop
