from dataclasses import replace

import numpy as np
import pytest
import torch

from maskgr.sids import rqvae
from maskgr.sids.config import QuantizerConfig
from maskgr.sids.quantizers import fit_quantizer, reconstruction_errors
from maskgr.sids.rqvae import Quantised, RqvaeNetwork, _revive, closest, rotation

CONFIG = QuantizerConfig(quantizer="rqvae", levels=3, codes=16, rqvae_latent=8, rqvae_steps=200)


@pytest.fixture(autouse=True)
def _small_network(monkeypatch):
    monkeypatch.setattr(rqvae, "HIDDEN", (32,))
    monkeypatch.setattr(rqvae, "BATCH", 128)
    monkeypatch.setattr(rqvae, "LEARNING_RATE", 5e-3)


def fit(vectors, *, normalise=True, **settings):
    return fit_quantizer(vectors, replace(CONFIG, **settings), normalise=normalise, device="cpu")


@pytest.fixture(scope="module")
def vectors():
    generator = np.random.default_rng(0)
    centres = generator.standard_normal((20, 12))
    return centres[generator.integers(20, size=400)] + generator.normal(0, 0.4, (400, 12))


@pytest.mark.parametrize(("normalise", "scale"), [(True, 1), (False, 1), (False, 1000)])
def test_training_lowers_the_error_and_uses_the_codes(normalise, scale, vectors):
    vectors = vectors * scale
    untrained = fit(vectors, normalise=normalise, rqvae_steps=1)
    trained = fit(vectors, normalise=normalise)
    first, last = (
        reconstruction_errors(q, vectors, q.encode(vectors))[-1] for q in (untrained, trained)
    )
    assert last < 0.5 * first
    assert all(len(np.unique(column)) >= 15 for column in trained.encode(vectors).T)


def test_encode_is_brute_force_nearest_level_by_level(vectors):
    quantizer = fit(vectors, rqvae_steps=5)
    rows = torch.from_numpy((vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype("f4"))
    residuals = quantizer.network.encoder(rows).detach()
    for level, book in enumerate(quantizer.network.codebooks):
        codes = torch.cdist(residuals, book.weight).argmin(dim=1)
        assert (quantizer.encode(vectors)[:, level] == codes.numpy()).all()
        residuals = residuals - book(codes).detach()


def test_fitting_does_not_change_the_global_random_state(vectors):
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    fit(vectors, rqvae_steps=2)
    assert torch.equal(torch.rand(2), expected)


def test_rotation_returns_the_quantised_value():
    latents, quantised = torch.randn(2, 30, 5)
    assert torch.allclose(rotation(latents, quantised), quantised, atol=1e-5)


def test_rotation_turns_and_scales_the_gradient():
    # From (1, 0) to (0, 2): a quarter turn and a scale of 2, so the gradient is turned back by it.
    latents = torch.tensor([[1.0, 0.0]], requires_grad=True)
    (rotation(latents, torch.tensor([[0.0, 2.0]])) * torch.tensor([[5.0, 7.0]])).sum().backward()
    assert torch.allclose(latents.grad, torch.tensor([[14.0, -10.0]]))


def test_codebook_loss_has_no_gradient_for_the_latents():
    network = RqvaeNetwork(dimensions=2, hidden=(), latent=2, levels=1, codes=1)
    latents = torch.tensor([[3.0, 0.0]], requires_grad=True)
    with torch.no_grad():
        network.codebooks[0].weight.copy_(torch.tensor([[1.0, 0.0]]))
    quantised = Quantised(latents, network.books)
    assert quantised.codebook_loss.item() == quantised.commitment_loss.item() == 4
    quantised.codebook_loss.backward()
    assert latents.grad is None
    assert torch.equal(network.codebooks[0].weight.grad, torch.tensor([[-4.0, 0.0]]))


def test_dead_codes_move_to_residuals_and_live_ones_stay():
    torch.manual_seed(0)
    network = RqvaeNetwork(dimensions=2, hidden=(), latent=2, levels=1, codes=3)
    with torch.no_grad():
        network.codebooks[0].weight.copy_(torch.tensor([[0.0, 0.0], [50.0, 0.0], [60.0, 0.0]]))
    latents = torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 2.0]])
    idle = torch.tensor([[100.0, 100.0, 0.0]])
    _revive(network, Quantised(latents, network.books), idle)
    books = network.codebooks[0].weight.detach()
    assert torch.equal(books[[0, 2]], torch.tensor([[0.0, 0.0], [60.0, 0.0]]))
    assert books[1].tolist() in latents.tolist()
    assert idle.tolist() == [[0, 0, 1]]


def test_closest_is_brute_force():
    points, codes = torch.randn(40, 6), torch.randn(9, 6)
    assert torch.equal(closest(points, codes), torch.cdist(points, codes).argmin(dim=1))
