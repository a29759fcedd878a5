"""Compares blockwise losses with the dense logits of small catalogues."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from maskgr.nn import softmax
from maskgr.nn.softmax import (
    Bonus,
    NegativeSampler,
    binary_cross_entropy,
    catalogue_cross_entropy,
    log_normaliser,
    sampled_cross_entropy,
)

# MAX_SCORES, MIN_KEPT_ROWS, BLOCK_ITEMS, and what they make of 7 rows and 11 items: the rows and
# items of a block, and whether all blocks of a row are kept
Shape = tuple[int, int, bool]
BLOCKS: dict[str, tuple[int, int, int, Shape]] = {
    "all in one": (2**22, 64, 1024, (7, 11, True)),
    "blocks of rows": (25, 2, 1024, (2, 11, True)),
    "kept blocks of items": (2**22, 64, 4, (7, 4, True)),
    "kept blocks of both": (25, 2, 5, (2, 4, True)),
    "blocks of items": (28, 64, 1024, (4, 6, False)),
    "single rows": (11, 1, 1024, (1, 11, True)),
    "blocks of both": (4, 64, 1024, (2, 2, False)),
}


@dataclass(frozen=True, eq=False)
class Case:
    queries: Tensor
    table: Tensor
    targets: Tensor
    bonus: Bonus

    @property
    def leaves(self) -> list[Tensor]:
        return [self.queries, self.table, self.bonus.values]

    def loss(self) -> Tensor:
        return catalogue_cross_entropy(self.queries, self.table, self.targets, bonus=self.bonus)

    def logits(self) -> Tensor:
        """(rows, items) with the bonus."""
        places = (self.bonus.rows, self.bonus.items)
        return (self.queries @ self.table.T).index_put(places, self.bonus.values, accumulate=True)

    def brute_force(self) -> Tensor:
        return functional.cross_entropy(self.logits(), self.targets, reduction="sum")


def case(
    rows: int = 7, items: int = 11, width: int = 3, *, seed: int = 0, scale: float = 1
) -> Case:
    """In double; a third of all pairs has a bonus, and so have the targets of even rows."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64) * scale

    targets = torch.randint(items, (rows,), generator=generator)
    has = torch.rand(rows, items, generator=generator) < 1 / 3
    has[torch.arange(rows)[::2], targets[::2]] = True
    owners, owned = has.nonzero(as_tuple=True)
    leaves = normal(rows, width), normal(items, width), normal(len(owners))
    queries, table, values = (leaf.requires_grad_() for leaf in leaves)
    return Case(queries, table, targets, Bonus(owners, owned, values))


def gradients(loss: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad(loss, leaves))


@pytest.fixture(params=BLOCKS)
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Shape:
    cells, few, items, shape = BLOCKS[request.param]
    monkeypatch.setattr(softmax, "MAX_SCORES", cells)
    monkeypatch.setattr(softmax, "MIN_KEPT_ROWS", few)
    monkeypatch.setattr(softmax, "BLOCK_ITEMS", items)
    return shape


def test_block_shapes(blocks: Shape) -> None:
    assert softmax._block_shape(7, 11) == blocks


def test_loss_and_gradients_equal_those_of_dense_logits(blocks: Shape) -> None:
    one = case()
    torch.testing.assert_close(one.loss(), one.brute_force())
    own, expected = (gradients(loss, one.leaves) for loss in (one.loss(), one.brute_force()))
    torch.testing.assert_close(own, expected)


def test_loss_and_gradients_without_bonus(blocks: Shape) -> None:
    one = case()
    loss = catalogue_cross_entropy(one.queries, one.table, one.targets)
    logits = one.queries @ one.table.T
    expected = functional.cross_entropy(logits, one.targets, reduction="sum")
    torch.testing.assert_close(loss, expected)
    leaves = one.leaves[:2]
    torch.testing.assert_close(gradients(loss, leaves), gradients(expected, leaves))


def test_gradients_equal_finite_differences(blocks: Shape) -> None:
    one = case()

    def loss(queries: Tensor, table: Tensor, values: Tensor) -> Tensor:
        bonus = replace(one.bonus, values=values)
        return replace(one, queries=queries, table=table, bonus=bonus).loss()

    assert torch.autograd.gradcheck(loss, one.leaves)


