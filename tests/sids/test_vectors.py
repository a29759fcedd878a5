import numpy as np
import pytest

from maskgr.errors import DataError
from maskgr.sids.vectors import distinct_rows, fillable_codes, prepare, unit


def normalised(vectors):
    return prepare(vectors, normalise=True)


def test_rows_get_length_one_and_the_input_stays():
    vectors = np.array([[3.0, 4.0], [0.0, -2.0]])
    assert np.allclose(normalised(vectors), [[0.6, 0.8], [0, -1]])
    assert vectors[0, 0] == 3


def test_without_normalising_rows_keep_their_length():
    vectors = np.array([[3.0, 4.0], [0.0, 0.0]], np.float32)
    rows = prepare(vectors, normalise=False)
    assert (rows == vectors).all()
    rows[0] = 9
    assert vectors[0, 0] == 3  # it was a copy


def test_very_large_and_very_small_values_keep_their_direction():
    vectors = np.array([[3e30, 4e30], [3e-38, 4e-38]], np.float32)
    assert np.allclose(normalised(vectors), [[0.6, 0.8], [0.6, 0.8]], atol=1e-4)


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_raises_when_a_value_is_not_finite(value, normalise):
    vectors = np.ones((4, 3))
    vectors[2, 1] = value
    with pytest.raises(DataError, match=r"^row 2 of the embeddings has a NaN or infinite value;"):
        prepare(vectors, normalise=normalise)


def test_raises_when_rows_to_normalise_are_zero():
    vectors = np.ones((5, 3))
    vectors[[1, 3]] = 0
    with pytest.raises(DataError, match=r"^row 1 of the embeddings \(1 more rows too\) is all zer"):
        normalised(vectors)


def test_unit_does_not_scale_up_rounding_noise():
    residuals = np.array([[1e-8, -1e-8], [3e-3, 4e-3]], np.float32)
    assert np.allclose(unit(residuals), [[0, 0], [0.6, 0.8]])


def test_codes_are_lowered_with_a_warning_to_as_many_as_rows_are_different():
    rows = normalised(np.eye(3)[[0, 1, 2, 0, 1]])
    assert fillable_codes(rows, 3) == 3
    with pytest.warns(UserWarning, match="5 items have 3 different embeddings, too few for 4 cod"):
        assert fillable_codes(rows, 4) == 3
    with pytest.warns(UserWarning, match="9 items have 1 different"):
        assert fillable_codes(normalised(np.ones((9, 3))), 4) == 1


def test_distinct_rows_follow_the_order_and_the_limit():
    rows = np.array([[0], [1], [0], [2]], np.float32)
    assert distinct_rows(rows, np.array([2, 0, 3, 1]), 9) == [2, 3, 1]
    assert distinct_rows(rows, np.array([2, 0, 3, 1]), 2) == [2, 3]
