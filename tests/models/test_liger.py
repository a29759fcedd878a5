"""LIGER against TIGER's definition and cosines written out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from maskgr.data.sequences import Sequences
from maskgr.data.splits import leave_out
from maskgr.decoding.config import DecodingConfig
from maskgr.errors import RequestError
from maskgr.evaluation.ranking import Query
from maskgr.models.base import TrainConfig, Training
from maskgr.models.liger import Liger, LigerConfig
from maskgr.nn.encoder_decoder import Attention, EncoderDecoderConfig
from maskgr.sids.semantic_ids import SemanticIds
from maskgr.training.fit import FitConfig
from tests.models.test_tiger import (
    ATTENTIONS,
    BATCH,
    ENOUGH,
    NETWORK,
    SIDS,
    encoded,
    hidden,
    how,
    id_log_probs,
    item_log_probs,
)
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

COUNTS = np.arange(ITEMS) % 5  # items 0, 5 and 10 were never trained on
COLD = np.flatnonzero(COUNTS == 0)


@pytest.fixture(scope="module")
def sids() -> SemanticIds:
    return SemanticIds.make(shop(), SIDS)


def make(sids: SemanticIds, limit: int = 9, **changes: Any) -> Liger:
    own = LigerConfig(SIDS, replace(NETWORK, **changes), text_hidden=12)
    config = TrainConfig("liger", own, FitConfig(), history_limit=limit, device="cpu")
    torch.manual_seed(0)
    made = Liger(config, sids, COUNTS)
    randomise(made)
    return made.eval()


@pytest.fixture(scope="module", params=ATTENTIONS)
def own(sids: SemanticIds, request: pytest.FixtureRequest) -> Liger:
    return make(sids, attention=request.param)


@pytest.fixture(scope="module")
def causal(sids: SemanticIds) -> Liger:
    return make(sids)


@torch.no_grad()
def dense_log_probs(own: Liger, history: npt.ArrayLike) -> Tensor:
    """(items,) by hand: cosines of the last encoder state and of every text's vector."""
    standard = (texts() - texts().mean(0)) / texts().var(0).mean() ** 0.5
    vectors = own.text.maps(torch.from_numpy(standard))
    last = encoded(own, history)[-1]
    cosines = vectors @ last / (vectors.norm(dim=1) * last.norm())
    found: Tensor = (cosines / 0.07).log_softmax(0)
    return found


def all_dense(own: Liger, histories: Sequences) -> Tensor:
    """(users, items)."""
    return torch.stack([dense_log_probs(own, history) for history in histories])


# The network


@torch.no_grad()
def test_a_token_is_its_digit_text_and_positions_normed(causal: Liger) -> None:
    numbers, places = torch.tensor([4, 9]), torch.tensor([2, 0])
    found = causal.embed_items(numbers, places)
    text = causal.text(numbers)
    for item in range(2):
        for level in range(causal.levels):
            token = causal.tokens.starts[level] + causal.codes[numbers[item], level]
            parts = [
                causal.tokens.table.weight[token] * causal.network.width**0.5,
                text[item],
                causal.item_position.weight[places[item]],
                causal.digit_position.weight[level],
            ]
            expected = causal.input_norm(torch.stack(parts).sum(0))
            torch.testing.assert_close(found[item, level], expected)


def test_digits_are_predicted_as_by_definition(own: Liger) -> None:
    expected = item_log_probs(own, HISTORIES)
    for query in queries():
        found = own.decode(query, how(retrieval="generative", beams=ENOUGH))
        assert_same(found, ranked_by(expected, query))


def test_text_of_the_target_and_of_later_items_does_not_leak(
    causal: Liger, sids: SemanticIds
) -> None:
    """The same digits with another text: only items behind it may notice."""
    before = hidden(causal, [3, 1, 4, 6])[0]
    changed = make(sids)
    changed.text.embeddings = changed.text.embeddings.clone()
    changed.text.embeddings[4] += 3.0
    after = hidden(changed, [3, 1, 4, 6])[0]
    torch.testing.assert_close(after[:3], before[:3])  # item 4 is the third target
    assert not torch.allclose(after[3], before[3])


