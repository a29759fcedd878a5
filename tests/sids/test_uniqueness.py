import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from maskgr.errors import DataError
from maskgr.sids.config import QuantizerConfig
from maskgr.sids.quantizers import fit_quantizer
from maskgr.sids.uniqueness import (
    FreeTuples,
    append,
    collisions,
    make_unique,
    place_new,
    reassign,
)
from maskgr.sids.vectors import prepare


def tables(codes=3, levels=3, most=40):
    shapes = st.tuples(st.integers(1, most), st.just(levels))
    return shapes.flatmap(lambda s: arrays(np.int32, s, elements=st.integers(0, codes - 1)))


def draw(count, dimensions=4, seed=0):
    return np.random.default_rng(seed).standard_normal((count, dimensions), dtype=np.float32)


def fit(vectors, *, seed=0, normalise=True, **settings):
    return fit_quantizer(vectors, QuantizerConfig(**settings), seed=seed, normalise=normalise)


def squared_error(digits, vectors, quantizer):
    rows = prepare(vectors, normalise=quantizer.normalise)
    return np.square(rows - quantizer.decode(digits)).sum(axis=1)


def test_collisions_count_items_per_tuple():
    found = collisions(np.array([[0, 1], [2, 2], [0, 1], [1, 1], [0, 1]], np.int32))
    assert sorted(found.group_sizes.tolist()) == [1, 1, 3]
    assert found.items == 5
    assert found.unique_share == 2 / 5


def test_append_counts_in_item_order():
    digits = np.array([[0, 1], [2, 2], [0, 1], [1, 1], [0, 1]], np.int32)
    assert append(digits)[:, -1].tolist() == [0, 0, 1, 0, 2]
    assert (append(digits)[:, :-1] == digits).all()
    assert append(digits).dtype == np.int32


@given(tables())
def test_append_is_unique_and_no_larger_than_the_largest_group(digits):
    result = append(digits)
    assert collisions(result).unique_share == 1
    if collisions(digits).unique_share == 1:
        assert result is digits  # a digit that is always 0 is no digit
    else:
        assert result[:, -1].max() + 1 == collisions(digits).group_sizes.max()


def best_by_enumeration(digits, vectors, quantizer):
    """The least total error over all ways to give colliding items distinct last digits."""
    codes = range(quantizer.codebook_sizes[-1])
    _, group, size = np.unique(digits, axis=0, return_inverse=True, return_counts=True)
    colliding = np.flatnonzero(size[group] > 1)
    best = np.inf
    for choice in itertools.product(codes, repeat=len(colliding)):
        trial = digits.copy()
        trial[colliding, -1] = choice
        if len(np.unique(trial, axis=0)) == len(trial):
            best = min(best, squared_error(trial, vectors, quantizer).sum())
    return best


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("name", ["residual-kmeans", "pq"])
def test_reassign_is_the_best_of_all_assignments(name, normalise):
    solved = 0
    for seed in range(40):
        vectors = draw(9, seed=seed)
        settings = {"quantizer": name, "levels": 2, "codes": 4, "components": 0}
        quantizer = fit(vectors, seed=seed, normalise=normalise, **settings)
        digits = quantizer.encode(vectors)
        expected = best_by_enumeration(digits, vectors, quantizer)
        if collisions(digits).unique_share == 1 or not np.isfinite(expected):
            continue
        solved += 1
        result = reassign(digits, vectors, quantizer)
        assert squared_error(result, vectors, quantizer).sum() == pytest.approx(expected, rel=1e-4)
    assert solved > 5


@settings(max_examples=40, deadline=None)
@given(tables(codes=4, levels=3, most=64), st.integers(0, 99))
def test_reassign_is_unique_and_moves_only_colliding_items(digits, seed):
    vectors = draw(len(digits), seed=seed)
    quantizer = fit(draw(40), levels=3, codes=4, components=0)
    result = reassign(digits, vectors, quantizer)
    assert collisions(result).unique_share == 1
    assert ((result >= 0) & (result < 4)).all()
    _, group, size = np.unique(digits, axis=0, return_inverse=True, return_counts=True)
    alone = size[group] == 1
    assert (result[alone] == digits[alone]).all()
    _, family, members = np.unique(digits[:, :-1], axis=0, return_inverse=True, return_counts=True)
    fits = members[family] <= 4
    assert (result[fits, :-1] == digits[fits, :-1]).all()


def test_reassign_without_collisions_changes_nothing():
    vectors = draw(30)
    quantizer = fit(vectors, levels=2, codes=8)
    digits = np.array(list(itertools.product(range(8), range(8)))[:30], np.int32)
    assert (reassign(digits, vectors, quantizer) == digits).all()


def test_reassign_moves_items_beyond_a_full_prefix_to_the_nearest_other():
    vectors = draw(5, dimensions=3)
    quantizer = fit(draw(50, dimensions=3), levels=2, codes=4, components=0)
    result = reassign(np.zeros((5, 2), np.int32), vectors, quantizer)
    assert sorted(result[result[:, 0] == 0, 1].tolist()) == [0, 1, 2, 3]
    moved = int(np.flatnonzero(result[:, 0] != 0)[0])
    row = prepare(vectors, normalise=True)[moved]
    options = np.array([[code, 0] for code in range(1, 4)], np.int32)
    gaps = np.square(quantizer.decode(options, levels=1) - row).sum(axis=1)
    assert result[moved, 0] == options[gaps.argmin(), 0]


