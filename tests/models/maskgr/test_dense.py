"""The dense head and text as an input: what leaks, what learns, what it costs."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from maskgr.errors import RequestError
from maskgr.models.maskgr.config import DenseConfig, NetworkConfig, ObjectiveConfig, PaperConfig
from maskgr.models.maskgr.dense import DenseHead, LowRank
from maskgr.models.maskgr.network import Network
from maskgr.models.maskgr.noise import draw_noise
from maskgr.models.maskgr.objective import masked_rows, negative_elbo
from maskgr.nn.transformer import Layout

SIZES = (4, 3, 2)
CODES = torch.tensor(list(product(range(4), range(3), range(2))))  # of 24 items
NUMBERS = torch.tensor([5, 7, 1, 2, 3, 23])
LAYOUT = Layout.of([6, 12])
TEXT = torch.randn(24, 5, generator=torch.Generator().manual_seed(3))


def network(layer: int = 0, **changes: Any) -> Network:
    torch.manual_seed(0)
    config = NetworkConfig(layers=3, width=16, heads=2, hidden=32, **changes)
    made = Network(config, SIZES, DenseConfig(head=True, layer=layer, hidden=6, rank=2), TEXT)
    for parameter in made.parameters():  # far from the start, where everything is alike
        torch.nn.init.normal_(parameter, std=0.5)
    return made.eval()


def digit_states(net: Network, masked: torch.Tensor) -> torch.Tensor:
    rows, _ = masked_rows(masked, 3)
    with torch.no_grad():
        return net.denoise(CODES[NUMBERS], masked, LAYOUT, rows, NUMBERS).digits


@pytest.mark.parametrize(("item", "read"), [(1, False), (2, False), (7, False), (3, True)])
def test_text_of_a_partly_masked_item_does_not_leak(item: int, read: bool) -> None:
    masked = torch.zeros(18, dtype=torch.bool)
    masked[[6, 7, 10]] = (
        True  # two digits of item 1, one of item 2; both are in the second sequence
    )
    net = network()
    plain = digit_states(net, masked)
    assert net.text is not None
    net.text.text[item] += 10
    # 3 is visible; 7 is visible too, but in the first sequence, of which nothing is asked
    assert torch.equal(digit_states(net, masked), plain) != read


@pytest.mark.parametrize("attention", ["full", "isolated"])
def test_every_parameter_learns_and_is_saved(attention: str) -> None:
    net = network(layer=2, attention=attention).train()
    generator = torch.Generator().manual_seed(1)
    noise = draw_noise(LAYOUT.sequences, 3, ObjectiveConfig(whole_item=1.0), generator)
    loss, states = negative_elbo(net, CODES[NUMBERS], LAYOUT, noise, NUMBERS)
    assert states.queries is not None
    assert states.predicted is not None
    assert 0 < len(states.predicted) < len(NUMBERS)
    scores = states.queries @ TEXT.T
    (loss + functional.cross_entropy(scores, NUMBERS[states.predicted])).backward()
    for name, parameter in net.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name
    saved = net.state_dict()
    assert set(saved) == {n for n, _ in net.named_parameters()} | {"text.mean", "text.basis"}
    again = Network(net.config, SIZES, net.dense_config, TEXT)
    again.load_state_dict(saved)
    masked = torch.ones(18, dtype=torch.bool)
    assert torch.equal(digit_states(net.eval(), masked), digit_states(again.eval(), masked))


def test_loaded_basis_replaces_that_of_a_larger_catalogue() -> None:
    more = torch.cat([TEXT, 3 + torch.randn(9, 5)])
    net = network()
    grown = Network(net.config, SIZES, net.dense_config, more)
    grown.load_state_dict(net.state_dict())
    assert net.text is not None
    assert grown.text is not None
    torch.testing.assert_close(grown.text.text[:24], net.text.text)


def test_only_wholly_masked_items_are_predicted() -> None:
    net = network(layer=1)
    masked = torch.zeros(18, dtype=torch.bool)
    masked[[0, 1, 2, 6, 7, 15, 16, 17]] = True
    with torch.no_grad():
        states = net.denoise(CODES[NUMBERS], masked, LAYOUT, masked_rows(masked, 3)[0], NUMBERS)
    assert states.predicted is not None
    assert states.predicted.tolist() == [0, 5]
    assert states.queries is not None
    assert states.queries.shape == (2, 5)


@pytest.mark.parametrize("layer", [0, 2])
@pytest.mark.parametrize("share", [0, 1])
def test_batches_without_wholly_masked_or_without_visible_items(layer: int, share: int) -> None:
    net = network(layer)
    masked = torch.full((18,), bool(share))
    masked[::3] = True
    rows, _ = masked_rows(masked, 3)
    states = net.denoise(CODES[NUMBERS], masked, LAYOUT, rows, NUMBERS)
    assert states.queries is not None
    assert len(states.queries) == 6 * share
    (states.digits.sum() + states.queries.sum()).backward()
    assert net.tokens.table.weight.grad is not None


def test_head_reads_the_hidden_states_after_its_layer() -> None:
    """Later layers change the digits, and not what the head predicts."""
    net = network(layer=2)
    masked = torch.ones(18, dtype=torch.bool)
    rows, _ = masked_rows(masked, 3)
    before = net.denoise(CODES[NUMBERS], masked, LAYOUT, rows, NUMBERS)
    with torch.no_grad():
        net.encoder.blocks[2].down.bias[0] += 3  # type: ignore[union-attr, index, operator]
    after = net.denoise(CODES[NUMBERS], masked, LAYOUT, rows, NUMBERS)
    assert torch.equal(before.queries, after.queries)  # type: ignore[arg-type]
    assert not torch.allclose(before.digits, after.digits)


def test_low_rank_map_is_the_product_of_its_factors_at_a_fraction_of_the_cost() -> None:
    low = LowRank(40, 50, 3)
    x = torch.randn(7, 40)
    torch.testing.assert_close(
        low(x), x @ (low.up.weight @ low.down.weight).T + low.up.bias, atol=1e-5, rtol=1e-4
    )
    head = DenseHead(DenseConfig(hidden=256, rank=32), 640, torch.randn(3, 4096))
    with FlopCounterMode(display=False) as counter:
        head(torch.randn(7, 640))
    assert counter.get_total_flops() == 7 * 2 * 32 * (640 + 256 + 256 + 4096)


def test_head_by_hand() -> None:
    head = DenseHead(DenseConfig(hidden=12, rank=0), 16, TEXT)
    states = torch.randn(3, 16)
    first, _, second = head.maps
    inner = functional.gelu(functional.layer_norm(states, (16,)) @ first.weight.T + first.bias)
    torch.testing.assert_close(head(states), inner @ second.weight.T + second.bias)
    assert torch.equal(head.table, TEXT)


@pytest.mark.parametrize("changes", [{"layer": -1}, {"hidden": 0}, {"rank": -1}])
def test_raises_when_a_setting_is_out_of_range(changes: dict[str, int]) -> None:
    with pytest.raises(RequestError, match=rf"dense\.{next(iter(changes))} is"):
        DenseConfig(**changes)


def test_raises_when_the_head_reads_a_layer_that_is_not_there() -> None:
    with pytest.raises(RequestError, match=r"dense\.layer is 4 in a network of 3 layers"):
        PaperConfig(network=NetworkConfig(layers=3), dense=DenseConfig(layer=4))