def test_normalisers_equal_those_of_dense_logits(blocks: Shape) -> None:
    one = case()
    found = log_normaliser(one.queries, one.table, bonus=one.bonus)
    torch.testing.assert_close(found, one.logits().logsumexp(1).detach())
    assert not found.requires_grad
    plain = log_normaliser(one.queries, one.table)
    torch.testing.assert_close(plain, (one.queries @ one.table.T).logsumexp(1).detach())


def test_scores_too_large_for_exp_are_exact(blocks: Shape) -> None:
    one = case(scale=60)  # scores of thousands
    torch.testing.assert_close(one.loss(), one.brute_force())
    own, expected = (gradients(loss, one.leaves) for loss in (one.loss(), one.brute_force()))
    torch.testing.assert_close(own, expected)


def test_bonus_of_minus_infinity_removes_items(blocks: Shape) -> None:
    one = case()
    keep = torch.tensor([3, 4, 10])  # some blocks lose all their items
    others = torch.tensor([item for item in range(11) if item not in keep])
    bonus = Bonus(
        torch.arange(7).repeat_interleave(len(others)),
        others.repeat(7),
        torch.full((56,), -math.inf),
    )
    targets = torch.tensor([0, 1, 2, 0, 1, 2, 0])
    loss = catalogue_cross_entropy(one.queries, one.table, keep[targets], bonus=bonus)
    expected = catalogue_cross_entropy(one.queries, one.table[keep], targets)
    torch.testing.assert_close(loss, expected)
    leaves = one.leaves[:2]
    torch.testing.assert_close(gradients(loss, leaves), gradients(expected, leaves))


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 9),
    st.integers(1, 9),
    st.integers(1, 4),
    st.integers(1, 100),
    st.integers(1, 8),
    st.integers(1, 9),
    st.integers(0, 10**6),
)
def test_loss_and_gradients_with_any_shape_and_block_shape(
    rows: int, items: int, width: int, cells: int, few: int, most: int, seed: int
) -> None:
    one = case(rows, items, width, seed=seed, scale=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(softmax, "MAX_SCORES", cells)
        patch.setattr(softmax, "MIN_KEPT_ROWS", few)
        patch.setattr(softmax, "BLOCK_ITEMS", most)
        height, across, kept = softmax._block_shape(rows, items)
        assert height * (items if kept else across) <= cells
        loss = one.loss()
        own = gradients(loss, one.leaves)
    expected = one.brute_force()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(own, gradients(expected, one.leaves))


@given(st.integers(0, 10**7), st.integers(0, 10**8))
def test_block_shapes_stay_within_bounds(rows: int, items: int) -> None:
    height, width, kept = softmax._block_shape(rows, items)
    assert height <= min(rows, softmax.BLOCK_ROWS)
    assert width <= min(items, softmax.BLOCK_ITEMS)
    assert height * (items if kept else width) <= softmax.MAX_SCORES
    assert (height and width) or not (rows and items)


@pytest.mark.parametrize("wanted", range(3))
def test_only_inputs_that_require_grad_get_gradients(
    wanted: int, blocks: Shape, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = case()
    expected = gradients(one.brute_force(), one.leaves)[wanted]
    for place, leaf in enumerate(one.leaves):
        leaf.requires_grad_(place == wanted)
    made = []
    real = softmax._loss_and_gradients

    def spy(*arguments: object) -> tuple[Tensor, list[Tensor | None]]:
        made.append(real(*arguments))  # type: ignore[arg-type]
        return made[-1]

    monkeypatch.setattr(softmax, "_loss_and_gradients", spy)
    one.loss().backward()
    assert [gradient is not None for gradient in made[0][1]] == [i == wanted for i in range(3)]
    assert [leaf.grad is not None for leaf in one.leaves] == [i == wanted for i in range(3)]
    torch.testing.assert_close(one.leaves[wanted].grad, expected)


def test_blocks_are_computed_twice_only_for_the_gradient_of_a_large_table(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(softmax, "MAX_SCORES", 28)
    made = []
    real = softmax._Scores.compute

    def count(self: softmax._Scores, rows: slice, items: slice) -> Tensor:
        made.append((rows, items))
        return real(self, rows, items)

    monkeypatch.setattr(softmax._Scores, "compute", count)
    one = case()
    one.loss()
    assert len(made) == 2 * 4  # 2 blocks of rows, 2 of items, again for the table's gradient
    made.clear()
    one.table.requires_grad_(False)
    one.loss()
    assert len(made) == 4
    monkeypatch.setattr(softmax, "MAX_SCORES", 2**22)
    made.clear()
    one.table.requires_grad_()
    one.loss()
    assert len(made) == 1


def test_no_gradients_are_computed_without_grad_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    one = case()
    expected = one.brute_force()
    monkeypatch.setattr(softmax._Softmax, "exponentials", None)
    with torch.no_grad():
        loss = one.loss()
    torch.testing.assert_close(loss, expected.detach())
    assert not loss.requires_grad
    for leaf in one.leaves:
        leaf.requires_grad_(False)
    assert not one.loss().requires_grad


def test_backward_scales_gradients_without_copying_them() -> None:
    one = case()
    expected = [3 * gradient for gradient in gradients(one.brute_force(), one.leaves)]
    loss = one.loss()
    held = loss.grad_fn.gradients  # type: ignore[union-attr]
    places = [gradient.data_ptr() for gradient in held]
    del held
    (3 * loss).backward()
    torch.testing.assert_close([leaf.grad for leaf in one.leaves], expected)
    # a copy would double the largest allocation, the table's gradient
    assert [leaf.grad.data_ptr() for leaf in one.leaves if leaf.grad is not None] == places


def test_second_backward_computes_gradients_again() -> None:
    one = case()
    expected = gradients(one.brute_force(), one.leaves)
    loss = one.loss()
    first = torch.autograd.grad(2 * loss, one.leaves, retain_graph=True)
    second = torch.autograd.grad(loss, one.leaves)
    torch.testing.assert_close(list(second), expected)
    torch.testing.assert_close(list(first), [2 * gradient for gradient in expected])
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, one.leaves)


def test_loss_is_float32_under_autocast() -> None:
    exact = case(scale=2)
    expected = exact.brute_force()
    leaves = [leaf.detach().float().requires_grad_() for leaf in exact.leaves]
    bonus = replace(exact.bonus, values=leaves[2])
    single = Case(leaves[0], leaves[1], exact.targets, bonus)
    with torch.autocast("cpu", torch.bfloat16):
        loss = single.loss()
        loss.backward()
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), expected)
    wanted = [gradient.float() for gradient in gradients(expected, exact.leaves)]
    torch.testing.assert_close([leaf.grad for leaf in leaves], wanted)


