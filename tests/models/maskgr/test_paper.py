"""The paper's MaskGR as a model: its bound, its three ways to retrieve, its files."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import polars as pl
import pytest
import torch

from maskgr.data.config import SyntheticConfig
from maskgr.data.dataset import Dataset
from maskgr.data.open import fetch
from maskgr.data.sequences import Sequences
from maskgr.data.splits import Holdout, leave_out
from maskgr.decoding.config import DecodingConfig, Order
from maskgr.errors import ArtefactError, RequestError
from maskgr.evaluation.ranking import Query, Ranked
from maskgr.models.base import TrainConfig, Training
from maskgr.models.maskgr.config import (
    DenseConfig,
    NetworkConfig,
    ObjectiveConfig,
    PaperConfig,
)
from maskgr.models.maskgr.history import Histories
from maskgr.models.maskgr.noise import Noise
from maskgr.models.maskgr.paper import MaskedBatch, PaperMaskGR
from maskgr.nn.transformer import Layout
from maskgr.sids.config import QuantizerConfig, SidsConfig
from maskgr.sids.semantic_ids import SemanticIds
from maskgr.training.distributed import World
from maskgr.training.fit import FitConfig
from maskgr.training.log import read_log
from maskgr.training.workspace import Workspace

ITEMS, USERS, LEVELS = 60, 80, 3
SIDS = SidsConfig(quantizer=QuantizerConfig(levels=LEVELS, codes=16), unique="reassign")
NETWORK = NetworkConfig(layers=1, width=16, heads=2, hidden=32, dropout=0.0)
HEAD = DenseConfig(head=True, hidden=16, rank=0)
FIT = FitConfig(
    steps=60, token_budget=1500, learning_rate=1e-2, ema=0.0, validations=1,
    validation_users=4 * USERS,
)  # fmt: skip
TRAINED = PaperConfig(SIDS, NETWORK, HEAD, ObjectiveConfig(whole_item=0.3))


@pytest.fixture(scope="module")
def shop() -> Dataset:
    made = fetch("synthetic", synthetic=SyntheticConfig(users=USERS, items=ITEMS))
    vectors = np.random.default_rng(0).standard_normal((ITEMS, 8)).astype(np.float32)
    return replace(made, embeddings=vectors)


@pytest.fixture(scope="module")
def sids(shop: Dataset) -> SemanticIds:
    return SemanticIds.make(shop, SIDS)


def config(model: PaperConfig, **changes: Any) -> TrainConfig:
    return TrainConfig("maskgr-paper", model, FIT, device="cpu", **changes)


def random_model(
    sids: SemanticIds, counts: npt.NDArray[np.int64] | None = None, **changes: Any
) -> PaperMaskGR:
    """A model whose probabilities are far from uniform, as training would make them."""
    torch.manual_seed(0)
    counts = np.zeros(len(sids.digits), np.int64) if counts is None else counts
    model = PaperMaskGR(config(PaperConfig(network=NETWORK, **changes)), sids, counts)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return model.eval()


@pytest.fixture(scope="module")
def plain(sids: SemanticIds) -> PaperMaskGR:
    return random_model(sids)


@pytest.fixture(scope="module")
def dense(sids: SemanticIds) -> PaperMaskGR:
    return random_model(sids, dense=HEAD)


@pytest.fixture(scope="module")
def aware(sids: SemanticIds) -> PaperMaskGR:
    model = random_model(sids, objective=ObjectiveConfig(catalogue_aware=True))
    isolated = replace(model.own, network=replace(NETWORK, attention="isolated"))
    other = PaperMaskGR(config(isolated), sids, model.counts)
    other.load_state_dict(model.state_dict())
    return other.eval()


@pytest.fixture(scope="module")
def histories(shop: Dataset) -> Sequences:
    found = leave_out(shop.histories).test.histories.select(np.arange(10))
    return Sequences.of([[], *found])


def decode(model: PaperMaskGR, histories: Sequences, top: int, **how: Any) -> Ranked:
    return model.decode(Query(histories, top), DecodingConfig(**how))


def dense_log_probs(model: PaperMaskGR, histories: Sequences) -> npt.NDArray[np.float32]:
    """(users, items) from the network alone, one user at a time."""
    network, rows = model.network, []
    assert network.head is not None
    for history in histories.last(model.config.history_limit):
        numbers = torch.tensor([*history.tolist(), 0])  # the next item is masked: any number
        masked = torch.zeros(len(numbers) * LEVELS, dtype=torch.bool)
        masked[-LEVELS:] = True
        layout = Layout.of([len(masked)])
        with torch.no_grad():
            states = network.denoise(
                model.codes[numbers], masked, layout, masked.nonzero()[:, 0], numbers
            )
            assert states.queries is not None
            rows.append((states.queries[-1] @ network.head.table.T).log_softmax(0))
    return torch.stack(rows).numpy()


# Training


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module")
def trained(shop: Dataset, run: Path) -> PaperMaskGR:
    work = Workspace(run, World(0, 1, torch.device("cpu")))
    return PaperMaskGR.learn(Training(shop, leave_out(shop.histories), config(TRAINED), work))


def test_training_lowers_the_bound_and_raises_recall(shop: Dataset, trained: PaperMaskGR) -> None:
    test = leave_out(shop.histories).test
    fresh = PaperMaskGR(trained.config, trained.sids, trained.counts)
    before, after = fresh.validate(test), trained.validate(test)
    assert after["bound"] < before["bound"] - 0.5
    assert after["recall@10"] > before["recall@10"] + 0.1


def test_log_has_figures_of_held_out_and_of_training_items_apart(
    shop: Dataset, trained: PaperMaskGR, run: Path
) -> None:
    split = leave_out(shop.histories)
    rows = [row for row in read_log(run) if row["bound"] is not None]
    assert len(rows) == 1
    held_out = trained.validate(split.validation)
    users = np.flatnonzero(split.train.lengths > 1)
    last = Holdout(
        users,
        Sequences.of([split.train[user][:-1] for user in users]),
        np.array([split.train[user][-1:] for user in users]),
    )
    seen = trained.validate(last)
    for name in ("bound", "recall@10"):
        assert rows[0][name] == pytest.approx(held_out[name], rel=1e-4)
        assert rows[0][f"training_{name}"] == pytest.approx(seen[name], rel=1e-4)
    assert seen["bound"] != pytest.approx(held_out["bound"], rel=1e-3)


def test_counts_are_the_training_events(shop: Dataset, trained: PaperMaskGR) -> None:
    train = leave_out(shop.histories).train.values.tolist()
    assert trained.counts.tolist() == [train.count(item) for item in range(ITEMS)]


def test_given_semantic_ids_are_used_as_they_are(shop: Dataset, tmp_path: Path) -> None:
    given = SemanticIds.make(shop, replace(SIDS, quantizer=QuantizerConfig("random", 2, 16)))
    quick = replace(config(TRAINED), fit=replace(FIT, steps=1))
    work = Workspace(tmp_path, World(0, 1, torch.device("cpu")))
    split = leave_out(shop.histories)
    model = PaperMaskGR.learn(Training(shop, split, quick, work, given))
    assert np.array_equal(model.sids.digits, given.digits)
    other = replace(shop, items=shop.items.with_columns(item_id="x" + pl.col("item_id")))
    work = replace(work, run=tmp_path / "other")
    with pytest.raises(ArtefactError, match="made for other items than the dataset's"):
        PaperMaskGR.learn(Training(other, split, quick, work, given))


def exact_bound(model: PaperMaskGR, history: list[int], target: int) -> float:
    """The negative ELBO of `target` after `history`, over all masks of its digits.

    With k of m digits masked, the integral of t^k (1 - t)^(m - k) / t is Beta(k, m + 1 - k).
    """
    numbers, codes, total = torch.tensor([*history, target]), model.codes[target], 0.0
    layout = Layout.of([LEVELS * len(numbers)])
    for mask in product([False, True], repeat=LEVELS):
        k = sum(mask)
        if not k:
            continue
        beta = math.gamma(k) * math.gamma(LEVELS + 1 - k) / math.gamma(LEVELS + 1)
        masked = torch.zeros(LEVELS * len(numbers), dtype=torch.bool)
        masked[-LEVELS:] = torch.tensor(mask)
        rows = torch.arange(len(masked))
        with torch.no_grad():
            hidden = model.network.denoise(
                model.codes[numbers], masked, layout, rows, numbers
            ).digits[-LEVELS:]
        for level in range(LEVELS):
            if mask[level]:
                log_probs = model.network.tokens.log_probs(hidden[level, None], level)[0]
                total -= beta * log_probs[codes[level]].item()
    return total


def repeated(history: list[int], target: int, times: int) -> Holdout:
    return Holdout(
        np.arange(times),
        Sequences.of([history] * times),
        np.full((times, 1), target, dtype=np.int32),
    )


@pytest.mark.parametrize("history", [[], [7, 30]])
def test_bound_is_the_negative_elbo_of_the_target_by_enumeration(
    dense: PaperMaskGR, history: list[int]
) -> None:
    expected = exact_bound(dense, history, 11)
    assert dense.bound(repeated(history, 11, 6000)) == pytest.approx(expected, rel=0.01)


def test_bound_does_not_count_the_history(sids: SemanticIds) -> None:
    """Where all digits are independent, the target's bound is its own cost, whatever it follows."""
    model = random_model(sids)
    with torch.no_grad():  # hidden states of zero: only the biases of the codes are left
        model.network.encoder.norm.weight.zero_()
        model.network.encoder.norm.bias.zero_()
        model.network.tokens.bias.zero_()
    target, cost = 5, sum(math.log(size) for size in sids.codebook_sizes)
    for likelihood in (0.0, -8.0):
        for item in set(range(ITEMS)) - {target}:  # codes of other items alone become unlikely
            for level in range(LEVELS):
                code = int(sids.digits[item, level])
                if code != sids.digits[target, level]:
                    model.network.tokens.bias.data[model.network.tokens.starts[level] + code] = (
                        likelihood
                    )
        for history in ([], [1, 2], [40, 41, 42]):
            found = model.bound(repeated(history, target, LEVELS))
            if likelihood == 0.0:
                assert found == pytest.approx(cost, rel=1e-5)
            else:
                assert found < 0.1 * cost


