"""SASRec against dense scores of one history at a time."""

from __future__ import annotations

from collections import Counter
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

from maskgr.data.sequences import Sequences
from maskgr.data.splits import leave_out
from maskgr.errors import ArtefactError, RequestError
from maskgr.evaluation.ranking import Query
from maskgr.models import retrieval
from maskgr.models.base import TrainConfig, Training
from maskgr.models.sasrec import (
    NegativeBatch,
    SASRec,
    SASRecConfig,
    distinct_pairs,
    earlier_items,
)
from maskgr.nn.item_vectors import ItemSource
from maskgr.nn.softmax import NegativeSampler
from maskgr.nn.transformer import TransformerConfig
from maskgr.sids.config import EncoderConfig
from maskgr.sids.item_text import ItemText
from maskgr.training.fit import FitConfig
from tests.models.tiny import (
    HISTORIES,
    ITEMS,
    TEXT,
    assert_same,
    queries,
    randomise,
    ranked_by,
    shop,
    texts,
    workspace,
)

NETWORK = TransformerConfig(layers=2, width=8, heads=2, hidden=16, dropout=0.4)
COUNTS = np.arange(ITEMS) % 5
BATCH = Sequences.of([[7], [3, 3, 5], [0, 2, 0, 9], [4, 1, 8, 6]])


def model(source: ItemSource = "id", limit: int = 20, **settings: object) -> SASRec:
    config = SASRecConfig(NETWORK, items=source, **settings)  # type: ignore[arg-type]
    torch.manual_seed(0)
    made = SASRec(config, COUNTS, torch.from_numpy(texts()) if source != "id" else None, limit)
    if source != "id":
        made.text = ItemText(texts(), EncoderConfig("embeddings"))
    randomise(made)
    return made.eval()


@torch.no_grad()
def log_probs(own: SASRec, histories: Sequences) -> Tensor:
    """(users, items) one user after the other, over the whole catalogue."""
    rows = []
    for history in histories:
        logits = logits_after(own, history[-own.history_limit :])
        if own.repeat is not None:
            logits[np.unique(history)] += own.repeat_value
        rows.append(logits.log_softmax(0))
    return torch.stack(rows)


def logits_after(own: SASRec, history: np.ndarray) -> Tensor:
    hidden, _ = own.encode(Sequences.of([history]))
    logits: Tensor = own.items() @ (own.query(hidden[-1]) * NETWORK.width**-0.5)
    return logits


def prefixes(sequences: Sequences) -> list[tuple[np.ndarray, int]]:
    """Every item of a batch with the items before it."""
    return [(row[:n], int(row[n])) for row in sequences for n in range(len(row))]


# The network


def test_a_state_does_not_depend_on_later_items_or_other_users() -> None:
    own = model()
    hidden, _ = own.encode(Sequences.of([[3, 1, 4]]))
    changed, _ = own.encode(Sequences.of([[3, 1, 9, 2]]))
    torch.testing.assert_close(hidden[:3], changed[:3])  # the start token and two items
    assert not torch.allclose(hidden[3], changed[3])
    together, layout = own.encode(Sequences.of([[9], [3, 1, 4], [3, 1, 9, 2]]))
    torch.testing.assert_close(together[layout.sequences == 1], hidden)
    torch.testing.assert_close(together[layout.sequences == 2], changed)


def test_the_order_of_a_history_matters() -> None:
    own = model()
    first, second = log_probs(own, Sequences.of([[3, 1, 4], [1, 3, 4]]))
    assert not torch.allclose(first, second)


