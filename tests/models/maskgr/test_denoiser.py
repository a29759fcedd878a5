from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

from maskgr.data.sequences import Sequences
from maskgr.data.splits import Holdout
from maskgr.evaluation.ranking import Query, Ranked
from maskgr.models.maskgr.denoiser import (
    CHANGE,
    Denoiser,
    HistoryMemory,
    choose_change,
    fit_codes,
)
from maskgr.nn.transformer import Layout, TransformerConfig
from tests.models.tiny import randomise

SIZES, WIDTH = (3, 2, 4), 8
LENGTHS = [1, 2, 2, 5]
CONFIG = TransformerConfig(layers=1, width=WIDTH, heads=2, hidden=16, dropout=0.5)


def denoiser(items: int = 1) -> Denoiser:
    torch.manual_seed(0)
    made = Denoiser(CONFIG, SIZES, items).eval()
    randomise(made)
    return made


def digits(rows: int, seed: int = 0, items: int = 1) -> tuple[Tensor, Tensor]:
    """Random codes (rows, items, levels), and which of them are revealed."""
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, items)
    codes = torch.stack([torch.randint(n, shape, generator=generator) for n in SIZES], 2)
    return codes, torch.rand(*shape, len(SIZES), generator=generator) < 0.5


def places(rows: int, place: int = 0) -> Tensor:
    return torch.full((rows,), place)


def states(lengths: Sequence[int]) -> tuple[Tensor, Layout]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(sum(lengths), WIDTH, generator=generator), Layout.of(lengths)


def test_an_untrained_denoiser_changes_no_query() -> None:
    hidden, layout = states(LENGTHS)
    change = Denoiser(CONFIG, SIZES)(hidden, layout, *digits(len(hidden)), places(len(hidden)))
    assert (change == 0).all()


@torch.no_grad()
@pytest.mark.parametrize("best", CHANGE)
def test_change_of_queries_is_scaled_to_what_validation_chooses(best: float) -> None:
    own, (hidden, layout) = denoiser(), states(LENGTHS)
    asked = (hidden, layout, *digits(len(hidden)), places(len(hidden)))
    learned = own(*asked)
    holdout = Holdout(np.arange(1), Sequences.of([[0]]), np.array([[7]]))

    def rank(query: Query) -> Ranked:
        """The target first if the denoiser changes queries by the best share, else second."""
        found = [7, 8] if torch.allclose(own(*asked), best * learned) else [8, 7]
        return Ranked(np.array([found], dtype=np.int32), np.zeros((1, 2), dtype=np.float32))

    assert choose_change(own, rank, holdout, top=2) == best
    torch.testing.assert_close(own(*asked), best * learned)


@torch.no_grad()
@pytest.mark.parametrize(("items", "place"), [(1, 0), (2, 0), (2, 1)])
def test_memory_gives_the_change_at_the_last_token_of_each_history(items: int, place: int) -> None:
    own, (hidden, layout) = denoiser(items), states(LENGTHS)
    memory = HistoryMemory(own, hidden, layout)
    ends = torch.tensor(LENGTHS).cumsum(0) - 1
    assert torch.equal(memory.last, hidden[ends])
    for seed in range(3):  # three different beams of each user
        codes, revealed = digits(len(hidden), seed, items)
        everywhere = own(hidden, layout, codes, revealed, places(len(hidden), place))
        asked = memory.change(torch.arange(4), codes[ends], revealed[ends], place)
        torch.testing.assert_close(asked, everywhere[ends])
    # Several beams of some users at once, none of others.
    user = torch.tensor([0, 2, 2, 2, 3])
    codes, revealed = digits(5, 0, items)
    together = memory.change(user, codes, revealed, place)
    for row in range(5):
        part = slice(row, row + 1)
        alone = memory.change(user[part], codes[part], revealed[part], place)
        torch.testing.assert_close(together[part], alone)


