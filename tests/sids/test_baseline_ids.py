import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maskgr.errors import DataError
from maskgr.sids.baseline_ids import ItemIds, RandomIds
from maskgr.sids.config import QuantizerConfig
from maskgr.sids.vectors import normalise


def test_item_ids_count_the_rows():
    vectors = np.eye(5)
    quantizer = ItemIds.fit(vectors, QuantizerConfig())
    assert quantizer.encode(vectors).tolist() == [[0], [1], [2], [3], [4]]
    assert quantizer.codebook_sizes == (5,)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 3), st.integers(2, 5), st.data())
def test_random_ids_are_distinct_up_to_the_last_tuple(levels, codes, data):
    count = data.draw(st.integers(1, codes**levels))
    config = QuantizerConfig(levels=levels, codes=codes, seed=data.draw(st.integers(0, 99)))
    table = RandomIds.fit(np.ones((count, 2)), config).encode(np.ones((count, 2)))
    assert table.shape == (count, levels)
    assert len(np.unique(table, axis=0)) == count
    assert ((table >= 0) & (table < codes)).all()


def test_random_ids_with_more_tuples_than_64_bits():
    config = QuantizerConfig(levels=9, codes=256)
    assert RandomIds.fit(np.ones((3, 2)), config).encode(np.ones((3, 2))).shape == (3, 9)


def test_more_items_than_tuples():
    with pytest.raises(DataError, match=r"items \(5\); raise --codes or --levels"):
        RandomIds.fit(np.eye(5), QuantizerConfig(levels=2, codes=2))


@pytest.mark.parametrize("kind", [RandomIds, ItemIds])
def test_new_items_have_no_id(kind):
    quantizer = kind.fit(np.eye(5), QuantizerConfig())
    with pytest.raises(DataError, match=r"IDs belong to the 5 items .* and 2 were given"):
        quantizer.encode(np.eye(5)[:2])


@pytest.mark.parametrize("kind", [RandomIds, ItemIds])
def test_an_id_tells_no_more_than_the_mean(kind):
    vectors = np.array([[2.0, 0], [0, 3.0]])
    quantizer = kind.fit(vectors, QuantizerConfig())
    mean = normalise(vectors).mean(axis=0)
    assert np.allclose(quantizer.decode(quantizer.encode(vectors)), [mean, mean])


def test_the_table_is_not_the_callers_to_change():
    quantizer = ItemIds.fit(np.eye(3), QuantizerConfig())
    quantizer.encode(np.eye(3))[:] = 9
    assert quantizer.encode(np.eye(3)).max() == 2
