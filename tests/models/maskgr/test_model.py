"""MaskGR on a catalogue small enough to enumerate, untrained and trained for a few steps."""

from __future__ import annotations

import math
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from torch import Tensor

from maskgr.data.sequences import Sequences
from maskgr.data.splits import leave_out
from maskgr.decoding.config import DecodingConfig, Order
from maskgr.decoding.orders import ORDERS
from maskgr.errors import ArtefactError, RequestError
from maskgr.evaluation.ranking import Query
from maskgr.models.base import TrainConfig, Training
from maskgr.models.maskgr.bias import Bias
from maskgr.models.maskgr.config import MaskGRConfig
from maskgr.models.maskgr.denoiser import HistoryMemory
from maskgr.models.maskgr.model import MaskGR
from maskgr.models.maskgr.stages import score_space, shares
from maskgr.models.neighbours import Neighbours
from maskgr.models.sasrec import SASRec, SASRecConfig
from maskgr.nn.transformer import TransformerConfig
from maskgr.recommender import Recommender
from maskgr.sids.config import QuantizerConfig, SidsConfig
from maskgr.sids.semantic_ids import SemanticIds
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

LIMIT = 4
SIDS = SidsConfig(quantizer=QuantizerConfig(levels=3, codes=3, components=0), unique="share")
CONFIG = TrainConfig(
    "maskgr",
    MaskGRConfig(
        TransformerConfig(layers=1, width=8, heads=2, hidden=16, dropout=0.3),
        neighbours=5,
        sids=SIDS,
        decoding=DecodingConfig(beams=4),
    ),
    FitConfig(steps=15, token_budget=60, ema=0.9, validations=2, checkpoint_minutes=0),
    history_limit=LIMIT,
    device="cpu",
)
BATCH = Sequences.of([[7], [3, 3, 5], [0, 2, 0, 9], [4, 1, 8, 6]])
NOTHING = torch.zeros(3, dtype=torch.bool)
WAYS = [(order, steps) for order in ORDERS for steps in (2, 3)]


@pytest.fixture(scope="module")
def sids() -> SemanticIds:
    """Three items have all digits of another."""
    made = SemanticIds.make(shop(), SIDS)
    rng = np.random.default_rng(0)
    digits = rng.permutation(27)[:ITEMS, None] // [9, 3, 1] % 3
    digits[-3:] = digits[:3]
    return replace(made, digits=digits.astype(np.int32), codebook_sizes=(3, 3, 3))


@pytest.fixture(scope="module")
def model(sids: SemanticIds) -> MaskGR:
    """Random weights, and every kind of bias."""
    return untrained(sids)


def untrained(sids: SemanticIds, **settings: Any) -> MaskGR:
    torch.manual_seed(0)
    own = replace(CONFIG.model, **settings)
    network = SASRecConfig(own.transformer, items="text", repeat_bias=True)
    embeddings = torch.from_numpy(sids.embeddings)
    history = SASRec(network, np.arange(ITEMS), embeddings, LIMIT)
    neighbours = Neighbours.count(leave_out(shop().histories).train, ITEMS, own.neighbours)
    config = replace(CONFIG, model=own)
    made = MaskGR(config, sids, history, neighbours, Bias(2.0, 0.7))
    randomise(made)
    return made.eval()


@torch.no_grad()
def query_vector(model: MaskGR, history: np.ndarray, codes: Tensor, revealed: Tensor) -> Tensor:
    """(width,) q(history, revealed) of one user alone."""
    hidden, layout = model.history.encode(Sequences.of([history[-LIMIT:]]))
    query = model.history.queries(hidden[-1:])
    if revealed.any():
        memory = HistoryMemory(model.denoiser, hidden, layout)
        query = query + memory.change(torch.tensor([0]), codes[None, None], revealed[None, None])
    return query[0]


def energies(model: MaskGR, history: np.ndarray, codes: Tensor, revealed: Tensor) -> Tensor:
    """(items,) the energies of one user, without biases."""
    return model.history.table().detach() @ query_vector(model, history, codes, revealed)


def biases(model: MaskGR, history: np.ndarray) -> Tensor:
    """(items,) of one user at ranking."""
    found = torch.zeros(ITEMS)
    assert model.neighbours is not None
    after, strengths = model.neighbours.after(Sequences.of([history]))
    found[after.values] = model.bias.follow * torch.from_numpy(strengths)
    found[np.unique(history)] = model.bias.repeat * model.history.repeat_value
    return found


