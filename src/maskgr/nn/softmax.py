"""The softmax of dense retrieval over every item of a catalogue, in little memory: its
cross-entropy, and what it expects.

A score is the product of a query and an item's vector. Scores of all rows and items at once are
gigabytes where a catalogue has a million items, so they are made block by block, in the same
memory, and what the loss and its gradients need of a block is taken while it is there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from maskgr.errors import RequestError

CELLS = 2**23  # scores that exist at a time
ROWS = 512  # of a block; more make a matrix product no faster
ITEMS = 1024  # of a block: what is done to it after the product finds it near the processor
FEW = 64  # rows; with fewer, reading the table costs more than multiplying it


@dataclass(frozen=True, eq=False)
class Bonus:
    """What some items' scores get beside the product, e.g. those that a user already has."""

    rows: Tensor  # (entries,) int64, ascending
    items: Tensor  # (entries,) int64; no (row, item) pair twice
    values: Tensor  # (entries,) float, differentiable

    @torch.no_grad()
    def at(self, rows: Tensor, items: Tensor) -> Tensor:
        """The values of pairs of `rows` and `items`, 0 for those that get nothing."""
        found = torch.zeros(rows.shape, device=rows.device)
        if len(self.rows) and items.numel():
            size = 1 + int(max(self.items.max(), items.max()))
            keys, order = (self.rows * size + self.items).sort()
            wanted = rows * size + items
            place = torch.searchsorted(keys, wanted).clamp(max=len(keys) - 1)
            values = self.values.detach().float()[order][place]
            found = torch.where(keys[place] == wanted, values, found)
        return found


def catalogue_cross_entropy(
    queries: Tensor,
    table: Tensor,
    targets: Tensor,
    *,
    weights: Tensor | None = None,
    bonus: Bonus | None = None,
) -> Tensor:
    """() sum over rows of weight * -log softmax(query . every item)[target], exactly, in chunks.

    `queries` (rows, width), `table` (items, width), `targets` (rows,) int64, `weights` (rows,),
    which get no gradient. In float32 even where autocast is not; in double if that is given.
    """
    _check(queries, table, bonus)
    _check_targets(targets, weights, len(queries), len(table))
    extra = (None, None, None) if bonus is None else (bonus.rows, bonus.items, bonus.values)
    inputs = (queries, table, extra[2], targets, weights, *extra[:2])
    wanted = [tensor is not None and tensor.requires_grad for tensor in inputs[:3]]
    if torch.is_grad_enabled() and any(wanted):
        return cast(Tensor, _CrossEntropy.apply(*inputs))  # type: ignore[no-untyped-call]
    with torch.no_grad():
        return _evaluate(inputs, [False] * 3)[0]


@torch.no_grad()
def log_normaliser(queries: Tensor, table: Tensor, *, bonus: Bonus | None = None) -> Tensor:
    """(rows,) log of the sum over the catalogue of exp(score); no gradient."""
    found = [sums.top + sums.total.log() for _, sums in expectations(queries, table, bonus=bonus)]
    return torch.cat(found) if found else queries.new_empty(0)


@torch.no_grad()
def expectations(
    queries: Tensor, table: Tensor, *, bonus: Bonus | None = None
) -> Iterator[tuple[slice, Expected]]:
    """Some rows, and what these expect of the whole catalogue, valid until the next rows.

    To be gone through to the end: what is asked of it meanwhile is in float32 too.
    """
    _check(queries, table, bonus)
    with torch.autocast(queries.device.type, enabled=False):
        scores = _Scores(queries.detach(), table.detach(), bonus)
        for rows in scores.row_blocks:
            yield rows, Expected(scores, rows)


