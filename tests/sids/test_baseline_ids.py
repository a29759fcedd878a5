import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maskgr.errors import DataError
from maskgr.sids.config import QuantizerConfig
from maskgr.sids.quantizers import fit_quantizer
from maskgr.sids.vectors import prepare


def fit(name, vectors, seed=0, **settings):
    return fit_quantizer(vectors, QuantizerConfig(quantizer=name, **settings), seed=seed)


def test_item_ids_are_row_numbers():
    vectors = np.eye(5)
    quantizer = fit("item-id", vectors)
    assert quantizer.encode(vectors).tolist() == [[0], [1], [2], [3], [4]]
    assert quantizer.codebook_sizes == (5,)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 3), st.integers(2, 5), st.data())
def test_random_ids_are_distinct_up_to_the_last_tuple(levels, codes, data):
    vectors = np.ones((count := data.draw(st.integers(1, codes**levels)), 2))
    seed = data.draw(st.integers(0, 99))
    table = fit("random", vectors, seed, levels=levels, codes=codes).encode(vectors)
    assert table.shape == (count, levels)
    assert len(np.unique(table, axis=0)) == count
    assert ((table >= 0) & (table < codes)).all()


def test_random_ids_with_more_tuples_than_64_bits():
    vectors = np.ones((3, 2))
    assert fit("random", vectors, levels=9, codes=256).encode(vectors).shape == (3, 9)


def test_raises_when_items_outnumber_tuples():
    with pytest.raises(DataError, match=r"items \(5\); raise --codes or --levels"):
        fit("random", np.eye(5), levels=2, codes=2)


@pytest.mark.parametrize("name", ["random", "item-id"])
def test_raises_when_new_items_are_encoded(name):
    quantizer = fit(name, np.eye(5))
    with pytest.raises(DataError, match=r"IDs belong to the 5 items .* and 2 were given"):
        quantizer.encode(np.eye(5)[:2])


@pytest.mark.parametrize("name", ["random", "item-id"])
def test_every_id_decodes_to_the_mean(name):
    vectors = np.array([[2.0, 0], [0, 3.0]])
    quantizer = fit(name, vectors)
    mean = prepare(vectors, normalise=True).mean(axis=0)
    assert np.allclose(quantizer.decode(quantizer.encode(vectors)), [mean, mean])


def test_changing_encoded_digits_does_not_change_the_quantiser():
    quantizer = fit("item-id", np.eye(3))
    quantizer.encode(np.eye(3))[:] = 9
    assert quantizer.encode(np.eye(3)).max() == 2