def agrees(model: MaskGR, codes: Tensor, revealed: Tensor) -> Tensor:
    """(items,) whether an item has the revealed digits."""
    return ((model.codes == codes) | ~revealed).all(1)


def assert_lists_are_whole(found: np.ndarray, query: Query) -> None:
    """As many different items as the filters leave, then nothing."""
    for row, user in enumerate(found):
        left = np.ones(ITEMS, dtype=bool) if query.allowed is None else query.allowed.copy()
        if query.excluded is not None:
            left[query.excluded[row]] = False
        count = min(query.top, int(left.sum()))
        assert len(set(user[:count].tolist())) == count
        assert left[user[:count]].all()
        assert (user[count:] == -1).all()


# Training


@torch.no_grad()
def test_loss_is_that_of_every_item_given_its_history_and_revealed_digits(model: MaskGR) -> None:
    batch = model.prepare(BATCH, torch.Generator().manual_seed(3))
    places = [(row[:n], int(row[n])) for row in BATCH for n in range(len(row))]
    assert 3 < batch.revealed.any(2).sum() < len(places)
    expected = 0.0
    for (history, target), (revealed,) in zip(places, batch.revealed, strict=True):
        if not revealed.any():
            continue
        codes = model.codes[target]
        logits = energies(model, history, codes, revealed)
        logits[np.unique(history)] += model.history.repeat_value
        logits[~agrees(model, codes, revealed)] = -torch.inf
        expected -= logits.log_softmax(0)[target].item()
    assert model(batch).item() == pytest.approx(expected, rel=1e-5)


@torch.no_grad()
def test_sampled_loss_is_exact_where_few_items_have_the_revealed_digits(
    sids: SemanticIds,
) -> None:
    exact = untrained(sids)
    exact.history.repeat = None
    batch = exact.prepare(BATCH, torch.Generator().manual_seed(3))
    own = untrained(sids, loss="sampled", repeat_bias=False)
    own.history.repeat = None
    drawn = own.prepare(BATCH, torch.Generator().manual_seed(3))
    assert torch.equal(drawn.revealed, batch.revealed)
    assert own(drawn).item() == pytest.approx(exact(batch).item(), rel=1e-5)
    # Fewer draws than items with the digits: the target is once among them, as itself.
    targets, rows = torch.from_numpy(BATCH.values).long(), drawn.revealed.any(2).nonzero()[:, 0]
    few = replace(drawn, draws=torch.rand(len(targets), 2))
    found, extra = own._contrasted(targets[rows], drawn.revealed[rows, 0], rows, few)
    own_item = found.items == targets[rows][found.owners]
    assert found.owners[own_item].tolist() == list(range(len(rows)))
    assert (extra[own_item] == 0).all()
    assert (extra[~own_item] > 0).any()


def test_every_item_has_some_digits_masked(model: MaskGR) -> None:
    sequences = Sequences.of([[1] * 3000])
    batch = model.prepare(sequences, torch.Generator().manual_seed(0))
    counts = torch.bincount(batch.revealed.sum((1, 2)), minlength=4)
    assert counts[3] == 0
    assert (counts[:3] - 1000).abs().max() < 5 * 1000**0.5  # each number of digits as often


def test_losses_of_parts_sum_to_the_loss_of_the_batch(model: MaskGR) -> None:
    batch = model.prepare(BATCH, torch.Generator().manual_seed(3))
    parts = [batch.part(np.array(rows)) for rows in ([0, 2], [1, 3])]
    assert model(batch).item() == pytest.approx(sum(model(part).item() for part in parts), rel=1e-5)


def test_only_the_denoiser_is_trained(sids: SemanticIds) -> None:
    own = untrained(sids).train()
    assert own.denoiser.training
    assert not own.history.training
    own(own.prepare(BATCH, torch.Generator().manual_seed(3))).backward()
    assert all(p.grad is None for p in own.history.parameters())
    assert all(p.grad is not None for p in own.denoiser.parameters())
    own.zero_grad()
    empty = own.prepare(BATCH, torch.Generator()).part(np.empty(0, dtype=np.int64))
    own(empty).backward()
    assert all((p.grad == 0).all() for p in own.denoiser.parameters())


