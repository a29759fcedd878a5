"""Histories as a denoiser: against the plain network, with and without the cache."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from maskgr.config import NetworkConfig
from maskgr.data.sequences import Sequences
from maskgr.models.history import Cache, Histories
from maskgr.models.network import Network
from maskgr.nn.layout import Layout

SIZES = (4, 3, 2)
DIGITS = torch.tensor(list(product(range(4), range(3), range(2))))
HISTORIES = Sequences.of([[], [5], [7], [1, 2], [3, 23, 0], [9, 9, 9]])


def network(attention: str = "full") -> Network:
    torch.manual_seed(0)
    config = NetworkConfig(layers=3, width=16, heads=2, hidden=32, attention=attention)  # type: ignore[arg-type]
    made = Network(config, SIZES)
    for parameter in made.parameters():  # far from the start, where everything is alike
        torch.nn.init.normal_(parameter, std=0.5)
    return made.eval()


def alone(net: Network, user: int, tokens: Tensor, items: int) -> list[Tensor]:
    """Level by level (items, codes): one sequence through the network by itself."""
    past = net.tokenise(DIGITS[torch.from_numpy(HISTORIES[user]).long()])
    whole = torch.cat([past, tokens.flatten()])
    states = net.hidden(whole, Layout.of([len(whole)]), target_items=items)[len(past) :]
    by_item = states.view(items, len(SIZES), -1)
    return [net.log_probs(by_item[:, level], level) for level in range(len(SIZES))]


@pytest.mark.parametrize("attention", ["full", "isolated"])
@pytest.mark.parametrize("items", [1, 2])
def test_the_first_step_against_one_sequence_at_a_time(attention: str, items: int) -> None:
    net = network(attention)
    first = Histories(net, HISTORIES, DIGITS, items=items, cache="off").first()
    masked = torch.full((items, len(SIZES)), net.mask_token)
    for user in range(len(HISTORIES)):
        for level, expected in enumerate(alone(net, user, masked, items)):
            torch.testing.assert_close(first[level][user], expected)


CASES: list[tuple[str, Cache]] = [
    ("full", "off"), ("isolated", "off"), ("isolated", "frozen"),
]  # fmt: skip


@pytest.mark.parametrize("items", [1, 2])
@pytest.mark.parametrize(("attention", "cache"), CASES)
def test_later_steps_against_one_sequence_at_a_time(
    attention: str, cache: Cache, items: int
) -> None:
    net = network(attention)
    denoiser = Histories(net, HISTORIES, DIGITS, items=items, cache=cache)
    denoiser.first()
    generator = torch.Generator().manual_seed(1)
    user = torch.tensor([0, 0, 1, 3, 3, 3, 5])
    digits = DIGITS[torch.randint(24, (7, items), generator=generator)]
    revealed = torch.rand(digits.shape, generator=generator) < 0.5
    wanted = ~revealed & (torch.rand(digits.shape, generator=generator) < 0.7)
    found = denoiser(user, digits, revealed, wanted)
    tokens = torch.where(revealed, net.tokenise(digits.view(-1, 3)).view_as(digits), net.mask_token)
    for level in range(len(SIZES)):
        expected = [
            alone(net, int(user[row]), tokens[row], items)[level][item]
            for row, item in wanted[:, :, level].nonzero().tolist()
        ]
        torch.testing.assert_close(found[level], torch.stack(expected), atol=1e-4, rtol=1e-4)


def test_frozen_is_an_approximation_where_the_history_sees_the_target() -> None:
    net = network("full")
    user = torch.arange(len(HISTORIES))
    digits = DIGITS[user + 3].unsqueeze(1)
    revealed = torch.tensor([True, True, False]).expand_as(digits)
    answers = []
    for cache in ("off", "frozen"):
        denoiser = Histories(net, HISTORIES, DIGITS, items=1, cache=cache)  # type: ignore[arg-type]
        denoiser.first()
        answers.append(denoiser(user, digits, revealed, ~revealed)[2])
    torch.testing.assert_close(answers[0][0], answers[1][0])  # there is no history to differ
    assert not torch.allclose(answers[0][3:], answers[1][3:], atol=1e-3)


def test_many_rows_go_in_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    net = network()
    user = torch.arange(len(HISTORIES)).repeat_interleave(4)
    digits = DIGITS[torch.arange(len(user)) % 24].unsqueeze(1)
    revealed = torch.tensor([True, False, False]).expand_as(digits)
    answers = []
    for tokens in (10**6, 20):
        monkeypatch.setattr("maskgr.models.history.TOKENS", tokens)
        denoiser = Histories(net, HISTORIES, DIGITS, items=1, cache="off")
        denoiser.first()
        answers.append(denoiser(user, digits, revealed, ~revealed))
    for one, other in zip(*answers, strict=True):
        torch.testing.assert_close(one, other)