def test_bound_repeats_and_depends_on_the_seed(dense: PaperMaskGR, histories: Sequences) -> None:
    holdout = Holdout(
        np.arange(len(histories)), histories, np.arange(len(histories), dtype=np.int32)[:, None]
    )
    assert dense.bound(holdout) == dense.bound(holdout)
    other = PaperMaskGR(replace(dense.config, seed=1), dense.sids, dense.counts)
    other.load_state_dict(dense.state_dict())
    assert other.bound(holdout) != dense.bound(holdout)
    for user in range(3):  # also where no item happens to be wholly masked
        assert math.isfinite(dense.validate(holdout.select(np.array([user])))["bound"])


def test_parts_of_a_batch_add_up(dense: PaperMaskGR, shop: Dataset) -> None:
    sequences = shop.histories.select(np.argsort(shop.histories.lengths)[:9])
    batch = dense.prepare(sequences, torch.Generator().manual_seed(0))
    assert batch.weight == LEVELS * len(sequences.values)
    dense.train()
    with torch.no_grad():
        whole = dense(batch)
        parts = [dense(batch.part(np.arange(start, 9, 4))) for start in range(4)]
        assert dense(batch.part(np.arange(0))) == 0
    dense.eval()
    torch.testing.assert_close(whole, torch.stack(parts).sum())


