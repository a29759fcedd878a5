"""Against the logits of the whole catalogue, which are small enough here to be written down."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from maskgr.errors import RequestError
from maskgr.nn import softmax
from maskgr.nn.softmax import (
    Bonus,
    NegativeSampler,
    catalogue_cross_entropy,
    expectations,
    log_normaliser,
    sampled_cross_entropy,
)

# CELLS, FEW, ITEMS, and what they make of 7 rows and 11 items: the rows and items of a block, and
# whether all blocks of a row are kept
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
    weights: Tensor
    bonus: Bonus

    @property
    def leaves(self) -> list[Tensor]:
        return [self.queries, self.table, self.bonus.values]

    def loss(self) -> Tensor:
        return catalogue_cross_entropy(
            self.queries, self.table, self.targets, weights=self.weights, bonus=self.bonus
        )

    def logits(self) -> Tensor:
        """(rows, items) with the bonus."""
        places = (self.bonus.rows, self.bonus.items)
        return (self.queries @ self.table.T).index_put(places, self.bonus.values, accumulate=True)

    def brute_force(self) -> Tensor:
        losses = functional.cross_entropy(self.logits(), self.targets, reduction="none")
        return (losses * self.weights).sum()


def case(
    rows: int = 7, items: int = 11, width: int = 3, *, seed: int = 0, scale: float = 1
) -> Case:
    """In double; a third of all pairs has a bonus, and the targets of even rows do."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64) * scale

    targets = torch.randint(items, (rows,), generator=generator)
    has = torch.rand(rows, items, generator=generator) < 1 / 3
    has[torch.arange(rows)[::2], targets[::2]] = True
    owners, owned = has.nonzero(as_tuple=True)
    leaves = normal(rows, width), normal(items, width), normal(len(owners))
    queries, table, values = (leaf.requires_grad_() for leaf in leaves)
    weights = torch.rand(rows, generator=generator, dtype=torch.float64)
    return Case(queries, table, targets, weights, Bonus(owners, owned, values))


def gradients(loss: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad(loss, leaves))


@pytest.fixture(params=BLOCKS)
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Shape:
    cells, few, items, shape = BLOCKS[request.param]
    monkeypatch.setattr(softmax, "CELLS", cells)
    monkeypatch.setattr(softmax, "FEW", few)
    monkeypatch.setattr(softmax, "ITEMS", items)
    return shape


def test_blocks_are_the_ones_that_are_meant(blocks: Shape) -> None:
    assert softmax._block(7, 11) == blocks


def test_loss_and_gradients_are_those_of_dense_logits(blocks: Shape) -> None:
    one = case()
    torch.testing.assert_close(one.loss(), one.brute_force())
    own, expected = (gradients(loss, one.leaves) for loss in (one.loss(), one.brute_force()))
    torch.testing.assert_close(own, expected)


def test_without_weights_and_bonus(blocks: Shape) -> None:
    one = case()
    loss = catalogue_cross_entropy(one.queries, one.table, one.targets)
    logits = one.queries @ one.table.T
    expected = functional.cross_entropy(logits, one.targets, reduction="sum")
    torch.testing.assert_close(loss, expected)
    leaves = one.leaves[:2]
    torch.testing.assert_close(gradients(loss, leaves), gradients(expected, leaves))


def test_gradients_by_finite_differences(blocks: Shape) -> None:
    one = case()

    def loss(queries: Tensor, table: Tensor, values: Tensor) -> Tensor:
        bonus = replace(one.bonus, values=values)
        return replace(one, queries=queries, table=table, bonus=bonus).loss()

    assert torch.autograd.gradcheck(loss, one.leaves)


def test_normalisers_are_those_of_dense_logits(blocks: Shape) -> None:
    one = case()
    found = log_normaliser(one.queries, one.table, bonus=one.bonus)
    torch.testing.assert_close(found, one.logits().logsumexp(1).detach())
    assert not found.requires_grad
    plain = log_normaliser(one.queries, one.table)
    torch.testing.assert_close(plain, (one.queries @ one.table.T).logsumexp(1).detach())