@pytest.mark.parametrize("source", get_args(ItemSource))
@pytest.mark.parametrize("repeat_bias", [False, True])
def test_ranking_equals_dense_scores(
    source: ItemSource, repeat_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = model(source, limit=4, repeat_bias=repeat_bias)
    expected = log_probs(own, HISTORIES)
    for query in queries():
        assert_same(own.rank(query), ranked_by(expected, query))
    monkeypatch.setattr(retrieval, "RANK_TOKENS", 6)  # few users at once
    for query in queries():
        assert_same(own.rank(query), ranked_by(expected, query))


def test_no_users_get_no_items() -> None:
    assert model().rank(Query(Sequences.of([]), 3)).items.shape == (0, 3)


def test_repeat_bias_counts_for_items_beyond_the_history_limit() -> None:
    own = model(limit=2, repeat_bias=True)
    assert own.repeat is not None
    history = [5, 6, 7, 8]
    with torch.no_grad():
        own.repeat.fill_(-100.0)
    last = own.rank(Query(Sequences.of([history]), ITEMS)).items[0, -4:]
    assert set(last.tolist()) == set(history)


def test_repeat_bias_learns_whether_items_come_again() -> None:
    for sequences, sign in (([[1, 1, 1, 1]], -1), ([[1, 2, 3, 4]], 1)):
        own = model(repeat_bias=True)
        own(own.prepare(Sequences.of(sequences), torch.Generator())).backward()
        assert own.repeat is not None
        assert own.repeat.grad is not None
        assert own.repeat.grad.sign().item() == sign


def test_dropout_is_off_in_evaluation() -> None:
    own, query = model(), Query(HISTORIES, 4)
    quiet = SASRec(replace(own.config, transformer=replace(NETWORK, dropout=0.0)), COUNTS)
    quiet.load_state_dict(own.state_dict())
    own.train()
    batch = own.prepare(BATCH, torch.Generator())
    assert own(batch).item() != own(batch).item()
    assert_same(own.rank(query), quiet.eval().rank(query), exact=True)


@torch.no_grad()
def test_table_is_kept_between_rankings_and_dropped_when_training() -> None:
    own, query = model(), Query(HISTORIES, ITEMS)
    own.rank(query)
    table = own.table()
    own.rank(query)
    assert own.table() is table
    own.train()
    randomise(own, seed=1)
    own.eval()
    assert_same(own.rank(query), ranked_by(log_probs(own, HISTORIES), query))


# The losses


@pytest.mark.parametrize("repeat_bias", [False, True])
def test_softmax_loss_is_the_cross_entropy_of_every_item(repeat_bias: bool) -> None:
    own = model(repeat_bias=repeat_bias)
    expected = 0.0
    for history, target in prefixes(BATCH):
        expected -= log_probs(own, Sequences.of([history]))[0, target].item()
    loss = own(own.prepare(BATCH, torch.Generator()))
    assert loss.item() == pytest.approx(expected, rel=1e-5)


def test_sampled_loss_by_hand() -> None:
    own = model(loss="sampled", negatives=5)
    negatives = torch.tensor([3, 9, 9, 0, 12])
    log_q = NegativeSampler(torch.from_numpy(COUNTS), 5).log_q(negatives)
    expected = 0.0
    for history, target in prefixes(BATCH):
        logits = logits_after(own, history)
        others = (logits[negatives] - log_q)[negatives != target]
        expected += (torch.cat([logits[target, None], others]).logsumexp(0) - logits[target]).item()
    loss = own(NegativeBatch(BATCH, 12.0, negatives, shared=True))
    assert loss.item() == pytest.approx(expected, rel=1e-5)


def test_binary_loss_by_hand() -> None:
    own = model(loss="bce")
    negatives = (torch.from_numpy(BATCH.values).long() + 1) % ITEMS
    expected = 0.0
    for (history, target), negative in zip(prefixes(BATCH), negatives, strict=True):
        logits = logits_after(own, history)
        expected -= functional.logsigmoid(logits[target]).item()
        expected -= functional.logsigmoid(-logits[negative]).item()
    loss = own(NegativeBatch(BATCH, 12.0, negatives, shared=False))
    assert loss.item() == pytest.approx(expected, rel=1e-5)


def test_binary_negatives_are_uniform_and_never_the_target() -> None:
    own, sequences = model(loss="bce"), Sequences.of([[4] * 6500])
    batch = own.prepare(sequences, torch.Generator().manual_seed(0))
    assert isinstance(batch, NegativeBatch)
    drawn = Counter(batch.negatives.tolist())
    assert set(drawn) == set(range(ITEMS)) - {4}
    assert max(abs(count - 500) for count in drawn.values()) < 5 * 500**0.5


@pytest.mark.parametrize("loss", ["softmax", "sampled", "bce"])
def test_losses_of_parts_sum_to_the_loss_of_the_batch(loss: str) -> None:
    # As many draws as the batch has items: draws for all must not be taken for one each.
    own = model(loss=loss, negatives=len(BATCH.values))
    batch = own.prepare(BATCH, torch.Generator().manual_seed(0))
    parts = [batch.part(np.array(rows)) for rows in ([0, 2], [1, 3])]
    assert own(batch).item() == pytest.approx(sum(own(part).item() for part in parts), rel=1e-5)


def test_an_empty_part_has_no_loss_and_gradients_of_zero() -> None:
    own = model(repeat_bias=True)
    batch = own.prepare(BATCH, torch.Generator())
    loss = own(batch.part(np.empty(0, dtype=np.int64)))
    loss.backward()
    assert loss.item() == 0
    assert all(p.grad is not None and (p.grad == 0).all() for p in own.parameters())


def test_repeat_bias_goes_with_the_softmax_loss_alone() -> None:
    with pytest.raises(RequestError, match="repeat_bias goes with loss=softmax, not with bce"):
        SASRecConfig(loss="bce", repeat_bias=True)
    with pytest.raises(RequestError, match="negatives is 0; give a whole number from 1 to "):
        SASRecConfig(negatives=0)


# Helpers

batches = st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=6), min_size=1, max_size=4)


