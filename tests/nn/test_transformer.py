from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from maskgr.errors import RequestError
from maskgr.nn.transformer import (
    Dropout,
    Encoder,
    Layout,
    Tap,
    TransformerConfig,
    causal_mask,
    isolated_mask,
    rotary,
    rotate,
)

CONFIG = TransformerConfig(layers=2, width=16, heads=2, hidden=24, dropout=0.3)
CPU = torch.device("cpu")


def encoder() -> Encoder:
    torch.manual_seed(0)
    return Encoder(CONFIG).eval()


def states(
    model: Encoder,
    x: Tensor,
    layout: Layout,
    kind: str = "full",
    rows: Tensor | None = None,
) -> Tensor:
    made = {
        "full": lambda length: None,
        "isolated": lambda length: isolated_mask(length, 2, CPU),
        "causal": lambda length: causal_mask(length, CPU),
    }
    masks = [made[kind](length) for _, length in layout.groups]
    with torch.no_grad():
        out: Tensor = model(x, layout, masks, rows)[0]
    return out


def test_layout_by_hand() -> None:
    layout = Layout.of([2, 2, 3])
    assert layout.groups == ((2, 2), (1, 3))
    assert layout.sizes == [4, 3]
    assert layout.positions.tolist() == [0, 1, 0, 1, 0, 1, 2]
    assert layout.sequences.tolist() == [0, 0, 1, 1, 2, 2, 2]


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=6),
    st.sampled_from(["full", "isolated", "causal"]),
)
@settings(deadline=None, max_examples=15)
def test_packed_equals_each_sequence_alone(lengths: list[int], kind: str) -> None:
    model = encoder()
    layout = Layout.of(lengths)
    x = torch.randn(sum(lengths), 16)
    alone = [states(model, part, Layout.of([len(part)]), kind) for part in torch.split(x, lengths)]
    torch.testing.assert_close(
        states(model, x, layout, kind), torch.cat(alone), atol=1e-5, rtol=1e-5
    )


def test_order_of_groups_does_not_matter() -> None:
    model = encoder()
    lengths = [3, 1, 3, 2]
    parts = [torch.randn(length, 16) for length in lengths]
    order = [1, 3, 0, 2]
    one = states(model, torch.cat(parts), Layout.of(lengths)).split(lengths)
    sorted_lengths = [lengths[i] for i in order]
    other = states(model, torch.cat([parts[i] for i in order]), Layout.of(sorted_lengths))
    for i, got in zip(order, other.split(sorted_lengths), strict=True):
        torch.testing.assert_close(got, one[i], atol=1e-5, rtol=1e-5)


@given(st.integers(-50, 500))
@settings(deadline=None, max_examples=15)
def test_only_differences_of_positions_count(shift: int) -> None:
    model = encoder()
    layout = Layout.of([4, 4, 6])
    shifted = Layout(layout.groups, layout.positions + shift, layout.sequences)
    x = torch.randn(14, 16)
    torch.testing.assert_close(
        states(model, x, shifted), states(model, x, layout), atol=2e-4, rtol=1e-3
    )


def test_order_of_tokens_counts() -> None:
    model = encoder()
    x = torch.randn(5, 16)
    forwards = states(model, x, Layout.of([5]))
    backwards = states(model, x.flip(0), Layout.of([5])).flip(0)
    assert (forwards - backwards).abs().max() > 1e-2


def test_rotation_is_a_rotation_in_every_pair_with_its_own_frequency() -> None:
    width = 8
    vectors = torch.eye(width)[None, None].expand(1, 1, width, width)  # every entry alone
    turned = rotate(vectors, rotary(torch.tensor([1]), width))[0, 0]
    angles = torch.atan2(turned[range(4), range(4, 8)], turned[range(4), range(4)])
    torch.testing.assert_close(angles, 10000.0 ** (-torch.arange(4) / 4))
    torch.testing.assert_close(turned @ turned.T, torch.eye(width))


def test_every_pair_of_a_head_makes_products_depend_on_position() -> None:
    width = 16
    for pair in range(width // 2):
        q = torch.zeros(2, 1, 1, width)
        q[..., pair] = 1
        near, far = rotate(q, rotary(torch.tensor([0, 100]), width))
        expected = torch.cos(torch.tensor(100 * 10000.0 ** (-2 * pair / width)))
        torch.testing.assert_close((near * far).sum(), expected)
        assert expected != 1


def test_masks_by_hand() -> None:
    isolated = isolated_mask(4, 2, CPU)
    assert isolated.int().tolist() == [[1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1], [1, 1, 1, 1]]
    session = isolated_mask(6, 4, CPU)
    assert session[:2].int().tolist() == [[1, 1, 0, 0, 0, 0]] * 2
    assert session[2:].all()
    assert causal_mask(3, CPU).int().tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]


