"""Losses over the items of a catalogue: exact softmax, sampled softmax, binary cross-entropy.

The score of an item is the inner product of a query and the item's vector. The scores of all rows
and items at once take gigabytes where a catalogue has a million items, so the exact softmax
computes them block by block in reused memory, and reads what the loss and its gradients need from
a block before the next one overwrites it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional

MAX_SCORES = 2**23  # scores in memory at a time
BLOCK_ROWS = 512  # more make a matrix product no faster
BLOCK_ITEMS = 1024  # small enough that the steps after the product find a block in the CPU's cache
MIN_KEPT_ROWS = 64  # with fewer rows, reading the table costs more than multiplying it


@dataclass(frozen=True, eq=False)
class Bonus:
    """Sparse additive bias on the scores of (row, item) pairs, e.g. of items a user already has."""

    rows: Tensor  # (entries,) int64, ascending
    items: Tensor  # (entries,) int64; no (row, item) pair twice
    values: Tensor  # (entries,) float, differentiable

    def __post_init__(self) -> None:
        assert self.rows.shape == self.items.shape == self.values.shape
        assert (self.rows.diff() >= 0).all()

    @classmethod
    def empty(cls, device: torch.device) -> Bonus:
        none = torch.empty(0, dtype=torch.int64, device=device)
        return cls(none, none, none.float())

    def select(self, rows: Tensor) -> Bonus:
        """The bias of some `rows` (ascending), numbered anew in this order."""
        place = torch.searchsorted(rows, self.rows).clamp(max=len(rows) - 1)
        here = (rows[place] == self.rows).nonzero().squeeze(1)
        return Bonus(place[here], self.items[here], self.values[here])

    @torch.no_grad()
    def at(self, rows: Tensor, items: Tensor) -> Tensor:
        """Values of the pairs of `rows` and `items` (of equal shape); 0 where a pair has none."""
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
    bonus: Bonus | None = None,
    weights: Tensor | None = None,
) -> Tensor:
    """() sum over rows of -log softmax(scores of all items)[target], exact, in flat memory.

    `queries` (rows, width), `table` (items, width), `targets` (rows,) int64. `weights` (rows,):
    factors on the rows' losses; rows of weight 0 are not computed. Computed in float32 even under
    autocast; in double if queries or table are.
    """
    assert targets.shape == (len(queries),)
    assert _within(targets, len(table))
    bonus = bonus or Bonus.empty(queries.device)
    if weights is None:
        weights = queries.new_ones(len(queries))
    elif not weights.all():
        rows = weights.nonzero().squeeze(1)
        if not len(rows):
            return 0 * (queries.sum() + table.sum() + bonus.values.sum())
        queries, targets, weights = queries[rows], targets[rows], weights[rows]
        bonus = bonus.select(rows)
    inputs = (queries, table, bonus.values, targets, bonus.rows, bonus.items, weights)
    if torch.is_grad_enabled():
        return cast(Tensor, _CrossEntropy.apply(*inputs))  # type: ignore[no-untyped-call]
    return _loss_and_gradients(inputs, [False] * 3)[0]


@torch.no_grad()
def log_normaliser(queries: Tensor, table: Tensor, *, bonus: Bonus | None = None) -> Tensor:
    """(rows,) log of the sum of exp(score) over the catalogue; without gradient."""
    with torch.autocast(queries.device.type, enabled=False):
        scores = _Scores(queries, table, bonus or Bonus.empty(queries.device))
        result = scores.queries.new_empty(len(queries))
        for rows in scores.row_blocks:
            softmax = _Softmax(scores, rows)
            torch.add(softmax.top, softmax.total.log(), out=result[rows])
        return result


class _CrossEntropy(torch.autograd.Function):
    """Computes the gradients together with the loss, while the exponentials are in memory.

    The loss is one number, so backward only has to scale them. A second backward through the same
    graph computes them again.
    """

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        loss, ctx.gradients = _loss_and_gradients(inputs, ctx.needs_input_grad)
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, incoming: Tensor) -> tuple[Tensor | None, ...]:
        inputs = ctx.saved_tensors
        gradients = ctx.gradients or _loss_and_gradients(inputs, ctx.needs_input_grad)[1]
        ctx.gradients = None  # a tensor without another owner becomes .grad without a copy
        scaled = [
            None if gradient is None else gradient.mul_(incoming).to(tensor.dtype)
            for gradient, tensor in zip(gradients, inputs[:3], strict=True)
        ]
        return (*scaled, None, None, None, None)


def _loss_and_gradients(
    inputs: Sequence[Tensor], wanted: Sequence[bool]
) -> tuple[Tensor, list[Tensor | None]]:
    """The loss, and its gradients for queries, table and bonus values where `wanted`.

    `inputs`: queries, table, bonus values, targets, bonus rows, bonus items, weights. The gradient
    of a score is softmax minus one-hot, times the row's weight. Only exponentials are as large as a
    block: what normalises them multiplies the queries or the products instead.
    """
    queries, table, values, targets, bonus_rows, bonus_items, weights = inputs
    with torch.autocast(queries.device.type, enabled=False):
        scores = _Scores(queries, table, Bonus(bonus_rows, bonus_items, values))
        queries, weights = scores.queries, weights.to(scores.queries)
        loss = queries.new_zeros(())
        by_queries = torch.empty_like(queries) if wanted[0] else None
        by_table = torch.zeros_like(table, dtype=queries.dtype) if wanted[1] else None
        by_values = scores.of_bonus if wanted[2] else None
        normalisers = queries.new_empty(len(queries))
        for rows in scores.row_blocks:
            softmax = _Softmax(scores, rows, targets[rows], sum_vectors=wanted[0])
            log_total = softmax.total.log()
            loss += (softmax.top - softmax.target_scores + log_total) @ weights[rows]
            torch.add(softmax.top, log_total, out=normalisers[rows])
            if by_queries is not None:
                torch.div(softmax.vectors, softmax.total[:, None], out=by_queries[rows])
            if by_table is not None:
                normalised = queries[rows] * (weights[rows] / softmax.total)[:, None]
                for items in scores.item_blocks:
                    block, factor = softmax.exponentials(items)
                    by_table[items].addmm_(block.T, normalised * factor[:, None])
        if by_queries is not None:
            by_queries.sub_(table[targets]).mul_(weights[:, None])
        if by_table is not None:
            by_table.index_add_(0, targets, queries * weights[:, None], alpha=-1)
        if by_values is not None:
            by_values.sub_(normalisers[bonus_rows]).exp_()
            by_values.sub_((bonus_items == targets[bonus_rows]).to(by_values))
            by_values.mul_(weights[bonus_rows])
    return loss, [by_queries, by_table, by_values]


class _Scores:
    """Scores of a block of rows for a block of items.

    A block overwrites the one before it; if `kept`, all item blocks of the same rows lie side by
    side instead.
    """

    def __init__(self, queries: Tensor, table: Tensor, bonus: Bonus) -> None:
        assert queries.shape[1:] == table.shape[1:]
        assert len(table) or not len(queries)
        assert _within(bonus.rows, len(queries))
        assert _within(bonus.items, len(table))
        dtype = _precision(queries, table)
        self.queries, self.table, self.bonus = queries.to(dtype), table, bonus
        height, width, self.kept = _block_shape(len(queries), len(table))
        self.row_blocks = _slices(len(queries), height)
        self.item_blocks = _slices(len(table), width)
        self.memory = self.queries.new_empty(height * (len(table) if self.kept else width))
        self.of_bonus = torch.empty_like(bonus.values, dtype=dtype)  # scores of the bonus' pairs
        starts = [rows.start for rows in self.row_blocks]
        edges = torch.tensor([*starts, len(queries)], device=bonus.rows.device)
        bounds = torch.searchsorted(bonus.rows, edges).tolist()
        self.entries = dict(zip(starts, map(slice, bounds, bounds[1:]), strict=True))

    def vectors(self, items: slice) -> Tensor:
        """(items of the block, width); a table in half precision is never copied as a whole."""
        return self.table[items].to(self.queries.dtype)

    def compute(self, rows: slice, items: slice) -> Tensor:
        """(rows of the block, items of the block), valid until its memory is used again."""
        block = self.block(rows, items)
        torch.mm(self.queries[rows], self.vectors(items).T, out=block)
        entries = self.entries[rows.start]
        if entries.start < entries.stop:
            column = self.bonus.items[entries] - items.start
            here = ((column >= 0) & (column < block.shape[1])).nonzero().squeeze(1)
            cells = (self.bonus.rows[entries][here] - rows.start) * block.shape[1] + column[here]
            flat = block.view(-1)
            flat.index_add_(0, cells, self.bonus.values[entries][here].to(block))
            self.of_bonus[entries][here] = flat[cells]
        return block

    def block(self, rows: slice, items: slice) -> Tensor:
        """The memory of a block."""
        height, width = rows.stop - rows.start, items.stop - items.start
        start = height * items.start if self.kept else 0
        return self.memory[start : start + height * width].view(height, width)


class _Softmax:
    """Softmax of a block of rows over the catalogue, in one pass over the items.

    Exponentials are relative to the row's highest score so far; a higher one rescales the sums.
    """

    def __init__(
        self,
        scores: _Scores,
        rows: slice,
        targets: Tensor | None = None,
        *,
        sum_vectors: bool = False,
    ) -> None:
        """`targets` (rows,): items whose scores to look up. `sum_vectors`: compute `vectors`."""
        queries = scores.queries[rows]
        self.scores, self.rows = scores, rows
        self.top = queries.new_full((len(queries),), torch.finfo(queries.dtype).min)
        self.total = torch.zeros_like(self.top)  # (rows,) sum of exp(score - top)
        self.target_scores = torch.zeros_like(self.top)
        self.vectors = torch.zeros_like(queries)  # (rows, width) sum of exp(score - top) * vector
        self.tops: dict[int, Tensor] = {}  # by a block's first item: `top` when it was computed
        for items in scores.item_blocks:
            block = scores.compute(rows, items)
            if targets is not None:
                self._look_up(block, targets - items.start)
            top = torch.maximum(self.top, block.amax(1))
            rescale = (self.top - top).exp_()
            self.top = self.tops[items.start] = top
            block.sub_(top[:, None]).exp_()
            self.total.mul_(rescale).add_(block.sum(1))
            if sum_vectors:
                self.vectors.mul_(rescale[:, None]).addmm_(block, scores.vectors(items))

    def _look_up(self, block: Tensor, columns: Tensor) -> None:
        inside = (columns >= 0) & (columns < block.shape[1])
        found = block.gather(1, columns.clamp(0, block.shape[1] - 1)[:, None]).squeeze(1)
        self.target_scores = torch.where(inside, found, self.target_scores)

    def exponentials(self, items: slice) -> tuple[Tensor, Tensor]:
        """(rows, items of the block) and (rows,), whose product is exp(score - top).

        Computed again unless the block was kept.
        """
        top = self.tops[items.start]
        if self.scores.kept:
            block = self.scores.block(self.rows, items)
        else:
            block = self.scores.compute(self.rows, items).sub_(top[:, None]).exp_()
        return block, (top - self.top).exp_()


def _block_shape(rows: int, items: int) -> tuple[int, int, bool]:
    """Rows and items of a block, and whether to keep all blocks of the same rows.

    They are kept if enough rows fit beside all items: no score is then computed twice.
    """
    height = MAX_SCORES // max(items, 1)
    if height >= min(rows, MIN_KEPT_ROWS):
        return _even(rows, min(height, BLOCK_ROWS)), _even(items, BLOCK_ITEMS), True
    height = _even(rows, min(math.isqrt(MAX_SCORES), BLOCK_ROWS))
    return height, _even(items, min(MAX_SCORES // height, BLOCK_ITEMS)), False


def _even(count: int, most: int) -> int:
    """Size of blocks, at most `most`, such that the last one is not a sliver."""
    return math.ceil(count / math.ceil(count / most)) if count else 0


def _slices(count: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, count)) for start in range(0, count, max(size, 1))]


def _precision(*tensors: Tensor) -> torch.dtype:
    """At least float32: a sum over a catalogue loses too much in anything less."""
    return reduce(torch.promote_types, (tensor.dtype for tensor in tensors), torch.float32)


def _within(numbers: Tensor, count: int) -> bool:
    return bool(((numbers >= 0) & (numbers < count)).all())


def sampled_cross_entropy(
    queries: Tensor,
    positives: Tensor,
    negatives: Tensor,
    *,
    log_q_negatives: Tensor,
    hits: Tensor,
    weights: Tensor | None = None,
) -> Tensor:
    """() sum over rows of the sampled softmax loss with the log-q correction.

    `queries` and `positives` (rows, width), `negatives` (samples, width), shared by all rows.
    `log_q_negatives` (samples,): log of how often the item is expected in the sample. `hits`
    (rows, samples): the sample is the row's own positive, and left out of its denominator.
    `weights` (rows,): factors on the rows' losses.

    The denominator contains the positive once and is unbiased: the loss approaches that of the
    whole catalogue as the number of samples grows.
    """
    assert queries.shape == positives.shape
    assert hits.shape == (len(queries), len(negatives))
    dtype = _precision(queries, positives, negatives)
    with torch.autocast(queries.device.type, enabled=False):
        queries = queries.to(dtype)
        positive = (queries * positives.to(dtype)).sum(1)  # (rows,)
        others = queries @ negatives.to(dtype).T - log_q_negatives  # (rows, samples)
        others = others.masked_fill(hits, -torch.inf)
        losses = torch.cat([positive[:, None], others], dim=1).logsumexp(1) - positive
        return weighted_sum(losses, weights)


def binary_cross_entropy(
    queries: Tensor, positives: Tensor, negatives: Tensor, weights: Tensor | None = None
) -> Tensor:
    """() sum over rows of -log sigmoid(query . positive) - log sigmoid(-query . negative).

    All (rows, width): one negative a row. `weights` (rows,): factors on the rows' losses. Computed
    in float32 even under autocast.
    """
    assert queries.shape == positives.shape == negatives.shape
    dtype = _precision(queries, positives, negatives)
    with torch.autocast(queries.device.type, enabled=False):
        positive = (queries.to(dtype) * positives).sum(1)  # (rows,)
        negative = (queries.to(dtype) * negatives).sum(1)
        losses = functional.softplus(-positive) + functional.softplus(negative)
        return weighted_sum(losses, weights)


def weighted_sum(losses: Tensor, weights: Tensor | None) -> Tensor:
    """() the sum of `losses` (rows,), each times its weight (rows,) where there are weights."""
    return losses.sum() if weights is None else losses @ weights.to(losses)


class NegativeSampler:
    """Draws items with replacement, in proportion to (training count + 1) ** power.

    Power 0 is uniform, 1 is popularity. A draw is one search in the cumulative distribution, which
    takes 8 bytes an item.
    """

    def __init__(self, training_counts: Tensor, count: int, power: float = 0.75) -> None:
        """`training_counts` (items,): occurrences in the training data. `count`: items per draw."""
        assert len(training_counts)
        assert (training_counts >= 0).all()
        assert count >= 1
        self.count = count
        logs = training_counts.cpu().double().log1p().mul_(power)  # (items,)
        self._edges = logs.exp().cumsum_(0)  # (items,) upper edges of the items' shares
        expected = logs.sub_(self._edges[-1].log()).add_(math.log(count))
        self._log_q = expected.float()  # (items,)

    def draw(self, generator: torch.Generator) -> Tensor:
        """(count,) item numbers on the CPU, as `generator` must be."""
        points = torch.rand(self.count, generator=generator, dtype=torch.float64)
        items = torch.searchsorted(self._edges, points.mul_(self._edges[-1]), right=True)
        return items.clamp_(max=len(self._edges) - 1)  # rounding may reach the last edge

    def log_q(self, items: Tensor) -> Tensor:
        """Log of the expected number of times that each of `items` is in a draw, shaped alike."""
        return self._log_q[items.cpu()].to(items.device)
