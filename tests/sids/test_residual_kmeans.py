from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maskgr.sids.config import QuantizerConfig
from maskgr.sids.quantizers import fit_quantizer, reconstruction_errors
from maskgr.sids.uniqueness import collisions, reassign
from maskgr.sids.vectors import prepare

BEAUTY = Path(__file__).parents[2] / ".." / "shared" / "data" / "beauty" / "embeddings.npy"


def draw(count, dimensions, seed=0):
    return np.random.default_rng(seed).standard_normal((count, dimensions), dtype=np.float32)


def fit(vectors, *, normalise=True, seed=0, **settings):
    config = QuantizerConfig(**({"components": 0} | settings))
    return fit_quantizer(vectors, config, normalise=normalise, seed=seed)


@pytest.mark.parametrize("normalise", [True, False])
def test_encode_is_brute_force_nearest_level_by_level(normalise):
    vectors = draw(200, 6)
    quantizer = fit(vectors, normalise=normalise, levels=3, codes=7)
    unseen = draw(50, 6, seed=1)
    residuals = prepare(unseen, normalise=normalise).astype(np.float64)
    for level, digits in enumerate(quantizer.encode(unseen).T):
        lengths = np.linalg.norm(residuals, axis=1, keepdims=True) if normalise else 1
        gaps = np.square((residuals / lengths)[:, None] - quantizer.centroids[level]).sum(axis=2)
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


@pytest.mark.parametrize("normalise", [True, False])
def test_an_offset_is_the_mean_residual_of_its_members(normalise):
    vectors = draw(300, 5)
    quantizer = fit(vectors, normalise=normalise, levels=2, codes=4)
    digits = quantizer.encode(vectors)
    residuals = prepare(vectors, normalise=normalise)
    for level in range(2):
        for code in range(4):
            members = digits[:, level] == code
            assert np.allclose(
                quantizer.offsets[level, code], residuals[members].mean(axis=0), atol=1e-5
            )
        residuals = residuals - quantizer.offsets[level, digits[:, level]]


def test_one_code_per_vector_leaves_no_residual():
    vectors = draw(16, 4)
    quantizer = fit(vectors, levels=3, codes=16)
    digits = quantizer.encode(vectors)
    assert len(np.unique(digits[:, 0])) == 16
    assert np.allclose(quantizer.decode(digits), prepare(vectors, normalise=True), atol=1e-5)
    assert (digits[:, 1:] == digits[0, 1:]).all()  # rounding noise is not quantised


def test_error_of_few_components_includes_the_variance_outside_them():
    vectors = draw(400, 12) * np.arange(12, 0, -1)
    every = fit(vectors, components=12, levels=2, codes=8)
    few = fit(vectors, components=3, levels=2, codes=8)
    assert few.basis.shape == (3, 12)
    assert np.allclose(few.basis @ few.basis.T, np.eye(3), atol=1e-5)
    rows = prepare(vectors, normalise=True)
    centred = rows - few.mean
    lost = np.square(centred - centred @ few.basis.T @ few.basis).sum(axis=1).mean()
    spread = np.sort(np.linalg.eigvalsh(np.cov(rows.T, bias=True)))[:-3].sum()
    assert lost == pytest.approx(spread, rel=1e-3)
    error = reconstruction_errors(few, vectors, few.encode(vectors))[-1]
    assert error > lost
    assert np.allclose(every.basis.T @ every.basis, np.eye(12), atol=1e-5)


def test_components_are_at_most_the_dimensions():
    assert fit(draw(50, 4), components=32, levels=1, codes=4).basis.shape == (4, 4)


def test_codebooks_fitted_on_a_sample_serve_all_vectors(monkeypatch):
    monkeypatch.setattr("maskgr.sids.vectors.SAMPLE", 20)
    vectors = draw(2000, 8)
    quantizer = fit(vectors, levels=2, codes=8)
    digits = quantizer.encode(vectors)
    errors = reconstruction_errors(quantizer, vectors, digits)
    assert all(len(np.unique(column)) == 8 for column in digits.T)
    assert errors[1] < errors[0] < 1


@pytest.mark.parametrize("normalise", [True, False])
def test_fitting_and_encoding_do_not_change_the_input(normalise):
    vectors = prepare(draw(60, 4), normalise=True)
    before = vectors.copy()
    fit(vectors, normalise=normalise, levels=2, codes=4).encode(vectors)
    assert (vectors == before).all()


def varied_lengths():
    """(400, 6) random directions with lengths from 0.1 to 10."""
    lengths = np.exp(np.random.default_rng(1).uniform(np.log(0.1), np.log(10), (400, 1)))
    return (prepare(draw(400, 6), normalise=True) * lengths).astype(np.float32)


def test_plain_error_is_lower_where_lengths_vary():
    vectors = varied_lengths()
    plain, normalised = (fit(vectors, normalise=n, levels=3, codes=8) for n in (False, True))
    plain_decoded = plain.decode(plain.encode(vectors))
    directions = normalised.decode(normalised.encode(vectors))
    # The digits of directions know no length; they get the one scale that suits them best.
    scale = (directions * vectors).sum() / np.square(directions).sum()
    assert (
        np.square(vectors - plain_decoded).sum()
        < 0.5 * np.square(vectors - scale * directions).sum()
    )


def test_first_digit_of_plain_vectors_groups_them_more_closely_than_that_of_directions():
    vectors = varied_lengths()
    errors = []
    for normalise in (False, True):
        first = fit(vectors, normalise=normalise, levels=1, codes=8).encode(vectors)[:, 0]
        means = np.stack([vectors[first == code].mean(axis=0) for code in range(8)])
        errors.append(np.square(vectors - means[first]).sum())  # the best decoding of the groups
    assert errors[0] < errors[1]


@settings(max_examples=20, deadline=None)
@given(
    st.integers(0, 999),
    st.integers(1, 4),
    st.integers(2, 9),
    st.sampled_from([0, 3, 6]),
    st.booleans(),
)
def test_error_falls_and_all_codes_of_the_first_level_are_used(
    seed, levels, codes, components, normalise
):
    vectors = draw(60, 6, seed)
    shape = {"levels": levels, "codes": codes, "components": components}
    quantizer = fit(vectors, normalise=normalise, seed=seed, **shape)
    digits = quantizer.encode(vectors)
    errors = reconstruction_errors(quantizer, vectors, digits)
    assert all(b <= a + 1e-6 for a, b in pairwise(errors))
    assert len(np.unique(digits[:, 0])) == codes


@pytest.mark.skipif(not BEAUTY.exists(), reason="the Beauty embeddings are not at hand")
def test_beauty_digits_are_nearly_unique_and_reassigning_costs_little():
    vectors = np.load(BEAUTY, allow_pickle=False)
    quantizer = fit_quantizer(vectors, QuantizerConfig())
    digits = quantizer.encode(vectors)
    before = reconstruction_errors(quantizer, vectors, digits)
    unique = reassign(digits, vectors, quantizer)
    assert collisions(digits).unique_share >= 0.95
    assert [len(np.unique(column)) for column in digits.T] == [256] * 4
    assert before == sorted(before, reverse=True)
    assert collisions(unique).unique_share == 1
    assert reconstruction_errors(quantizer, vectors, unique)[-1] < 1.02 * before[-1]