def test_gradients_have_the_dtypes_of_their_inputs(blocks: Shape) -> None:
    exact = case()
    leaves = [leaf.detach().bfloat16().requires_grad_() for leaf in exact.leaves]
    bonus = replace(exact.bonus, values=leaves[2])
    half = Case(leaves[0], leaves[1], exact.targets, bonus)
    half.loss().backward()
    rounded = [leaf.detach().float().requires_grad_() for leaf in leaves]
    bonus = replace(bonus, values=rounded[2])
    single = Case(rounded[0], rounded[1], exact.targets, bonus)
    torch.testing.assert_close(half.loss(), single.loss())  # only the inputs are coarse
    wanted = [gradient.bfloat16() for gradient in gradients(single.brute_force(), rounded)]
    torch.testing.assert_close([leaf.grad for leaf in leaves], wanted)


@pytest.mark.parametrize("items", [0, 5])
def test_loss_of_no_rows_is_zero(items: int) -> None:
    queries = torch.zeros(0, 3, requires_grad=True)
    table = torch.ones(items, 3, requires_grad=True)
    none = torch.zeros(0, dtype=torch.int64)
    values = torch.zeros(0, requires_grad=True)
    loss = catalogue_cross_entropy(queries, table, none, bonus=Bonus(none, none, values))
    assert loss == 0
    loss.backward()
    assert torch.equal(table.grad, torch.zeros(items, 3))  # type: ignore[arg-type]
    assert queries.grad is not None
    assert values.grad is not None
    assert log_normaliser(queries, table).shape == (0,)