def test_dense_head_is_trained_on_wholly_masked_items_only(dense: PaperMaskGR) -> None:
    sequences = Sequences.of([[4, 9], [7, 1, 30]])
    masked = torch.tensor([1, 1, 1, 0, 0, 0, 1, 0, 1, 0, 0, 0, 1, 1, 1], dtype=torch.bool)
    noise = Noise(masked, torch.full((15,), 0.5), torch.tensor(15))
    batch = MaskedBatch(sequences, 15.0, noise, LEVELS)
    numbers = torch.from_numpy(sequences.values).long()
    with torch.no_grad():
        digits_alone = dense.eval()(batch)
        both = dense.train()(batch)
        layout = Layout.of([6, 9])
        states = dense.eval().network.denoise(
            dense.codes[numbers], masked, layout, masked.nonzero()[:, 0], numbers
        )
        assert states.queries is not None
        assert dense.network.head is not None
        log_probs = (states.queries @ dense.network.head.table.T).log_softmax(1)
    expected = -log_probs[0, 4] - log_probs[1, 30]
    torch.testing.assert_close(both - digits_alone, expected, atol=1e-4, rtol=1e-4)


def test_averaged_copy_shares_the_semantic_ids(plain: PaperMaskGR) -> None:
    assert copy.deepcopy(plain).sids is plain.sids


