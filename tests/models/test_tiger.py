"""TIGER against one history, one target and one digit at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from maskgr.data.dataset import Dataset
from maskgr.data.sequences import Sequences
from maskgr.data.splits import leave_out
from maskgr.decoding.config import DecodingConfig
from maskgr.errors import RequestError
from maskgr.evaluation.ranking import Query, Ranked
from maskgr.models import tiger
from maskgr.models.base import TrainConfig, Training
from maskgr.models.generative import without_gaps
from maskgr.models.tiger import Encoded, LeftToRight, Tiger, TigerConfig
from maskgr.nn.encoder_decoder import Attention, Decoder, EncoderDecoderConfig
from maskgr.nn.transformer import rotary, rotate
from maskgr.sids.config import QuantizerConfig, SidsConfig
from maskgr.sids.semantic_ids import SemanticIds
from maskgr.training.fit import FitConfig
from tests.models.tiny import (
    HISTORIES,
    ITEMS,
    assert_same,
    queries,
    randomise,
    ranked_by,
    shop,
    workspace,
)

SIDS = SidsConfig(quantizer=QuantizerConfig(levels=2, codes=4))  # and an appended digit
NETWORK = EncoderDecoderConfig(
    layers=2, width=8, heads=2, hidden=16, dropout=0.3, decoder_layers=2, head_width=6
)
COUNTS = np.arange(ITEMS) % 5
BATCH = Sequences.of([[7], [3, 3, 5], [0, 2, 0, 9], [4, 1, 8, 6]])
ENOUGH = 64  # beams for every prefix of digits
ATTENTIONS: list[Attention] = ["causal", "full"]


@pytest.fixture(scope="module")
def sids() -> SemanticIds:
    return SemanticIds.make(shop(), SIDS)


def make(sids: SemanticIds, limit: int = 20, **changes: Any) -> Tiger:
    """A model whose probabilities are far from uniform, as training would make them."""
    own = TigerConfig(SIDS, replace(NETWORK, **changes))
    config = TrainConfig("tiger", own, FitConfig(), history_limit=limit, device="cpu")
    torch.manual_seed(0)
    made = Tiger(config, sids, COUNTS)
    randomise(made)
    return made.eval()


@pytest.fixture(scope="module", params=ATTENTIONS)
def own(sids: SemanticIds, request: pytest.FixtureRequest) -> Tiger:
    return make(sids, attention=request.param)


@pytest.fixture(scope="module")
def causal(sids: SemanticIds) -> Tiger:
    return make(sids)


def how(**changes: Any) -> DecodingConfig:
    return replace(DecodingConfig(order="left-to-right"), **changes)


# By definition: attention weights written out, a history and a prefix at a time


def attention(queries: Tensor, keys: Tensor, values: Tensor, visible: Tensor) -> Tensor:
    """(queries, heads x width) of (tokens, heads, width) each."""
    scores = torch.einsum("qhw,khw->hqk", queries, keys) / queries.shape[-1] ** 0.5
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khw->qhw", weights, values).flatten(1)


def turned(vectors: Tensor, positions: Tensor) -> Tensor:
    return rotate(vectors[:, None], rotary(positions, vectors.shape[-1]))[:, 0]


def decoded(decoder: Decoder, x: Tensor, positions: Tensor, states: Tensor) -> Tensor:
    """(tokens, width) of one target's tokens behind all `states` of its history."""
    past = torch.arange(len(states))
    order = torch.ones(len(x), len(x), dtype=torch.bool).tril()
    for block in decoder.blocks:
        q, k, v = block.qkv(block.attention_norm(x)).unflatten(1, (3, 2, -1)).unbind(1)
        x = x + block.out(attention(turned(q, positions), turned(k, positions), v, order))
        q = block.cross_queries(block.cross_norm(x)).unflatten(1, (2, -1))
        k, v = block.cross_keys_values(states).unflatten(1, (2, 2, -1)).unbind(1)
        everything = torch.ones(len(x), len(states), dtype=torch.bool)
        looked = attention(turned(q, positions), turned(k, past), v, everything)
        x = x + block.cross_out(looked)
        x = x + block.down(functional.gelu(block.up(block.hidden_norm(x))))
    out: Tensor = decoder.norm(x)
    return out


def encoded(own: Tiger, history: npt.ArrayLike) -> Tensor:
    """(tokens, width) encoder states of one history, where no later item exists."""
    items = np.asarray(history, dtype=np.int32)
    return own.encode(Sequences.of([items])).states