class _CrossEntropy(torch.autograd.Function):
    """The loss is one number, so backward only scales: its gradients are made with it, while the
    exponentials are there, and are handed over without a copy.

    A second backward through the same graph makes them anew.
    """

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor | None) -> Tensor:
        ctx.save_for_backward(*inputs)
        loss, ctx.gradients = _evaluate(inputs, ctx.needs_input_grad[:3])
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, incoming: Tensor) -> tuple[Tensor | None, ...]:
        inputs = ctx.saved_tensors
        gradients = ctx.gradients or _evaluate(inputs, ctx.needs_input_grad[:3])[1]
        ctx.gradients = None  # what is held by nobody else becomes a parameter's .grad as it is
        scaled = [
            None if gradient is None else gradient.mul_(incoming).to(tensor.dtype)
            for gradient, tensor in zip(gradients, inputs[:3], strict=True)
        ]
        return (*scaled, None, None, None, None)


def _evaluate(
    inputs: Sequence[Tensor | None], wanted: Sequence[bool]
) -> tuple[Tensor, list[Tensor | None]]:
    """The loss, and its gradients by queries, table and the bonus' values, where `wanted`.

    `inputs`: queries, table, the bonus' values, targets, weights, the bonus' rows and items.
    """
    queries, table, values, targets, weights, rows, items = inputs
    assert queries is not None
    assert table is not None
    assert targets is not None
    bonus = None
    if rows is not None and items is not None and values is not None:
        bonus = Bonus(rows, items, values)
    with torch.autocast(queries.device.type, enabled=False):
        scores = _Scores(queries, table, bonus)
        if weights is None:
            weights = scores.queries.new_ones(len(queries))
        return _loss_and_gradients(scores, targets, weights.to(scores.queries), wanted)


def _loss_and_gradients(
    scores: _Scores, targets: Tensor, weights: Tensor, wanted: Sequence[bool]
) -> tuple[Tensor, list[Tensor | None]]:
    """Softmax minus one-hot, times the other factor. Nothing but the exponentials is ever as large
    as a block: what divides and weighs them does so to the queries and to the products."""
    queries, table, bonus = scores.queries, scores.table, scores.bonus
    loss = queries.new_zeros(())
    by_queries = torch.empty_like(queries) if wanted[0] else None
    by_table = torch.zeros_like(table, dtype=queries.dtype) if wanted[1] else None
    normalisers = torch.empty_like(weights) if wanted[2] else None  # (rows,) logarithms
    for rows in scores.row_blocks:
        sums = Expected(scores, rows, targets[rows], products=wanted[0])
        log_total = sums.total.log()
        loss += weights[rows] @ (sums.top - sums.chosen + log_total)
        share = (weights[rows] / sums.total)[:, None]  # (rows of the block, 1)
        if by_queries is not None:
            torch.mul(sums.products, share, out=by_queries[rows])
        if by_table is not None:
            shared = queries[rows] * share
            for items in scores.item_blocks:
                block, shrunk = sums.exponentials(items)
                by_table[items].addmm_(block.T, shared * shrunk[:, None])
        if normalisers is not None:
            torch.add(sums.top, log_total, out=normalisers[rows])
    if by_queries is not None:
        by_queries.sub_(table[targets].to(queries) * weights[:, None])
    if by_table is not None:
        by_table.index_add_(0, targets, queries * weights[:, None], alpha=-1)
    by_values = None
    if bonus is not None and normalisers is not None:
        by_values = (scores.of_bonus - normalisers[bonus.rows]).exp_()  # (entries,)
        by_values.sub_((bonus.items == targets[bonus.rows]).to(queries))
        by_values.mul_(weights[bonus.rows])
    return loss, [by_queries, by_table, by_values]


