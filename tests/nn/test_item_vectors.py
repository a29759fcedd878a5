from __future__ import annotations

from typing import get_args

import pytest
import torch

from maskgr.nn.item_vectors import (
    DigitVectors,
    ItemSource,
    ItemVectors,
    principal_components,
    table_scores,
)
from maskgr.nn.scoring import best_items

ITEMS, WIDTH = 9, 6


def texts(items: int = ITEMS, width: int = 10, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(items, width, generator=generator) + 5  # with a common part


def made(source: ItemSource) -> ItemVectors:
    return ItemVectors(WIDTH, ITEMS, None if source == "id" else texts(), source)


def trained(source: ItemSource, seed: int = 0) -> ItemVectors:
    """Random weights instead of those at the start."""
    torch.manual_seed(seed)
    vectors = made(source)
    with torch.no_grad():
        for parameter in vectors.parameters():
            parameter.normal_()
    return vectors


@pytest.mark.parametrize("source", get_args(ItemSource))
def test_vectors_of_some_items_are_rows_of_the_whole_table(source: ItemSource) -> None:
    vectors = trained(source)
    numbers = torch.tensor([3, 0, 3, 8])
    table = vectors()
    assert table.shape == (ITEMS, WIDTH)
    torch.testing.assert_close(vectors(numbers), table[numbers])


def test_an_item_is_at_first_what_its_text_says() -> None:
    embeddings = texts()
    embeddings[4] = embeddings[1]
    vectors = ItemVectors(WIDTH, ITEMS, embeddings)
    assert (vectors.own.weight == 0).all()
    table = vectors()
    torch.testing.assert_close(table[4], table[1])
    assert not torch.allclose(table[4], table[2])


@pytest.mark.parametrize("source", ["id", "both"])
def test_own_vectors_are_at_first_random(source: ItemSource) -> None:
    torch.manual_seed(0)
    vectors = made(source)
    assert len(vectors().unique(dim=0)) == ITEMS
    assert vectors.own.weight.std() < 0.05


@pytest.mark.parametrize("source", ["text", "both"])
def test_own_vectors_and_text_are_both_learned(source: ItemSource) -> None:
    vectors = made(source)
    (vectors() * torch.randn(ITEMS, WIDTH)).sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in vectors.parameters())


@torch.no_grad()
def test_factors_weigh_text_and_own_vectors_whatever_their_lengths() -> None:
    vectors = trained("both")
    before = vectors()
    vectors.own.weight.mul_(100)
    torch.testing.assert_close(vectors(), before, rtol=1e-3, atol=1e-3)
    vectors.factors.copy_(torch.tensor([-20.0, 1.0]))  # no text
    alone = torch.nn.functional.layer_norm(vectors.own.weight, (WIDTH,))
    torch.testing.assert_close(vectors(), vectors.norm(alone), rtol=1e-3, atol=1e-3)


@torch.no_grad()
def test_digit_vectors_are_sums_over_the_digits() -> None:
    codes = torch.tensor([[0, 1], [2, 1], [0, 0]])
    vectors = DigitVectors(WIDTH, codes, (3, 2))
    weights = vectors.digits.weight
    expected = torch.stack([weights[a] + weights[3 + b] for a, b in codes.tolist()])
    torch.testing.assert_close(vectors(), expected)
    torch.testing.assert_close(vectors(torch.tensor([2, 0])), expected[[2, 0]])
    assert set(vectors.state_dict()) == {"digits.weight"}  # no vector of any item's own


def test_texts_are_data_that_is_not_saved() -> None:
    state = trained("text").state_dict()
    assert {"text_mean", "text_basis"} <= state.keys()
    assert not {"embeddings", "text"} & state.keys()


def test_loaded_weights_bring_the_basis_of_their_texts() -> None:
    old = trained("text")
    more = torch.cat([texts(), texts(3, seed=1) * 9])  # another mean, and other components
    new = ItemVectors(WIDTH, ITEMS + 3, more)
    state = old.state_dict()
    state["own.weight"] = torch.cat([state["own.weight"], torch.zeros(3, WIDTH)])
    new.load_state_dict(state)
    torch.testing.assert_close(new()[:ITEMS], old())


@pytest.mark.parametrize(("rows", "columns", "most"), [(30, 8, 5), (30, 4, 9), (3, 8, 5)])
def test_principal_components_are_centred_orthogonal_and_of_unit_variance_on_average(
    rows: int, columns: int, most: int
) -> None:
    given = texts(rows, columns).double()
    mean, basis = principal_components(given, most)
    count = min(columns, most)
    assert basis.shape == (columns, count)
    projected = (given - mean) @ basis
    torch.testing.assert_close(projected.mean(0), torch.zeros(count).double())
    assert projected.square().mean().item() == pytest.approx(1)
    gram = basis.T @ basis
    torch.testing.assert_close(gram, gram[0, 0] * torch.eye(count).double())


def test_principal_components_keep_the_directions_that_differ_most() -> None:
    given = torch.zeros(40, 5)
    given[:, 2] = torch.randn(40, generator=torch.Generator().manual_seed(0))
    given[:, 4] = 3 * torch.randn(40, generator=torch.Generator().manual_seed(1))
    _, basis = principal_components(given, 1)
    assert basis.squeeze(1).abs().argmax() == 4


def test_equal_texts_give_finite_vectors() -> None:
    vectors = ItemVectors(WIDTH, ITEMS, torch.ones(ITEMS, 10))
    assert vectors().isfinite().all()


@torch.no_grad()
def test_digit_table_stands_for_the_table_that_is_not_written_out() -> None:
    generator = torch.Generator().manual_seed(0)
    codes = torch.stack([torch.randint(n, (20,), generator=generator) for n in (3, 4, 2)], 1)
    vectors = DigitVectors(WIDTH, codes, (3, 4, 2))
    whole, table = vectors(), vectors.table()
    queries = torch.randn(5, WIDTH, generator=generator)
    assert (len(table), table.shape) == (20, (20, WIDTH))
    torch.testing.assert_close(table[torch.tensor([7, 7, 0])], whole[[7, 7, 0]])
    torch.testing.assert_close(table_scores(queries, table), queries @ whole.T)
    for first, last in ((0, 20), (3, 9), (15, 40)):
        expected = table_scores(queries, whole, first, last)
        torch.testing.assert_close(table_scores(queries, table, first, last), expected)
    for ours, theirs in zip(
        best_items(queries, table, 6), best_items(queries, whole, 6), strict=True
    ):
        torch.testing.assert_close(ours, theirs)
