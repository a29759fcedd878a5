from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest

from maskgr import Dataset
from maskgr.data.config import SyntheticConfig
from maskgr.data.open import fetch
from maskgr.errors import DataError
from maskgr.sids.collaborative import Collaborative
from maskgr.sids.config import QuantizerConfig
from maskgr.sids.report import report
from maskgr.sids.semantic_ids import SemanticIds


def test_vectors_that_follow_from_text_are_foretold() -> None:
    rng = np.random.default_rng(0)
    text = rng.standard_normal((4000, 6)).astype(np.float32) + 3
    slopes, constant = rng.standard_normal((6, 4)), rng.standard_normal(4)
    vectors = (text @ slopes + constant).astype(np.float32)
    found = Collaborative.of(vectors, text)
    new = rng.standard_normal((50, 6)).astype(np.float32) + 3
    assert found.foretell(new) == pytest.approx(new @ slopes + constant, abs=0.1)


def test_vectors_that_do_not_follow_are_foretold_as_the_mean() -> None:
    rng = np.random.default_rng(0)
    text, vectors = rng.standard_normal((2000, 3)), 5 + rng.standard_normal((2000, 2))
    found = Collaborative.of(vectors.astype(np.float32), text.astype(np.float32))
    assert found.foretell(np.zeros((1, 3), np.float32)) == pytest.approx(5, abs=0.2)


def test_counts_must_agree() -> None:
    with pytest.raises(DataError, match="3 learned vectors do not go with 4 text embeddings"):
        Collaborative.of(np.ones((3, 2), np.float32), np.ones((4, 2), np.float32))


@pytest.fixture(scope="module")
def shop() -> Dataset:
    return fetch("synthetic", synthetic=SyntheticConfig(users=100, items=60))


def test_ids_remade_of_learned_vectors(shop: Dataset, tmp_path: Path) -> None:
    quantizer = QuantizerConfig(levels=2, codes=8)
    made = SemanticIds.make(shop, quantizer=quantizer, unique="reassign")
    vectors = np.random.default_rng(0).standard_normal((60, 7)).astype(np.float32)
    remade = made.remade(vectors, quantizer)
    assert not np.array_equal(remade.digits, made.digits)
    assert np.array_equal(remade.embeddings, made.embeddings)  # the text stays the text
    assert np.array_equal(remade.vectors, vectors)
    assert report(remade).unique_share_after == 1
    remade.save(tmp_path / "sids")
    again = SemanticIds.load(tmp_path / "sids")
    assert np.array_equal(again.digits, remade.digits)
    assert np.array_equal(again.vectors, vectors)
    new = shop.items[:2].with_columns(item_id=pl.Series(["a", "b"]))
    more = again.encode_new(new)
    assert len(more.digits) == len(more.vectors) == len(more.embeddings) == 62
    assert np.array_equal(more.digits[:60], again.digits)
    assert again.learned is not None
    foretold = again.learned.foretell(more.embeddings[60:])
    assert np.array_equal(more.vectors[60:], foretold)
