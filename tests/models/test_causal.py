"""The causal layout: training's one pass against decoding, one history and target at a time."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from maskgr.config import DenseConfig, NetworkConfig, ObjectiveConfig
from maskgr.data.sequences import Sequences
from maskgr.errors import RequestError
from maskgr.models.causal import Copies, Past
from maskgr.models.history import Histories
from maskgr.models.maskgr.objective import masked_rows, negative_elbo
from maskgr.models.network import Network
from maskgr.nn.layout import Layout

SIZES = (4, 3, 2)
DIGITS = torch.tensor(list(product(range(4), range(3), range(2))))  # of 24 items
SEQUENCES = [[5], [7], [1, 2], [3, 23, 0, 3], [9, 9, 9, 1]]
NUMBERS = torch.tensor([item for sequence in SEQUENCES for item in sequence])
LAYOUT = Layout.of([3 * len(sequence) for sequence in SEQUENCES])
KINDS = [("tokens", 0), ("tokens", 1), ("pooled", 0), ("pooled", 2)]


def network(history: str, layers: int, *, dense: bool = False, **changes: Any) -> Network:
    torch.manual_seed(0)
    config = NetworkConfig(
        layers=2, width=16, heads=2, hidden=32, attention="causal", history=history,  # type: ignore[arg-type]
        history_layers=layers, **changes,
    )  # fmt: skip
    head = DenseConfig(text_input=True, table="learned", hidden=0) if dense else None
    made = Network(config, SIZES, head, torch.randn(24, 5) if dense else None)
    for parameter in made.parameters():  # far from the start, where everything is alike
        torch.nn.init.normal_(parameter, std=0.5)
    return made.eval()


def alone(net: Network, history: list[int], tokens: Tensor, masked: Tensor) -> list[Tensor]:
    """Level by level (codes,) for one target whose `masked` digits are hidden."""
    denoiser = Histories(net, Sequences.of([history]), DIGITS, items=1, cache="frozen")
    denoiser.first()
    everything = torch.ones(1, 1, 3, dtype=torch.bool)
    found = denoiser(torch.tensor([0]), tokens.view(1, 1, 3), ~masked.view(1, 1, 3), everything)
    return [level[0] for level in found]


def prefixes() -> list[list[int]]:
    return [sequence[:place] for sequence in SEQUENCES for place in range(len(sequence))]


def test_places_by_hand() -> None:
    layout = Layout.of([2, 4])  # one item, two items, of two digits
    past = Past.of(layout, 2, 1)
    plan = Copies.of(past, layout, 2, 1)
    assert past.items.tolist() == [False, True, False]
    assert past.layout.groups == ((1, 1), (1, 2))
    assert past.layout.positions.tolist() == [0, 0, 2]
    assert past.units.tolist() == [0, 0, 1]
    assert past.before.tolist() == [0, 1, 2]
    assert plan.layout.groups == ((1, 3), (1, 6))
    assert plan.layout.positions.tolist() == [0, 2, 3, 0, 2, 2, 3, 4, 5]
    assert plan.order.tolist() == [0, 3, 4, 1, 2, 5, 6, 7, 8]
    assert plan.copies.tolist() == [1, 2, 5, 6, 7, 8]


@pytest.mark.parametrize(("history", "layers"), KINDS)
def test_one_pass_trains_on_what_decoding_meets(history: str, layers: int) -> None:
    net = network(history, layers, dense=layers > 0)
    digits = DIGITS[NUMBERS]
    masked = torch.rand(len(LAYOUT.positions), generator=torch.Generator().manual_seed(2)) < 0.6
    rows, counts = masked_rows(masked, 3)
    with torch.no_grad():
        states = net.denoise(digits, masked, LAYOUT, rows, NUMBERS)
        levels = [
            net.log_probs(part, level)
            for level, part in enumerate(torch.split(states.digits, counts))
        ]
    expected: list[list[Tensor]] = [[], [], []]
    for item, past in enumerate(prefixes()):
        own = masked.view(-1, 3)[item]
        for level, answer in enumerate(alone(net, past, digits[item], own)):
            if own[level]:
                expected[level].append(answer)
    for level in range(3):
        torch.testing.assert_close(
            levels[level], torch.stack(expected[level]), atol=1e-4, rtol=1e-4
        )
    if not layers:
        return
    assert states.predicted is not None
    assert states.predicted.tolist() == list(range(len(NUMBERS)))
    for item, past in enumerate(prefixes()):
        query = Histories(net, Sequences.of([past]), DIGITS, items=1, cache="off").queries()
        assert states.queries is not None
        torch.testing.assert_close(states.queries[item], query[0], atol=1e-4, rtol=1e-4)
    with torch.no_grad():
        alike = net.queries(net.remember(digits, LAYOUT, NUMBERS))
    torch.testing.assert_close(alike, states.queries, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("history", "layers"), KINDS)
def test_estimates_converge_to_the_sum_of_every_items_bound(history: str, layers: int) -> None:
    net = network(history, layers).double()
    sequence = torch.tensor([3, 23, 0])
    exact = 0.0
    for place, item in enumerate(sequence.tolist()):
        for mask in product([False, True], repeat=3):
            if any(mask):
                hidden = torch.tensor(mask)
                past = sequence[:place].tolist()
                answers = alone(net, past, DIGITS[item], hidden)
                nats = -sum(answers[j][DIGITS[item, j]].item() for j in range(3) if mask[j])
                exact += {1: 1 / 3, 2: 1 / 6, 3: 1 / 3}[sum(mask)] * nats  # Beta(k, 4 - k)
    copies, generator = 300, torch.Generator().manual_seed(0)
    layout = Layout.of([9] * copies)
    estimates = []
    with torch.no_grad():
        for _ in range(20):
            noise = net.draw_noise(layout, ObjectiveConfig(), generator)
            digits = DIGITS[sequence].repeat(copies, 1)
            estimates.append(negative_elbo(net, digits, layout, noise)[0].total / copies)
    found = torch.stack(estimates)
    error = (found.std() / len(found) ** 0.5).item()
    assert error < 0.02 * exact
    assert found.mean().item() == pytest.approx(exact, abs=4 * error)


def test_every_parameter_learns() -> None:
    net = network("pooled", 1, dense=True).train()
    noise = net.draw_noise(LAYOUT, ObjectiveConfig(), torch.Generator().manual_seed(0))
    loss, states = negative_elbo(net, DIGITS[NUMBERS], LAYOUT, noise, None, NUMBERS)
    assert states.queries is not None
    scores = states.queries @ net.table(DIGITS).T
    (loss.total + torch.nn.functional.cross_entropy(scores, NUMBERS, reduction="sum")).backward()
    for name, parameter in net.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"history": "pooled"}, "network.history=pooled goes with network.attention=causal"),
        ({"history_layers": 1}, "network.history_layers=1 goes with"),
        ({"layers": 0}, "layers is none"),
    ],
)
def test_what_does_not_go_together(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        Network(NetworkConfig(**changes), SIZES)


def test_masking_that_a_causal_network_cannot_do() -> None:
    for config in (ObjectiveConfig(last_item_share=0.5), ObjectiveConfig(masking="fixed")):
        with pytest.raises(RequestError, match="predicts every item from a clean history"):
            network("pooled", 0).draw_noise(LAYOUT, config, torch.Generator())