@torch.no_grad()
def test_vectors_of_items_are_kept_while_the_denoiser_trains(sids: SemanticIds) -> None:
    own = untrained(sids)
    table = own.history.table()
    own.train()
    own(own.prepare(BATCH, torch.Generator()))
    own.rank(Query(HISTORIES, 3))
    assert own.history.table() is table


def pure(sids: SemanticIds, **settings: Any) -> MaskGR:
    """Random weights; items are the sums of their digits, and there are no biases."""
    own = replace(CONFIG.model, vectors="digits", repeat_bias=False, neighbours=0, **settings)
    torch.manual_seed(0)
    network = SASRecConfig(own.transformer, own.loss, own.negatives)
    history = SASRec(network, np.arange(ITEMS), None, LIMIT)
    made = MaskGR(replace(CONFIG, model=own), sids, history)
    made.start_from(torch.zeros(9, 8))
    randomise(made)
    return made.eval()


@torch.no_grad()
@pytest.mark.parametrize("loss", ["softmax", "sampled"])
def test_items_of_digits_are_trained_with_nothing_revealed_too(
    sids: SemanticIds, loss: str
) -> None:
    own = pure(sids, loss=loss)
    batch = own.prepare(BATCH, torch.Generator().manual_seed(3))
    rows = batch.revealed.any(2).squeeze(1)
    expected = own.history(batch.asked).item()
    places = [(row[:n], int(row[n])) for row in BATCH for n in range(len(row))]
    for (history, target), (revealed,) in zip(places, batch.revealed, strict=True):
        codes = own.codes[target]
        logits = energies(own, history, codes, revealed)
        logits[~agrees(own, codes, revealed)] = -torch.inf
        if revealed.any():
            expected -= logits.log_softmax(0)[target].item()
    assert rows.any()
    assert own(batch).item() == pytest.approx(expected, rel=1e-5)


def test_everything_is_trained_where_items_are_digits(sids: SemanticIds) -> None:
    own = pure(sids).train()
    assert own.history.training
    own(own.prepare(BATCH, torch.Generator().manual_seed(3))).backward()
    assert all(p.grad is not None for p in own.parameters())
    names = {name for name, _ in own.named_parameters() if name.startswith("history.items")}
    assert names == {"history.items.digits.weight"}  # no item has a vector of its own


def test_digits_start_as_parts_of_the_learned_vectors(sids: SemanticIds) -> None:
    own = pure(sids)
    tokens = torch.randn(9, 8)
    own.start_from(tokens)
    own.eval()
    starts = torch.tensor([0, 3, 6])
    torch.testing.assert_close(own.history.table(), tokens[own.codes + starts].sum(1))
    torch.testing.assert_close(own.denoiser.codes.weight.data, tokens)


@pytest.mark.parametrize("kind", ["learned", "digits"])
@torch.no_grad()
def test_loss_of_sessions_is_that_of_the_item_asked_for(sids: SemanticIds, kind: str) -> None:
    own = pure(sids, session=2) if kind == "digits" else untrained(sids, session=2)
    own.own = replace(own.own, repeat_bias=False)
    own.history.repeat = None
    sequences = Sequences.of([row for row in BATCH for _ in range(6)])
    batch = own.prepare(sequences, torch.Generator().manual_seed(5))
    places = [(row, n) for row in sequences for n in range(len(row))]
    expected = own.history(batch.asked).item() if kind == "digits" else 0.0
    asked = list(zip(places, batch.revealed, batch.place.tolist(), strict=True))
    for (row, n), revealed, place in asked:
        session = torch.from_numpy(row[n : n + 2]).long()
        assert place < len(session)
        assert not revealed[len(session) :].any()
        if not (place or revealed.any()):
            continue  # the history's own question
        codes = own.codes[session]
        if len(session) == 1:
            codes = torch.cat([codes, codes])  # hidden
        hidden, layout = own.history.encode(Sequences.of([row[:n]]))
        memory = HistoryMemory(own.denoiser, hidden, layout)
        change = memory.change(torch.tensor([0]), codes[None], revealed[None], place)
        logits = own.history.table() @ (own.history.queries(hidden[-1:]) + change)[0]
        logits[~agrees(own, codes[place], revealed[place])] = -torch.inf
        expected -= logits.log_softmax(0)[session[place]].item()
    assert {place for _, _, place in asked} == {0, 1}
    whole = [not r[p].any() and (p or r.any()) for _, r, p in asked]
    assert 0 < sum(map(bool, whole)) < len(whole)  # of the whole catalogue, and of a part of it
    assert own(batch).item() == pytest.approx(expected, rel=1e-5)


