from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from safetensors.torch import load_file

from maskgr import Dataset, Recommender
from maskgr.config import DenseConfig, NetworkConfig, TrainConfig
from maskgr.data.config import SyntheticConfig
from maskgr.data.open import fetch
from maskgr.errors import RequestError
from maskgr.models.collaborative import carry_over, fit_tokens, score_space
from maskgr.models.maskgr import MaskGR
from maskgr.models.network import Network
from maskgr.models.stages import FIRST
from maskgr.models.task import BEST
from maskgr.nn.layout import Layout
from maskgr.training.log import read_log
from tests.models.test_retrieval import CONFIG

COLLABORATIVE = replace(
    CONFIG, collaborative=0.5, objective=replace(CONFIG.objective, distil=0.5, copies=2)
)
DENSE = DenseConfig(text_input=True, table="learned")
DIGITS = torch.tensor(list(product(range(4), range(3), range(2))))  # of 24 items


def network(sizes: tuple[int, ...], seed: int) -> Network:
    torch.manual_seed(seed)
    config = NetworkConfig(
        layers=1, history_layers=1, width=16, heads=2, hidden=32, attention="causal",
        history="pooled",
    )  # fmt: skip
    made = Network(config, sizes, DENSE, torch.randn(24, 5, generator=torch.Generator()))
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return made.eval()


def test_other_digits_change_no_vector_and_no_prediction() -> None:
    old, new = network((4, 3, 2), 0), network((5, 5, 5), 1)
    other = torch.randint(5, (24, 3), generator=torch.Generator().manual_seed(0))
    carry_over(old, DIGITS, new, other)
    torch.testing.assert_close(old.table(DIGITS), new.table(other), atol=1e-4, rtol=1e-4)
    numbers, layout = torch.tensor([3, 1, 9, 9, 0]), Layout.of([6, 9])
    torch.testing.assert_close(
        old.queries(old.remember(DIGITS[numbers], layout, numbers)),
        new.queries(new.remember(other[numbers], layout, numbers)),
        atol=1e-4,
        rtol=1e-4,
    )


def test_states_ask_of_the_digits_what_they_ask_of_the_item() -> None:
    old, new = network((4, 3, 2), 0), network((24, 1, 1), 1)
    other = torch.stack([torch.arange(24), torch.zeros(24), torch.zeros(24)], dim=1).long()
    carry_over(old, DIGITS, new, other)
    state = torch.randn(1, 16)
    dense = state @ old.item_vectors(DIGITS, torch.arange(24)).T / 16**0.5
    new.bias.data.zero_()
    found = new.log_probs(state, 0)
    torch.testing.assert_close(found, dense.log_softmax(1), atol=1e-5, rtol=1e-5)


def test_tokens_are_the_parts_that_vectors_are_made_of() -> None:
    rng = np.random.default_rng(0)
    digits = np.stack([rng.integers(size, size=500) for size in (4, 3, 2)], axis=1)
    parts = [rng.standard_normal((size, 6)) for size in (4, 3, 2)]
    vectors = sum(part[digits[:, level]] for level, part in enumerate(parts))
    tokens = fit_tokens(vectors, digits, (4, 3, 2))
    found = tokens[digits[:, 0]] + tokens[4 + digits[:, 1]] + tokens[7 + digits[:, 2]]
    assert found == pytest.approx(vectors, abs=1e-3)


def test_distances_in_score_space_are_differences_of_scores() -> None:
    rng = np.random.default_rng(0)
    vectors, queries = rng.standard_normal((7, 5)), rng.standard_normal((30, 5))
    queries[:, 2] = 0  # nobody asks for that
    found = score_space(vectors, queries)
    for one, two in product(range(7), repeat=2):
        scores = queries @ (vectors[one] - vectors[two])
        assert ((found[one] - found[two]) ** 2).sum() == pytest.approx((scores**2).mean(), abs=1e-5)


@pytest.fixture(scope="module")
def shop() -> Dataset:
    return fetch("synthetic", synthetic=SyntheticConfig(users=200, items=40))


def test_two_stages_one_run(shop: Dataset, tmp_path: Path) -> None:
    rec = Recommender.train(shop, config=COLLABORATIVE, run=tmp_path)
    assert isinstance(rec.model, MaskGR)
    assert rec.model.sids.learned is not None
    steps = CONFIG.loop.steps // 2
    for folder in (tmp_path / FIRST, tmp_path):
        assert max(row["step"] for row in read_log(folder)) == steps
    # What the dense head learned is frozen while the digits learn.
    network, first = rec.model.network.state_dict(), load_file(tmp_path / FIRST / BEST)
    for name, tensor in first.items():
        if name.startswith(("head.", "encoder.history_blocks.", "items.norm.", "items.text.")):
            assert torch.equal(network[name], tensor), name
    assert not torch.equal(network["levels"], first["levels"])
    with pytest.raises(RequestError, match=r"holds a training; --resume \(resume=True\) goes on"):
        Recommender.train(shop, config=COLLABORATIVE, run=tmp_path)
    again = Recommender.train(shop, config=COLLABORATIVE, run=tmp_path, resume=True)
    asked = shop.histories.select(np.arange(10))
    one, two = (r.rank(asked, 5, exclude_seen=True) for r in (rec, again))
    assert np.array_equal(one.scores, two.scores)
    new = shop.items[:1].with_columns(item_id=pl.Series(["new"]))
    for way in ("generative", "dense", "unified", "fused"):
        found = rec.add_items(new).recommend([], 1, allow=["new"], retrieval=way)
        assert [r.item_id for r in found] == ["new"]


def test_given_ids_are_used_as_they_are(shop: Dataset, tmp_path: Path) -> None:
    quick = replace(COLLABORATIVE, loop=replace(COLLABORATIVE.loop, steps=2))
    first = Recommender.train(shop, config=replace(quick, collaborative=0.0))
    assert isinstance(first.model, MaskGR)
    rec = Recommender.train(shop, config=quick, sids=first.model.sids, run=tmp_path)
    assert isinstance(rec.model, MaskGR)
    assert np.array_equal(rec.model.sids.digits, first.model.sids.digits)
    assert not (tmp_path / FIRST).exists()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (replace(COLLABORATIVE, collaborative=1.0), "it is a share of the training"),
        (replace(COLLABORATIVE, dense=DenseConfig()), "what a dense head learned"),
        (TrainConfig(collaborative=0.2), "what a dense head learned"),
    ],
)
def test_bad_settings(shop: Dataset, config: TrainConfig, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        Recommender.train(shop, config=config)
