from __future__ import annotations

import math
from typing import Literal

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from maskgr.config import DenseConfig, NetworkConfig
from maskgr.decoding.catalogue import Catalogue
from maskgr.models.causal import repeat_runs
from maskgr.models.distillation import DenseTeacher
from maskgr.models.maskgr.noise import Noise
from maskgr.models.maskgr.objective import masked_loss, masked_rows
from maskgr.models.network import Network, Part, flops_per_token
from maskgr.nn.layout import Layout

SIZES = (5, 4, 2)


def network(**changes: object) -> Network:
    torch.manual_seed(0)
    config = NetworkConfig(layers=2, width=16, heads=2, hidden=24, **changes)  # type: ignore[arg-type]
    model = Network(config, SIZES)
    torch.nn.init.normal_(model.bias)
    return model.eval()


def test_tokens_are_numbered_level_by_level_and_mask_comes_last() -> None:
    model = network()
    digits = torch.tensor([[0, 0, 0], [4, 3, 1]])
    assert model.tokenise(digits).tolist() == [0, 5, 9, 4, 8, 10]
    assert model.mask_token == 11
    assert model.tokens.num_embeddings == 12


def test_log_probs_by_hand() -> None:
    hidden = torch.randn(7, 16)
    for logits in ("level", "vocabulary"):
        model = network(logits=logits)
        scores = hidden @ model.tokens.weight[:-1].T + model.bias  # (rows, all tokens but the mask)
        for level, part in enumerate(scores.split(SIZES, dim=1)):
            over = part if logits == "level" else scores
            expected = part - over.logsumexp(1, keepdim=True)
            torch.testing.assert_close(model.log_probs(hidden, level), expected)


def test_log_probs_normalise() -> None:
    hidden = torch.randn(7, 16)
    levels = [network().log_probs(hidden, level).exp().sum(1) for level in range(3)]
    torch.testing.assert_close(torch.stack(levels), torch.ones(3, 7))
    paper = network(logits="vocabulary")
    parts = [paper.log_probs(hidden, level).exp().sum(1) for level in range(3)]
    torch.testing.assert_close(torch.stack(parts).sum(0), torch.ones(7))


@pytest.mark.parametrize("logits", ["level", "vocabulary"])
def test_allowed_codes_share_all_the_mass(logits: str) -> None:
    model = network(logits=logits)
    hidden = torch.randn(3, 16)
    allowed = torch.tensor([[1, 0, 1, 1], [0, 1, 0, 0], [1, 1, 1, 1]], dtype=torch.bool)
    log_probs = model.log_probs(hidden, 1, allowed)
    assert torch.equal(log_probs == -torch.inf, ~allowed)
    torch.testing.assert_close(log_probs.exp().sum(1), torch.ones(3))
    free = model.log_probs(hidden, 1)
    torch.testing.assert_close(log_probs[0, 0] - log_probs[0, 2], free[0, 0] - free[0, 2])
    assert log_probs[1, 1] == 0


def test_log_probs_are_float32_under_autocast() -> None:
    model = network()
    layout = Layout.of([6])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = model.hidden(torch.arange(6), layout)
        log_probs = model.log_probs(hidden, 0)
    assert log_probs.dtype == torch.float32
    expected = model.log_probs(model.hidden(torch.arange(6), layout), 0)
    torch.testing.assert_close(log_probs, expected, atol=0.1, rtol=0.1)


def test_isolated_attention_hides_as_many_items_as_are_predicted() -> None:
    model = network(attention="isolated")
    tokens = model.tokenise(torch.tensor([[0, 1, 0], [1, 2, 1], [2, 3, 0]]))
    masked = tokens.clone()
    masked[3:] = model.mask_token
    layout = Layout.of([9])
    one = [model.hidden(t, layout) for t in (tokens, masked)]
    session = [model.hidden(t, layout, target_items=2) for t in (tokens, masked)]
    assert not torch.equal(one[0][:3], one[1][:3])
    assert torch.equal(session[0][:3], session[1][:3])


def test_every_parameter_is_saved_and_learns() -> None:
    model = network().train()
    tokens = model.tokenise(torch.tensor([[0, 1, 0], [1, 2, 1], [2, 3, 0]]))
    tokens[3] = model.mask_token
    hidden = model.hidden(tokens, Layout.of([3, 6]))
    sum(model.log_probs(hidden, level)[:, 0].sum() for level in range(3)).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name
    assert set(model.state_dict()) == {name for name, _ in model.named_parameters()}


def test_saved_and_loaded_is_the_same() -> None:
    model = network()
    other = Network(model.config, SIZES).eval()
    other.load_state_dict(model.state_dict())
    tokens = torch.tensor([0, 6, 9, 11, 11, 11])
    layout = Layout.of([6])
    assert torch.equal(model.hidden(tokens, layout), other.hidden(tokens, layout))