def digit_log_probs(own: Tiger, history: npt.ArrayLike) -> Callable[[tuple[int, ...]], Tensor]:
    """A function from the first digits of a target to the (codes,) of the next level."""
    table = own.tokens.table.weight[: len(own.tokens.bias)]

    @cache
    @torch.no_grad()
    def after(digits: tuple[int, ...]) -> Tensor:
        x = own.embed_targets(torch.tensor([digits], dtype=torch.int64))[0]
        hidden = decoded(own.decoder, x, len(states) + torch.arange(len(x)), states)[-1]
        start, stop = own.tokens.starts[len(digits) : len(digits) + 2]
        logits = table @ hidden + own.tokens.bias
        if own.network.logits == "vocabulary":
            return logits.log_softmax(0)[start:stop]
        return logits[start:stop].log_softmax(0)

    with torch.no_grad():
        states = encoded(own, history)
    return after


def id_log_probs(own: Tiger, history: npt.ArrayLike, ids: npt.NDArray[Any]) -> list[float]:
    """The log-probability of each of `ids` (rows, levels)."""
    after = digit_log_probs(own, history)
    return [
        sum(after(tuple(row[:level]))[digit].item() for level, digit in enumerate(row))
        for row in ids.tolist()
    ]


def item_log_probs(own: Tiger, histories: Sequences) -> Tensor:
    """(users, items)."""
    recent = histories.last(own.config.history_limit)
    return torch.tensor([id_log_probs(own, history, own.sids.digits) for history in recent])


# Training


@pytest.mark.parametrize("logits", ["level", "vocabulary"])
def test_loss_of_every_item_equals_each_prefix_encoded_by_itself(
    sids: SemanticIds, logits: str
) -> None:
    own = make(sids, logits=logits)
    expected = sum(
        -id_log_probs(own, row[:n], sids.digits[row[n : n + 1]])[0]
        for row in BATCH
        for n in range(len(row))
    )
    batch = own.prepare(BATCH, torch.Generator())
    assert batch.weight == own.levels * len(BATCH.values)
    assert own(batch).item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("logits", ["level", "vocabulary"])
def test_loss_as_published_is_that_of_one_target_a_sequence(sids: SemanticIds, logits: str) -> None:
    own = make(sids, attention="full", logits=logits)
    batch = own.prepare(BATCH, torch.Generator().manual_seed(1))
    assert batch.weight == own.levels * len(BATCH)
    expected = sum(
        -id_log_probs(own, row[:-1], sids.digits[row[-1:]])[0] for row in batch.sequences
    )
    assert own(batch).item() == pytest.approx(expected, rel=1e-5)


def test_targets_as_published_are_drawn_evenly_behind_at_least_one_item(sids: SemanticIds) -> None:
    own = make(sids, attention="full")
    generator = torch.Generator().manual_seed(0)
    many = Sequences.of([[9], *([[3, 1, 4, 5]] * 3000)])
    drawn = own.prepare(many, generator).sequences
    assert drawn[0].tolist() == [9]
    assert (np.diff(drawn.lengths) >= 0).all()
    assert {tuple(row.tolist()) for row in drawn} == {(9,), (3, 1), (3, 1, 4), (3, 1, 4, 5)}
    shares = np.bincount(drawn.lengths)[2:] / 3000
    assert shares == pytest.approx([1 / 3] * 3, abs=0.03)


def test_parts_of_a_batch_add_up(own: Tiger) -> None:
    batch = own.prepare(BATCH, torch.Generator().manual_seed(0))
    parts = [own(batch.part(np.arange(start, len(BATCH), 3))) for start in range(3)]
    torch.testing.assert_close(own(batch), torch.stack(parts).sum())
    nothing = own(batch.part(np.arange(0)))
    assert nothing.item() == 0
    nothing.backward()
    assert all(parameter.grad is not None for parameter in own.parameters())
    own.zero_grad()


def test_every_parameter_learns(own: Tiger) -> None:
    own(own.prepare(BATCH, torch.Generator())).backward()
    still = [n for n, p in own.named_parameters() if p.grad is None or not p.grad.any()]
    own.zero_grad()
    assert not still


