"""What all quantisers have in common."""

import subprocess
import sys
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from maskgr.errors import ArtefactError, DataError, RequestError
from maskgr.sids.config import QuantizerConfig
from maskgr.sids.quantizers import (
    QUANTIZERS,
    fit_quantizer,
    load_quantizer,
    quantizer_class,
    reconstruction_errors,
    save_quantizer,
)
from maskgr.sids.vectors import normalise

CONFIG = QuantizerConfig(
    levels=3,
    codes=8,
    components=6,
    rqvae_hidden=(16,),
    rqvae_latent=6,
    rqvae_steps=150,
    rqvae_learning_rate=1e-2,
    rqvae_batch=64,
    device="cpu",
)
READ_VECTORS = ["residual-kmeans", "rqvae", "pq", "opq"]


@pytest.fixture(scope="module")
def vectors():
    generator = np.random.default_rng(0)
    centres = generator.standard_normal((12, 10))
    return (centres[generator.integers(12, size=300)] + generator.normal(0, 0.5, (300, 10))).astype(
        np.float32
    )


@pytest.fixture(scope="module")
def fitted(vectors):
    return {name: fit_quantizer(vectors, replace(CONFIG, quantizer=name)) for name in QUANTIZERS}


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
def test_decoding_is_a_float32_matrix_like_the_input(name, fitted, vectors):
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
def test_all_levels_tell_more_than_one(name, fitted, vectors):
    errors = reconstruction_errors(fitted[name], vectors, fitted[name].encode(vectors))
    assert errors[-1] < 0.9 * errors[0]


@pytest.mark.parametrize("name", QUANTIZERS)
def test_same_seed_same_digits(name, fitted, vectors):
    again = fit_quantizer(vectors, replace(CONFIG, quantizer=name))
    assert (again.encode(vectors) == fitted[name].encode(vectors)).all()


@pytest.mark.parametrize("name", ["residual-kmeans", "rqvae", "pq", "random"])
def test_another_seed_other_digits(name, fitted, vectors):
    other = fit_quantizer(vectors, replace(CONFIG, quantizer=name, seed=1))
    assert (other.encode(vectors) != fitted[name].encode(vectors)).any()


@pytest.mark.parametrize("name", READ_VECTORS)
def test_length_does_not_matter_and_unseen_vectors_have_digits(name, fitted, vectors):
    quantizer = fitted[name]
    unseen = vectors[:20] + 0.01
    assert (quantizer.encode(unseen) == quantizer.encode(unseen * 4)).all()
    assert quantizer.encode(unseen[:1]).shape == (1, 3)


@pytest.mark.parametrize("name", QUANTIZERS)
def test_saved_and_loaded_it_is_the_same(name, fitted, vectors, tmp_path):
    save_quantizer(tmp_path, fitted[name])
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "quantizer.json",
        "quantizer.safetensors",
    ]
    loaded = load_quantizer(tmp_path)
    digits = fitted[name].encode(vectors)
    assert loaded.name == name
    assert loaded.codebook_sizes == fitted[name].codebook_sizes
    assert (loaded.encode(vectors) == digits).all()
    assert (loaded.decode(digits) == fitted[name].decode(digits)).all()


@pytest.mark.parametrize("name", QUANTIZERS)
def test_a_truncated_file_is_named(name, fitted, tmp_path):
    save_quantizer(tmp_path, fitted[name])
    file = tmp_path / "quantizer.safetensors"
    file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(ArtefactError, match=r"quantizer\.safetensors is damaged"):
        load_quantizer(tmp_path)


def test_other_damage_is_named(fitted, tmp_path):
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
def test_bad_vectors_are_refused_by_row(name, fitted, vectors):
    bad = vectors.copy()
    bad[7, 2] = np.nan
    with pytest.raises(DataError, match="row 7 "):
        fit_quantizer(bad, replace(CONFIG, quantizer=name))
    with pytest.raises(DataError, match="row 7 "):
        fitted[name].encode(bad)


@pytest.mark.parametrize("name", READ_VECTORS)
def test_too_few_or_equal_vectors_are_refused(name, vectors):
    with pytest.raises(DataError, match="lower --codes to 5 or less"):
        fit_quantizer(vectors[:5], replace(CONFIG, quantizer=name))
    with pytest.raises(DataError, match="all 300 embeddings are equal"):
        fit_quantizer(np.ones_like(vectors), replace(CONFIG, quantizer=name))


@pytest.mark.parametrize(("setting", "value"), [("levels", 0), ("codes", 1), ("restarts", 0)])
def test_impossible_settings(setting, value, vectors):
    with pytest.raises(RequestError, match=f"^{setting} is {value}; it must be"):
        fit_quantizer(vectors, replace(CONFIG, **{setting: value}))


def test_unknown_name():
    with pytest.raises(RequestError, match="no quantiser 'zip'; choose one of residual-kmeans,"):
        quantizer_class("zip")


def test_the_error_of_a_level_is_the_mean_squared_distance(fitted, vectors):
    quantizer = fitted["residual-kmeans"]
    digits = quantizer.encode(vectors)
    gaps = [np.square(normalise(vectors) - quantizer.decode(digits, n)).sum(1) for n in (1, 2, 3)]
    assert np.allclose(
        reconstruction_errors(quantizer, vectors, digits), [gap.mean() for gap in gaps]
    )


def test_the_registry_imports_nothing_heavy():
    code = (
        "import sys, maskgr.sids.quantizers; "
        "print({'torch', 'faiss', 'scipy', 'safetensors'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
