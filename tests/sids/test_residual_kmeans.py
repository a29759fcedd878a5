from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maskgr.sids.config import QuantizerConfig
from maskgr.sids.quantizers import reconstruction_errors
from maskgr.sids.residual_kmeans import ResidualKMeans
from maskgr.sids.uniqueness import collisions, reassign
from maskgr.sids.vectors import normalise

BEAUTY = Path(__file__).parents[2] / ".." / "shared" / "data" / "beauty" / "embeddings.npy"


def draw(count, dimensions, seed=0):
    return np.random.default_rng(seed).standard_normal((count, dimensions), dtype=np.float32)


def fit(vectors, **settings):
    return ResidualKMeans.fit(vectors, QuantizerConfig(**({"components": 0} | settings)))


def test_encode_is_brute_force_nearest_level_by_level():
    vectors = draw(200, 6)
    quantizer = fit(vectors, levels=3, codes=7)
    unseen = draw(50, 6, seed=1)
    residuals = normalise(unseen).astype(np.float64)
    for level, digits in enumerate(quantizer.encode(unseen).T):
        units = residuals / np.linalg.norm(residuals, axis=1, keepdims=True)
        gaps = np.square(units[:, None] - quantizer.directions[level][None]).sum(axis=2)
        assert (gaps.argmin(axis=1) == digits).all()
        residuals -= quantizer.offsets[level, digits]


def test_decode_is_the_sum_of_the_offsets():
    vectors = draw(100, 5)
    quantizer = fit(vectors, levels=2, codes=4)
    digits = np.array([[3, 1], [0, 2]], np.int32)
    assert np.allclose(quantizer.decode(digits, 1), quantizer.offsets[0][[3, 0]])
    assert np.allclose(
        quantizer.decode(digits), quantizer.offsets[0][[3, 0]] + quantizer.offsets[1][[1, 2]]
    )


def test_an_offset_is_the_mean_residual_of_its_members():
    vectors = draw(300, 5)
    quantizer = fit(vectors, levels=2, codes=4)
    digits = quantizer.encode(vectors)
    residuals = normalise(vectors)
    for level in range(2):
        for code in range(4):
            members = digits[:, level] == code
            assert np.allclose(
                quantizer.offsets[level, code], residuals[members].mean(axis=0), atol=1e-5
            )
        residuals = residuals - quantizer.offsets[level, digits[:, level]]


def test_one_code_a_vector_leaves_nothing_over():
    vectors = draw(16, 4)
    quantizer = fit(vectors, levels=3, codes=16)
    digits = quantizer.encode(vectors)
    assert len(np.unique(digits[:, 0])) == 16
    assert np.allclose(quantizer.decode(digits), normalise(vectors), atol=1e-5)
    assert (digits[:, 1:] == digits[0, 1:]).all()  # rounding noise is not quantised


def test_all_components_lose_nothing_and_few_lose_the_rest():
    vectors = draw(400, 12) * np.arange(12, 0, -1)
    every = fit(vectors, components=12, levels=2, codes=8)
    few = fit(vectors, components=3, levels=2, codes=8)
    assert few.basis.shape == (3, 12)
    assert np.allclose(few.basis @ few.basis.T, np.eye(3), atol=1e-5)
    rows = normalise(vectors)
    centred = rows - few.mean
    lost = np.square(centred - centred @ few.basis.T @ few.basis).sum(axis=1).mean()
    spread = np.sort(np.linalg.eigvalsh(np.cov(rows.T, bias=True)))[:-3].sum()
    assert lost == pytest.approx(spread, rel=1e-3)
    error = reconstruction_errors(few, vectors, few.encode(vectors))[-1]
    assert error > lost
    assert np.allclose(every.basis.T @ every.basis, np.eye(12), atol=1e-5)


def test_more_components_than_dimensions_are_all():
    assert fit(draw(50, 4), components=32, levels=1, codes=4).basis.shape == (4, 4)


def test_a_sample_fits_and_all_are_assigned():
    vectors = draw(2000, 8)
    quantizer = fit(vectors, levels=2, codes=8, sample=20)
    digits = quantizer.encode(vectors)
    errors = reconstruction_errors(quantizer, vectors, digits)
    assert all(len(np.unique(column)) == 8 for column in digits.T)
    assert errors[1] < errors[0] < 1


def test_fitting_leaves_the_input_as_it_is():
    vectors = normalise(draw(60, 4))
    before = vectors.copy()
    fit(vectors, levels=2, codes=4)
    assert (vectors == before).all()


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 999), st.integers(1, 4), st.integers(2, 9), st.sampled_from([0, 3, 6]))
def test_error_falls_and_all_codes_of_the_first_level_are_used(seed, levels, codes, components):
    vectors = draw(60, 6, seed)
    quantizer = fit(vectors, levels=levels, codes=codes, components=components, seed=seed)
    digits = quantizer.encode(vectors)
    errors = reconstruction_errors(quantizer, vectors, digits)
    assert all(b <= a + 1e-6 for a, b in pairwise(errors))
    assert len(np.unique(digits[:, 0])) == codes


@pytest.mark.skipif(not BEAUTY.exists(), reason="the Beauty embeddings are not at hand")
def test_beauty():
    vectors = np.load(BEAUTY, allow_pickle=False)
    quantizer = ResidualKMeans.fit(vectors, QuantizerConfig(restarts=1))
    digits = quantizer.encode(vectors)
    before = reconstruction_errors(quantizer, vectors, digits)
    unique = reassign(digits, vectors, quantizer)
    assert collisions(digits).unique_share >= 0.95
    assert [len(np.unique(column)) for column in digits.T] == [256] * 4
    assert before == sorted(before, reverse=True)
    assert collisions(unique).unique_share == 1
    assert reconstruction_errors(quantizer, vectors, unique)[-1] < 1.02 * before[-1]