class _Scores:
    """Scores of a block of rows for a block of items; each block in the memory of the last, or all
    of the same rows side by side where they are `kept`."""

    def __init__(self, queries: Tensor, table: Tensor, bonus: Bonus | None) -> None:
        dtype = _precision(queries, table)
        self.queries, self.table, self.bonus = queries.to(dtype), table, bonus
        height, width, self.kept = _block(len(queries), len(table))
        self.row_blocks = _slices(len(queries), height)
        self.item_blocks = _slices(len(table), width)
        self.memory = self.queries.new_empty(height * (len(table) if self.kept else width))
        if bonus is not None:
            self.of_bonus = torch.empty_like(bonus.values, dtype=dtype)  # scores, as they are made
            starts = [rows.start for rows in self.row_blocks]
            edges = torch.tensor([*starts, len(queries)], device=bonus.rows.device)
            self.edges = torch.searchsorted(bonus.rows, edges).tolist()  # of each block's entries

    def vectors(self, items: slice) -> Tensor:
        """(items of the block, width); a table in half precision is never copied as a whole."""
        return self.table[items].to(self.queries.dtype)

    def make(self, rows: slice, items: slice) -> Tensor:
        """(rows of the block, items of the block), valid until the next block is made, or, where
        they are kept, the next of these items."""
        block = self.block(rows, items)
        torch.mm(self.queries[rows], self.vectors(items).T, out=block)
        if self.bonus is not None:
            self._add_bonus(self.bonus, block, rows, items)
        return block

    def block(self, rows: slice, items: slice) -> Tensor:
        """The memory of a block."""
        height, width = rows.stop - rows.start, items.stop - items.start
        start = height * items.start if self.kept else 0
        return self.memory[start : start + height * width].view(height, width)

    def _add_bonus(self, bonus: Bonus, block: Tensor, rows: slice, items: slice) -> None:
        place = self.row_blocks.index(rows)
        entries = slice(self.edges[place], self.edges[place + 1])
        column = bonus.items[entries] - items.start
        here = ((column >= 0) & (column < block.shape[1])).nonzero().squeeze(1)
        cells = (bonus.rows[entries][here] - rows.start) * block.shape[1] + column[here]
        flat = block.view(-1)
        flat.index_add_(0, cells, bonus.values.detach()[entries][here].to(block))
        self.of_bonus[entries][here] = flat[cells]


class Expected:
    """The softmax of a block of rows: exponentials, relative to each row's highest score `top`, and
    their sums over the catalogue."""

    def __init__(
        self,
        scores: _Scores,
        rows: slice,
        targets: Tensor | None = None,
        *,
        products: bool = False,
    ) -> None:
        """Goes over the catalogue once; a new highest score shrinks what was summed before it.

        `targets`: whose scores are `chosen`. `products`: also sum exponential * item's vector.
        """
        queries = scores.queries[rows]
        self.scores, self.rows = scores, rows
        self.top = queries.new_full((len(queries),), torch.finfo(queries.dtype).min)
        self.total = torch.zeros_like(self.top)
        self.chosen = torch.zeros_like(self.top)
        self.products = torch.zeros_like(queries)
        self.tops: dict[int, Tensor] = {}  # by the first of a block's items, when it was made
        self.parts: dict[int, Tensor] = {}  # the same: its exponentials' sum, relative to that
        for items in scores.item_blocks:
            block = scores.make(rows, items)
            if targets is not None:
                self._choose(block, targets - items.start)
            top = torch.maximum(self.top, block.amax(1))
            shrink = (self.top - top).exp_()
            self.top = self.tops[items.start] = top
            block.sub_(top[:, None]).exp_()
            self.parts[items.start] = block.sum(1)
            self.total.mul_(shrink).add_(self.parts[items.start])
            if products:
                self.products.mul_(shrink[:, None]).addmm_(block, scores.vectors(items))

    def _choose(self, block: Tensor, columns: Tensor) -> None:
        inside = (columns >= 0) & (columns < block.shape[1])
        found = block.gather(1, columns.clamp(0, block.shape[1] - 1)[:, None]).squeeze(1)
        self.chosen = torch.where(inside, found, self.chosen)

    def draw(self, uniform: Tensor) -> Tensor:
        """(rows, draws) items, as likely as the softmax says: each where `uniform` (rows, draws),
        from 0 to 1, falls among the probabilities laid side by side."""
        blocks = self.scores.item_blocks
        sums = [self.parts[b.start] * (self.tops[b.start] - self.top).exp_() for b in blocks]
        shares = torch.stack(sums, 1)  # (rows, blocks)
        below = shares.cumsum(1)
        wanted = uniform.to(below) * below[:, -1:]
        place = torch.searchsorted(below, wanted, right=True).clamp_(max=len(blocks) - 1)
        wanted -= (below - shares).gather(1, place)
        drawn = torch.empty_like(place)
        for number, items in enumerate(blocks):
            row, draw = (place == number).nonzero(as_tuple=True)
            if len(row):
                block, shrunk = self.exponentials(items)
                within = block[row].cumsum(1)
                left = (wanted[row, draw] / shrunk[row])[:, None]
                found = torch.searchsorted(within, left, right=True).squeeze(1)
                drawn[row, draw] = items.start + found.clamp_(max=within.shape[1] - 1)
        return drawn

    def probabilities(self, chosen: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Some items, and (items, chosen) how likely each is in the rows `chosen` (chosen,) of the
        block; over and over until all items were there."""
        for items in self.scores.item_blocks if len(chosen) else ():
            block, shrunk = self.exponentials(items)
            yield items, (block[chosen] * (shrunk / self.total)[chosen, None]).T.contiguous()

    def exponentials(self, items: slice) -> tuple[Tensor, Tensor]:
        """(rows, items of the block) and (rows,), whose products are exp(score - top); made again
        unless they were kept."""
        if self.scores.kept:
            shrunk = (self.tops[items.start] - self.top).exp_()
            return self.scores.block(self.rows, items), shrunk
        block = self.scores.make(self.rows, items).sub_(self.top[:, None]).exp_()
        return block, torch.ones_like(self.top)


def _block(rows: int, items: int) -> tuple[int, int, bool]:
    """Rows and items of a block, and whether all of the same rows are kept: if enough rows fit
    beside all items, for then the scores need not be made twice."""
    height = CELLS // max(items, 1)
    if height >= min(rows, FEW):
        return _even(rows, min(height, ROWS)), _even(items, ITEMS), True
    height = _even(rows, min(math.isqrt(CELLS), ROWS))
    return height, _even(items, min(CELLS // height, ITEMS)), False


def _even(count: int, most: int) -> int:
    """A block's size, at most `most`, such that the last of the blocks is not a sliver."""
    return math.ceil(count / math.ceil(count / most)) if count else 0


def _slices(count: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, count)) for start in range(0, count, max(size, 1))]