@torch.no_grad()
def test_histories_of_other_lengths_do_not_matter() -> None:
    own, (hidden, layout) = denoiser(), states(LENGTHS)
    memory, (codes, revealed) = HistoryMemory(own, hidden, layout), digits(4)
    together = memory.change(torch.arange(4), codes, revealed)
    for user, states_of_user in enumerate(torch.split(hidden, LENGTHS)):
        alone = HistoryMemory(own, states_of_user, Layout.of([LENGTHS[user]]))
        rows = slice(user, user + 1)
        change = alone.change(torch.tensor([0]), codes[rows], revealed[rows])
        torch.testing.assert_close(change, together[rows])


@torch.no_grad()
@pytest.mark.parametrize(("items", "place"), [(1, 0), (2, 1)])
def test_a_change_depends_on_the_history_and_the_revealed_digits_alone(
    items: int, place: int
) -> None:
    own, (hidden, layout) = denoiser(items), states([4])
    codes, revealed = digits(4, 0, items)
    revealed[2] = torch.tensor([True, False, True])

    def change(hidden: Tensor, codes: Tensor) -> Tensor:
        found: Tensor = own(hidden, layout, codes, revealed, places(4, place))
        return found

    expected = change(hidden, codes)
    masked = torch.where(revealed, codes, (codes + 1) % torch.tensor(SIZES))
    torch.testing.assert_close(change(hidden, masked), expected)
    later = torch.cat([hidden[:3], -hidden[3:]])
    torch.testing.assert_close(change(later, codes)[:3], expected[:3])
    earlier = torch.cat([-hidden[:1], hidden[1:]])
    assert not torch.allclose(change(earlier, codes)[2], expected[2])
    for item in range(items):  # its own digits, and those of the other items of the session
        other = codes.clone()
        other[:, item] = (codes + revealed)[:, item] % torch.tensor(SIZES)
        assert not torch.allclose(change(hidden, other)[2], expected[2])


@torch.no_grad()
def test_an_item_of_a_session_is_asked_for_by_its_place() -> None:
    own, (hidden, layout) = denoiser(2), states([4])
    codes, revealed = digits(4, 0, 2)
    nothing = torch.zeros_like(revealed)
    first, second = (own(hidden, layout, codes, nothing, places(4, place)) for place in (0, 1))
    assert not torch.allclose(first, second)
    # The digits of two items are told apart.
    swapped = own(hidden, layout, codes.flip(1), revealed.flip(1), places(4))
    assert not torch.allclose(own(hidden, layout, codes, revealed, places(4)), swapped)


def test_codes_are_fitted_exactly_where_vectors_are_sums_of_codes() -> None:
    rng = np.random.default_rng(0)
    codes = np.array(list(product(*map(range, SIZES))))
    parts = [rng.normal(size=(size, WIDTH)) for size in SIZES]
    vectors = sum(part[codes[:, level]] for level, part in enumerate(parts))
    tokens = fit_codes(vectors, codes, SIZES)
    assert tokens.shape == (sum(SIZES), WIDTH)
    found = sum(tokens[start + codes[:, level]] for level, start in enumerate((0, 3, 5)))
    np.testing.assert_allclose(found, vectors, atol=1e-5)


def test_codes_are_nearly_the_least_squares_where_vectors_are_anything() -> None:
    rng = np.random.default_rng(0)
    codes = np.stack([rng.integers(size, size=60) for size in SIZES], 1)
    vectors = rng.normal(size=(60, WIDTH))
    tokens = fit_codes(vectors, codes, SIZES)
    design = np.concatenate([np.eye(n)[codes[:, level]] for level, n in enumerate(SIZES)], 1)
    best = np.linalg.lstsq(design, vectors, rcond=None)[0]
    error = np.square(vectors - design @ tokens).sum()
    assert error == pytest.approx(np.square(vectors - design @ best).sum(), rel=1e-3)


def test_codes_of_no_item_are_zero() -> None:
    tokens = fit_codes(np.ones((2, WIDTH)), np.array([[0, 1, 0], [1, 1, 0]]), SIZES)
    assert (tokens[[2, 3, 6, 7, 8]] == 0).all()
    np.testing.assert_allclose(tokens[[0, 4, 5]].sum(0), np.ones(WIDTH), rtol=1e-6)