# Training


def by_hand(own: Liger, pairs: list[tuple[np.ndarray, int]]) -> float:
    """Mean cross-entropy of digits plus mean cross-entropy of items, equally weighted."""
    ids = own.sids.digits
    digits = [-id_log_probs(own, row, ids[[target]])[0] for row, target in pairs]
    items = [-dense_log_probs(own, row)[target].item() for row, target in pairs]
    return float(np.sum(digits) / (own.levels * len(pairs)) + np.mean(items))


def test_loss_is_the_mean_over_digits_plus_the_mean_over_items(causal: Liger) -> None:
    pairs = [(row[:n], int(row[n])) for row in BATCH for n in range(len(row))]
    batch = causal.prepare(BATCH, torch.Generator())
    found = causal(batch).item() / batch.weight
    assert found == pytest.approx(by_hand(causal, pairs), rel=1e-5)


def test_loss_as_published_has_one_target_a_sequence(sids: SemanticIds) -> None:
    own = make(sids, attention="full")
    batch = own.prepare(BATCH, torch.Generator().manual_seed(3))
    pairs = [(row[:-1], int(row[-1])) for row in batch.sequences]
    found = own(batch).item() / batch.weight
    assert found == pytest.approx(by_hand(own, pairs), rel=1e-5)


def test_every_parameter_learns(own: Liger) -> None:
    own(own.prepare(BATCH, torch.Generator())).backward()
    assert all(p.grad is not None for p in own.parameters())
    still = [n for n, p in own.named_parameters() if p.grad is None or not p.grad.any()]
    own.zero_grad()
    assert not still


# Retrieval


def test_dense_retrieval_ranks_all_items_by_cosine(own: Liger) -> None:
    expected = all_dense(own, HISTORIES)
    for query in queries():
        assert_same(own.decode(query, how(retrieval="dense")), ranked_by(expected, query))


@pytest.mark.parametrize("cache", ["frozen", "off"])
@pytest.mark.parametrize("top", [2, 7, ITEMS])
def test_unified_ranks_beams_and_cold_items_by_cosine(own: Liger, top: int, cache: Any) -> None:
    dense, beams = all_dense(own, HISTORIES), 4
    found = own.decode(Query(HISTORIES, top), how(beams=beams, cache=cache))
    wide = Query(HISTORIES, max(top, beams))
    generated = own.decode(wide, how(retrieval="generative", beams=beams)).items
    for user, row in enumerate(generated.tolist()):
        united = {*row[:beams], *COLD.tolist()}
        best = sorted(united, key=lambda item: -dense[user, item].item())
        rest = [item for item in row[beams:] if item not in united]
        expected = [*best, *rest][:top]
        assert found.items[user].tolist() == expected
        scores = np.minimum.accumulate(dense[user, expected].numpy())
        assert found.scores[user] == pytest.approx(scores, abs=1e-4)


def test_unified_obeys_filters(own: Liger) -> None:
    allowed = np.isin(np.arange(ITEMS), [0, 1, 2, 5, 8])
    query = Query(HISTORIES, 6, allowed, HISTORIES)
    found = own.decode(query, how(beams=4))
    for row, history in zip(found.items.tolist(), HISTORIES, strict=True):
        left = {0, 1, 2, 5, 8} - set(history.tolist())
        assert sorted(item for item in row if item >= 0) == sorted(left)
        assert row[len(left) :] == [-1] * (6 - len(left))


def test_unified_without_cold_items_ranks_the_beams(sids: SemanticIds) -> None:
    own = make(sids)
    own.counts = np.ones(ITEMS, dtype=np.int64)
    found = own.decode(Query(HISTORIES, 4), how(beams=4)).items
    beams = own.decode(Query(HISTORIES, 4), how(retrieval="generative", beams=4)).items
    assert np.array_equal(np.sort(found, 1), np.sort(beams, 1))
    assert not np.array_equal(found, beams)