def test_semantic_ids_are_made_where_distances_are_differences_of_scores(model: MaskGR) -> None:
    split = leave_out(shop().histories)
    vectors = score_space(model.history, split.train, CONFIG)
    recent = split.train.last(LIMIT)
    with torch.no_grad():
        asked = [model.history.queries(model.history.encode(Sequences.of([h]))[0]) for h in recent]
        scores = model.history.table() @ torch.cat(asked).T  # (items, queries)
    distances = np.square(vectors[:, None] - vectors).sum(2)
    differences = (scores[:, None] - scores).square().mean(2)
    np.testing.assert_allclose(distances, differences.numpy(), rtol=1e-3, atol=1e-4)


def test_training_is_shared_between_encoder_and_denoiser() -> None:
    config = FitConfig(steps=10, minutes=2.0)
    first, second = shares(config, 0.3)
    assert (first.steps, second.steps) == (7, 3)
    assert (first.minutes, second.minutes) == pytest.approx((1.4, 0.6))
    assert [part.steps for part in shares(FitConfig(steps=1), 0.5)] == [1, 1]


# Generation


def test_one_step_is_the_ranking_of_the_history_with_its_biases(model: MaskGR) -> None:
    log_probs = torch.stack(
        [
            (energies(model, h, model.codes[0], NOTHING) + biases(model, h)).log_softmax(0)
            for h in HISTORIES
        ]
    )
    for query in queries():
        found, traces = model.trace(query, DecodingConfig(steps=1))
        assert_same(found, ranked_by(log_probs, query))
        assert all(len(own) == 1 for own in traces)


def test_one_step_is_the_ranking_of_sasrec_where_nothing_else_is_known(sids: SemanticIds) -> None:
    own = untrained(sids)
    own.bias = Bias()
    for query in queries():
        assert_same(own.decode(query, DecodingConfig(steps=1)), own.history.rank(query))


def test_all_beams_give_the_scores_of_enumeration(model: MaskGR) -> None:
    ways = DecodingConfig(order="left-to-right", beams=ITEMS)
    found = model.decode(Query(HISTORIES, ITEMS), ways)
    for row, history in enumerate(HISTORIES):
        expected = {}
        for item, codes in enumerate(model.codes):
            score = 0.0
            for level in range(3):
                revealed = torch.arange(3) < level
                logits = energies(model, history, codes, revealed) + biases(model, history)
                logits[~agrees(model, codes, revealed)] = -torch.inf
                chances = logits.softmax(0)
                after = agrees(model, codes, torch.arange(3) <= level)
                score += math.log(chances[item] if level == 2 else chances[after].sum())
            expected[item] = score
        assert found.items[row].tolist() == sorted(expected, key=lambda i: -expected[i])
        best = sorted(expected.values(), reverse=True)
        assert found.scores[row].tolist() == pytest.approx(best, abs=1e-4)


@pytest.mark.parametrize(("order", "steps"), WAYS)
def test_every_way_fills_the_list_with_different_items(
    model: MaskGR, order: Order, steps: int
) -> None:
    for query in queries():
        found = model.decode(query, DecodingConfig(order=order, steps=steps, beams=3))
        assert_lists_are_whole(found.items, query)


@pytest.mark.parametrize(("order", "steps"), WAYS)
def test_first_results_do_not_depend_on_how_many_are_asked_for(
    model: MaskGR, order: Order, steps: int
) -> None:
    ways = DecodingConfig(order=order, steps=steps, beams=5)
    whole = model.decode(Query(HISTORIES, ITEMS), ways)
    for top in (1, 5, 10):
        found = model.decode(Query(HISTORIES, top), ways)
        assert np.array_equal(found.items, whole.items[:, :top])
        assert np.array_equal(found.scores, whole.scores[:, :top])


@pytest.mark.parametrize("order", ORDERS)
def test_results_do_not_depend_on_other_users(model: MaskGR, order: Order) -> None:
    ways, query = DecodingConfig(order=order, beams=3), Query(HISTORIES, 6, excluded=HISTORIES)
    together = model.decode(query, ways)
    for row in range(len(HISTORIES)):
        alone = model.decode(query.select(np.array([row])), ways)
        assert np.array_equal(alone.items[0], together.items[row])
        np.testing.assert_allclose(alone.scores[0], together.scores[row], atol=1e-4)


