from dataclasses import replace

import numpy as np
import pytest
import torch

from maskgr.sids.config import QuantizerConfig
from maskgr.sids.quantizers import reconstruction_errors
from maskgr.sids.rqvae import (
    Quantised,
    Rqvae,
    RqvaeNetwork,
    _revive,
    closest,
    rotation,
    straight_through,
)

CONFIG = QuantizerConfig(
    quantizer="rqvae",
    levels=3,
    codes=16,
    rqvae_hidden=(32,),
    rqvae_latent=8,
    rqvae_steps=200,
    rqvae_batch=128,
    rqvae_learning_rate=5e-3,
    device="cpu",
)


@pytest.fixture(scope="module")
def vectors():
    generator = np.random.default_rng(0)
    centres = generator.standard_normal((20, 12))
    return centres[generator.integers(20, size=400)] + generator.normal(0, 0.4, (400, 12))


@pytest.mark.parametrize("estimator", ["straight-through", "rotation"])
def test_training_lowers_the_error_and_uses_the_codes(estimator, vectors):
    untrained = Rqvae.fit(vectors, replace(CONFIG, rqvae_steps=1, rqvae_estimator=estimator))
    trained = Rqvae.fit(vectors, replace(CONFIG, rqvae_estimator=estimator))
    first, last = (
        reconstruction_errors(q, vectors, q.encode(vectors))[-1] for q in (untrained, trained)
    )
    assert last < 0.5 * first
    assert all(len(np.unique(column)) >= 15 for column in trained.encode(vectors).T)


def test_encode_is_brute_force_nearest_level_by_level(vectors):
    quantizer = Rqvae.fit(vectors, replace(CONFIG, rqvae_steps=5))
    rows = torch.from_numpy((vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype("f4"))
    residuals = quantizer.network.encoder(rows).detach()
    for level, book in enumerate(quantizer.network.codebooks):
        codes = torch.cdist(residuals, book.weight).argmin(dim=1)
        assert (quantizer.encode(vectors)[:, level] == codes.numpy()).all()
        residuals = residuals - book(codes).detach()


def test_the_callers_random_state_is_left_alone(vectors):
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    Rqvae.fit(vectors, replace(CONFIG, rqvae_steps=2))
    assert torch.equal(torch.rand(2), expected)


def test_both_estimators_give_the_quantised_value():
    latents, quantised = torch.randn(2, 30, 5)
    assert torch.allclose(straight_through(latents, quantised), quantised, atol=1e-5)
    assert torch.allclose(rotation(latents, quantised), quantised, atol=1e-5)


def test_straight_through_hands_the_gradient_on_unchanged():
    latents = torch.randn(4, 3, requires_grad=True)
    slope = torch.randn(4, 3)
    (straight_through(latents, torch.randn(4, 3)) * slope).sum().backward()
    assert torch.equal(latents.grad, slope)


def test_rotation_turns_and_scales_the_gradient():
    # From (1, 0) to (0, 2): a quarter turn and a scale of 2, so the gradient is turned back by it.
    latents = torch.tensor([[1.0, 0.0]], requires_grad=True)
    (rotation(latents, torch.tensor([[0.0, 2.0]])) * torch.tensor([[5.0, 7.0]])).sum().backward()
    assert torch.allclose(latents.grad, torch.tensor([[14.0, -10.0]]))


def test_losses_pull_codes_and_latents_apart_from_each_other():
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
