"""BERT4Rec against a padded network with a dense softmax, and masks against their shares."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import polars as pl
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from maskgr.data.dataset import Dataset
from maskgr.data.sequences import Sequences
from maskgr.data.splits import leave_out
from maskgr.errors import RequestError
from maskgr.evaluation.ranking import Query
from maskgr.models import retrieval
from maskgr.models.base import TrainConfig, Training
from maskgr.models.bert4rec import (
    Bert4Rec,
    Bert4RecConfig,
    Head,
    MaskedBatch,
    published_ratio,
    with_one_more,
)
from maskgr.models.maskgr.noise import mask_share
from maskgr.nn.softmax import NegativeSampler
from maskgr.nn.transformer import Block, TransformerConfig
from maskgr.training.fit import FitConfig
from tests.models.tiny import (
    HISTORIES,
    ITEMS,
    assert_same,
    queries,
    randomise,
    ranked_by,
    workspace,
)

NETWORK = TransformerConfig(layers=2, width=8, heads=2, hidden=16, dropout=0.4)
COUNTS = np.arange(ITEMS) % 5
BATCH = Sequences.of([[7], [3, 3, 5], [0, 2, 0, 9], [4, 1, 8, 6]])
MASKED = torch.tensor([1, 0, 1, 1, 1, 0, 0, 1, 0, 0, 0, 1]).bool()
HEADS = get_args(Head)


def model(limit: int = 20, **settings: object) -> Bert4Rec:
    config = Bert4RecConfig(NETWORK, **{"mask_ratio": 0.4, **settings})  # type: ignore[arg-type]
    torch.manual_seed(0)
    made = Bert4Rec(config, COUNTS, limit)
    randomise(made)
    return made.eval()


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# The same network, written with padding and explicit masks


@torch.no_grad()
def padded_logits(own: Bert4Rec, rows: list[list[int | None]]) -> list[Tensor]:
    """For each row, (tokens, items) logits at all its tokens; None is a mask."""
    most = max(len(row) for row in rows)
    x = torch.full((len(rows), most, NETWORK.width), 7.0)  # padding that must not matter
    for number, row in enumerate(rows):
        for place, item in enumerate(row):
            vector = own.mask[0] if item is None else own.items.norm(own.items.own.weight[item])
            x[number, place] = vector
    real = torch.tensor([[place < len(row) for place in range(most)] for row in rows])
    for block in own.encoder.blocks:
        assert isinstance(block, Block)
        x = x + padded_attention(block, block.attention_norm(x), real)
        x = x + block.down(functional.gelu(block.up(block.hidden_norm(x))))
    x = own.query(own.encoder.norm(x))
    if own.query_norm is not None:
        x = own.query_norm(functional.gelu(x))
    logits = x @ own.items.norm(own.items.own.weight).T / math.sqrt(NETWORK.width)
    if own.bias is not None:
        logits = logits + own.bias
    return [logits[number, : len(row)] for number, row in enumerate(rows)]


def padded_attention(block: Block, x: Tensor, real: Tensor) -> Tensor:
    """(rows, places, width): every token attends to every real token of its row."""
    rows, places, width = x.shape
    size = width // NETWORK.heads
    split = torch.split(block.qkv(x), width, dim=2)
    parts = [part.view(rows, places, NETWORK.heads, size) for part in split]
    q, k = (rotated(part) for part in parts[:2])
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(size)
    weights = scores.masked_fill(~real[:, None, None, :], -torch.inf).softmax(-1)
    attended = torch.einsum("bhqk,bkhd->bqhd", weights, parts[2]).reshape(rows, places, width)
    out: Tensor = block.out(attended)
    return out


def rotated(x: Tensor) -> Tensor:
    """Rotary positions as complex numbers: entries i and i + size / 2 turn by place * rate i."""
    size = x.shape[-1]
    rates = torch.tensor([10000.0 ** (-2 * i / size) for i in range(size // 2)])
    turns = torch.exp(1j * torch.arange(x.shape[1])[:, None] * rates)[None, :, None]
    turned = torch.complex(x[..., : size // 2], x[..., size // 2 :]) * turns
    return torch.cat([turned.real, turned.imag], dim=-1)


def with_masks(sequences: Sequences, masked: Tensor) -> list[list[int | None]]:
    parts = torch.split(masked, sequences.lengths.tolist())
    return [
        [None if hidden else int(item) for item, hidden in zip(row, part, strict=True)]
        for row, part in zip(sequences, parts, strict=True)
    ]


def masked_logits(own: Bert4Rec) -> list[tuple[Tensor, int]]:
    """(items,) logits and the answer for every masked item of BATCH."""
    found = padded_logits(own, with_masks(BATCH, MASKED))
    rows = torch.cat(found)[MASKED]
    return list(zip(rows, BATCH.values[MASKED.numpy()].tolist(), strict=True))


def log_probs(own: Bert4Rec, histories: Sequences) -> Tensor:
    """(users, items) of the item after each history."""
    rows = [[*map(int, row[-own.history_limit :]), None] for row in histories]
    return torch.stack([found[-1].log_softmax(0) for found in padded_logits(own, rows)])


# The losses


@pytest.mark.parametrize("head", HEADS)
def test_softmax_loss_equals_a_padded_network_with_dense_softmax(head: Head) -> None:
    own = model(head=head)
    expected = sum(-row.log_softmax(0)[target].item() for row, target in masked_logits(own))
    loss = own(MaskedBatch(BATCH, 6.0, MASKED, None))
    assert loss.item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("head", HEADS)
def test_sampled_loss_by_hand(head: Head) -> None:
    own = model(head=head, loss="sampled", negatives=5)
    negatives = torch.tensor([3, 9, 9, 0, 12])
    log_q = NegativeSampler(torch.from_numpy(COUNTS), 5).log_q(negatives)
    expected = 0.0
    for logits, target in masked_logits(own):
        others = (logits[negatives] - log_q)[negatives != target]
        expected += (torch.cat([logits[target, None], others]).logsumexp(0) - logits[target]).item()
    loss = own(MaskedBatch(BATCH, 6.0, MASKED, negatives))
    assert loss.item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("loss", ["softmax", "sampled"])
def test_losses_of_parts_sum_to_the_loss_of_the_batch(loss: str) -> None:
    own = model(loss=loss, negatives=len(BATCH.values))
    batch = own.prepare(BATCH, generator())
    parts = [batch.part(np.array(rows)) for rows in ([0, 2], [1, 3])]
    assert own(batch).item() == pytest.approx(sum(own(part).item() for part in parts), rel=1e-5)
    assert batch.weight == sum(int(part.masked.sum()) for part in parts)


@pytest.mark.parametrize("head", HEADS)
def test_an_empty_part_has_no_loss_and_gradients_of_zero(head: Head) -> None:
    own = model(head=head)
    batch = own.prepare(BATCH, generator())
    loss = own(batch.part(np.empty(0, dtype=np.int64)))
    loss.backward()
    assert loss.item() == 0
    assert all(p.grad is not None and (p.grad == 0).all() for p in own.parameters())


@pytest.mark.parametrize("loss", ["softmax", "sampled"])
@pytest.mark.parametrize("head", HEADS)
def test_every_parameter_has_a_gradient(head: Head, loss: str) -> None:
    own = model(head=head, loss=loss)
    own(own.prepare(BATCH, generator())).backward()
    assert all(p.grad is not None and (p.grad != 0).any() for p in own.parameters())


def test_sequences_of_one_item_are_learned_from_masks_alone() -> None:
    own = model()
    single = Sequences.of([[4], [6]])
    expected = -log_probs(own, Sequences.of([[]]))[0, [4, 6]].sum().item()
    loss = own(own.prepare(single, generator()))
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    loss.backward()
    assert own.mask.grad is not None
    assert (own.mask.grad != 0).any()


# What is masked


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.floats(0.01, 1), st.integers(0, 9))
def test_each_sequence_has_its_rounded_share_masked_and_never_none(
    lengths: list[int], share: float, seed: int
) -> None:
    sequences = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    masked = mask_share(share, sequences, generator(seed))
    found = torch.bincount(sequences, masked.double()).tolist()
    assert found == [max(1, round(share * length)) for length in lengths]


def masks(own: Bert4Rec, lengths: list[int], times: int) -> list[Tensor]:
    """For each length, (times, length) masks drawn for sequences of that length."""
    rows = [[0] * length for length in lengths for _ in range(times)]
    masked = own.prepare(Sequences.of(rows), generator()).masked
    parts = torch.split(masked, [length * times for length in lengths])
    return [part.view(times, length) for part, length in zip(parts, lengths, strict=True)]


def share_is(draws: Tensor, probability: float) -> None:
    """Within five standard errors."""
    error = 5 * (probability * (1 - probability) / draws.numel()) ** 0.5
    assert draws.double().mean().item() == pytest.approx(probability, abs=error)


def test_every_place_and_pair_of_places_is_masked_alike_often() -> None:
    own = model(mask_ratio=0.6, last_item_share=0.0)
    for masked, count in zip(masks(own, [1, 3, 5], 10_000), [1, 2, 3], strict=True):
        length = masked.shape[1]
        assert (masked.sum(1) == count).all()
        for place in range(length):
            share_is(masked[:, place], count / length)
            for other in range(place):
                pair = count * (count - 1) / (length * (length - 1))
                share_is(masked[:, place] & masked[:, other], pair)


def test_the_last_item_alone_is_masked_in_its_share_of_the_samples() -> None:
    own = model(mask_ratio=0.4, last_item_share=0.3)
    (masked,) = masks(own, [5], 20_000)
    last_alone = masked[:, -1] & (masked.sum(1) == 1)
    share_is(last_alone, 0.3)
    assert (masked[~last_alone].sum(1) == 2).all()
    share_is(masked[:, -1], 0.3 + 0.7 * 0.4)
    share_is(masked[:, 0], 0.7 * 0.4)


def test_weight_of_a_batch_is_the_number_of_masked_items() -> None:
    own = model(mask_ratio=0.6)
    batch = own.prepare(BATCH, generator())
    assert batch.weight == batch.masked.sum()
    only_last = model(last_item_share=1.0).prepare(BATCH, generator())
    assert only_last.masked.nonzero().squeeze(1).tolist() == [0, 3, 7, 11]
    assert only_last.weight == 4


def test_draws_follow_from_the_generator() -> None:
    own = model(loss="sampled", negatives=6)
    one, two, other = (own.prepare(BATCH, generator(seed)) for seed in (3, 3, 4))
    assert one.negatives is not None
    assert two.negatives is not None
    assert other.negatives is not None
    assert torch.equal(one.masked, two.masked)
    assert torch.equal(one.negatives, two.negatives)
    assert not torch.equal(one.negatives, other.negatives)


def test_automatic_ratio_is_the_published_one_of_sparse_or_dense_data() -> None:
    assert published_ratio(Sequences.of([[1, 2, 3], [4, 5], []])) == 0.6
    assert published_ratio(Sequences.of([[0] * 60, [1] * 40, []])) == 0.2
    assert published_ratio(Sequences.of([[0] * 60, [1] * 39])) == 0.6


# The network


@torch.no_grad()
def test_what_a_masked_item_is_changes_no_hidden_state() -> None:
    own = model()
    hidden = own.encode(BATCH, MASKED)
    for place in range(len(BATCH.values)):
        values = BATCH.values.copy()
        values[place] = (values[place] + 1) % ITEMS
        changed = own.encode(Sequences(values, BATCH.offsets), MASKED)
        owner = BATCH.owners[MASKED.numpy()] == BATCH.owners[place]
        if MASKED[place]:
            assert torch.equal(changed, hidden)
        else:  # a visible item is seen by every mask of its sequence, before it and after it
            assert (changed != hidden).any(1).tolist() == owner.tolist()


@torch.no_grad()
def test_states_do_not_depend_on_other_sequences() -> None:
    own = model()
    together = torch.split(own.encode(BATCH, MASKED), [1, 2, 2, 1])
    for row, (hidden, part) in enumerate(
        zip(together, torch.split(MASKED, [1, 3, 4, 4]), strict=True)
    ):
        alone = own.encode(BATCH.select(np.array([row])), part)
        torch.testing.assert_close(alone, hidden)


def test_the_order_of_a_history_matters() -> None:
    found = model().rank(Query(Sequences.of([[3, 1, 4], [1, 3, 4]]), ITEMS))
    assert not np.allclose(*found.scores)


@pytest.mark.parametrize("head", HEADS)
def test_ranking_equals_dense_scores(head: Head, monkeypatch: pytest.MonkeyPatch) -> None:
    own = model(limit=4, head=head)
    expected = log_probs(own, HISTORIES)  # one history is empty, one longer than the limit
    for query in queries():
        assert_same(own.rank(query), ranked_by(expected, query))
    monkeypatch.setattr(retrieval, "RANK_TOKENS", 6)  # few users at once
    for query in queries():
        assert_same(own.rank(query), ranked_by(expected, query))


def test_no_users_get_no_items() -> None:
    assert model().rank(Query(Sequences.of([]), 3)).items.shape == (0, 3)


def test_dropout_is_off_in_evaluation() -> None:
    own, query = model(), Query(HISTORIES, 4)
    quiet = Bert4Rec(replace(own.config, transformer=replace(NETWORK, dropout=0.0)), COUNTS)
    quiet.load_state_dict(own.state_dict())
    own.train()
    batch = own.prepare(BATCH, generator())
    assert own(batch).item() != own(batch).item()
    assert_same(own.rank(query), quiet.eval().rank(query), exact=True)


def test_ranking_after_more_training_uses_the_new_weights() -> None:
    own, query = model(head="bert"), Query(HISTORIES, ITEMS)
    own.rank(query)
    own.train()
    randomise(own, seed=1)
    assert_same(own.rank(query), ranked_by(log_probs(own, HISTORIES), query))


@given(st.lists(st.lists(st.integers(0, 4), max_size=4), max_size=4))
def test_one_more_place_at_the_end_of_each_sequence(rows: list[list[int]]) -> None:
    assert with_one_more(Sequences.of(rows)) == Sequences.of([[*row, 0] for row in rows])


# Settings, files, learning


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mask_ratio": -0.1}, "mask_ratio is -0.1; give a number from "),
        ({"mask_ratio": 1.5}, "mask_ratio is 1.5; give a number from "),
        ({"last_item_share": 2.0}, "last_item_share is 2.0; give a number from "),
        ({"loss": "bce"}, "loss is 'bce'; choose one of softmax, sampled"),
        ({"head": "mlp"}, "head is 'mlp'; choose one of linear, bert"),
        ({"negatives": 0}, "negatives is 0; give a whole number from 1 to "),
    ],
)
def test_raises_when_a_setting_is_out_of_range(settings: dict[str, object], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        Bert4RecConfig(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("head", HEADS)
def test_saved_and_loaded_model_ranks_alike(head: Head, tmp_path: Path) -> None:
    own = model(limit=4, head=head)
    own.save(tmp_path)
    config = TrainConfig("bert4rec", own.config, FitConfig(), history_limit=4, device="cpu")
    loaded = Bert4Rec.load(tmp_path, config)
    assert not loaded.training
    for query in queries():
        assert_same(loaded.rank(query), own.rank(query), exact=True)


@pytest.mark.parametrize(("loss", "head"), [("softmax", "linear"), ("sampled", "bert")])
def test_learns_which_item_comes_next(loss: str, head: Head, tmp_path: Path) -> None:
    data = walks()
    split = leave_out(data.histories)
    network = replace(NETWORK, layers=1, width=16, dropout=0.0)
    config = TrainConfig(
        "bert4rec",
        Bert4RecConfig(network, head=head, loss=loss, negatives=8),  # type: ignore[arg-type]
        FitConfig(steps=100, token_budget=400, learning_rate=1e-2, ema=0.9, validations=1),
        history_limit=4,
        device="cpu",
    )
    learned = Bert4Rec.learn(Training(data, split, config, workspace(tmp_path)))
    assert not learned.training
    assert learned.config.mask_ratio == 0.6
    ranked = learned.rank(Query(split.test.histories, 2)).items
    assert (ranked == split.test.targets).any(1).mean() > 0.9  # by chance: 0.14


def walks() -> Dataset:
    """Users who go from each item to the next one, from every item and for several lengths."""
    rows = [
        (f"u{start}-{length}", f"i{(start + place) % ITEMS:02}", place)
        for start in range(ITEMS)
        for length in (7, 8, 9)
        for place in range(length)
    ]
    events = pl.DataFrame(rows, schema=["user_id", "item_id", "position"], orient="row")
    return Dataset.from_frames(
        events, pl.DataFrame({"item_id": [f"i{n:02}" for n in range(ITEMS)]})
    )