@pytest.mark.parametrize(("kind", "blind"), [("isolated", 4), ("causal", 4), ("full", 0)])
def test_tokens_that_do_not_see_the_last_item(kind: str, blind: int) -> None:
    model = encoder()
    x = torch.randn(6, 16)
    changed = x.clone()
    changed[4:] = torch.randn(2, 16)
    layout = Layout.of([6])
    same = (states(model, x, layout, kind) == states(model, changed, layout, kind)).all(1)
    assert same.tolist() == [True] * blind + [False] * (6 - blind)


@pytest.mark.parametrize("kind", ["isolated", "causal", "full"])
def test_last_item_sees_everything(kind: str) -> None:
    model = encoder()
    x = torch.randn(6, 16)
    changed = x.clone()
    changed[0] = torch.randn(16)
    layout = Layout.of([6])
    same = (states(model, x, layout, kind) == states(model, changed, layout, kind)).all(1)
    assert not same[4:].any()


@pytest.mark.parametrize("layer", [1, 2])
@pytest.mark.parametrize("rows", [None, [9, 0, 3, 13], []])
def test_tapped_states_are_those_after_their_layer(layer: int, rows: list[int] | None) -> None:
    model = encoder()
    layout, x = Layout.of([4, 4, 6]), torch.randn(14, 16)
    wanted, masks = torch.tensor([2, 11, 5]), [None, None]
    chosen = None if rows is None else torch.tensor(rows, dtype=torch.int64)
    rotation = rotary(layout.positions, 8)
    with torch.no_grad():
        out, tapped = model(x, layout, masks, chosen, None, Tap(layer, wanted))
        expected = x
        for block in model.blocks[:layer]:
            expected = block(expected, layout, rotation, masks)
    torch.testing.assert_close(tapped, expected[wanted])
    torch.testing.assert_close(out, states(model, x, layout, rows=chosen))


@pytest.mark.parametrize("kind", ["full", "isolated"])
def test_states_of_chosen_rows_equal_those_of_all(kind: str) -> None:
    model = encoder()
    layout = Layout.of([4, 4, 6])
    x = torch.randn(14, 16)
    for rows in (torch.tensor([9, 0, 3, 13]), torch.empty(0, dtype=torch.int64)):
        torch.testing.assert_close(
            states(model, x, layout, kind, rows), states(model, x, layout, kind)[rows]
        )


def test_gradients_of_chosen_rows_equal_those_of_all() -> None:
    model = encoder()
    layout = Layout.of([4, 6])
    x = torch.randn(10, 16)
    rows = torch.tensor([1, 4, 8])
    gradients = []
    for out in (model(x, layout, [None, None], rows)[0], model(x, layout, [None, None])[0][rows]):
        model.zero_grad()
        out.square().sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    torch.testing.assert_close(*gradients)


def test_evaluation_is_deterministic_and_training_is_not() -> None:
    model = encoder()
    x = torch.randn(4, 16)
    layout = Layout.of([4])
    assert torch.equal(states(model, x, layout), states(model, x, layout))
    model.train()
    assert not torch.equal(states(model, x, layout), states(model, x, layout))


@pytest.mark.parametrize(("rate", "rounded"), [(0.25, 0.25), (0.1, 26 / 256)])
def test_dropout_drops_its_share_and_keeps_the_mean(rate: float, rounded: float) -> None:
    torch.manual_seed(0)
    dropout = Dropout(rate)
    x = torch.ones(1001, 101, requires_grad=True)  # not a multiple of eight
    out = dropout(x)
    share = (out == 0).double().mean().item()
    assert share == pytest.approx(rounded, abs=5 * (rounded * (1 - rounded) / x.numel()) ** 0.5)
    torch.testing.assert_close(out[out > 0].unique(), torch.tensor([1 / (1 - rounded)]))
    out.sum().backward()
    assert torch.equal(x.grad, out.detach())
    assert dropout.eval()(x) is x


def test_dropout_follows_the_global_seed() -> None:
    dropout = Dropout(0.5)
    draws = []
    for _ in range(2):
        torch.manual_seed(3)
        draws.append(torch.stack([dropout(torch.ones(40)) for _ in range(2)]))
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0][0], draws[0][1])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"width": 20}, "a width of 20 cannot be shared evenly by 4 heads; use a multiple of 8"),
        ({"layers": 0}, "layers is 0; give a whole number from 1 to "),
        ({"dropout": 1.0}, "dropout is 1.0; give a number from "),
    ],
)
def test_raises_when_a_size_is_impossible(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        TransformerConfig(**changes)