def test_users_have_random_orders_of_their_own(model: MaskGR) -> None:
    histories = Sequences.of([[n] for n in range(ITEMS)])
    _, traces = model.trace(Query(histories, 1), DecodingConfig(order="random", beams=1))
    orders = {tuple(step.positions[0, 0].item() for step in trace) for trace in traces}
    assert len(orders) > 3
    assert all(sorted(order) == [0, 1, 2] for order in orders)


def test_traces_end_with_the_results(model: MaskGR) -> None:
    ranked, traces = model.trace(Query(HISTORIES, 4), DecodingConfig(beams=4))
    for items, scores, steps in zip(ranked.items, ranked.scores, traces, strict=True):
        assert [step.positions.shape for step in steps] == [(len(s.scores), 1) for s in steps]
        assert steps[-1].scores.tolist() == scores.tolist()
        codes = model.codes[items.tolist()].gather(1, steps[-1].positions)
        assert torch.equal(codes, steps[-1].codes)


@pytest.mark.parametrize("steps", [1, 2, 0])
def test_user_who_has_every_item_gets_none_when_seen_items_are_excluded(
    model: MaskGR, steps: int
) -> None:
    histories = Sequences.of([list(range(ITEMS)), [1]])
    for rows in ([0], [0, 1]):
        query = Query(histories, ITEMS, excluded=histories).select(np.array(rows))
        found = model.decode(query, DecodingConfig(steps=steps))
        assert_lists_are_whole(found.items, query)
        assert (found.scores[found.items < 0] == -np.inf).all()


def test_no_users_get_no_items(model: MaskGR) -> None:
    assert model.rank(Query(Sequences.of([]), 3)).items.shape == (0, 3)


@pytest.fixture(scope="module")
def planner(sids: SemanticIds) -> MaskGR:
    """Random weights, for sessions of two items."""
    return untrained(sids, session=2)


@torch.no_grad()
def session_query(model: MaskGR, history: np.ndarray, *known: Tensor | None) -> list[Tensor]:
    """(items,) energies with biases of each item of a session, of which some are known whole."""
    hidden, layout = model.history.encode(Sequences.of([history[-LIMIT:]]))
    memory = HistoryMemory(model.denoiser, hidden, layout)
    revealed = torch.tensor([[codes is not None] * 3 for codes in known])
    codes = torch.stack([torch.zeros(3).long() if c is None else c for c in known])
    found = []
    for place in range(len(known)):
        query = model.history.queries(hidden[-1:])
        if place or revealed.any():
            query = query + memory.change(torch.tensor([0]), codes[None], revealed[None], place)
        found.append(model.history.table() @ query[0] + biases(model, history))
    return found


def test_sessions_in_two_steps_have_the_scores_of_enumeration(planner: MaskGR) -> None:
    ways = DecodingConfig(order="left-to-right", steps=2, beams=ITEMS**2)
    query = Query(HISTORIES, ITEMS * (ITEMS - 1))
    found, scores = planner.sessions(query, 2, ways, repeats=False)
    for row, history in enumerate(HISTORIES):
        first, _ = session_query(planner, history, None, None)
        expected = {}
        for one in range(ITEMS):
            shared = agrees(planner, planner.codes[one], torch.ones(3).bool())
            assert shared[one]
            _, second = session_query(planner, history, planner.codes[one], None)
            chances = first.log_softmax(0)[one] + second.log_softmax(0)
            expected |= {(one, two): chances[two].item() for two in range(ITEMS) if two != one}
        answer = {
            tuple(pair): score for pair, score in zip(found[row].tolist(), scores[row], strict=True)
        }
        assert answer.keys() == expected.keys()
        assert list(scores[row]) == sorted(scores[row], reverse=True)
        assert answer == pytest.approx(expected, abs=1e-4)


def test_sessions_respect_filters(planner: MaskGR) -> None:
    for query in queries():
        found, scores = planner.sessions(
            replace(query, top=3), 2, DecodingConfig(beams=3), repeats=False
        )
        assert (np.isfinite(scores) == (found >= 0).all(2)).all()
        for row, sessions in enumerate(found):
            for one, two in sessions[sessions[:, 0] >= 0].tolist():
                assert one != two
                for item in (one, two):
                    assert query.allowed is None or query.allowed[item]
                    assert query.excluded is None or item not in query.excluded[row]