def _precision(*tensors: Tensor) -> torch.dtype:
    """At least float32: a sum over a catalogue drowns in the steps of anything less."""
    dtype = torch.float32
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


def sampled_cross_entropy(
    queries: Tensor,
    positives: Tensor,
    negatives: Tensor,
    *,
    log_q_negatives: Tensor,
    hits: Tensor,
    weights: Tensor | None = None,
) -> Tensor:
    """() sampled softmax with the log-q correction: an estimate for catalogues of millions.

    `queries` and `positives` (rows, width), `negatives` (samples, width), shared by all rows.
    `log_q_negatives` (samples,): the log of how often the item is expected in the sample. `hits`
    (rows, samples): the sample is the row's own positive, and left out of its denominator.

    The denominator has the positive once, exactly, and is unbiased: the more samples, the nearer is
    the loss to the catalogue's.
    """
    if queries.shape != positives.shape or queries.shape[1:] != negatives.shape[1:]:
        raise RequestError(
            f"queries {tuple(queries.shape)}, positives {tuple(positives.shape)} and negatives "
            f"{tuple(negatives.shape)} do not fit; give one positive a query, all of one width"
        )
    if hits.shape != (len(queries), len(negatives)):
        raise RequestError(
            f"hits of shape {tuple(hits.shape)} do not fit {len(queries)} queries and "
            f"{len(negatives)} negatives; give (queries, negatives)"
        )
    dtype = _precision(queries, positives, negatives)
    with torch.autocast(queries.device.type, enabled=False):
        queries = queries.to(dtype)
        positive = (queries * positives.to(dtype)).sum(1)  # (rows,)
        others = queries @ negatives.to(dtype).T - log_q_negatives  # (rows, samples)
        others = others.masked_fill(hits, -torch.inf)
        losses = torch.cat([positive[:, None], others], dim=1).logsumexp(1) - positive
        return losses.sum() if weights is None else losses @ weights.to(dtype)