def test_paper_preset_has_every_option_off() -> None:
    paper: PaperConfig = PaperMaskGR.presets["paper"].model
    assert paper.objective == ObjectiveConfig()
    assert not paper.dense.head
    assert paper.network.logits == "vocabulary"
    assert paper.network.attention == "full"
    assert paper.sids.quantizer.components == 0


# Retrieval


@pytest.mark.parametrize("order", ["greedy", "left-to-right", "random"])
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_every_order_and_schedule_gives_the_asked_number_of_distinct_items(
    plain: PaperMaskGR, histories: Sequences, order: Order, steps: int
) -> None:
    found = decode(plain, histories, 10, order=order, steps=steps, beams=10)
    for row in found.items.tolist():
        assert len(set(row)) == 10
        assert min(row) >= 0
    assert (np.diff(found.scores, axis=1) <= 0).all()


def test_probabilities_of_all_items_sum_to_one_when_the_likelihood_is_catalogue_aware(
    aware: PaperMaskGR, histories: Sequences
) -> None:
    found = decode(aware, histories, ITEMS, order="left-to-right", beams=ITEMS)
    assert sorted(found.items[0].tolist()) == list(range(ITEMS))
    total = np.exp(found.scores.astype(np.float64)).sum(axis=1)
    assert total == pytest.approx(np.ones(len(histories)), abs=1e-4)


def test_dense_retrieval_by_brute_force(dense: PaperMaskGR, histories: Sequences) -> None:
    expected = dense_log_probs(dense, histories)
    found = decode(dense, histories, ITEMS, retrieval="dense")
    assert found.scores == pytest.approx(-np.sort(-expected, axis=1), abs=1e-3)
    assert found.scores == pytest.approx(np.take_along_axis(expected, found.items, 1), abs=1e-3)


@pytest.mark.parametrize("top", [5, 8, 20])
def test_unified_ranks_the_first_beams_by_their_dense_score(
    dense: PaperMaskGR, histories: Sequences, top: int
) -> None:
    scores = dense_log_probs(dense, histories)
    beams = decode(dense, histories, 8, retrieval="generative", beams=8).items
    wide = decode(dense, histories, 20, retrieval="generative", beams=8).items
    found = decode(dense, histories, top, retrieval="unified", beams=8)
    for user in range(len(histories)):
        by_hand = sorted(beams[user].tolist(), key=lambda item: -scores[user, item])
        by_hand = [*by_hand, *wide[user, 8:].tolist()][:top]
        assert found.items[user].tolist() == by_hand
        assert found.scores[user] == pytest.approx(scores[user, by_hand], abs=1e-3)


@pytest.mark.parametrize("retrieval", ["generative", "unified"])
@pytest.mark.parametrize("order", ["greedy", "left-to-right"])
def test_first_ten_do_not_depend_on_how_many_are_asked_for(
    dense: PaperMaskGR,
    histories: Sequences,
    retrieval: Literal["generative", "unified"],
    order: Order,
) -> None:
    few = decode(dense, histories, 10, retrieval=retrieval, order=order, beams=10)
    many = decode(dense, histories, 50, retrieval=retrieval, order=order, beams=10)
    assert np.array_equal(few.items, many.items[:, :10])
    assert few.scores == pytest.approx(many.scores[:, :10], rel=1e-5)
    assert all(len(set(row)) == 50 and min(row) >= 0 for row in many.items.tolist())
    wide = decode(dense, histories, 10, retrieval=retrieval, order=order, beams=50)
    assert not np.array_equal(few.items, wide.items)  # more beams do find others


