"""The dense head and text as an input: what leaks, what learns, what it costs."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from maskgr.config import DenseConfig, NetworkConfig, ObjectiveConfig
from maskgr.errors import RequestError
from maskgr.models.dense import DenseHead, LowRank
from maskgr.models.maskgr.objective import masked_rows, negative_elbo
from maskgr.models.network import Network
from maskgr.nn.layout import Layout

SIZES = (4, 3, 2)
DIGITS = torch.tensor(list(product(range(4), range(3), range(2))))  # of 24 items
NUMBERS = torch.tensor([5, 7, 1, 2, 3, 23])
LAYOUT = Layout.of([6, 12])
TEXT = torch.randn(24, 5, generator=torch.Generator().manual_seed(3))


def network(dense: DenseConfig, text: torch.Tensor = TEXT, **changes: Any) -> Network:
    torch.manual_seed(0)
    config = NetworkConfig(layers=3, width=16, heads=2, hidden=32, **changes)
    made = Network(config, SIZES, dense, text)
    for parameter in made.parameters():  # far from the start, where everything is alike
        torch.nn.init.normal_(parameter, std=0.5)
    return made.eval()


def digit_states(net: Network, masked: torch.Tensor) -> torch.Tensor:
    rows, _ = masked_rows(masked, 3)
    with torch.no_grad():
        return net.denoise(DIGITS[NUMBERS], masked, LAYOUT, rows, NUMBERS).digits


def test_a_partly_masked_item_does_not_leak_through_its_text() -> None:
    dense = DenseConfig(text_input=True, table="text")
    masked = torch.zeros(18, dtype=torch.bool)
    masked[[6, 7, 10]] = True  # two digits of item 1, one of item 2
    plain = digit_states(network(dense), masked)
    for item, leaks in ((1, False), (2, False), (7, True), (3, True)):  # 7, 3: wholly visible
        text = TEXT.clone()
        text[item] += 10 * torch.randn(5)
        other = network(dense, text)
        # what is centred is the whole catalogue: compare under the same centre
        other.text_mean, other.text_basis = network(dense).text_mean, network(dense).text_basis
        found = digit_states(other, masked)
        same_sequence = slice(None) if item != 7 else slice(0, 0)
        if leaks and item != 7:
            assert not torch.allclose(found, plain)
        else:
            assert torch.equal(found[same_sequence], plain[same_sequence])


@pytest.mark.parametrize("attention", ["full", "isolated", "causal"])
@pytest.mark.parametrize("table", ["text", "learned"])
@pytest.mark.parametrize("cosine", [False, True])
def test_every_parameter_is_registered_learns_and_is_saved(
    attention: str, table: str, cosine: bool
) -> None:
    dense = DenseConfig(
        text_input=True, table=table, layer=0 if attention == "causal" else 2,  # type: ignore[arg-type]
        hidden=6, rank=2, similarity="cosine" if cosine else "product", temperature=0.1,
        learn_temperature=True, repeat_bias=False,
    )  # fmt: skip
    alone = int(attention == "causal")  # layers of the history
    net = network(dense, attention=attention, history_layers=alone).train()
    noise = net.draw_noise(
        LAYOUT, ObjectiveConfig(whole_item=1.0), torch.Generator().manual_seed(1)
    )
    loss, states = negative_elbo(net, DIGITS[NUMBERS], LAYOUT, noise, None, NUMBERS)
    assert states.queries is not None
    assert states.predicted is not None
    assert len(states.predicted)
    scores = states.queries @ net.table(DIGITS).T
    dense_loss = functional.cross_entropy(scores, NUMBERS[states.predicted])
    (loss.total + dense_loss).backward()
    for name, parameter in net.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name
    saved = net.state_dict()
    assert set(saved) == {name for name, _ in net.named_parameters()} | {"text_mean", "text_basis"}
    again = Network(net.config, SIZES, dense, TEXT)
    again.load_state_dict(saved)
    masked = torch.ones(18, dtype=torch.bool)
    assert torch.equal(digit_states(net.eval(), masked), digit_states(again.eval(), masked))


def test_only_wholly_masked_items_are_predicted() -> None:
    net = network(DenseConfig(table="text", layer=1))
    masked = torch.zeros(18, dtype=torch.bool)
    masked[[0, 1, 2, 6, 7, 15, 16, 17]] = True
    with torch.no_grad():
        states = net.denoise(DIGITS[NUMBERS], masked, LAYOUT, masked_rows(masked, 3)[0], NUMBERS)
    assert states.predicted is not None
    assert states.predicted.tolist() == [0, 5]
    assert states.queries is not None
    assert states.queries.shape == (2, 5)


def test_evaluation_is_deterministic_and_dropout_is_off() -> None:
    net = network(DenseConfig(text_input=True, table="learned"), dropout=0.5)
    masked = torch.ones(18, dtype=torch.bool)
    assert torch.equal(digit_states(net, masked), digit_states(net, masked))
    net.train()
    assert not torch.equal(digit_states(net, masked), digit_states(net, masked))


def test_factors_are_a_map_and_stay_apart() -> None:
    low = LowRank(40, 50, 3)
    x = torch.randn(7, 40)
    torch.testing.assert_close(
        low(x), x @ (low.up.weight @ low.down.weight).T + low.up.bias, atol=1e-5, rtol=1e-4
    )
    with FlopCounterMode(display=False) as counter:
        low(x)
    assert counter.get_total_flops() == 2 * 7 * 3 * (40 + 50)
    head = DenseHead(DenseConfig(hidden=256, rank=32), 640, 4096)
    with FlopCounterMode(display=False) as counter:
        head(torch.randn(7, 640))
    assert counter.get_total_flops() == 7 * head.flops == 7 * 2 * 32 * (640 + 256 + 256 + 4096)
    assert head.outputs == 4096


def test_scores_by_hand() -> None:
    states, vectors = torch.randn(3, 16), torch.randn(9, 8)
    for similarity, temperature, scale in (("product", 0.0, 8**-0.5), ("cosine", 0.2, 5.0)):
        head = DenseHead(
            DenseConfig(hidden=0, similarity=similarity, temperature=temperature),  # type: ignore[arg-type]
            16,
            8,
        )
        raw = head.maps(functional.layer_norm(states, (16,)))
        if similarity == "cosine":
            expected = functional.cosine_similarity(raw[:, None], vectors[None], dim=-1)
        else:
            expected = raw @ vectors.T
        torch.testing.assert_close(head(states) @ head.targets(vectors).T, scale * expected)


def test_a_new_items_vector_is_what_digits_and_text_say() -> None:
    pooled = {"attention": "causal", "history": "pooled", "history_layers": 1}
    net = network(DenseConfig(text_input=True, table="learned"), **pooled)
    torch.nn.init.zeros_(net.items.own.weight)
    alone = network(DenseConfig(text_input=True), **pooled)  # no part of its own
    alone.load_state_dict(net.state_dict(), strict=False)
    torch.testing.assert_close(net.table(DIGITS), alone.item_vectors(DIGITS, torch.arange(24)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer": 4}, "dense.layer is 4 in a network of 3 layers"),
        ({"rank": -1}, "dense.rank is -1"),
        ({"repeat_bias": True}, "repeat_bias goes with network.attention=causal"),
    ],
)
def test_bad_settings(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        network(DenseConfig(table="text", **changes))


def test_text_must_be_given() -> None:
    with pytest.raises(RequestError, match="need the items' text embeddings"):
        Network(NetworkConfig(), SIZES, DenseConfig(table="text"))


@pytest.mark.parametrize("changes", [{"layer": 1}, {"history_layers": 0}])
def test_a_causal_head_reads_the_history_after_its_own_layers(changes: dict[str, int]) -> None:
    dense = DenseConfig(table="learned", layer=changes.get("layer", 0))
    with pytest.raises(RequestError, match="reads the history after its own layers"):
        network(dense, attention="causal", history_layers=changes.get("history_layers", 1))