@pytest.mark.parametrize("scale", [1, 60])
def test_expectations_are_those_of_dense_logits(blocks: Shape, scale: float) -> None:
    one = case(scale=scale)
    expected = one.logits().softmax(1).detach()
    edges = expected.cumsum(1)
    uniform = torch.rand(7, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    uniform[:, 0] = 0
    seen = []
    for rows, expects in expectations(one.queries, one.table, bonus=one.bonus):
        drawn = expects.draw(uniform[rows])
        by_hand = torch.searchsorted(edges[rows], uniform[rows], right=True)
        assert drawn.tolist() == by_hand.tolist()
        chosen = torch.arange(rows.stop - rows.start)[::2]
        found = torch.cat([part for _, part in expects.probabilities(chosen)])
        torch.testing.assert_close(found, expected[rows][chosen].T)
        assert not list(expects.probabilities(chosen[:0]))
        seen += range(rows.start, rows.stop)
    assert seen == list(range(7))


def test_scores_beyond_what_exp_can_hold(blocks: Shape) -> None:
    one = case(scale=60)  # scores of thousands
    torch.testing.assert_close(one.loss(), one.brute_force())
    own, expected = (gradients(loss, one.leaves) for loss in (one.loss(), one.brute_force()))
    torch.testing.assert_close(own, expected)


def test_a_bonus_of_minus_infinity_takes_items_out(blocks: Shape) -> None:
    one = case()
    keep = torch.tensor([3, 4, 10])  # nothing is left of some blocks
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
def test_any_shape_in_any_blocks(
    rows: int, items: int, width: int, cells: int, few: int, most: int, seed: int
) -> None:
    one = case(rows, items, width, seed=seed, scale=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(softmax, "CELLS", cells)
        patch.setattr(softmax, "FEW", few)
        patch.setattr(softmax, "ITEMS", most)
        height, across, kept = softmax._block(rows, items)
        assert height * (items if kept else across) <= cells
        loss = one.loss()
        own = gradients(loss, one.leaves)
    expected = one.brute_force()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(own, gradients(expected, one.leaves))


@given(st.integers(0, 10**7), st.integers(0, 10**8))
def test_blocks_stay_within_their_bounds(rows: int, items: int) -> None:
    height, width, kept = softmax._block(rows, items)
    assert height <= min(rows, softmax.ROWS)
    assert width <= min(items, softmax.ITEMS)
    assert height * (items if kept else width) <= softmax.CELLS
    assert (height and width) or not (rows and items)


@pytest.mark.parametrize("wanted", range(3))
def test_only_what_is_asked_for_gets_a_gradient(
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


def test_frozen_table_of_many_blocks_is_scored_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(softmax, "CELLS", 28)
    made = []
    real = softmax._Scores.make

    def count(self: softmax._Scores, rows: slice, items: slice) -> Tensor:
        made.append((rows, items))
        return real(self, rows, items)

    monkeypatch.setattr(softmax._Scores, "make", count)
    one = case()
    one.loss()
    assert len(made) == 2 * 4  # 2 blocks of rows and 2 of items; the table's gradient again
    made.clear()
    one.table.requires_grad_(False)
    one.loss()
    assert len(made) == 4
    monkeypatch.setattr(softmax, "CELLS", 2**22)
    made.clear()
    one.table.requires_grad_()
    one.loss()
    assert len(made) == 1


def test_without_grad_there_is_the_loss_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    one = case()
    expected = one.brute_force()
    monkeypatch.setattr(softmax.Expected, "exponentials", None)
    with torch.no_grad():
        loss = one.loss()
    torch.testing.assert_close(loss, expected.detach())
    assert not loss.requires_grad
    for leaf in one.leaves:
        leaf.requires_grad_(False)
    assert not one.loss().requires_grad


def test_the_gradient_is_scaled_and_becomes_the_parameters_own() -> None:
    one = case()
    expected = [3 * gradient for gradient in gradients(one.brute_force(), one.leaves)]
    loss = one.loss()
    held = loss.grad_fn.gradients  # type: ignore[union-attr]
    places = [gradient.data_ptr() for gradient in held]
    del held
    (3 * loss).backward()
    torch.testing.assert_close([leaf.grad for leaf in one.leaves], expected)
    # no copy: a table's gradient is the largest thing there is
    assert [leaf.grad.data_ptr() for leaf in one.leaves if leaf.grad is not None] == places


def test_backward_twice() -> None:
    one = case()
    expected = gradients(one.brute_force(), one.leaves)
    loss = one.loss()
    first = torch.autograd.grad(2 * loss, one.leaves, retain_graph=True)
    second = torch.autograd.grad(loss, one.leaves)
    torch.testing.assert_close(list(second), expected)
    torch.testing.assert_close(list(first), [2 * gradient for gradient in expected])
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, one.leaves)


def test_float32_and_autocast() -> None:
    exact = case(scale=2)
    expected = exact.brute_force()
    leaves = [leaf.detach().float().requires_grad_() for leaf in exact.leaves]
    bonus = replace(exact.bonus, values=leaves[2])
    single = Case(leaves[0], leaves[1], exact.targets, exact.weights.float(), bonus)
    with torch.autocast("cpu", torch.bfloat16):
        loss = single.loss()
        loss.backward()
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), expected)
    wanted = [gradient.float() for gradient in gradients(expected, exact.leaves)]
    torch.testing.assert_close([leaf.grad for leaf in leaves], wanted)