def test_auto_is_unified_with_a_dense_head_and_generative_without(
    plain: PaperMaskGR, dense: PaperMaskGR, histories: Sequences
) -> None:
    for model, way in ((plain, "generative"), (dense, "unified")):
        auto, named = decode(model, histories, 5), decode(model, histories, 5, retrieval=way)
        assert np.array_equal(auto.items, named.items)
    with pytest.raises(RequestError, match="dense retrieval needs a dense head"):
        decode(plain, histories, 5, retrieval="dense")


def test_random_order_of_a_user_does_not_depend_on_the_others(
    plain: PaperMaskGR, histories: Sequences
) -> None:
    how: dict[str, Any] = {"order": "random", "beams": 10}
    together = decode(plain, histories, 10, **how)
    for user in range(len(histories)):
        alone = decode(plain, histories.select(np.array([user])), 10, **how)
        assert np.array_equal(alone.items[0], together.items[user])
        assert alone.scores[0] == pytest.approx(together.scores[user], abs=1e-4)
    fixed = decode(plain, histories, 10, order="left-to-right", beams=10)
    assert not np.array_equal(together.items, fixed.items)


def test_frozen_cache_equals_none_where_attention_is_isolated(
    aware: PaperMaskGR, histories: Sequences
) -> None:
    off, frozen = (decode(aware, histories, 10, cache=cache) for cache in ("off", "frozen"))
    assert np.array_equal(off.items, frozen.items)
    assert off.scores == pytest.approx(frozen.scores, abs=1e-4)


def test_invalid_share_is_a_number_only_where_beams_may_be_no_item(
    dense: PaperMaskGR, histories: Sequences
) -> None:
    for way in ("generative", "unified", "dense"):
        assert decode(dense, histories, 10, retrieval=way).invalid_share is None
    for way in ("generative", "unified"):
        share = decode(dense, histories, 10, retrieval=way, constrained=False).invalid_share
        assert share is not None
        assert 0 < share < 1


@pytest.mark.parametrize("way", ["generative", "unified", "dense"])
def test_filters(dense: PaperMaskGR, histories: Sequences, way: str) -> None:
    how = DecodingConfig(retrieval=way)  # type: ignore[arg-type]
    unseen = dense.decode(Query(histories, 30, excluded=histories), how).items
    for row, history in zip(unseen, histories, strict=True):
        assert not set(row.tolist()) & set(history.tolist())
    allowed = np.isin(np.arange(ITEMS), range(0, 12, 2))
    few = dense.decode(Query(histories, 10, allowed), how)
    for row in few.items.tolist():
        assert sorted(row[:6]) == list(range(0, 12, 2))
        assert row[6:] == [-1] * 4
    assert (few.scores[:, 6:] == -np.inf).all()


def test_only_the_last_items_of_a_long_history_count(plain: PaperMaskGR) -> None:
    limit = plain.config.history_limit
    long = np.arange(55)
    asked = Sequences.of([long, long[-limit:], long[-limit + 1 :]])
    one, same, other = decode(plain, asked, 10).scores
    assert one == pytest.approx(same, abs=1e-4)
    assert one != pytest.approx(other, abs=1e-2)


def test_trace_has_every_step_of_the_search(plain: PaperMaskGR, histories: Sequences) -> None:
    query, how = Query(histories, 4), DecodingConfig(beams=6)
    ranked, traces = plain.trace(query, how)
    assert np.array_equal(ranked.items, plain.decode(query, how).items)
    for user, steps in enumerate(traces):
        assert len(steps) == LEVELS
        before = torch.zeros(1)
        for step in steps:
            assert (step.remaining >= 1).all()
            gained = step.log_probs.sum(1)
            torch.testing.assert_close(step.scores, before[step.parents] + gained)
            before = step.scores
        assert before[:4].tolist() == pytest.approx(ranked.scores[user].tolist())


