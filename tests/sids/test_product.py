import numpy as np
import pytest

from maskgr.errors import DataError
from maskgr.sids.config import QuantizerConfig
from maskgr.sids.quantizers import fit_quantizer, reconstruction_errors
from maskgr.sids.vectors import prepare


def draw(count, dimensions, seed=0):
    return np.random.default_rng(seed).standard_normal((count, dimensions), dtype=np.float32)


def fit(name, vectors, levels, codes):
    return fit_quantizer(vectors, QuantizerConfig(quantizer=name, levels=levels, codes=codes))


def test_encode_is_brute_force_nearest_in_each_block():
    vectors = draw(200, 6)
    quantizer = fit("pq", vectors, levels=3, codes=5)
    blocks = prepare(vectors, normalise=True).reshape(200, 3, 2)
    gaps = np.square(blocks[:, :, None] - quantizer.codebooks[None]).sum(axis=3)  # (n, 3, 5)
    assert (quantizer.encode(vectors) == gaps.argmin(axis=2)).all()


def test_blocks_of_unknown_digits_decode_to_their_mean():
    vectors = draw(200, 6)
    quantizer = fit("pq", vectors, levels=3, codes=5)
    decoded = quantizer.decode(np.array([[4, 0, 0]], np.int32), levels=1)[0]
    assert np.allclose(decoded[:2], quantizer.codebooks[0, 4])
    assert np.allclose(decoded[2:], prepare(vectors, normalise=True).mean(axis=0)[2:], atol=1e-6)


@pytest.mark.parametrize("name", ["pq", "opq"])
def test_any_number_of_codes_and_dimensions(name):
    vectors = draw(300, 10)  # 10 is not divisible by 4; 6 is not a power of two
    quantizer = fit(name, vectors, levels=4, codes=6)
    digits = quantizer.encode(vectors)
    assert quantizer.codebook_sizes == (6, 6, 6, 6)
    assert all(len(np.unique(column)) == 6 for column in digits.T)
    assert quantizer.decode(digits).shape == (300, 10)


def test_opq_rotation_is_orthogonal_and_helps_where_blocks_are_uneven():
    vectors = draw(600, 8) * np.array([9, 9, 1, 1, 0.1, 0.1, 0.1, 0.1])
    plain, rotated = (fit(name, vectors, levels=2, codes=16) for name in ("pq", "opq"))
    assert np.allclose(rotated.rotation @ rotated.rotation.T, np.eye(8), atol=1e-4)
    errors = [reconstruction_errors(q, vectors, q.encode(vectors))[-1] for q in (plain, rotated)]
    assert errors[1] < errors[0]


def test_raises_when_levels_outnumber_dimensions():
    with pytest.raises(DataError, match=r"5 levels .* have 3; lower --levels"):
        fit("pq", draw(50, 3), levels=5, codes=4)
