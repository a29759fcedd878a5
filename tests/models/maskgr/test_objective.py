"""Against enumeration: two items of two digits with three codes, every mask, every order."""

from __future__ import annotations

import math
from itertools import permutations, product

import pytest
import torch
from torch import Tensor

from maskgr.decoding.matching import CodeIndex
from maskgr.models.maskgr.config import NetworkConfig, ObjectiveConfig
from maskgr.models.maskgr.network import Network
from maskgr.models.maskgr.noise import Noise, draw_noise
from maskgr.models.maskgr.objective import masked_rows, negative_elbo
from maskgr.nn.transformer import Layout
from tests.decoding.toy import index

DIGITS = torch.tensor([[2, 0], [1, 2]])
TOKENS = 4
MASKS = [torch.tensor(mask) for mask in product([False, True], repeat=TOKENS)]


@pytest.fixture(scope="module")
def network() -> Network:
    torch.manual_seed(1)
    config = NetworkConfig(layers=2, width=8, heads=2, hidden=12, dropout=0.2)
    return Network(config, (3, 3)).double().eval()


def all_log_conditionals(network: Network, digits: Tensor) -> Tensor:
    """(masks, tokens) log p(token | what the mask leaves), for every mask and token."""
    tokens = (
        network.tokens.numbers(digits).flatten().masked_fill(torch.stack(MASKS), network.mask_token)
    )
    with torch.no_grad():
        hidden, _ = network.encode(
            network.tokens.embed(tokens.flatten()), Layout.of([TOKENS] * len(MASKS))
        )
        levels = [
            network.tokens.log_probs(hidden, level).view(len(MASKS), TOKENS, 3) for level in (0, 1)
        ]
    codes = digits.flatten().tolist()
    return torch.stack([levels[i % 2][:, i, code] for i, code in enumerate(codes)], dim=1)


def log_conditionals(network: Network, digits: Tensor, mask: Tensor) -> Tensor:
    """(tokens,) log p(token | what the mask leaves), for every token."""
    place = next(i for i, other in enumerate(MASKS) if torch.equal(mask, other))
    return all_log_conditionals(network, digits)[place]


def exact_negative_elbo(network: Network, digits: Tensor) -> float:
    """Over all masks: with k of 4 masked, the integral of t^k (1-t)^(4-k) / t is Beta(k, 5-k)."""
    total = 0.0
    for mask in MASKS:
        k = int(mask.sum())
        if k:
            beta = math.gamma(k) * math.gamma(5 - k) / math.gamma(5)
            total -= beta * log_conditionals(network, digits, mask)[mask].sum().item()
    return total


def log_likelihoods_of_orders(network: Network, digits: Tensor) -> Tensor:
    """(24,) for each order of revealing the tokens, the sum of their log-conditionals."""
    rows = all_log_conditionals(network, digits).tolist()
    table = {tuple(mask.tolist()): row for mask, row in zip(MASKS, rows, strict=True)}
    sums = []
    for order in permutations(range(TOKENS)):
        masked = [True] * TOKENS
        total = 0.0
        for place in order:
            total += table[tuple(masked)][place]
            masked[place] = False
        sums.append(total)
    return torch.tensor(sums, dtype=torch.float64)


def nats(
    network: Network,
    codes: Tensor,
    layout: Layout,
    noise: Noise,
    catalogue: CodeIndex | None = None,
) -> Tensor:
    """The negative ELBO of a network that reads no text, so it does not need item numbers."""
    numbers = torch.zeros(len(codes), dtype=torch.int64)
    return negative_elbo(network, codes, layout, noise, numbers, catalogue)[0]


def totals(network: Network, config: ObjectiveConfig, draws: int, rounds: int) -> Tensor:
    """(rounds,) nats a sequence, each the mean over a batch of `draws` copies of one sequence."""
    generator = torch.Generator().manual_seed(0)
    layout = Layout.of([TOKENS] * draws)
    results = []
    with torch.no_grad():
        for _ in range(rounds):
            noise = draw_noise(layout.sequences, 2, config, generator)
            results.append(nats(network, DIGITS.repeat(draws, 1), layout, noise) / draws)
    return torch.stack(results)


def agrees(estimates: Tensor, exact: float) -> None:
    """Within four standard errors, which must themselves be small."""
    error = (estimates.std() / len(estimates) ** 0.5).item()
    assert error < 0.02 * abs(exact)
    assert estimates.mean().item() == pytest.approx(exact, abs=4 * error)


def test_equation_3_by_enumeration_of_all_masks(network: Network) -> None:
    agrees(totals(network, ObjectiveConfig(), 200, 60), exact_negative_elbo(network, DIGITS))


def test_loss_of_one_mask_by_hand(network: Network) -> None:
    mask = torch.tensor([True, False, True, True])
    noise = Noise(mask, torch.full((4,), 0.4), torch.tensor(4))
    with torch.no_grad():
        loss = nats(network, DIGITS, Layout.of([TOKENS]), noise)
    expected = -log_conditionals(network, DIGITS, mask)[mask].sum() / 0.4
    torch.testing.assert_close(loss, expected, atol=1e-5, rtol=1e-5)