def test_items_that_share_a_semantic_id_are_ranked_by_training_count(shop: Dataset) -> None:
    quantizer = QuantizerConfig(levels=2, codes=4)
    sids = SemanticIds.make(shop, SidsConfig(quantizer=quantizer, unique="share"))
    counts = np.random.default_rng(0).integers(0, 5, ITEMS)
    model = random_model(sids, counts)
    for steps in (1, 2):
        found = decode(model, Sequences.of([[3, 1]]), ITEMS, steps=steps, beams=ITEMS)
        ranked, scores = found.items[0].tolist(), found.scores[0].tolist()
        assert sorted(ranked) == list(range(ITEMS))
        order = sorted(
            range(ITEMS), key=lambda item: (-scores[ranked.index(item)], -counts[item], item)
        )
        assert ranked == order
        assert len(set(scores)) <= 16 < ITEMS


def test_sessions_of_one_step_by_enumeration(plain: PaperMaskGR, histories: Sequences) -> None:
    query = Query(histories, 8, excluded=histories)
    sets, scores = plain.sessions(query, 2, DecodingConfig(steps=1, beams=8), repeats=False)
    order = np.argsort(histories.lengths, kind="stable")
    own = Histories(plain.network, histories.select(order), plain.codes, items=2, cache="off")
    first = own.first()
    for place, user in enumerate(order):
        each = [
            sum(first[level][place, item][plain.codes[:, level]] for level in range(LEVELS))
            for item in (0, 1)
        ]
        total = (each[0][:, None] + each[1][None, :]).fill_diagonal_(-torch.inf)
        seen = torch.from_numpy(histories[int(user)]).long()
        total[seen], total[:, seen] = -torch.inf, -torch.inf
        best = total.flatten().sort(descending=True)
        assert scores[user] == pytest.approx(best.values[:8].numpy(), abs=1e-4)
        assert sets[user, 0].tolist() == list(divmod(int(best.indices[0]), ITEMS))


def test_session_of_one_item_is_the_next_item(plain: PaperMaskGR, histories: Sequences) -> None:
    query, how = Query(histories, 6), DecodingConfig(beams=6)
    sets, scores = plain.sessions(query, 1, how, repeats=False)
    found = plain.decode(query, how)
    assert np.array_equal(sets[:, :, 0], found.items)
    assert scores == pytest.approx(found.scores, abs=1e-5)


def test_session_may_repeat_an_item_only_where_asked(
    plain: PaperMaskGR, histories: Sequences
) -> None:
    query = Query(histories, 30)
    for repeats in (False, True):
        sets, _ = plain.sessions(query, 2, DecodingConfig(steps=2, beams=30), repeats=repeats)
        assert (sets[:, :, 0] == sets[:, :, 1]).any() == repeats


def test_samples_of_one_step_follow_the_enumerated_probabilities(plain: PaperMaskGR) -> None:
    """Digit after digit is drawn from the codes of items that have those before it."""
    history = Sequences.of([[8, 2]])
    first = Histories(plain.network, history, plain.codes, items=1, cache="off").first()
    expected = np.ones(ITEMS)
    for item, codes in enumerate(plain.sids.digits):
        for level in range(LEVELS):
            same = (plain.sids.digits[:, :level] == codes[:level]).all(1)
            allowed = np.unique(plain.sids.digits[same, level])
            probs = first[level][0, 0].exp().numpy()
            expected[item] *= probs[codes[level]] / probs[allowed].sum()
    drawn = plain.sample(Query(history, 4000), steps=1, temperature=1.0, seed=0)[0]
    found = np.bincount(drawn, minlength=ITEMS) / 4000
    assert expected.sum() == pytest.approx(1)
    assert found == pytest.approx(expected, abs=5 * (0.25 / 4000) ** 0.5)


def test_samples_follow_the_seed_the_temperature_and_the_filters(
    plain: PaperMaskGR, histories: Sequences
) -> None:
    query = Query(histories, 100, excluded=histories)

    def draw(temperature: float, seed: int) -> npt.NDArray[np.int64]:
        return plain.sample(query, steps=0, temperature=temperature, seed=seed)

    warm = draw(1.0, 0)
    assert np.array_equal(warm, draw(1.0, 0))
    assert not np.array_equal(warm, draw(1.0, 1))
    for user, history in enumerate(histories):
        assert not set(warm[user].tolist()) & set(history.tolist())
    assert len(np.unique(draw(0.05, 0)[0])) < len(np.unique(warm[0]))