@given(batches)
def test_earlier_items_are_those_before_each_place_once(rows: list[list[int]]) -> None:
    later, earlier = earlier_items(Sequences.of(rows))
    places = [(row, n) for row in rows for n in range(len(row))]
    expected = [(at, item) for at, (row, n) in enumerate(places) for item in set(row[:n])]
    assert sorted(zip(later.tolist(), earlier.tolist(), strict=True)) == sorted(expected)
    assert (np.diff(later) >= 0).all()


@given(batches)
def test_distinct_pairs(rows: list[list[int]]) -> None:
    owners, items = distinct_pairs(Sequences.of(rows))
    expected = {(owner, item) for owner, row in enumerate(rows) for item in row}
    assert len(owners) == len(expected)
    assert set(zip(owners.tolist(), items.tolist(), strict=True)) == expected


# Items and files


def test_new_items_are_known_by_their_text() -> None:
    own = model("text", repeat_bias=True)
    best = int(own.rank(Query(Sequences.of([[3, 1]]), 1)).items[0, 0])
    new = np.stack([texts()[best], np.full(TEXT, 7, dtype=np.float32)])
    grown = own.with_items(pl.DataFrame({"item_id": ["x", "y"]}), new)
    with torch.no_grad():
        vectors, old = grown.table(), own.table()
        torch.testing.assert_close(vectors[:ITEMS], old)
        own.items.own.weight[best] = 0  # nothing but text is known of a new item
        torch.testing.assert_close(vectors[ITEMS], own.items()[best])
    found = grown.rank(Query(Sequences.of([[3, 1], [ITEMS, ITEMS + 1]]), ITEMS + 2))
    assert ITEMS in found.items[0]
    assert set(found.items[1].tolist()) == set(range(ITEMS + 2))
    again = grown.with_items(pl.DataFrame({"item_id": ["z"]}), new[:1])
    assert len(again.table()) == ITEMS + 3


def test_raises_for_new_items_when_items_are_ids_alone() -> None:
    with pytest.raises(RequestError, match="knows nothing of new items; train one with items=text"):
        model().with_items(pl.DataFrame({"item_id": ["x"]}), None)


@pytest.mark.parametrize("source", get_args(ItemSource))
def test_saved_and_loaded_model_ranks_alike(source: ItemSource, tmp_path: Path) -> None:
    own = model(source, limit=4, repeat_bias=True)
    own.save(tmp_path)
    config = TrainConfig("sasrec", own.config, FitConfig(), history_limit=4, device="cpu")
    loaded = SASRec.load(tmp_path, config)
    assert not loaded.training
    for query in queries():
        assert_same(loaded.rank(query), own.rank(query), exact=True)


@pytest.mark.parametrize(
    ("loss", "source"),
    [("softmax", "text"), ("softmax", "both"), ("softmax", "id"), ("sampled", "id"), ("bce", "id")],
)
def test_learns_which_item_comes_next(loss: str, source: ItemSource, tmp_path: Path) -> None:
    data = shop()
    split = leave_out(data.histories)
    network = replace(NETWORK, layers=1, width=16, dropout=0.0)
    config = TrainConfig(
        "sasrec",
        SASRecConfig(network, loss, negatives=8, items=source),  # type: ignore[arg-type]
        FitConfig(steps=80, token_budget=200, learning_rate=1e-2, ema=0.9, validations=2),
        device="cpu",
    )
    learned = SASRec.learn(Training(data, split, config, workspace(tmp_path)))
    assert not learned.training
    ranked = learned.rank(Query(split.test.histories, 3)).items
    found = (ranked == split.test.targets).any(1).mean()
    assert found > 0.6  # three of fourteen items by chance: 0.21


def test_raises_when_the_counts_are_damaged(tmp_path: Path) -> None:
    (tmp_path / "counts.npy").write_bytes(b"")
    config = TrainConfig("sasrec", SASRecConfig(NETWORK), FitConfig(), device="cpu")
    with pytest.raises(ArtefactError, match=r"counts\.npy is damaged .*; train again"):
        SASRec.load(tmp_path, config)
