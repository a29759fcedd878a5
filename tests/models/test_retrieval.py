"""The four ways to retrieve, by brute force on a small trained model; and items that came later."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import polars as pl
import pytest
import torch

from maskgr import Dataset, Recommender
from maskgr.config import DenseConfig, LoopConfig, NetworkConfig, ObjectiveConfig, TrainConfig
from maskgr.data.config import SyntheticConfig
from maskgr.data.open import fetch
from maskgr.data.sequences import Sequences
from maskgr.data.splits import leave_out
from maskgr.errors import DataError, RequestError
from maskgr.models.maskgr import MaskGR
from maskgr.nn.layout import Layout
from maskgr.sids.config import QuantizerConfig
from tests.conftest import Outcome

ITEMS = 40
WAYS = ("generative", "dense", "unified", "fused")
CONFIG = TrainConfig(
    unique="reassign",
    quantizer=QuantizerConfig(levels=2, codes=8),
    network=NetworkConfig(
        layers=1, width=16, heads=2, hidden=32, attention="causal", history="pooled",
        history_layers=1,
    ),
    dense=DenseConfig(
        text_input=True, table="learned", hidden=0, temperature=0, repeat_bias=True, followers=6
    ),
    objective=ObjectiveConfig(catalogue_aware=True),
    loop=LoopConfig(steps=60, token_budget=1500, learning_rate=1e-2, validations=2),
)  # fmt: skip
PAPER = replace(
    CONFIG,
    unique="append",
    network=NetworkConfig(layers=2, width=16, heads=2, hidden=32),
    dense=DenseConfig(text_input=True, table="text", layer=1, hidden=16, rank=4, followers=6),
    objective=ObjectiveConfig(whole_item=0.2),
)


@pytest.fixture(scope="module")
def shop() -> Dataset:
    return fetch("synthetic", synthetic=SyntheticConfig(users=200, items=ITEMS))


@pytest.fixture(scope="module", params=["causal", "paper"])
def trained(request: pytest.FixtureRequest, shop: Dataset) -> Recommender:
    rec = Recommender.train(shop, config=CONFIG if request.param == "causal" else PAPER)
    assert isinstance(rec.model, MaskGR)
    if rec.model.followers is not None:  # whatever validation found
        rec.model.weights = replace(rec.model.weights, follow=0.7, repeat=2.0)
        rec.model.forget()
    return rec


def histories(shop: Dataset, count: int = 12) -> Sequences:
    return leave_out(shop.histories).test.histories.select(np.arange(count))


def rank(
    rec: Recommender, asked: Sequences, top: int, way: str, *, seen: bool = True, beams: int = 20
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    how = rec.decoding(retrieval=way, beams=beams)
    found = rec.rank(asked, top, exclude_seen=not seen, decoding=how)
    return found.items, found.scores


def dense_log_probs(rec: Recommender, asked: Sequences) -> torch.Tensor:
    """(users, items) from the network alone, one user at a time."""
    model = rec.model
    assert isinstance(model, MaskGR)
    net, digits = model.network, model.digits
    rows = []
    for history in asked.last(rec.config.history_limit):
        numbers = torch.from_numpy(history).long()
        # one more item, all of its digits masked
        whole = torch.cat([numbers, torch.zeros(1, dtype=torch.int64)])
        masked = torch.zeros(len(whole) * net.digits, dtype=torch.bool)
        masked[-net.digits :] = True
        layout = Layout.of([len(masked)])
        with torch.no_grad():
            states = net.denoise(digits[whole], masked, layout, masked.nonzero()[:, 0], whole)
            assert states.queries is not None
            scores = states.queries[-1] @ net.table(digits).T
            if net.head.repeat_bias is not None:
                scores[numbers.unique()] += model.weights.repeat * net.head.repeat_bias
            if model.followers is not None:
                found, strengths = model.followers.after(Sequences.of([history]))
                new = ~np.isin(found.values, history)
                scores[found.values[new]] += torch.from_numpy(
                    np.float32(model.weights.follow) * strengths[new]
                )
        rows.append(scores.log_softmax(0))
    return torch.stack(rows)


def test_dense_is_brute_force(shop: Dataset, trained: Recommender) -> None:
    asked = histories(shop)
    expected = dense_log_probs(trained, asked)
    items, scores = rank(trained, asked, ITEMS, "dense")
    best = expected.sort(dim=1, descending=True)
    torch.testing.assert_close(torch.from_numpy(scores), best.values, atol=1e-4, rtol=1e-4)
    assert np.array_equal(items[:, :5], best.indices[:, :5].numpy())
    assert scores == pytest.approx(np.take_along_axis(expected.numpy(), items, 1), abs=1e-4)


def test_unified_is_the_beams_ranked_by_the_dense_score(
    shop: Dataset, trained: Recommender
) -> None:
    asked = histories(shop)
    dense = dense_log_probs(trained, asked).numpy()
    beams, _ = rank(trained, asked, 8, "generative", beams=8)
    items, scores = rank(trained, asked, 5, "unified", beams=8)
    for user in range(len(asked)):
        by_hand = sorted(beams[user].tolist(), key=lambda item: -dense[user, item])[:5]
        assert items[user].tolist() == by_hand
        assert scores[user] == pytest.approx(dense[user, by_hand], abs=1e-4)


def test_fused_is_the_weighted_sum_over_what_either_finds(
    shop: Dataset, trained: Recommender
) -> None:
    asked = histories(shop)
    dense = dense_log_probs(trained, asked).numpy()
    model = trained.model
    assert isinstance(model, MaskGR)
    plain = replace(trained, model=replace(model, weights=replace(model.weights, repeat_beams=0.0)))
    every, log_probs = rank(plain, asked, ITEMS, "generative", beams=ITEMS)
    generative = np.empty_like(dense)
    np.put_along_axis(generative, every.astype(np.int64), log_probs, axis=1)
    beams, _ = rank(trained, asked, 6, "generative", beams=6)
    near, _ = rank(trained, asked, 6, "dense")
    for weight in (0.0, 0.7):
        told = replace(trained, model=replace(model, weights=replace(model.weights, fusion=weight)))
        items, scores = rank(told, asked, 6, "fused", beams=6)
        for user in range(len(asked)):
            total = dense[user] + weight * generative[user]
            pool = set(beams[user].tolist()) | set(near[user].tolist())
            by_hand = sorted(pool, key=lambda item: -total[item])[:6]
            assert scores[user] == pytest.approx(total[by_hand], abs=1e-3)
            assert set(items[user].tolist()) <= pool


def test_the_repeat_bias_of_beams(shop: Dataset, trained: Recommender) -> None:
    model = trained.model
    assert isinstance(model, MaskGR)
    asked = histories(shop)
    (plain_items, plain), (items, scores) = (
        rank(
            replace(trained, model=replace(model, weights=replace(model.weights, repeat_beams=w))),
            asked,
            ITEMS,
            "generative",
        )
        for w in (0.0, 3.0)
    )
    for user, history in enumerate(asked.last(trained.config.history_limit)):
        by_hand = plain[user] + 3 * model.network.repeats * np.isin(plain_items[user], history)
        assert scores[user] == pytest.approx(np.sort(by_hand)[::-1], abs=1e-5)
        assert dict(zip(items[user], scores[user], strict=True)) == pytest.approx(
            dict(zip(plain_items[user], by_hand, strict=True)), abs=1e-5
        )


@pytest.mark.parametrize("way", WAYS)
def test_filters(shop: Dataset, trained: Recommender, way: str) -> None:
    ids = shop.item_ids.to_list()
    history = [ids[n] for n in histories(shop)[0]]
    some = {r.item_id for r in trained.recommend(history, 20, exclude_seen=True, retrieval=way)}  # type: ignore[arg-type]
    assert len(some) == 20
    assert not some & set(history)
    only = trained.recommend(history, 10, allow=ids[:5], exclude_seen=False, retrieval=way)  # type: ignore[arg-type]
    assert sorted(r.item_id for r in only) == sorted(ids[:5])
    none = trained.recommend(history, 20, deny=ids[:10], exclude_seen=False, retrieval=way)  # type: ignore[arg-type]
    assert not {r.item_id for r in none} & set(ids[:10])
    scores = [r.score for r in none]
    assert scores == sorted(scores, reverse=True)
    assert len(trained.recommend([], 5, retrieval=way)) == 5  # type: ignore[arg-type]


def test_auto_is_fused_and_the_weight_is_kept(
    shop: Dataset, trained: Recommender, tmp_path: Path
) -> None:
    asked = histories(shop)
    auto = trained.rank(asked, 5, exclude_seen=True)
    assert np.array_equal(auto.items, rank(trained, asked, 5, "fused", seen=False)[0])
    trained.save(tmp_path / "run")
    again = Recommender.load(tmp_path / "run")
    assert isinstance(again.model, MaskGR)
    assert isinstance(trained.model, MaskGR)
    assert again.model.weights == trained.model.weights
    assert np.array_equal(again.rank(asked, 5, exclude_seen=True).scores, auto.scores)


def test_auto_is_dense_where_that_has_all_the_weight(
    shop: Dataset, trained: Recommender, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = histories(shop)
    assert isinstance(trained.model, MaskGR)
    monkeypatch.setattr(trained.model, "weights", replace(trained.model.weights, fusion=0.0))
    assert trained.model.retrieval(trained.decoding()) == "dense"
    auto = trained.rank(asked, 5, exclude_seen=True)
    fused, scores = rank(trained, asked, 5, "fused", seen=False)
    assert np.array_equal(auto.items, fused)
    assert auto.scores == pytest.approx(scores, abs=1e-4)


def test_a_run_without_a_head_says_so(shop: Dataset) -> None:
    plain = replace(CONFIG, dense=DenseConfig(), loop=replace(CONFIG.loop, steps=1))
    rec = Recommender.train(shop, config=plain)
    assert len(rec.recommend([], 3)) == 3
    with pytest.raises(RequestError, match="dense retrieval needs a dense head"):
        rec.recommend([], 3, retrieval="dense")


def new_items(shop: Dataset) -> pl.DataFrame:
    text = shop.items.drop("item_id")[:3]
    return text.with_columns(item_id=pl.Series(["new-1", "new-2", "new-3"])).select(
        "item_id", *text.columns
    )


@pytest.mark.parametrize("way", WAYS)
def test_new_items_are_recommendable_at_once(
    shop: Dataset, trained: Recommender, tmp_path: Path, way: str
) -> None:
    more = trained.add_items(new_items(shop))
    ids = ["new-1", "new-2", "new-3"]
    found = more.recommend([], 5, allow=ids, retrieval=way)  # type: ignore[arg-type]
    assert sorted(r.item_id for r in found) == ids
    assert all(np.isfinite(r.score) for r in found)
    assert len(more.recommend(ids, 4, retrieval=way)) == 4  # type: ignore[arg-type]
    everything = more.recommend([], ITEMS + 3, exclude_seen=False, retrieval=way)  # type: ignore[arg-type]
    assert len({r.item_id for r in everything}) == ITEMS + 3
    more.save(tmp_path / way)
    again = Recommender.load(tmp_path / way)
    assert again.recommend([], 5, allow=ids, retrieval=way) == found  # type: ignore[arg-type]


def test_adding_items_changes_no_old_id_and_no_old_score(
    shop: Dataset, trained: Recommender
) -> None:
    more = trained.add_items(new_items(shop)).add_items(
        new_items(shop).with_columns(item_id=pl.Series(["x", "y", "z"]))
    )
    old, new = trained.model, more.model
    assert isinstance(old, MaskGR)
    assert isinstance(new, MaskGR)
    assert np.array_equal(old.sids.digits, new.sids.digits[:ITEMS])
    assert len(more.items) == len(new.sids.digits) == ITEMS + 6
    asked = histories(shop)
    before = [trained.decoding(retrieval="generative", beams=ITEMS, order="left-to-right")]
    items, scores, _ = trained.rank(asked, ITEMS, exclude_seen=False, decoding=before[0])
    wide = replace(before[0], beams=ITEMS + 6)
    later, later_scores, _ = more.rank(asked, ITEMS + 6, exclude_seen=False, decoding=wide)
    for user in range(len(asked)):
        one = dict(zip(items[user].tolist(), scores[user].tolist(), strict=True))
        two = dict(zip(later[user].tolist(), later_scores[user].tolist(), strict=True))
        assert set(two) == set(range(ITEMS + 6))
        for item, score in one.items():
            assert two[item] == pytest.approx(score, abs=1e-4)


@pytest.mark.parametrize(
    ("ids", "message"),
    [(["a", "a"], "repeated"), (["a", None], "without an ID"), (None, "no column item_id")],
)
def test_bad_new_items(
    shop: Dataset, trained: Recommender, ids: list[str | None] | None, message: str
) -> None:
    frame = new_items(shop)[:2]
    frame = frame.drop("item_id") if ids is None else frame.with_columns(item_id=pl.Series(ids))
    with pytest.raises(DataError, match=message):
        trained.add_items(frame)
    old = shop.items[:1]
    with pytest.raises(DataError, match="are old"):
        trained.add_items(old)
    assert trained.add_items(frame.clear().with_columns(item_id=pl.lit("a"))[:0]) is trained


def test_popularity_takes_new_items_too(shop: Dataset) -> None:
    rec = Recommender.train(shop, config=TrainConfig(model="popularity"))
    more = rec.add_items(new_items(shop))
    assert len(more.recommend([], ITEMS + 3, exclude_seen=False)) == ITEMS + 3


@pytest.mark.parametrize("similarity", ["product", "cosine"])
def test_sampled_softmax_trains_too(shop: Dataset, similarity: str) -> None:
    dense = replace(
        CONFIG.dense, negatives=64, repeat_bias=False, similarity=similarity,  # type: ignore[arg-type]
        temperature=0.1 if similarity == "cosine" else 0.0,
    )  # fmt: skip
    rec = Recommender.train(shop, config=replace(CONFIG, dense=dense))
    test = leave_out(shop.histories).test
    found = rec.rank(
        test.histories, 10, exclude_seen=False, decoding=rec.decoding(retrieval="dense")
    )
    hits = (found.items == test.targets).any(1).mean()
    assert hits > 1.5 * 10 / ITEMS


def test_the_commands(
    maskgr: Callable[..., Outcome], shop: Dataset, trained: Recommender, tmp_path: Path
) -> None:
    shop.save(tmp_path / "shop")
    trained.save(tmp_path / "run")
    data = ("--data", tmp_path / "shop")
    found = {}
    for way in WAYS:
        outcome = maskgr("evaluate", tmp_path / "run", *data, "--retrieval", way, "--json")
        assert outcome.code == 0, outcome.err
        found[way] = json.loads(outcome.out)["recall@10"]
    assert len(set(found.values())) > 1
    new_items(shop).write_parquet(tmp_path / "new.parquet")
    added = maskgr("add-items", tmp_path / "run", tmp_path / "new.parquet")
    assert "3 new items, 43 in all" in added.out, added.err
    words = ("recommend", tmp_path / "run", "--allow", "new-2", "--json")
    assert [row["item_id"] for row in json.loads(maskgr(*words).out)] == ["new-2"]
    again = maskgr("add-items", tmp_path / "run", tmp_path / "new.parquet")
    assert again.code == 2
    assert "are old, repeated or without an ID" in again.err
    assert "is not a table; give a .parquet" in maskgr("add-items", tmp_path / "run", "x.doc").err
    outcome = maskgr("recommend", tmp_path / "run", "--retrieval", "telepathic")
    assert outcome.code == 2
    assert "--retrieval telepathic is not a choice; use generative, dense" in outcome.err
    # What says how to unmask is not taken where nothing is unmasked.
    words = ("recommend", tmp_path / "run", "--top", 2, "--retrieval")
    outcome = maskgr(*words, "dense", "--steps", 1)
    assert outcome.code == 2
    assert "--steps says how digits are unmasked, and dense retrieval" in outcome.err
    assert maskgr(*words, "generative", "--steps", 1).code == 0


def test_given_vectors_of_new_items_go_by_their_ids(
    maskgr: Callable[..., Outcome], tmp_path: Path
) -> None:
    rng = np.random.default_rng(0)
    shop = fetch("synthetic", synthetic=SyntheticConfig(users=60, items=ITEMS))
    shop = replace(shop, embeddings=rng.standard_normal((ITEMS, 8)).astype(np.float32))
    quick = replace(CONFIG, loop=replace(CONFIG.loop, steps=2))
    Recommender.train(shop, config=quick).save(tmp_path / "run")
    new, vectors = new_items(shop), rng.standard_normal((3, 8)).astype(np.float32)
    new.write_parquet(tmp_path / "new.parquet")
    table = pl.DataFrame({"item_id": new["item_id"], "vector": vectors.tolist()})
    table[::-1].write_parquet(tmp_path / "vectors.parquet")
    words = ("add-items", tmp_path / "run", tmp_path / "new.parquet")
    added = maskgr(*words, "--embeddings", tmp_path / "vectors.parquet")
    assert added.code == 0, added.err
    model = Recommender.load(tmp_path / "run").model
    assert isinstance(model, MaskGR)
    np.testing.assert_allclose(model.sids.embeddings[-3:], vectors, atol=1e-6)


def test_columns_of_another_type_are_named(shop: Dataset, trained: Recommender) -> None:
    listed = trained.items.with_columns(tags=pl.Series([["a"]] * ITEMS))
    told = replace(trained, items=listed)
    with pytest.raises(DataError, match=r"tags is String where the catalogue has List\(String\)"):
        told.add_items(new_items(shop).with_columns(tags=pl.lit("a")))


def test_an_approximate_search_ranks_without_the_whole_product(shop: Dataset) -> None:
    rec = Recommender.train(shop, config=replace(CONFIG, loop=replace(CONFIG.loop, steps=5)))
    assert isinstance(rec.model, MaskGR)
    asked, network = histories(shop), rec.model.network
    one = rank(rec, asked, 5, "dense")
    network.dense_config = replace(network.dense_config, index="hnsw")
    rec.model.forget()
    two = rank(rec, asked, 5, "dense")
    assert np.array_equal(one[0], two[0])  # so few items are all found
    np.testing.assert_allclose(np.diff(one[1]), np.diff(two[1]), atol=1e-4)


def test_what_was_decoded_before_changes_nothing(shop: Dataset, trained: Recommender) -> None:
    asked, model = histories(shop), trained.model
    assert isinstance(model, MaskGR)
    fresh = replace(trained, model=replace(model))
    for way in ("generative", "unified"):
        rank(trained, asked, 3, way)
        assert np.array_equal(rank(trained, asked, 5, way)[1], rank(fresh, asked, 5, way)[1])