# Items and files


def new_items(shop: Dataset, *ids: str) -> pl.DataFrame:
    return shop.items[: len(ids)].with_columns(item_id=pl.Series(ids))


def test_adding_items_changes_no_old_id_and_every_item_is_found(
    shop: Dataset, aware: PaperMaskGR, histories: Sequences
) -> None:
    vectors = np.random.default_rng(1).standard_normal((3, 8)).astype(np.float32)
    more = aware.with_items(new_items(shop, "x", "y", "z"), vectors)
    assert np.array_equal(more.sids.digits[:ITEMS], aware.sids.digits)
    assert more.counts.tolist() == [*aware.counts.tolist(), 0, 0, 0]
    found = decode(more, histories, ITEMS + 3, order="left-to-right", beams=100)
    for user in range(len(histories)):
        assert set(found.items[user].tolist()) == set(range(ITEMS + 3))


@pytest.mark.parametrize("way", ["generative", "unified", "dense"])
def test_new_items_are_found_at_once_and_saved(
    shop: Dataset, dense: PaperMaskGR, tmp_path: Path, way: str
) -> None:
    vectors = np.random.default_rng(1).standard_normal((3, 8)).astype(np.float32)
    more = dense.with_items(new_items(shop, "x", "y", "z"), vectors)
    new = np.arange(ITEMS, ITEMS + 3)
    allowed = np.isin(np.arange(ITEMS + 3), new)
    query = Query(Sequences.of([[], [ITEMS, 4]]), 3, allowed)
    found = more.decode(query, DecodingConfig(retrieval=way))  # type: ignore[arg-type]
    assert np.array_equal(np.sort(found.items, axis=1), [new, new])
    assert np.isfinite(found.scores).all()
    more.save(tmp_path)
    again = PaperMaskGR.load(tmp_path, more.config)
    assert again.counts.tolist() == more.counts.tolist()
    same = again.decode(query, DecodingConfig(retrieval=way))  # type: ignore[arg-type]
    assert np.array_equal(same.scores, found.scores)


def test_added_item_comes_behind_trained_ones_with_its_semantic_id(shop: Dataset) -> None:
    quantizer = QuantizerConfig(levels=2, codes=4)
    sids = SemanticIds.make(shop, SidsConfig(quantizer=quantizer, unique="share"))
    assert shop.embeddings is not None
    more = random_model(sids).with_items(new_items(shop, "x"), shop.embeddings[5:6])
    assert more.sids.digits[ITEMS].tolist() == sids.digits[5].tolist()
    ranked = decode(more, Sequences.of([[]]), ITEMS + 1, beams=100).items[0].tolist()
    alike = np.flatnonzero((sids.digits == sids.digits[5]).all(1))
    assert all(ranked.index(item) < ranked.index(ITEMS) for item in alike)


@pytest.mark.parametrize("name", ["plain", "dense", "aware", "trained"])
def test_saved_and_loaded_model_answers_the_same(
    name: str, histories: Sequences, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    model: PaperMaskGR = request.getfixturevalue(name)
    model.save(tmp_path)
    again = PaperMaskGR.load(tmp_path, TrainConfig.from_dict(model.config.to_dict()))
    one, two = decode(model, histories, 10), decode(again, histories, 10)
    assert np.array_equal(one.items, two.items)
    assert np.array_equal(one.scores, two.scores)


@pytest.mark.parametrize("file", ["counts.npy", "network.safetensors"])
def test_raises_when_a_saved_file_is_damaged(plain: PaperMaskGR, tmp_path: Path, file: str) -> None:
    plain.save(tmp_path)
    (tmp_path / file).write_bytes(b"x")
    with pytest.raises(ArtefactError, match=file):
        PaperMaskGR.load(tmp_path, plain.config)
