"""Properties shared by all quantisers."""

import subprocess
import sys
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from maskgr.errors import ArtefactError, DataError
from maskgr.sids import rqvae
from maskgr.sids.config import QuantizerConfig
from maskgr.sids.quantizers import (
    QUANTIZERS,
    fit_quantizer,
    load_quantizer,
    reconstruction_errors,
    save_quantizer,
)
from maskgr.sids.vectors import prepare

CONFIG = QuantizerConfig(levels=3, codes=8, components=6, rqvae_latent=6, rqvae_steps=150)
READ_VECTORS = ["residual-kmeans", "rqvae", "pq", "opq"]


@pytest.fixture(scope="module", autouse=True)
def _small_rqvae():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rqvae, "HIDDEN", (16,))
        patch.setattr(rqvae, "BATCH", 64)
        patch.setattr(rqvae, "LEARNING_RATE", 1e-2)
        yield


def fit(vectors, name, **options):
    return fit_quantizer(vectors, replace(CONFIG, quantizer=name), device="cpu", **options)


@pytest.fixture(scope="module")
def vectors():
    generator = np.random.default_rng(0)
    centres = generator.standard_normal((12, 10))
    return (centres[generator.integers(12, size=300)] + generator.normal(0, 0.5, (300, 10))).astype(
        np.float32
    )


@pytest.fixture(scope="module")
def fitted(vectors):
    return {name: fit(vectors, name) for name in QUANTIZERS}


@pytest.mark.parametrize("name", QUANTIZERS)
def test_digits_are_codes_of_their_level(name, fitted, vectors):
    quantizer = fitted[name]
    digits = quantizer.encode(vectors)
    assert quantizer.name == name
    assert digits.dtype == np.int32
    assert digits.shape == (300, len(quantizer.codebook_sizes))
    assert (digits >= 0).all()
    assert (digits < np.array(quantizer.codebook_sizes)).all()
    assert quantizer.codebook_sizes == ((300,) if name == "item-id" else (8, 8, 8))


@pytest.mark.parametrize("name", QUANTIZERS)
def test_decoded_vectors_have_the_shape_of_the_input(name, fitted, vectors):
    digits = fitted[name].encode(vectors)
    decoded = fitted[name].decode(digits)
    assert decoded.shape == vectors.shape
    assert decoded.dtype == np.float32
    assert (decoded == fitted[name].decode(digits, levels=digits.shape[1])).all()


@pytest.mark.parametrize("name", ["residual-kmeans", "pq", "opq", "random", "item-id"])
def test_the_error_never_rises_from_level_to_level(name, fitted, vectors):
    errors = reconstruction_errors(fitted[name], vectors, fitted[name].encode(vectors))
    assert all(b <= a + 1e-6 for a, b in pairwise(errors))


@pytest.mark.parametrize("name", READ_VECTORS)
def test_error_of_all_levels_is_lower_than_of_one(name, fitted, vectors):
    errors = reconstruction_errors(fitted[name], vectors, fitted[name].encode(vectors))
    assert errors[-1] < 0.9 * errors[0]


@pytest.mark.parametrize("name", QUANTIZERS)
def test_same_seed_same_digits(name, fitted, vectors):
    again = fit(vectors, name)
    assert (again.encode(vectors) == fitted[name].encode(vectors)).all()


@pytest.mark.parametrize("name", ["residual-kmeans", "rqvae", "pq", "random"])
def test_another_seed_other_digits(name, fitted, vectors):
    other = fit(vectors, name, seed=1)
    assert (other.encode(vectors) != fitted[name].encode(vectors)).any()


@pytest.mark.parametrize("name", READ_VECTORS)
def test_length_does_not_matter_where_vectors_are_normalised(name, fitted, vectors):
    quantizer = fitted[name]
    unseen = vectors[:20] + 0.01
    assert (quantizer.encode(unseen) == quantizer.encode(unseen * 4)).all()
    assert quantizer.encode(unseen[:1]).shape == (1, 3)


@pytest.mark.parametrize("name", READ_VECTORS)
def test_length_decides_digits_where_vectors_are_not_normalised(name):
    direction = np.random.default_rng(1).standard_normal(10)
    vectors = np.linspace(1, 100, 300)[:, None] * direction  # one direction, 300 lengths
    quantizer = fit(vectors, name, normalise=False)
    assert not quantizer.normalise
    digits = quantizer.encode(vectors)
    assert (digits[0] != digits[-1]).any()
    assert reconstruction_errors(quantizer, vectors, digits)[-1] < 0.02