def test_the_papers_network_has_seven_million_parameters() -> None:
    config = NetworkConfig(layers=8, width=128, heads=8, hidden=3072, dropout=0.25)
    for last in (1, 16, 256):  # codes of the digit that tells equal tuples apart
        with torch.device("meta"):
            model = Network(config, (256, 256, 256, 256, last))
        assert sum(p.numel() for p in model.parameters()) == pytest.approx(7.0e6, rel=0.01)


def test_fresh_network_is_nearly_undecided_about_a_masked_digit() -> None:
    torch.manual_seed(0)
    model = Network(NetworkConfig(dropout=0.0), (256, 256))
    tokens = model.tokenise(torch.randint(256, (500, 2)))
    tokens[::2] = model.mask_token
    hidden = model.hidden(tokens, Layout.of([10] * 100))[::2]
    loss = -model.log_probs(hidden, 0).mean().item()
    assert loss == pytest.approx(math.log(256) + 0.5, abs=0.2)  # logits of variance 1


@pytest.mark.parametrize("logits", ["level", "vocabulary"])
def test_flops_against_torchs_own_count(logits: Literal["level", "vocabulary"]) -> None:
    config = NetworkConfig(layers=3, width=16, heads=2, hidden=40, logits=logits)
    model = Network(config, (6, 6))
    tokens = model.tokenise(torch.randint(6, (12, 2)))
    rows = torch.arange(0, 24, 4)  # a quarter of them, all of level 0
    embedded = model.embed(tokens).detach().requires_grad_()
    # torch does not count the products inside its fused attention
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        hidden, _ = model.encode(embedded, Layout.of([8, 8, 8]), rows)
        model.log_probs(hidden, 0).sum().backward()
    assert counter.get_total_flops() == 24 * flops_per_token(model, 8, 0.25)


def test_flops_of_the_causal_layout_against_torchs_own_count() -> None:
    config = NetworkConfig(
        layers=2, width=16, heads=2, hidden=40, attention="causal", history="pooled",
        history_layers=1,
    )  # fmt: skip
    dense = DenseConfig(table="learned", hidden=8, rank=2)
    model = Network(config, (6, 6), dense, torch.randn(9, 3))
    digits = torch.randint(6, (12, 2))
    masked = torch.zeros(24, dtype=torch.bool)
    masked[::4] = True
    rows = masked.nonzero().squeeze(1)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        states = model.denoise(digits, masked, Layout.of([8, 8, 8]), rows, torch.arange(12) % 9)
        assert states.queries is not None
        table = model.table(torch.randint(6, (9, 2))).detach().requires_grad_()
        (model.log_probs(states.digits, 0).sum() + (states.queries @ table.T).sum()).backward()
    assert counter.get_total_flops() == pytest.approx(24 * flops_per_token(model, 8, 0.25))


@pytest.mark.parametrize(("part", "copies"), [("dense", 1), ("digits", 1), ("digits", 3)])
def test_flops_of_a_part_against_torchs_own_count(part: Part, copies: int) -> None:
    config = NetworkConfig(
        layers=2, width=16, heads=2, hidden=40, attention="causal", history="pooled",
        history_layers=2,
    )  # fmt: skip
    dense = DenseConfig(table="learned", hidden=0, rank=0)
    codes = torch.tensor([(a, b) for a in range(3) for b in range(3)])
    catalogue = Catalogue(codes, (3, 3))
    model = Network(config, (3, 3), dense, torch.randn(9, 3))
    model.learn_only(part)
    table = model.table(codes).detach().requires_grad_(part == "dense")
    numbers, layout = torch.arange(12) % 9, Layout.of([8, 8, 8])
    masked = torch.tensor([True, False] * 6 + [True, True] * 6).repeat(copies)  # half are whole
    rows, _ = masked_rows(masked, 2)
    noise = Noise(masked, torch.ones(24 * copies), torch.tensor(24 * copies))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        past = model.remember(codes[numbers], layout, numbers)
        queries = model.queries(past)
        if part == "dense":
            (queries @ table.T).sum().backward()
        else:
            teacher = DenseTeacher(0.5, queries, table, None, catalogue)
            uniform = torch.tensor([0.2, 0.7] * 6 * copies)
            owners = repeat_runs(torch.full((3,), 4), copies)
            digits, lesson = teacher.teach(numbers, owners, uniform, ~masked.view(-1, 2))
            copied = Layout.of([8] * 3 * copies)
            past = past.repeated(copies, copied, 2, 1)
            states = model.predict(past, digits, masked, copied, rows)
            masked_loss(model, states, digits, noise, catalogue, lesson).total.backward()
    expected = 24 * copies * flops_per_token(model, 8, 0.75, part=part, taught=True, copies=copies)
    assert counter.get_total_flops() == pytest.approx(expected, rel=0.02)