def hidden(own: Tiger, *rows: list[int]) -> list[Tensor]:
    """For each sequence the (items, levels, width) states that predict its digits."""
    sequences = Sequences.of(rows)
    targets = own._targets(sequences)
    with torch.no_grad():
        found = own.predict(own.encode(sequences.without_last()), targets)
    return list(torch.split(found, sequences.lengths.tolist()))


def test_a_prediction_sees_neither_its_digit_nor_later_items_nor_other_sequences(
    causal: Tiger, sids: SemanticIds
) -> None:
    before = hidden(causal, [3, 1, 4, 6])[0]
    last = next(n for n in range(ITEMS) if sids.digits[n, 0] != sids.digits[4, 0])
    changed = hidden(causal, [3, 1, last, 7])[0]
    torch.testing.assert_close(changed[:2], before[:2])
    torch.testing.assert_close(changed[2, 0], before[2, 0])  # the first digit is its own target
    assert not torch.allclose(changed[2, 1], before[2, 1])  # the second knows the first
    assert not torch.allclose(changed[3, 0], before[3, 0])
    together = hidden(causal, [9], [2, 8, 5], [3, 1, 4, 6], [3, 1, last, 7])
    torch.testing.assert_close(together[2], before)
    torch.testing.assert_close(together[3], changed)


def test_each_prediction_sees_every_earlier_item(causal: Tiger) -> None:
    before = hidden(causal, [3, 1, 4, 6])[0]
    for place in range(3):
        row = [3, 1, 4, 6]
        row[place] = 9
        after = hidden(causal, row)[0]
        for target in range(place + 1, 4):
            assert not torch.allclose(after[target, 0], before[target, 0])


def test_dropout_is_off_in_evaluation(own: Tiger) -> None:
    batch = own.prepare(BATCH, torch.Generator().manual_seed(0))
    assert own(batch) == own(batch)
    own.train()
    assert own(batch) != own(batch)
    first, second = (own.rank(Query(HISTORIES, 4)).scores for _ in range(2))
    assert not own.training
    assert np.array_equal(first, second)


# Retrieval


def test_beam_search_with_enough_beams_ranks_items_by_their_enumerated_probability(
    own: Tiger,
) -> None:
    expected = item_log_probs(own, HISTORIES)
    for query in queries():
        found = own.decode(query, how(beams=ENOUGH))
        assert_same(found, ranked_by(expected, query))
        assert found.invalid_share is None


def test_unconstrained_search_with_enough_beams_by_enumeration(sids: SemanticIds) -> None:
    own = make(sids)
    tuples = list(product(*map(range, sids.codebook_sizes)))
    found = own.decode(Query(HISTORIES, ITEMS), how(beams=len(tuples), constrained=False))
    assert_same(found, ranked_by(item_log_probs(own, HISTORIES), Query(HISTORIES, ITEMS)))
    assert found.invalid_share == pytest.approx(1 - ITEMS / len(tuples))


def test_unconstrained_search_of_few_beams_keeps_the_most_probable_digits(
    sids: SemanticIds,
) -> None:
    """One beam: the likeliest digit at every level, whether or not an item has them."""
    own = make(sids)
    found = own.decode(Query(HISTORIES, 1), how(beams=1, constrained=False))
    ids, invalid = sids.digits.tolist(), 0
    for user, history in enumerate(HISTORIES):
        after, digits = digit_log_probs(own, history), list[int]()
        for _ in range(own.levels):
            digits.append(int(after(tuple(digits)).argmax()))
        expected = ids.index(digits) if digits in ids else -1
        invalid += expected < 0
        assert found.items[user, 0] == expected
    assert found.invalid_share == pytest.approx(invalid / len(HISTORIES))


@pytest.mark.parametrize("beams", [1, 4])
@pytest.mark.parametrize("constrained", [True, False])
def test_cache_equals_no_cache(own: Tiger, beams: int, constrained: bool) -> None:
    for query in queries():
        with_cache, without = (
            own.decode(query, how(beams=beams, constrained=constrained, cache=kind))
            for kind in ("frozen", "off")
        )
        assert_same(with_cache, without)
        assert with_cache.invalid_share == without.invalid_share