def test_raises_for_longer_sessions_than_it_was_trained_for(planner: MaskGR) -> None:
    with pytest.raises(RequestError, match="sessions of 2, not of 3; ask for fewer, or train one"):
        planner.sessions(Query(HISTORIES, 3), 3, DecodingConfig(), repeats=False)


def test_one_item_is_decoded_alike_by_a_model_of_sessions(planner: MaskGR) -> None:
    """The first place of a session asks with nothing else known."""
    ways = DecodingConfig(steps=1)
    log_probs = torch.stack(
        [session_query(planner, h, None, None)[0].log_softmax(0) for h in HISTORIES]
    )
    assert_same(
        planner.decode(Query(HISTORIES, 5), ways), ranked_by(log_probs, Query(HISTORIES, 5))
    )


def test_guidance_moves_energies_away_from_those_of_an_empty_history(model: MaskGR) -> None:
    weight, nobody = 0.7, np.empty(0, dtype=np.int32)
    plain = [energies(model, h, model.codes[0], NOTHING) for h in HISTORIES]
    empty = energies(model, nobody, model.codes[0], NOTHING)
    log_probs = torch.stack(
        [
            (own + weight * (own - empty) + biases(model, h)).log_softmax(0)
            for own, h in zip(plain, HISTORIES, strict=True)
        ]
    )
    query = Query(HISTORIES, ITEMS)
    found = model.decode(query, DecodingConfig(steps=1, guidance=weight))
    assert_same(found, ranked_by(log_probs, query))
    several = model.decode(query, DecodingConfig(guidance=weight, beams=ITEMS))
    assert not np.array_equal(several.items, model.decode(query, DecodingConfig(beams=ITEMS)).items)
    assert (np.sort(several.items) == np.arange(ITEMS)).all()


def test_samples_respect_filters_and_repeat_with_the_same_seed(model: MaskGR) -> None:
    everything = Sequences.of([*HISTORIES, list(range(ITEMS))])
    query = Query(everything, 60, np.arange(ITEMS) % 3 != 1, everything)
    for steps in (0, 1, 2):
        drawn = model.sample(query, steps=steps, temperature=1.0, seed=5)
        again = model.sample(query, steps=steps, temperature=1.0, seed=5)
        other = model.sample(query, steps=steps, temperature=1.0, seed=6)
        assert np.array_equal(drawn, again)
        assert not np.array_equal(drawn, other)
        assert (drawn[-1] == -1).all()
        for row, seen in zip(drawn[:-1], HISTORIES, strict=True):
            assert (row % 3 != 1).all()
            assert (row >= 0).all()
            assert not set(row.tolist()) & set(seen.tolist())


def test_settings_of_decoding_are_resolved(model: MaskGR) -> None:
    assert model.levels == 3
    resolved = model.resolved(model.decoding())
    assert (resolved.retrieval, resolved.steps, resolved.cache) == ("generative", 3, "frozen")
    assert model.decoding().beams == 4


@pytest.mark.parametrize(
    ("decoding", "message"),
    [
        (DecodingConfig(retrieval="dense"), "generation in one step (--steps 1) is its dense"),
        (DecodingConfig(retrieval="unified"), "maskgr has no unified retrieval of its own; "),
        (DecodingConfig(constrained=False), "generates real items only; leave --unconstrained out"),
        (DecodingConfig(cache="off"), "encodes a history once, exactly; leave --cache out"),
        (DecodingConfig(steps=4), "4 steps cannot reveal 3 digits; give 1 to 3"),
    ],
)
def test_raises_when_it_cannot_decode_so(
    model: MaskGR, decoding: DecodingConfig, message: str
) -> None:
    with pytest.raises(RequestError) as caught:
        model.decode(Query(HISTORIES, 3), decoding)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


# Items and files


def test_new_items_are_recommended_by_their_text(sids: SemanticIds) -> None:
    model = untrained(sids)
    model.bias = Bias()  # neighbours are old items
    vectors = np.random.default_rng(2).normal(size=(40, TEXT)).astype(np.float32)
    new = pl.DataFrame({"item_id": [f"new{n}" for n in range(40)]})
    grown = model.with_items(new, vectors)
    assert len(grown.codes) == len(grown.index) == ITEMS + 40
    assert np.array_equal(grown.sids.digits[:ITEMS], model.sids.digits)
    torch.testing.assert_close(grown.history.table()[:ITEMS], model.history.table())
    for order in ORDERS:
        found = grown.decode(Query(HISTORIES, ITEMS + 40), DecodingConfig(order=order)).items
        assert (np.sort(found) == np.arange(ITEMS + 40)).all()
        assert (found[:, 0] >= ITEMS).any()  # some history's best item is a new one
    histories = Sequences.of([[ITEMS, 3, ITEMS + 39]])
    assert (grown.rank(Query(histories, 5)).items >= 0).all()