def test_loss_of_a_single_item_is_zero() -> None:
    queries, table = torch.randn(4, 3, requires_grad=True), torch.randn(1, 3)
    loss = catalogue_cross_entropy(queries, table, torch.zeros(4, dtype=torch.int64))
    assert loss == 0
    torch.testing.assert_close(gradients(loss, [queries])[0], torch.zeros(4, 3))


def sampled(one: Case, negatives: Tensor, log_q: Tensor) -> Tensor:
    return sampled_cross_entropy(
        one.queries,
        one.table[one.targets],
        one.table[negatives],
        log_q_negatives=log_q,
        hits=negatives == one.targets[:, None],
    )


def plain(one: Case) -> Tensor:
    """The catalogue's loss, without the bonus."""
    return catalogue_cross_entropy(one.queries, one.table, one.targets)


@pytest.mark.parametrize("copies", [1, 3])
def test_sampling_every_item_gives_the_catalogue_loss(copies: int) -> None:
    one = case()
    loss = sampled(
        one, torch.arange(11).repeat(copies), torch.full((11 * copies,), math.log(copies))
    )
    torch.testing.assert_close(loss, plain(one))
    leaves = one.leaves[:2]
    torch.testing.assert_close(gradients(loss, leaves), gradients(plain(one), leaves))


def test_sampled_loss_approaches_the_catalogue_loss() -> None:
    one = case()
    leaves = one.leaves[:2]
    counts = torch.arange(11) ** 2
    exact, exact_gradients = plain(one).item(), gradients(plain(one), leaves)
    generator = torch.Generator().manual_seed(0)
    off_value, off_gradient = [], []
    for count, draws in ((4, 600), (32, 300), (256, 150)):
        sampler = NegativeSampler(counts, count, power=0.5)
        value, sums = 0.0, [torch.zeros_like(leaf) for leaf in leaves]
        for _ in range(draws):
            items = sampler.draw(generator)
            loss = sampled(one, items, sampler.log_q(items))
            value += loss.item() / draws
            for total, gradient in zip(sums, gradients(loss, leaves), strict=True):
                total += gradient / draws
        off_value.append(abs(value - exact) / exact)
        differences = [(a - b).norm() for a, b in zip(sums, exact_gradients, strict=True)]
        norm = sum(gradient.norm() for gradient in exact_gradients)
        off_gradient.append(float(sum(differences) / norm))
    for off in (off_value, off_gradient):
        assert off[0] > 2 * off[1] > 4 * off[2]
        assert off[2] < 0.02


def test_log_q_correction_by_hand() -> None:
    queries, positives = torch.tensor([[2.0]]), torch.tensor([[0.5]])
    negatives = torch.tensor([[1.0], [0.5], [-1.0]])
    loss = sampled_cross_entropy(
        queries,
        positives,
        negatives,
        log_q_negatives=torch.tensor([0.5, 0.25, 2.0]).log(),
        hits=torch.tensor([[False, True, False]]),
    )
    own = math.exp(1)
    expected = -math.log(own / (own + math.exp(2) / 0.5 + math.exp(-2) / 2))
    assert loss.item() == pytest.approx(expected)


def test_sampled_loss_is_float32_under_autocast() -> None:
    queries, table = torch.randn(4, 3), torch.randn(6, 3)
    arguments = {"log_q_negatives": torch.zeros(6), "hits": torch.eye(4, 6).bool()}
    plain = sampled_cross_entropy(queries, table[:4], table, **arguments)
    with torch.autocast("cpu", torch.bfloat16):
        inside = sampled_cross_entropy(queries, table[:4], table, **arguments)
    assert torch.equal(plain, inside)


