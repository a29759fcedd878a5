from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from maskgr.models.maskgr.config import ObjectiveConfig
from maskgr.models.maskgr.noise import (
    draw_noise,
    last_items,
    mask_items,
    mask_last_item,
    mask_tokens,
    stratified_levels,
)

SEQUENCES = torch.tensor([0, 0, 1, 1, 1, 1])  # one item, two items; two digits each


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def repeated(times: int) -> tuple[torch.Tensor, torch.Tensor]:
    """SEQUENCES many times over, and the levels 0.25 and 0.6 of each pair of sequences."""
    sequences = (SEQUENCES + 2 * torch.arange(times)[:, None]).flatten()
    return sequences, torch.tensor([0.25, 0.6]).repeat(times)


def share_is(draws: torch.Tensor, probability: float) -> None:
    """Within five standard errors."""
    error = 5 * (probability * (1 - probability) / draws.numel()) ** 0.5
    assert draws.double().mean().item() == pytest.approx(probability, abs=error)


@given(st.integers(1, 300), st.integers(0, 100))
def test_stratified_levels_have_one_in_each_stratum(count: int, seed: int) -> None:
    levels = stratified_levels(count, generator(seed))
    assert (levels > 0).all()
    assert (levels <= 1).all()
    strata = (levels.double() * count - 1e-4).floor().long().sort().values
    assert (strata - torch.arange(count)).abs().max() <= (count > 1)
    edges = torch.arange(count + 1).double() / count
    ordered = levels.double().sort().values
    assert (ordered > edges[:-1] - 1e-6).all()
    assert (ordered <= edges[1:] + 1e-6).all()


def test_each_level_by_itself_is_uniform() -> None:
    source = generator()
    levels = torch.stack([stratified_levels(3, source) for _ in range(4000)])  # (draws, 3)
    for edge in (0.1, 1 / 3, 0.5, 0.9):
        for place in range(3):
            share_is(levels[:, place] <= edge, edge)


def test_tokens_are_masked_independently_with_their_sequences_level() -> None:
    sequences, levels = repeated(20_000)
    draws = mask_tokens(levels, sequences, generator()).view(-1, 6)
    for token, level in enumerate([0.25, 0.25, 0.6, 0.6, 0.6, 0.6]):
        share_is(draws[:, token], level)
    share_is(draws[:, 0] & draws[:, 1], 0.25**2)
    share_is(draws[:, 2] & draws[:, 3] & ~draws[:, 4], 0.6**2 * 0.4)


def test_full_noise_masks_everything() -> None:
    assert mask_tokens(torch.ones(2), SEQUENCES, generator()).all()


def test_mask_items_masks_all_digits_of_an_item_or_none() -> None:
    sequences, levels = repeated(20_000)
    draws = mask_items(levels, sequences, 2, generator()).view(-1, 6)
    assert torch.equal(draws[:, ::2], draws[:, 1::2])
    share_is(draws[:, 0], 0.25)
    share_is(draws[:, 2], 0.6)
    share_is(draws[:, 2] & draws[:, 4], 0.6**2)


def test_last_items_by_hand() -> None:
    assert last_items(SEQUENCES, 2).int().tolist() == [1, 1, 0, 0, 1, 1]
    assert last_items(torch.tensor([0, 0, 0]), 3).all()


def test_last_item_masks_times_weights_equal_independent_masks_times_weights() -> None:
    source = generator()
    digits, count = 3, 30_000
    sequences = torch.arange(count).repeat_interleave(digits)
    levels = stratified_levels(count, source)
    masked, noise = mask_last_item(levels, sequences, digits, source)
    masked = masked.view(count, digits)
    assert masked.any(1).all()
    torch.testing.assert_close(masked.sum(1) / digits, noise)
    beta = {1: 1 / 3, 2: 1 / 6, 3: 1 / 3}  # Beta(k, 4 - k)
    for mask in product([False, True], repeat=digits):
        if any(mask):
            found = (masked == torch.tensor(mask)).all(1).double() / noise
            assert found.mean().item() == pytest.approx(beta[sum(mask)], rel=0.05)


def test_mask_last_item_leaves_the_history_clean() -> None:
    source = generator()
    for _ in range(50):
        masked, _ = mask_last_item(stratified_levels(2, source), SEQUENCES, 2, source)
        assert not masked[2:4].any()


def batch(sequences: int, items: int) -> torch.Tensor:
    return torch.arange(sequences).repeat_interleave(2 * items)


def test_diffusion_masks_half_of_the_tokens_at_a_level_per_sequence() -> None:
    noise = draw_noise(batch(20_000, 2), 2, ObjectiveConfig(), generator())
    assert noise.tokens == 80_000
    share_is(noise.masked, 0.5)
    assert len(noise.levels.unique()) > 19_000


def test_fixed_masking_has_one_level() -> None:
    config = ObjectiveConfig(masking="fixed", fixed_ratio=0.15)
    noise = draw_noise(batch(10_000, 2), 2, config, generator())
    share_is(noise.masked, 0.15)
    assert noise.levels.unique().tolist() == [pytest.approx(0.15)]


def test_share_of_sequences_with_items_masked_whole() -> None:
    noise = draw_noise(batch(20_000, 2), 2, ObjectiveConfig(whole_item=0.3), generator())
    pairs = noise.masked.view(-1, 2)
    # apart in an item only where tokens are masked one by one: there with E[2 t (1 - t)] = 1/3
    share_is(pairs[:, 0] != pairs[:, 1], 0.7 / 3)
    assert noise.tokens == 80_000


def test_share_of_sequences_with_only_the_last_item_masked() -> None:
    noise = draw_noise(batch(20_000, 2), 2, ObjectiveConfig(last_item_share=0.4), generator())
    masked = noise.masked.view(-1, 4)
    # the history is masked in the other 60 % alone, the last item: t on average, or 3/4 (k = 1, 2)
    share_is(masked[:, 0], 0.6 * 0.5)
    share_is(masked[:, 2], 0.6 * 0.5 + 0.4 * 0.75)
    share = (80_000 - noise.tokens.item()) / 40_000  # the history's tokens that were not at stake
    assert share == pytest.approx(0.4, abs=0.02)


def test_same_seed_gives_same_noise() -> None:
    config = ObjectiveConfig(whole_item=0.3, last_item_share=0.4)
    one, two = (draw_noise(SEQUENCES, 2, config, generator(5)) for _ in range(2))
    assert torch.equal(one.masked, two.masked)
    assert torch.equal(one.levels, two.levels)