def test_raises_for_new_items_when_trained_without_text(sids: SemanticIds) -> None:
    history = SASRec(SASRecConfig(CONFIG.model.transformer), np.ones(ITEMS, np.int64))
    own = MaskGR(CONFIG, sids, history)
    with pytest.raises(RequestError, match="knows nothing of new items; train one of items with"):
        own.with_items(pl.DataFrame({"item_id": ["x"]}), texts()[:1])


def test_saved_and_loaded_model_decodes_alike(model: MaskGR, tmp_path: Path) -> None:
    model.save(tmp_path)
    loaded = MaskGR.load(tmp_path, CONFIG)
    assert loaded.bias == model.bias
    assert not loaded.training
    for query in queries():
        for steps in (1, 2, 3):
            ways = DecodingConfig(steps=steps, beams=3)
            assert_same(loaded.decode(query, ways), model.decode(query, ways), exact=True)
    (tmp_path / "chosen.json").write_text("{}")
    with pytest.raises(ArtefactError, match="is damaged"):
        MaskGR.load(tmp_path, CONFIG)


# Both stages together


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Recommender:
    return Recommender.train(shop(), config=CONFIG, run=tmp_path_factory.mktemp("run"))


def test_training_makes_semantic_ids_of_learned_vectors(trained: Recommender) -> None:
    own = trained.model
    assert isinstance(own, MaskGR)
    assert not own.training
    assert all(p.grad is None for p in own.parameters())
    assert own.sids.learned is not None
    expected = score_space(own.history, leave_out(shop().histories).train, CONFIG)
    np.testing.assert_allclose(own.sids.learned.vectors, expected, atol=1e-5)
    found = own.rank(Query(HISTORIES, ITEMS)).items
    assert_lists_are_whole(found, Query(HISTORIES, ITEMS))


def test_given_semantic_ids_are_kept(sids: SemanticIds, tmp_path: Path) -> None:
    data = shop()
    split, few = leave_out(data.histories), replace(CONFIG.fit, steps=2, checkpoint_minutes=9)
    config = replace(CONFIG, fit=few)
    own = MaskGR.learn(Training(data, split, config, workspace(tmp_path), sids))
    assert np.array_equal(own.sids.digits, sids.digits)
    others = replace(sids, items=sids.items.with_columns(item_id=pl.lit("x")))
    with pytest.raises(ArtefactError, match="made for other items than the dataset's"):
        MaskGR.learn(Training(data, split, config, workspace(tmp_path / "b"), others))


KILLED = """
import os, signal, sys
from pathlib import Path
from maskgr.recommender import Recommender
from maskgr.training import fit
from tests.models.maskgr.test_model import CONFIG
from tests.models.tiny import shop

run, stage, step = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
save = fit.save_checkpoint

def save_and_die(folder, number, *rest):
    if folder.name.startswith("history") == (stage == "history") and number == step:
        os.kill(os.getpid(), signal.SIGKILL)
    save(folder, number, *rest)

fit.save_checkpoint, fit._plot = save_and_die, lambda run: None
Recommender.train(shop(), config=CONFIG, run=run, resume=run.exists())
"""


def test_training_killed_in_either_stage_resumes_to_identical_bits(
    trained: Recommender, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    for stage, step in (("history", "5"), ("denoiser", "2")):
        command = [sys.executable, "-c", KILLED, str(run), stage, step]
        root = Path(__file__).parents[3]
        ended = subprocess.run(command, cwd=root, capture_output=True, check=False, timeout=120)
        assert ended.returncode == -signal.SIGKILL, ended.stderr.decode()
    resumed = Recommender.train(shop(), config=CONFIG, run=run, resume=True)
    first, second = trained.model, resumed.model
    assert isinstance(first, MaskGR)
    assert isinstance(second, MaskGR)
    assert first.bias == second.bias
    assert np.array_equal(first.sids.digits, second.sids.digits)
    for (name, one), other in zip(
        first.state_dict().items(), second.state_dict().values(), strict=True
    ):
        assert torch.equal(one, other), name
