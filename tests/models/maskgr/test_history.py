"""Histories as a denoiser: against the plain network, with and without the cache."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from maskgr.data.sequences import Sequences
from maskgr.models.maskgr.config import DenseConfig, NetworkConfig
from maskgr.models.maskgr.history import Cache, Histories
from maskgr.models.maskgr.network import Network
from maskgr.nn.transformer import Layout

SIZES = (4, 3, 2)
CODES = torch.tensor(list(product(range(4), range(3), range(2))))
HISTORIES = Sequences.of([[], [5], [7], [1, 2], [3, 23, 0], [9, 9, 9]])


def network(attention: str = "full", *, dense: bool = False) -> Network:
    torch.manual_seed(0)
    config = NetworkConfig(
        layers=3,
        width=16,
        heads=2,
        hidden=32,
        attention=attention,  # type: ignore[arg-type]
        level_embedding=True,
    )
    text = torch.randn(len(CODES), 5)
    made = Network(config, SIZES, DenseConfig(head=dense, layer=2, hidden=8), text)
    for parameter in made.parameters():  # far from the start, where everything is alike
        torch.nn.init.normal_(parameter, std=0.5)
    return made.eval()


def alone(net: Network, user: int, tokens: Tensor, items: int) -> list[Tensor]:
    """Level by level (items, codes): one sequence through the network by itself."""
    numbers = torch.from_numpy(HISTORIES[user]).long()
    past = net.embed_items(CODES[numbers], numbers)
    whole = torch.cat([past, net.tokens.embed(tokens.flatten())])
    hidden, _ = net.encode(whole, Layout.of([len(whole)]), None, items)
    by_item = hidden[len(past) :].view(items, len(SIZES), -1)
    return [net.tokens.log_probs(by_item[:, level], level) for level in range(len(SIZES))]


@pytest.mark.parametrize("attention", ["full", "isolated"])
@pytest.mark.parametrize("items", [1, 2])
def test_first_step_equals_one_sequence_at_a_time(attention: str, items: int) -> None:
    net = network(attention)
    first = Histories(net, HISTORIES, CODES, items=items, cache="off").first()
    masked = torch.full((items, len(SIZES)), net.mask_token)
    for user in range(len(HISTORIES)):
        for level, expected in enumerate(alone(net, user, masked, items)):
            torch.testing.assert_close(first[level][user], expected)


CASES: list[tuple[str, Cache, bool]] = [
    ("full", "off", False),
    ("isolated", "off", False),
    ("isolated", "frozen", False),
    ("isolated", "frozen", True),
]


@pytest.mark.parametrize("items", [1, 2])
@pytest.mark.parametrize(("attention", "cache", "dense"), CASES)
def test_later_steps_equal_one_sequence_at_a_time(
    attention: str, cache: Cache, dense: bool, items: int
) -> None:
    net = network(attention, dense=dense)
    denoiser = Histories(net, HISTORIES, CODES, items=items, cache=cache)
    denoiser.first()
    generator = torch.Generator().manual_seed(1)
    user = torch.tensor([0, 0, 1, 3, 3, 3, 5])
    codes = CODES[torch.randint(24, (7, items), generator=generator)]
    revealed = torch.rand(codes.shape, generator=generator) < 0.5
    wanted = ~revealed & (torch.rand(codes.shape, generator=generator) < 0.7)
    found = denoiser(user, codes, revealed, wanted)
    tokens = torch.where(
        revealed, net.tokens.numbers(codes.view(-1, 3)).view_as(codes), net.mask_token
    )
    for level in range(len(SIZES)):
        expected = [
            alone(net, int(user[row]), tokens[row], items)[level][item]
            for row, item in wanted[:, :, level].nonzero().tolist()
        ]
        torch.testing.assert_close(found[level], torch.stack(expected), atol=1e-4, rtol=1e-4)


def test_frozen_cache_is_an_approximation_where_the_history_sees_the_target() -> None:
    net = network("full")
    user = torch.arange(len(HISTORIES))
    codes = CODES[user + 3].unsqueeze(1)
    revealed = torch.tensor([True, True, False]).expand_as(codes)
    answers = []
    for cache in ("off", "frozen"):
        denoiser = Histories(net, HISTORIES, CODES, items=1, cache=cache)  # type: ignore[arg-type]
        denoiser.first()
        answers.append(denoiser(user, codes, revealed, ~revealed)[2])
    torch.testing.assert_close(answers[0][0], answers[1][0])  # there is no history to differ
    assert not torch.allclose(answers[0][3:], answers[1][3:], atol=1e-3)


@pytest.mark.parametrize("cache", ["off", "frozen"])
def test_rows_beyond_the_token_budget_go_in_portions(
    monkeypatch: pytest.MonkeyPatch, cache: Cache
) -> None:
    net = network("isolated")
    user = torch.arange(len(HISTORIES)).repeat_interleave(4)
    codes = CODES[torch.arange(len(user)) % 24].unsqueeze(1)
    revealed = torch.tensor([True, False, False]).expand_as(codes)
    answers = []
    for tokens in (10**6, 20):
        monkeypatch.setattr("maskgr.models.maskgr.history.TOKENS", tokens)
        denoiser = Histories(net, HISTORIES, CODES, items=1, cache=cache)
        denoiser.first()
        answers.append(denoiser(user, codes, revealed, ~revealed))
    for one, other in zip(*answers, strict=True):
        torch.testing.assert_close(one, other)


def test_queries_are_what_training_computes_for_a_wholly_masked_last_item() -> None:
    net = network(dense=True)
    found = Histories(net, HISTORIES, CODES, items=1, cache="off").queries()
    for user, history in enumerate(HISTORIES):
        numbers = torch.tensor([*history.tolist(), 0])
        masked = torch.zeros(3 * len(numbers), dtype=torch.bool)
        masked[-3:] = True
        rows, layout = masked.nonzero().squeeze(1), Layout.of([len(masked)])
        with torch.no_grad():
            trained = net.denoise(CODES[numbers], masked, layout, rows, numbers)
        assert trained.queries is not None
        torch.testing.assert_close(found[user], trained.queries[-1], atol=1e-4, rtol=1e-4)