def test_raises_when_items_outnumber_tuples():
    vectors = draw(20)
    quantizer = fit(vectors, levels=2, codes=4)
    with pytest.raises(DataError, match=r"20 items .* 4 × 4 codes; raise --codes or --levels"):
        reassign(quantizer.encode(vectors), vectors, quantizer)


def test_make_unique_applies_the_named_policy():
    vectors = draw(30)
    quantizer = fit(vectors, levels=3, codes=4)
    digits = quantizer.encode(vectors)
    assert (make_unique("share", digits, vectors, quantizer) == digits).all()
    assert make_unique("append", digits, vectors, quantizer).shape == (30, 4)
    moved = make_unique("reassign", digits, vectors, quantizer)
    assert collisions(moved).unique_share == 1


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(["append", "reassign"]),
    st.booleans(),
    st.integers(1, 30),
    st.integers(1, 25),
    st.data(),
)
def test_new_items_get_free_tuples_within_the_codebooks(
    policy, normalise, old_count, new_count, data
):
    quantizer = fit(draw(60), normalise=normalise, levels=3, codes=4, components=0)
    seed = data.draw(st.integers(0, 999))
    vectors = draw(old_count, seed=seed)
    old = make_unique(policy, quantizer.encode(vectors), vectors, quantizer)
    sizes = quantizer.codebook_sizes
    if old.shape[1] > len(sizes):
        sizes += (int(old[:, -1].max()) + 1,)
    before = old.copy()
    new = place_new(policy, old, sizes, draw(new_count, seed=seed + 1), quantizer)
    assert (old == before).all()
    assert collisions(np.vstack([old, new])).unique_share == 1
    assert ((new >= 0) & (new < np.array(sizes))).all()


def test_new_items_keep_their_own_tuple_when_it_is_free():
    quantizer = fit(draw(60), levels=3, codes=4, components=0)
    own = quantizer.encode(draw(12, seed=5))
    _, first = np.unique(own, axis=0, return_index=True)
    nobody = np.empty((0, 3), np.int32)
    placed = place_new("reassign", nobody, (4, 4, 4), draw(12, seed=5), quantizer)
    assert (placed[first] == own[first]).all()


@pytest.mark.parametrize("normalise", [True, False])
def test_a_new_item_gets_the_next_appended_digit_then_the_nearest_tuple(normalise):
    vectors = 3 * draw(60)
    quantizer = fit(vectors, normalise=normalise, levels=2, codes=4, components=0)
    sizes = (4, 4, 2)
    for item in vectors[:20, None]:
        own = quantizer.encode(item)[0]
        old = np.array([[*own, 0]], np.int32)
        first = place_new("append", old, sizes, item, quantizer)
        assert first.tolist() == [[*own, 1]]
        second = place_new("append", np.vstack([old, first]), sizes, item, quantizer)[0]
        siblings = np.array([[own[0], code] for code in range(4) if code != own[1]], np.int32)
        nearest = siblings[squared_error(siblings, np.repeat(item, 3, axis=0), quantizer).argmin()]
        assert second.tolist() == [*nearest, 0]


def test_share_keeps_the_tuples_of_the_quantiser():
    vectors = draw(60)
    quantizer = fit(vectors, levels=2, codes=4)
    old = quantizer.encode(vectors)
    assert (place_new("share", old, (4, 4), vectors[:3], quantizer) == old[:3]).all()


def test_raises_when_no_tuple_is_free_for_a_new_item():
    vectors = draw(60)
    quantizer = fit(vectors, levels=1, codes=4)
    old = np.arange(4, dtype=np.int32)[:, None]
    with pytest.raises(DataError, match="5 items cannot have different IDs of 1 digits"):
        place_new("reassign", old, (4,), vectors[:1], quantizer)
    with pytest.raises(DataError, match="all tuples"):
        FreeTuples(old, (4,), quantizer).claim(vectors[0], old[0])


@pytest.mark.parametrize("policy", ["append", "reassign"])
@pytest.mark.parametrize("normalise", [True, False])
def test_thirty_two_levels_are_made_unique(policy, normalise):
    vectors = draw(40)
    vectors[10:20] = vectors[0]
    quantizer = fit(vectors, normalise=normalise, levels=32, codes=4)
    own = quantizer.encode(vectors)
    assert own.shape == (40, 32)
    assert collisions(own).group_sizes.max() >= 11
    old = make_unique(policy, own, vectors, quantizer)
    sizes = quantizer.codebook_sizes + ((int(old[:, -1].max()) + 1,) if policy == "append" else ())
    new = place_new(policy, old, sizes, vectors[:12], quantizer)
    assert collisions(np.vstack([old, new])).unique_share == 1
    assert ((new >= 0) & (new < np.array(sizes))).all()