def test_a_search_with_a_cache_computes_one_token_a_beam_and_step(
    causal: Tiger, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, encodings = [], []
    forward, encode = Decoder.forward, Tiger.encode

    def counted(self: Decoder, x: Tensor, *rest: Any) -> Tensor:
        tokens.append(len(x))
        return forward(self, x, *rest)

    def encoded_once(self: Tiger, histories: Sequences) -> Encoded:
        encodings.append(len(histories))
        return encode(self, histories)

    monkeypatch.setattr(Decoder, "forward", counted)
    monkeypatch.setattr(Tiger, "encode", encoded_once)
    causal.decode(Query(HISTORIES, 3), how(beams=3))
    users = len(HISTORIES)
    assert tokens == [users] + [3 * users] * (causal.levels - 1)
    assert encodings == [users]


def test_prefixes_that_were_not_cached_are_computed(causal: Tiger) -> None:
    histories = Sequences.of([[], [6], [3, 1, 4]])
    user = torch.tensor([0, 2, 2])
    digits = torch.tensor([[[1, 2, 0]], [[0, 1, 0]], [[3, 3, 0]]])
    levels = torch.arange(3)
    cold = LeftToRight(causal, histories, cached=True)
    found = cold(user, digits, (levels < 2).expand(3, 1, 3), (levels == 2).expand(3, 1, 3))
    for row in range(3):
        after = digit_log_probs(causal, histories[int(user[row])])
        expected = after(tuple(digits[row, 0, :2].tolist()))
        torch.testing.assert_close(found[2][row], expected, atol=1e-5, rtol=1e-5)
    warm = LeftToRight(causal, histories, cached=True)
    warm.first()
    others = torch.tensor([[[2, 0, 0]], [[0, 0, 0]], [[3, 0, 0]]])
    warm(user, others, (levels < 1).expand(3, 1, 3), (levels == 1).expand(3, 1, 3))
    again = warm(user, digits, (levels < 2).expand(3, 1, 3), (levels == 2).expand(3, 1, 3))
    torch.testing.assert_close(again[2], found[2], atol=1e-5, rtol=1e-5)


def test_portions_of_users_and_rows_change_nothing(
    own: Tiger, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = own.decode(Query(HISTORIES, 6), how(beams=4))
    monkeypatch.setattr("maskgr.models.retrieval.RANK_TOKENS", 6)
    monkeypatch.setattr("maskgr.decoding.decoder.CELLS", 50)
    monkeypatch.setattr(tiger, "TOKENS", 20)
    for kind in ("frozen", "off"):
        assert_same(own.decode(Query(HISTORIES, 6), how(beams=4, cache=kind)), whole)


def test_first_results_do_not_depend_on_how_many_are_asked_for(causal: Tiger) -> None:
    few = causal.decode(Query(HISTORIES, 3), how(beams=3))
    many = causal.decode(Query(HISTORIES, ITEMS), how(beams=3))
    assert np.array_equal(few.items, many.items[:, :3])
    for row in many.items.tolist():
        assert sorted(row) == list(range(ITEMS))


def test_only_the_last_items_of_a_long_history_count(sids: SemanticIds) -> None:
    own = make(sids, limit=3)
    one, same, other = own.rank(Query(Sequences.of([[5, 6, 7, 8], [6, 7, 8], [7, 8]]), 5)).scores
    assert one == pytest.approx(same, abs=1e-5)
    assert one != pytest.approx(other, abs=1e-3)


def test_the_order_of_a_history_matters(own: Tiger) -> None:
    first, second = own.rank(Query(Sequences.of([[3, 1, 4], [1, 3, 4]]), ITEMS)).scores
    assert not np.allclose(first, second)


def test_trace_has_a_step_for_each_digit(causal: Tiger) -> None:
    ranked, traces = causal.trace(Query(HISTORIES, 4), how(beams=6))
    for user, steps in enumerate(traces):
        assert [set(step.positions.flatten().tolist()) for step in steps] == [{0}, {1}, {2}]
        assert steps[-1].scores[:4].tolist() == pytest.approx(ranked.scores[user].tolist())


def test_results_beyond_the_gaps_move_up() -> None:
    items, scores = torch.tensor([[4, -1, 7, -1, 2]]), torch.tensor([[0.0, 1, 2, 3, 4]])
    found, values = without_gaps(items, scores, 4)
    assert found.tolist() == [[4, 7, 2, -1]]
    assert values[0, :3].tolist() == [0, 2, 4]


# Settings


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"order": "greedy"}, "from left to right, not in greedy order"),
        ({"steps": 1}, "one digit a step, 3 in all, not in 1"),
        ({"guidance": 1.0}, "tiger has no guidance"),
        ({"remask": 1}, "tiger has no remask"),
        ({"retrieval": "dense"}, "tiger has no dense retrieval; .* train liger"),
        ({"retrieval": "unified"}, "tiger has no unified retrieval"),
    ],
)
def test_raises_where_it_cannot_decode_so(
    causal: Tiger, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        causal.decode(Query(HISTORIES, 3), how(**changes))


def test_auto_is_resolved(causal: Tiger) -> None:
    assert causal.resolved(how()) == how(retrieval="generative", steps=3, cache="frozen")
    assert causal.resolved(how(steps=3, cache="off")).cache == "off"
    assert causal.decoding() == how()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"decoder_layers": 0}, "decoder_layers is 0"),
        ({"head_width": -2}, "head_width is -2"),
        ({"head_width": 5}, "a width of 10 cannot be shared evenly by 2 heads"),
        ({"attention": "isolated"}, "attention is 'isolated'"),
        ({"logits": "all"}, "logits is 'all'"),
        ({"width": 7, "head_width": 0}, "a width of 7"),
    ],
)
def test_raises_on_wrong_settings(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        replace(NETWORK, **changes)


def test_published_preset_is_the_published_network() -> None:
    network = Tiger.presets["published"].model.network
    assert (network.layers, network.decoder_layers, network.width, network.hidden) == (
        4,
        4,
        128,
        1024,
    )
    assert (network.heads, network.head_width, network.attention_width) == (6, 64, 384)
    assert (network.attention, network.logits, network.dropout) == ("full", "vocabulary", 0.1)


def test_presets_decode_from_left_to_right() -> None:
    for preset in Tiger.presets.values():
        assert preset.model.decoding.order == "left-to-right"


# Items and files


def test_new_items_are_found_at_once(causal: Tiger) -> None:
    vectors = np.random.default_rng(5).normal(size=(2, 6)).astype(np.float32)
    more = causal.with_items(pl.DataFrame({"item_id": ["x", "y"]}), vectors)
    assert more.counts.tolist() == [*COUNTS.tolist(), 0, 0]
    found = more.decode(Query(Sequences.of([[], [ITEMS, 3]]), ITEMS + 2), how(beams=ENOUGH))
    for row in found.items.tolist():
        assert sorted(row) == list(range(ITEMS + 2))


def test_saved_and_loaded_model_answers_the_same(own: Tiger, tmp_path: Path) -> None:
    own.save(tmp_path)
    again = Tiger.load(tmp_path, TrainConfig.from_dict(own.config.to_dict()))
    assert_same(again.rank(Query(HISTORIES, 5)), own.rank(Query(HISTORIES, 5)), exact=True)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_training_finds_the_next_item(tmp_path: Path, attention: Attention) -> None:
    """Users walk to the next item or the one after it: two in three of all steps."""
    data = shop()
    own = TigerConfig(SIDS, EncoderDecoderConfig(1, 32, 2, 64, 0.1, 1, attention=attention))
    fit = FitConfig(steps=60, token_budget=400, learning_rate=1e-2, validations=1, ema=0.9)
    config = TrainConfig("tiger", own, fit, device="cpu")
    split = leave_out(data.histories)
    trained = Tiger.learn(Training(data, split, config, workspace(tmp_path)))

    def hits(model: Tiger) -> float:
        ranked: Ranked = model.rank(Query(split.test.histories, 3))
        return float((ranked.items == split.test.targets).any(1).mean())

    fresh = Tiger(config, trained.sids, trained.counts).eval()
    assert hits(trained) > max(0.6, hits(fresh) + 0.2)


def test_items_without_text_are_told_apart_by_a_digit_of_their_own(tmp_path: Path) -> None:
    log = shop().interactions()
    data = Dataset.from_frames(log)  # no items file, no vectors
    own = TigerConfig(SIDS, EncoderDecoderConfig(1, 16, 2, 32, 0.1, 1))
    fit = FitConfig(steps=3, token_budget=400, validations=1)
    training = Training(
        data, leave_out(data.histories), TrainConfig("tiger", own, fit), workspace(tmp_path)
    )
    with pytest.warns(UserWarning, match="14 items have 1 different embeddings"):
        trained = Tiger.learn(training)
    assert len(np.unique(trained.sids.digits, axis=0)) == ITEMS
    assert sorted(trained.rank(Query(HISTORIES, ITEMS)).items[0].tolist()) == list(range(ITEMS))