def test_loss_of_a_batch_is_the_sum_over_its_sequences(network: Network) -> None:
    torch.manual_seed(0)
    lengths = [2, 4, 4, 6]
    digits = torch.randint(3, (8, 2))
    layout = Layout.of(lengths)
    noise = draw_noise(layout.sequences, 2, ObjectiveConfig(), torch.Generator().manual_seed(3))
    whole = nats(network, digits, layout, noise)
    parts = zip(
        torch.split(digits, [n // 2 for n in lengths]),
        torch.split(torch.arange(len(noise.masked)), lengths),
        strict=True,
    )
    alone = [nats(network, d, Layout.of([len(tokens)]), noise.part(tokens)) for d, tokens in parts]
    torch.testing.assert_close(whole, torch.stack(alone).sum())


def test_loss_is_zero_where_nothing_is_masked(network: Network) -> None:
    noise = Noise(torch.zeros(TOKENS, dtype=torch.bool), torch.full((4,), 0.01), torch.tensor(4))
    assert nats(network, DIGITS, Layout.of([TOKENS]), noise) == 0


def test_elbo_is_the_mean_over_orders_and_below_the_log_of_the_mean(network: Network) -> None:
    orders = log_likelihoods_of_orders(network, DIGITS)
    bound = exact_negative_elbo(network, DIGITS)
    assert bound == pytest.approx(-orders.mean().item(), abs=1e-6)
    # The model that reveals in a uniformly random order has this likelihood, all orders summed out.
    truth = -(orders.logsumexp(0) - math.log(len(orders))).item()
    assert bound > truth


def test_likelihoods_of_all_sequences_sum_to_one(network: Network) -> None:
    total = 0.0
    for codes in product(range(3), repeat=TOKENS):
        orders = log_likelihoods_of_orders(network, torch.tensor(codes).view(2, 2))
        total += orders.exp().mean().item()
    assert total == pytest.approx(1, abs=1e-6)


def test_fixed_ratio_estimates_the_cross_entropy_at_that_level(network: Network) -> None:
    exact = 0.0
    for mask in MASKS:
        k = int(mask.sum())
        weight = 0.3**k * 0.7 ** (TOKENS - k) / 0.3
        exact -= weight * log_conditionals(network, DIGITS, mask)[mask].sum().item()
    config = ObjectiveConfig(masking="fixed", fixed_ratio=0.3)
    agrees(totals(network, config, 200, 60), exact)


def test_whole_items_estimate_the_bound_of_revealing_item_by_item(network: Network) -> None:
    exact = 0.0
    for first, second in ((True, False), (False, True), (True, True)):
        mask = torch.tensor([first, first, second, second])
        weight = 1 / 2  # Beta(1, 2) = Beta(2, 1)
        exact -= weight * log_conditionals(network, DIGITS, mask)[mask].sum().item()
    agrees(totals(network, ObjectiveConfig(whole_item=1.0), 200, 60), exact)


def test_last_item_estimates_its_bound_given_the_history(network: Network) -> None:
    exact = 0.0
    for third, fourth in ((True, False), (False, True), (True, True)):
        mask = torch.tensor([False, False, third, fourth])
        exact -= log_conditionals(network, DIGITS, mask)[mask].sum().item() / 2
    config = ObjectiveConfig(last_item_share=1.0)
    agrees(totals(network, config, 200, 60), exact)
    layout = Layout.of([TOKENS] * 6)
    noise = draw_noise(layout.sequences, 2, config, torch.Generator().manual_seed(0))
    assert noise.tokens == 12  # nats are per token of the last items


def test_masked_rows_come_level_by_level() -> None:
    masked = torch.tensor([1, 0, 1, 1, 0, 1, 0, 1, 1], dtype=torch.bool)
    rows, counts = masked_rows(masked, 3)
    assert rows.tolist() == [0, 3, 7, 2, 5, 8]
    assert counts == [2, 1, 3]


def test_catalogue_aware_by_hand(network: Network) -> None:
    catalogue = index([(2, 0), (1, 2), (2, 1)], (3, 3))
    layout = Layout.of([TOKENS])

    def cost(mask: list[bool]) -> float:
        noise = Noise(torch.tensor(mask), torch.ones(4), torch.tensor(4))
        with torch.no_grad():
            return nats(network, DIGITS, layout, noise, catalogue).item()

    # (1, 2) is the only item with either digit: nothing is left to guess
    assert cost([False, False, True, False]) == 0
    assert cost([False, False, False, True]) == 0
    # (2, 0) with its second digit hidden may be (2, 1) as well, but not (2, 2)
    mask = torch.tensor([False, True, False, False])
    tokens = network.tokens.numbers(DIGITS).flatten().masked_fill(mask, network.mask_token)
    with torch.no_grad():
        free = network.tokens.log_probs(network.encode(network.tokens.embed(tokens), layout)[0], 1)[
            1
        ]
    expected = -(free[0] - free[:2].logsumexp(0)).item()
    assert cost(mask.tolist()) == pytest.approx(expected, abs=1e-5)


def test_catalogue_aware_is_finite_and_never_costs_more(network: Network) -> None:
    catalogue = index([(2, 0), (1, 2), (2, 1), (0, 0)], (3, 3))
    layout = Layout.of([TOKENS])
    for mask in MASKS:
        noise = Noise(mask, torch.ones(4), torch.tensor(4))
        with torch.no_grad():
            aware = nats(network, DIGITS, layout, noise, catalogue)
            free = nats(network, DIGITS, layout, noise)
        assert aware.isfinite()
        assert aware <= free + 1e-6


def test_gradient_of_the_catalogue_aware_loss_is_finite(network: Network) -> None:
    catalogue = index([(2, 0), (1, 2)], (3, 3))
    noise = Noise(torch.ones(TOKENS, dtype=torch.bool), torch.ones(4), torch.tensor(4))
    network.zero_grad()
    nats(network, DIGITS, Layout.of([TOKENS]), noise, catalogue).backward()
    for parameter in network.parameters():
        assert parameter.grad is not None
        assert parameter.grad.isfinite().all()