def test_binary_cross_entropy_by_hand() -> None:
    queries = torch.tensor([[1.0, 2.0], [0.5, -1.0]], requires_grad=True)
    positives = torch.tensor([[1.0, 1.0], [2.0, 3.0]])  # scores 3 and -2
    negatives = torch.tensor([[-1.0, 0.0], [100.0, 10.0]])  # scores -1 and 40
    loss = binary_cross_entropy(queries, positives, negatives)
    losses = [math.log1p(math.exp(-3)), math.log1p(math.exp(2)), math.log1p(math.exp(-1)), 40]
    assert loss.item() == pytest.approx(sum(losses))
    first = [1 / (1 + math.exp(1)) * n - 1 / (1 + math.exp(3)) * p for n, p in ((-1, 1), (0, 1))]
    second = [n - 1 / (1 + math.exp(-2)) * p for n, p in ((100, 2), (10, 3))]
    torch.testing.assert_close(gradients(loss, [queries])[0], torch.tensor([first, second]))


def test_binary_cross_entropy_is_float32_under_autocast() -> None:
    inputs = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(0)).unbind()
    with torch.autocast("cpu", torch.bfloat16):
        loss = binary_cross_entropy(*(part.bfloat16() for part in inputs))
    assert loss.dtype == torch.float32
    rounded = (part.bfloat16().float() for part in inputs)
    assert torch.equal(loss, binary_cross_entropy(*rounded))


def test_sampler_draws_in_proportion_to_powers_of_counts() -> None:
    counts = torch.tensor([0, 3, 8, 0, 99])
    sampler = NegativeSampler(counts, 60_000, power=0.5)
    shares = torch.tensor([1.0, 2.0, 3.0, 1.0, 10.0]) / 17
    torch.testing.assert_close(sampler.log_q(torch.arange(5)), (60_000 * shares).log())
    drawn = torch.bincount(sampler.draw(torch.Generator().manual_seed(0)), minlength=5)
    errors = (60_000 * shares * (1 - shares)).sqrt()
    assert ((drawn - 60_000 * shares).abs() < 4 * errors).all()


def test_sampler_repeats_with_the_same_seed_and_keeps_shapes() -> None:
    sampler = NegativeSampler(torch.zeros(7), 20)
    one, two = (sampler.draw(torch.Generator().manual_seed(5)) for _ in range(2))
    assert torch.equal(one, two)
    assert one.shape == (20,)
    assert one.dtype == torch.int64
    found = sampler.log_q(torch.zeros(2, 3, dtype=torch.int64))
    torch.testing.assert_close(found, torch.full((2, 3), math.log(20 / 7)))


def test_bonus_of_given_pairs() -> None:
    bonus = Bonus(torch.tensor([0, 0, 2]), torch.tensor([4, 1, 3]), torch.tensor([0.5, -1.0, 2.0]))
    rows, items = torch.tensor([0, 0, 1, 2, 2]), torch.tensor([1, 4, 1, 3, 4])
    assert bonus.at(rows, items).tolist() == [-1.0, 0.5, 0.0, 2.0, 0.0]
    assert bonus.at(rows[:0], items[:0]).shape == (0,)
    nothing = Bonus(rows[:0], items[:0], torch.zeros(0))
    assert nothing.at(rows, items).tolist() == [0.0] * 5


@pytest.mark.parametrize("weights", [[1, 2, 0, 0.5, 0, 3, 1], [2] * 7, [0, 0, 0, 0, 0, 0, 1]])
def test_weighted_loss_and_gradients_equal_those_of_dense_logits(
    blocks: Shape, weights: list[float]
) -> None:
    one, factors = case(), torch.tensor(weights, dtype=torch.float64)
    own = catalogue_cross_entropy(
        one.queries, one.table, one.targets, bonus=one.bonus, weights=factors
    )
    brute = functional.cross_entropy(one.logits(), one.targets, reduction="none") @ factors
    torch.testing.assert_close(own, brute)
    for found, expected in zip(
        gradients(own, one.leaves), gradients(brute, one.leaves), strict=True
    ):
        torch.testing.assert_close(found, expected)


def test_rows_of_weight_zero_alone_have_no_loss() -> None:
    one = case()
    loss = catalogue_cross_entropy(one.queries, one.table, one.targets, weights=torch.zeros(7))
    assert loss == 0
    assert not any(part.any() for part in gradients(loss, [one.queries, one.table]))
