"""The best items are compared with a dense softmax and a stable sort."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from maskgr.data.sequences import Sequences
from maskgr.nn import scoring
from maskgr.nn.scoring import best_items, pairs
from maskgr.nn.softmax import Bonus

ROWS, ITEMS, WIDTH = 5, 12, 4
CPU = torch.device("cpu")
EXCLUDED = Sequences.of([[0, 5, 5, 11], [], [3], list(range(12)), [7, 1]])


def numbers(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    queries = torch.randn(ROWS, WIDTH, generator=generator)
    return queries, torch.randn(ITEMS, WIDTH, generator=generator)


def some_bonus() -> Bonus:
    rows, items = torch.tensor([0, 0, 2, 4]), torch.tensor([11, 3, 0, 7])
    return Bonus(rows, items, torch.tensor([2.5, -3.0, 4.0, -torch.inf]))


def dense(
    queries: Tensor,
    table: Tensor,
    top: int,
    allowed: Tensor | None,
    excluded: Sequences | None,
    bonus: Bonus | None,
) -> tuple[Tensor, Tensor]:
    """`best_items` by its definition."""
    logits = queries @ table.T
    if bonus is not None:
        logits[bonus.rows, bonus.items] += bonus.values
    log_probs = logits.log_softmax(1)
    if allowed is not None:
        log_probs[:, ~allowed] = -torch.inf
    if excluded is not None:
        log_probs[excluded.owners, excluded.values] = -torch.inf
    scores, items = log_probs.sort(dim=1, descending=True, stable=True)
    items[scores == -torch.inf] = -1
    missing = max(0, top - items.shape[1])
    items = torch.nn.functional.pad(items, (0, missing), value=-1)
    return items[:, :top], torch.nn.functional.pad(scores, (0, missing), value=-torch.inf)[:, :top]


@pytest.mark.parametrize(("cells", "block"), [(2**23, 2**16), (1, 5), (24, 4), (10, 1)])
@pytest.mark.parametrize("top", [1, 4, ITEMS, ITEMS + 3])
def test_best_items_equal_a_dense_softmax(
    cells: int, block: int, top: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scoring, "CELLS", cells)
    monkeypatch.setattr(scoring, "ITEMS", block)
    queries, table = numbers()
    allowed = torch.arange(ITEMS) % 3 != 0
    for mask, excluded, bonus in product((None, allowed), (None, EXCLUDED), (None, some_bonus())):
        items, scores = best_items(
            queries, table, top, allowed=mask, excluded=excluded, bonus=bonus
        )
        expected, values = dense(queries, table, top, mask, excluded, bonus)
        assert torch.equal(items, expected)
        torch.testing.assert_close(scores, values)


@given(
    scores=st.lists(st.integers(0, 2), min_size=1, max_size=12),
    top=st.integers(1, 14),
    block=st.integers(1, 12),
)
def test_equal_scores_are_ordered_by_item_number(scores: list[int], top: int, block: int) -> None:
    table = torch.tensor(scores, dtype=torch.float32)[:, None]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scoring, "ITEMS", block)
        items, _ = best_items(torch.ones(2, 1), table, top)
    expected = sorted(range(len(scores)), key=lambda item: (-scores[item], item))[:top]
    assert items.tolist() == [expected + [-1] * (top - len(expected))] * 2


def test_ties_at_the_cut_keep_the_first_items_of_a_large_block() -> None:
    table = torch.zeros(20_000, 1)  # so many that topk keeps arbitrary ones
    table[17_000] = 1
    items, _ = best_items(torch.ones(1, 1), table, 4)
    assert items.tolist() == [[17_000, 0, 1, 2]]


def test_no_item_where_none_is_allowed() -> None:
    items, scores = best_items(*numbers(), 3, allowed=torch.zeros(ITEMS, dtype=torch.bool))
    assert (items == -1).all()
    assert (scores == -torch.inf).all()


def test_filters_leave_the_other_scores_as_they_are() -> None:
    queries, table = numbers()
    whole = dict(
        zip(*(part[0].tolist() for part in best_items(queries, table, ITEMS)), strict=True)
    )
    items, scores = best_items(queries, table, ITEMS, excluded=EXCLUDED)
    for item, score in zip(items[0, :9].tolist(), scores[0, :9].tolist(), strict=True):
        assert score == pytest.approx(whole[item], abs=1e-6)


def test_half_precision_is_scored_in_float32() -> None:
    queries, table = (part.bfloat16() for part in numbers())
    items, scores = best_items(queries, table, ITEMS)
    expected, values = dense(queries.float(), table.float(), ITEMS, None, None, None)
    assert torch.equal(items, expected)
    torch.testing.assert_close(scores, values)


def test_pairs_of_sequences() -> None:
    sequences = Sequences.of([[4, 2], [], [7]])
    owners, values = pairs(sequences, CPU)
    assert (owners.tolist(), values.tolist()) == ([0, 0, 2], [4, 2, 7])
