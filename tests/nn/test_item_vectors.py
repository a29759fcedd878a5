from __future__ import annotations

import pytest
import torch

from maskgr.nn.item_vectors import ItemVectors, principal_components

ITEMS, WIDTH = 9, 6


def texts(items: int = ITEMS, width: int = 10, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(items, width, generator=generator) + 5  # with a common part


def trained(embeddings: torch.Tensor | None, seed: int = 0) -> ItemVectors:
    """Random weights instead of those at the start."""
    torch.manual_seed(seed)
    vectors = ItemVectors(WIDTH, ITEMS, embeddings)
    with torch.no_grad():
        for parameter in vectors.parameters():
            parameter.normal_()
    return vectors


@pytest.mark.parametrize("embeddings", [None, texts()])
def test_vectors_of_some_items_are_rows_of_the_whole_table(embeddings: torch.Tensor | None) -> None:
    vectors = trained(embeddings)
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


def test_an_item_without_text_is_at_first_random() -> None:
    torch.manual_seed(0)
    table = ItemVectors(WIDTH, ITEMS)()
    assert len(table.unique(dim=0)) == ITEMS


def test_own_vectors_and_text_are_both_learned() -> None:
    vectors = ItemVectors(WIDTH, ITEMS, texts())
    (vectors() * torch.randn(ITEMS, WIDTH)).sum().backward()
    assert {name for name, p in vectors.named_parameters() if p.grad is not None} == {
        "own.weight",
        "text_map.weight",
        "norm.weight",
        "norm.bias",
    }


def test_texts_are_data_that_is_not_saved() -> None:
    state = trained(texts()).state_dict()
    assert {"text_mean", "text_basis"} <= state.keys()
    assert not {"embeddings", "text"} & state.keys()


def test_loaded_weights_bring_the_basis_of_their_texts() -> None:
    old = trained(texts())
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