class NegativeSampler:
    """Draws items with replacement, in proportion to (training count + 1) ** power.

    0 is uniform, 1 is popularity. A draw is one search in the cumulative distribution, whose
    8 bytes an item are all that is kept beside the 4 of `log_q`.
    """

    def __init__(self, training_counts: Tensor, count: int, power: float = 0.75) -> None:
        """`training_counts` (items,): how often each is in the training data. `count`: draws."""
        if training_counts.ndim != 1 or not len(training_counts) or training_counts.min() < 0:
            raise RequestError(
                f"training counts of shape {tuple(training_counts.shape)} cannot be sampled from; "
                "give one number, 0 or more, for each item"
            )
        if count < 1:
            raise RequestError(f"{count} negatives teach nothing; draw 1 or more")
        self.count = count
        logs = training_counts.cpu().double().log1p_().mul_(power)  # (items,)
        self._edges = logs.exp().cumsum_(0)  # (items,) upper edges of the items' shares
        expected = logs.sub_(self._edges[-1].log()).add_(math.log(count))
        self._log_q = expected.float()  # (items,)

    def draw(self, generator: torch.Generator) -> Tensor:
        """(count,) item numbers, with a generator of the CPU."""
        points = torch.rand(self.count, generator=generator, dtype=torch.float64)
        items = torch.searchsorted(self._edges, points.mul_(self._edges[-1]), right=True)
        return items.clamp_(max=len(self._edges) - 1)  # rounding may reach the last edge

    def log_q(self, items: Tensor) -> Tensor:
        """Log of the number of times that each of `items` is expected in a draw; as `items` is."""
        return self._log_q[items.cpu()].to(items.device)


def _check(queries: Tensor, table: Tensor, bonus: Bonus | None) -> None:
    if queries.ndim != 2 or table.ndim != 2 or queries.shape[1] != table.shape[1]:
        raise RequestError(
            f"queries of shape {tuple(queries.shape)} do not fit a table of shape "
            f"{tuple(table.shape)}; give (rows, width) and (items, width)"
        )
    if len(queries) and not len(table):
        raise RequestError("the table has no items to score; give it one or more")
    if bonus is not None:
        _check_bonus(bonus, len(queries), len(table))


def _check_targets(targets: Tensor, weights: Tensor | None, rows: int, items: int) -> None:
    if targets.shape != (rows,) or targets.dtype != torch.int64:
        raise RequestError(
            f"targets of shape {tuple(targets.shape)} and type {targets.dtype} do not fit {rows} "
            "queries; give one int64 item number a query"
        )
    if weights is not None and weights.shape != (rows,):
        raise RequestError(
            f"weights of shape {tuple(weights.shape)} do not fit {rows} queries; give one a query"
        )
    _check_range("targets", targets, items)


def _check_bonus(bonus: Bonus, rows: int, items: int) -> None:
    shapes = {bonus.rows.shape, bonus.items.shape, bonus.values.shape}
    if len(shapes) > 1 or bonus.rows.ndim != 1:
        raise RequestError(
            f"a bonus' rows {tuple(bonus.rows.shape)}, items {tuple(bonus.items.shape)} and values "
            f"{tuple(bonus.values.shape)} do not fit; give one of each an entry"
        )
    _check_range("the bonus' rows", bonus.rows, rows)
    _check_range("the bonus' items", bonus.items, items)
    if (bonus.rows.diff() < 0).any():
        raise RequestError("the bonus' rows are not in ascending order; sort its entries by row")


def _check_range(name: str, numbers: Tensor, count: int) -> None:
    if not numbers.numel():
        return
    low, high = (int(edge) for edge in numbers.aminmax())
    if low < 0 or high >= count:
        wrong = low if low < 0 else high
        raise RequestError(f"{name} have {wrong}, which is not there; use 0 to {count - 1}")
