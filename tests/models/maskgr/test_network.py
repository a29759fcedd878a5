from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from maskgr.models.maskgr.config import NetworkConfig
from maskgr.models.maskgr.network import Network
from maskgr.nn.transformer import Layout

SIZES = (5, 4, 2)
CODES = torch.tensor([[0, 1, 0], [1, 2, 1], [2, 3, 0]])


def network(**changes: Any) -> Network:
    torch.manual_seed(0)
    model = Network(NetworkConfig(layers=2, width=16, heads=2, hidden=24, **changes), SIZES)
    torch.nn.init.normal_(model.tokens.bias)
    return model.eval()


def hidden_states(model: Network, tokens: torch.Tensor, **options: Any) -> torch.Tensor:
    return model.encode(model.tokens.embed(tokens), Layout.of([len(tokens)]), **options)[0]


def test_tokens_are_numbered_level_by_level_and_mask_comes_last() -> None:
    model = network()
    codes = torch.tensor([[0, 0, 0], [4, 3, 1]])
    assert model.tokens.numbers(codes).flatten().tolist() == [0, 5, 9, 4, 8, 10]
    assert model.mask_token == 11
    assert model.tokens.table.num_embeddings == 12


@pytest.mark.parametrize("logits", ["level", "vocabulary"])
def test_log_probs_by_hand(logits: str) -> None:
    hidden = torch.randn(7, 16)
    model = network(logits=logits)
    scores = (
        hidden @ model.tokens.table.weight[:-1].T + model.tokens.bias
    )  # (rows, all tokens but the mask)
    for level, part in enumerate(scores.split(SIZES, dim=1)):
        over = part if logits == "level" else scores
        expected = part - over.logsumexp(1, keepdim=True)
        torch.testing.assert_close(model.tokens.log_probs(hidden, level), expected)


@pytest.mark.parametrize("logits", ["level", "vocabulary"])
def test_allowed_codes_share_all_the_mass(logits: str) -> None:
    model = network(logits=logits)
    hidden = torch.randn(3, 16)
    allowed = torch.tensor([[1, 0, 1, 1], [0, 1, 0, 0], [1, 1, 1, 1]], dtype=torch.bool)
    log_probs = model.tokens.log_probs(hidden, 1, allowed)
    assert torch.equal(log_probs == -torch.inf, ~allowed)
    torch.testing.assert_close(log_probs.exp().sum(1), torch.ones(3))
    free = model.tokens.log_probs(hidden, 1)
    torch.testing.assert_close(log_probs[0, 0] - log_probs[0, 2], free[0, 0] - free[0, 2])
    assert log_probs[1, 1] == 0


@pytest.mark.parametrize("logits", ["level", "vocabulary"])
def test_logits_are_float32_under_autocast(logits: str) -> None:
    model = network(logits=logits)
    hidden = 10 * torch.randn(50, 16).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        found = model.tokens.log_probs(hidden, 1)
        rounded = hidden @ model.tokens.table.weight.T  # what autocast makes of such a product
    assert found.dtype == torch.float32
    assert rounded.dtype == torch.bfloat16
    expected = model.tokens.log_probs(hidden.float(), 1)
    assert (rounded.float() - hidden.float() @ model.tokens.table.weight.T).abs().max() > 0.05
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-6)


def test_isolated_attention_hides_as_many_items_as_are_predicted() -> None:
    model = network(attention="isolated")
    tokens = model.tokens.numbers(CODES).flatten()
    masked = tokens.clone()
    masked[3:] = model.mask_token
    one = [hidden_states(model, t) for t in (tokens, masked)]
    two = [hidden_states(model, t, target_items=2) for t in (tokens, masked)]
    assert not torch.equal(one[0][:3], one[1][:3])
    assert torch.equal(two[0][:3], two[1][:3])


def test_a_wholly_masked_item_tells_its_levels_apart_by_their_embedding() -> None:
    masked = torch.full((6,), network().mask_token)
    alike = hidden_states(network(), masked)
    torch.testing.assert_close(alike, alike[:1].expand_as(alike))
    items = hidden_states(network(level_embedding=True), masked).view(2, 3, -1)
    assert torch.pdist(items[0]).min() > 0.1


def test_every_parameter_is_saved_and_learns() -> None:
    model = network(level_embedding=True).train()
    tokens = model.tokens.numbers(CODES).flatten()
    tokens[3] = model.mask_token
    hidden = hidden_states(model, tokens)
    torch.stack(
        [model.tokens.log_probs(hidden, level)[:, 0].sum() for level in range(3)]
    ).sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name
    assert set(model.state_dict()) == {name for name, _ in model.named_parameters()}


def test_paper_network_has_seven_million_parameters() -> None:
    config = NetworkConfig(layers=8, width=128, heads=8, hidden=3072, dropout=0.25)
    for last in (1, 16, 256):  # codes of the digit that tells equal tuples apart
        with torch.device("meta"):
            model = Network(config, (256, 256, 256, 256, last))
        assert sum(p.numel() for p in model.parameters()) == pytest.approx(7.0e6, rel=0.01)


def test_fresh_network_is_nearly_undecided_about_a_masked_digit() -> None:
    torch.manual_seed(0)
    model = Network(NetworkConfig(dropout=0.0), (256, 256))
    tokens = model.tokens.numbers(torch.randint(256, (500, 2))).flatten()
    tokens[::2] = model.mask_token
    with torch.no_grad():
        hidden = model.encode(model.tokens.embed(tokens), Layout.of([10] * 100))[0][::2]
        loss = -model.tokens.log_probs(hidden, 0).mean().item()
    assert loss == pytest.approx(math.log(256) + 0.5, abs=0.2)  # logits of variance 1
