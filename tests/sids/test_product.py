import numpy as np
import pytest

from maskgr.errors import DataError
from maskgr.sids.config import QuantizerConfig
from maskgr.sids.product import OptimizedProductQuantizer, ProductQuantizer
from maskgr.sids.quantizers import reconstruction_errors
from maskgr.sids.vectors import normalise


def draw(count, dimensions, seed=0):
    return np.random.default_rng(seed).standard_normal((count, dimensions), dtype=np.float32)


def test_encode_is_brute_force_nearest_in_each_block():
    vectors = draw(200, 6)
    quantizer = ProductQuantizer.fit(vectors, QuantizerConfig(levels=3, codes=5))
    blocks = normalise(vectors).reshape(200, 3, 2)
    gaps = np.square(blocks[:, :, None] - quantizer.codebooks[None]).sum(axis=3)  # (n, 3, 5)
    assert (quantizer.encode(vectors) == gaps.argmin(axis=2)).all()


def test_unknown_blocks_are_decoded_to_their_mean():
    vectors = draw(200, 6)
    quantizer = ProductQuantizer.fit(vectors, QuantizerConfig(levels=3, codes=5))
    decoded = quantizer.decode(np.array([[4, 0, 0]], np.int32), levels=1)[0]
    assert np.allclose(decoded[:2], quantizer.codebooks[0, 4])
    assert np.allclose(decoded[2:], normalise(vectors).mean(axis=0)[2:], atol=1e-6)


@pytest.mark.parametrize("kind", [ProductQuantizer, OptimizedProductQuantizer])
def test_any_number_of_codes_and_dimensions(kind):
    vectors = draw(300, 10)  # 10 is not divisible by 4; 6 is not a power of two
    quantizer = kind.fit(vectors, QuantizerConfig(levels=4, codes=6))
    digits = quantizer.encode(vectors)
    assert quantizer.codebook_sizes == (6, 6, 6, 6)
    assert all(len(np.unique(column)) == 6 for column in digits.T)
    assert quantizer.decode(digits).shape == (300, 10)


def test_the_rotation_keeps_lengths_and_helps_where_blocks_are_uneven():
    vectors = draw(600, 8) * np.array([9, 9, 1, 1, 0.1, 0.1, 0.1, 0.1])
    config = QuantizerConfig(levels=2, codes=16)
    plain = ProductQuantizer.fit(vectors, config)
    turned = OptimizedProductQuantizer.fit(vectors, config)
    assert np.allclose(turned.rotation @ turned.rotation.T, np.eye(8), atol=1e-4)
    errors = [reconstruction_errors(q, vectors, q.encode(vectors))[-1] for q in (plain, turned)]
    assert errors[1] < errors[0]


def test_more_levels_than_dimensions():
    with pytest.raises(DataError, match=r"5 levels .* have 3; lower --levels"):
        ProductQuantizer.fit(draw(50, 3), QuantizerConfig(levels=5, codes=4))
