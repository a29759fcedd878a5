from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch

from maskgr.data.splits import leave_out
from maskgr.evaluation.ranking import Query
from maskgr.models.base import Training
from maskgr.models.items import item_text
from maskgr.models.maskgr.model import MaskGR
from maskgr.models.maskgr.stages import train_history
from maskgr.sids.config import EncoderConfig
from tests.models.maskgr.test_model import CONFIG
from tests.models.tiny import HISTORIES, ITEMS, assert_same, shop, texts, workspace

FEW = replace(CONFIG, fit=replace(CONFIG.fit, steps=4, checkpoint_minutes=9))


@pytest.mark.parametrize("better", ["text", "both"])
def test_validation_chooses_what_item_vectors_are_made_of(
    better: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = shop()
    training = Training(data, leave_out(data.histories), FEW, workspace(tmp_path))
    trained = []

    def fit(self: Training, network: object, *_: object, label: str, **__: object) -> object:
        source = network.config.items  # type: ignore[attr-defined]
        trained.append((source, label))
        return {"recall@10": 0.5 + 0.1 * (source == better)}

    monkeypatch.setattr(Training, "fit", fit)
    history = train_history(training, item_text(training, EncoderConfig()), FEW.fit)
    assert [source for source, _ in trained] == ["text", "both"]
    assert trained[0][1] != trained[1][1]
    assert history.config.items == better
    assert not history.training


@pytest.mark.parametrize("vectors", ["learned", "digits"])
def test_items_without_text_are_learned_by_their_ids(vectors: str, tmp_path: Path) -> None:
    data = shop()
    bare = replace(data, items=data.items.select("item_id"), embeddings=None)
    config = replace(FEW, model=replace(FEW.model, vectors=vectors))
    training = Training(bare, leave_out(bare.histories), config, workspace(tmp_path / "run"))
    own = MaskGR.learn(training)
    assert own.history.config.items == "id"
    query = Query(HISTORIES, ITEMS)
    assert (np.sort(own.rank(query).items) == np.arange(ITEMS)).all()
    (tmp_path / "saved").mkdir()
    own.save(tmp_path / "saved")
    assert_same(MaskGR.load(tmp_path / "saved", config).rank(query), own.rank(query), exact=True)


def test_new_items_are_known_by_their_digits_where_items_are_digits(tmp_path: Path) -> None:
    data = shop()
    config = replace(FEW, model=replace(FEW.model, vectors="digits", items="text", neighbours=0))
    own = MaskGR.learn(Training(data, leave_out(data.histories), config, workspace(tmp_path)))
    grown = own.with_items(pl.DataFrame({"item_id": ["x", "y"]}), texts()[[3, 7]])
    with torch.no_grad():
        table, digits = grown.history.table(), grown.history.items.digits.weight
        torch.testing.assert_close(table[:ITEMS], own.history.table())
        sums = digits[grown.codes + torch.tensor(grown.denoiser.starts)].sum(1)
        torch.testing.assert_close(table, sums)
    found = grown.rank(Query(HISTORIES, ITEMS + 2)).items
    assert (np.sort(found) == np.arange(ITEMS + 2)).all()