def test_gradients_have_the_types_of_what_they_belong_to(blocks: Shape) -> None:
    exact = case()
    leaves = [leaf.detach().bfloat16().requires_grad_() for leaf in exact.leaves]
    bonus = replace(exact.bonus, values=leaves[2])
    half = Case(leaves[0], leaves[1], exact.targets, exact.weights.float(), bonus)
    half.loss().backward()
    rounded = [leaf.detach().float().requires_grad_() for leaf in leaves]
    bonus = replace(bonus, values=rounded[2])
    single = Case(rounded[0], rounded[1], exact.targets, exact.weights.float(), bonus)
    torch.testing.assert_close(half.loss(), single.loss())  # only the inputs are coarse
    wanted = [gradient.bfloat16() for gradient in gradients(single.brute_force(), rounded)]
    torch.testing.assert_close([leaf.grad for leaf in leaves], wanted)


@pytest.mark.parametrize("items", [0, 5])
def test_no_rows(items: int) -> None:
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


def test_one_item_costs_nothing() -> None:
    queries, table = torch.randn(4, 3, requires_grad=True), torch.randn(1, 3)
    loss = catalogue_cross_entropy(queries, table, torch.zeros(4, dtype=torch.int64))
    assert loss == 0
    torch.testing.assert_close(gradients(loss, [queries])[0], torch.zeros(4, 3))


def test_what_does_not_fit_is_refused() -> None:
    one = case()
    bonus = one.bonus

    def refused(message: str, **changes: object) -> None:
        with pytest.raises(RequestError, match=message):
            replace(one, **changes).loss()  # type: ignore[arg-type]

    refused(r"queries of shape \(7, 2\) do not fit a table", queries=one.queries[:, :2])
    refused(r"queries of shape \(3,\) do not fit", queries=one.queries[0])
    refused("the table has no items", table=one.table[:0])
    refused(r"targets of shape \(6,\)", targets=one.targets[:6])
    refused("targets .*torch.int32", targets=one.targets.int())
    refused("targets have 11, which is not there; use 0 to 10", targets=one.targets.clamp(min=11))
    refused("targets have -1", targets=one.targets.clamp(max=-1))
    refused(r"weights of shape \(3,\)", weights=one.weights[:3])
    refused("one of each an entry", bonus=replace(bonus, items=bonus.items[1:]))
    refused("the bonus' rows have 7", bonus=replace(bonus, rows=bonus.rows + 1))
    refused("the bonus' items have -1", bonus=replace(bonus, items=-torch.ones_like(bonus.items)))
    refused("ascending", bonus=replace(bonus, rows=bonus.rows.flip(0)))