@pytest.mark.parametrize("name", READ_VECTORS)
def test_relative_error_does_not_depend_on_the_scale_of_the_vectors(name, vectors):
    errors = []
    for scale in (1, 64):  # a power of two: rounding is the same
        quantizer = fit(vectors * scale, name, normalise=False)
        digits = quantizer.encode(vectors * scale)
        errors.append(reconstruction_errors(quantizer, vectors * scale, digits))
    assert errors[0] == pytest.approx(errors[1], rel=1e-3)


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("name", QUANTIZERS)
def test_loaded_quantiser_equals_the_saved_one(name, normalise, fitted, vectors, tmp_path):
    quantizer = fitted[name] if normalise else fit(vectors, name, normalise=False)
    save_quantizer(tmp_path, quantizer)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "quantizer.json",
        "quantizer.safetensors",
    ]
    loaded = load_quantizer(tmp_path)
    digits = quantizer.encode(vectors)
    assert (loaded.name, loaded.normalise) == (name, normalise)
    assert loaded.codebook_sizes == quantizer.codebook_sizes
    assert (loaded.encode(vectors) == digits).all()
    assert (loaded.decode(digits) == quantizer.decode(digits)).all()


@pytest.mark.parametrize("name", QUANTIZERS)
def test_raises_when_a_saved_file_is_truncated(name, fitted, tmp_path):
    save_quantizer(tmp_path, fitted[name])
    file = tmp_path / "quantizer.safetensors"
    file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(ArtefactError, match=r"quantizer\.safetensors is damaged"):
        load_quantizer(tmp_path)


def test_raises_when_saved_settings_are_damaged(fitted, tmp_path):
    save_quantizer(tmp_path, fitted["pq"])
    settings = (tmp_path / "quantizer.json").read_text()
    (tmp_path / "quantizer.json").write_text(settings.replace('"pq"', '"residual-kmeans"'))
    with pytest.raises(ArtefactError, match=r"quantizer\.safetensors is damaged"):
        load_quantizer(tmp_path)
    (tmp_path / "quantizer.json").write_text(settings.replace('"pq"', '"zip"'))
    with pytest.raises(ArtefactError, match=r"quantizer\.json is damaged .*'zip'"):
        load_quantizer(tmp_path)
    (tmp_path / "quantizer.json").write_text(settings[:9])
    with pytest.raises(ArtefactError, match=r"quantizer\.json is damaged"):
        load_quantizer(tmp_path)
    (tmp_path / "quantizer.json").unlink()
    with pytest.raises(ArtefactError, match=r"quantizer\.json is missing"):
        load_quantizer(tmp_path)


@pytest.mark.parametrize("name", QUANTIZERS)
def test_raises_with_the_row_when_a_vector_is_not_finite(name, fitted, vectors):
    bad = vectors.copy()
    bad[7, 2] = np.nan
    with pytest.raises(DataError, match="row 7 "):
        fit(bad, name)
    with pytest.raises(DataError, match="row 7 "):
        fitted[name].encode(bad)


@pytest.mark.parametrize("name", READ_VECTORS)
def test_codes_are_as_many_as_vectors_are_different(name, vectors):
    few = np.tile(vectors[:5], (4, 1))
    with pytest.warns(UserWarning, match="20 items have 5 different embeddings"):
        quantizer = fit(few, name)
    assert set(quantizer.codebook_sizes) == {5}
    digits = quantizer.encode(few)
    assert np.array_equal(digits[:5], digits[5:10])
    with pytest.warns(UserWarning, match="300 items have 1 different"):
        alike = fit(np.ones_like(vectors), name)
    assert len(np.unique(alike.encode(np.ones_like(vectors)), axis=0)) == 1


@pytest.mark.parametrize("normalise", [True, False])
def test_error_of_a_level_is_the_mean_squared_distance_over_the_mean_square(normalise, vectors):
    quantizer = fit(vectors, "residual-kmeans", normalise=normalise)
    digits = quantizer.encode(vectors)
    rows = prepare(vectors, normalise=normalise)
    gaps = [np.square(rows - quantizer.decode(digits, n)).sum(1).mean() for n in (1, 2, 3)]
    scale = np.square(rows).sum(1).mean()
    assert np.allclose(reconstruction_errors(quantizer, vectors, digits), np.array(gaps) / scale)
    assert (abs(scale - 1) < 1e-5) == normalise


def test_importing_quantizers_does_not_import_torch_or_faiss():
    code = (
        "import sys, maskgr.sids.quantizers; "
        "print({'torch', 'faiss', 'scipy', 'safetensors'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