def test_unconstrained_beams_that_are_no_item_are_left_out(causal: Liger) -> None:
    found = causal.decode(Query(HISTORIES, 5), how(beams=5, constrained=False))
    assert found.invalid_share is not None
    assert found.invalid_share > 0
    for row in found.items.tolist():
        kept = [item for item in row if item >= 0]
        assert len(set(kept)) == len(kept) >= len(COLD)


def test_unified_is_its_own_way(causal: Liger) -> None:
    assert causal.resolved(causal.decoding()).retrieval == "unified"
    query = Query(HISTORIES, 5)
    assert_same(causal.rank(query), causal.decode(query, how(retrieval="unified")), exact=True)
    for wrong in (how(order="random"), how(steps=2), how(guidance=1.0), how(remask=2)):
        with pytest.raises(RequestError, match="liger"):
            causal.decode(query, wrong)
    with pytest.raises(RequestError, match="text_hidden is 0"):
        LigerConfig(text_hidden=0)


def test_table_follows_the_weights(sids: SemanticIds) -> None:
    own = make(sids)
    before = own.decode(Query(HISTORIES, 3), how(retrieval="dense")).scores
    own.train()
    with torch.no_grad():
        own.state_dict()["text.maps.4.weight"].mul_(torch.linspace(0.1, 3, 8)[:, None])
    after = own.decode(Query(HISTORIES, 3), how(retrieval="dense")).scores
    assert not np.allclose(before, after)
    assert not own.training


# Items and files


@pytest.mark.parametrize("retrieval", ["unified", "generative", "dense"])
def test_new_items_are_cold_and_found_at_once(
    causal: Liger, tmp_path: Path, retrieval: Any
) -> None:
    vectors = np.random.default_rng(5).normal(size=(2, TEXT)).astype(np.float32)
    more = causal.with_items(pl.DataFrame({"item_id": ["x", "y"]}), vectors)
    assert more.counts[-2:].tolist() == [0, 0]
    torch.testing.assert_close(more.text.mean, causal.text.mean)
    query = Query(Sequences.of([[], [ITEMS, 3]]), ITEMS + 2)
    found = more.decode(query, how(retrieval=retrieval, beams=2))
    for row in found.items.tolist():
        assert sorted(row) == list(range(ITEMS + 2))
    more.save(tmp_path)
    again = Liger.load(tmp_path, TrainConfig.from_dict(more.config.to_dict()))
    assert_same(again.decode(query, how(retrieval=retrieval, beams=2)), found, exact=True)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_training_improves_all_three_ways(tmp_path: Path, attention: Attention) -> None:
    data = shop()
    network = EncoderDecoderConfig(1, 32, 2, 64, 0.1, 1, attention=attention)
    fit = FitConfig(steps=60, token_budget=400, learning_rate=1e-2, validations=1, ema=0.9)
    config = TrainConfig("liger", LigerConfig(SIDS, network, text_hidden=32), fit, device="cpu")
    split = leave_out(data.histories)
    trained = Liger.learn(Training(data, split, config, workspace(tmp_path)))
    fresh = Liger(config, trained.sids, trained.counts).eval()

    def hits(model: Liger, decoding: DecodingConfig) -> float:
        ranked = model.decode(Query(split.test.histories, 3), decoding)
        return float((ranked.items == split.test.targets).any(1).mean())

    for retrieval in trained.retrievals:
        decoding = how(retrieval=retrieval)
        assert hits(trained, decoding) > max(0.5, hits(fresh, decoding) + 0.2)


def test_constant_texts_are_no_error(sids: SemanticIds) -> None:
    own = Liger(
        make(sids).config, replace(sids, embeddings=np.ones((ITEMS, 1), np.float32)), COUNTS
    )
    assert torch.isfinite(functional.normalize(own.text(), dim=1)).all()