def sampled(one: Case, negatives: Tensor, log_q: Tensor) -> Tensor:
    return sampled_cross_entropy(
        one.queries,
        one.table[one.targets],
        one.table[negatives],
        log_q_negatives=log_q,
        hits=negatives == one.targets[:, None],
        weights=one.weights,
    )


def plain(one: Case) -> Tensor:
    """The catalogue's loss, without the bonus."""
    return catalogue_cross_entropy(one.queries, one.table, one.targets, weights=one.weights)


@pytest.mark.parametrize("copies", [1, 3])
def test_every_item_drawn_is_the_catalogue(copies: int) -> None:
    one = case()
    loss = sampled(
        one, torch.arange(11).repeat(copies), torch.full((11 * copies,), math.log(copies))
    )
    torch.testing.assert_close(loss, plain(one))
    leaves = one.leaves[:2]
    torch.testing.assert_close(gradients(loss, leaves), gradients(plain(one), leaves))


def test_more_samples_come_nearer_to_the_catalogue() -> None:
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


def test_the_correction_by_hand() -> None:
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


def test_sampled_shapes_that_do_not_fit_are_refused() -> None:
    rows, few = torch.zeros(3, 2), torch.zeros(4, 2)
    with pytest.raises(RequestError, match="one positive a query"):
        sampled_cross_entropy(
            rows, few, few, log_q_negatives=torch.zeros(4), hits=torch.zeros(3, 4).bool()
        )
    with pytest.raises(RequestError, match=r"hits of shape \(4, 3\)"):
        sampled_cross_entropy(
            rows, rows, few, log_q_negatives=torch.zeros(4), hits=torch.zeros(4, 3).bool()
        )


def test_sampler_draws_what_it_says() -> None:
    counts = torch.tensor([0, 3, 8, 0, 99])
    sampler = NegativeSampler(counts, 60_000, power=0.5)
    shares = torch.tensor([1.0, 2.0, 3.0, 1.0, 10.0]) / 17
    torch.testing.assert_close(sampler.log_q(torch.arange(5)), (60_000 * shares).log())
    drawn = torch.bincount(sampler.draw(torch.Generator().manual_seed(0)), minlength=5)
    errors = (60_000 * shares * (1 - shares)).sqrt()
    assert ((drawn - 60_000 * shares).abs() < 4 * errors).all()


def test_sampler_repeats_and_keeps_shapes() -> None:
    sampler = NegativeSampler(torch.zeros(7), 20)
    one, two = (sampler.draw(torch.Generator().manual_seed(5)) for _ in range(2))
    assert torch.equal(one, two)
    assert one.shape == (20,)
    assert one.dtype == torch.int64
    found = sampler.log_q(torch.zeros(2, 3, dtype=torch.int64))
    torch.testing.assert_close(found, torch.full((2, 3), math.log(20 / 7)))


def test_samplers_of_nothing_are_refused() -> None:
    with pytest.raises(RequestError, match="cannot be sampled"):
        NegativeSampler(torch.zeros(0), 5)
    with pytest.raises(RequestError, match="cannot be sampled"):
        NegativeSampler(torch.tensor([3, -1]), 5)
    with pytest.raises(RequestError, match="0 negatives"):
        NegativeSampler(torch.zeros(3), 0)


def test_a_bonus_looked_up() -> None:
    bonus = Bonus(torch.tensor([0, 0, 2]), torch.tensor([4, 1, 3]), torch.tensor([0.5, -1.0, 2.0]))
    rows, items = torch.tensor([0, 0, 1, 2, 2]), torch.tensor([1, 4, 1, 3, 4])
    assert bonus.at(rows, items).tolist() == [-1.0, 0.5, 0.0, 2.0, 0.0]
    assert bonus.at(rows[:0], items[:0]).shape == (0,)
    nothing = Bonus(rows[:0], items[:0], torch.zeros(0))
    assert nothing.at(rows, items).tolist() == [0.0] * 5
