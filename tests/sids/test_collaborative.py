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
from maskgr.sids.config import EncoderConfig, Policy, QuantizerConfig, SidsConfig
from maskgr.sids.item_text import ItemText
from maskgr.sids.plot import draw
from maskgr.sids.report import portrait, report
from maskgr.sids.semantic_ids import SemanticIds


def test_linear_vectors_are_predicted_from_text() -> None:
    rng = np.random.default_rng(0)
    text = rng.standard_normal((4000, 6)).astype(np.float32) + 3
    slopes, constant = rng.standard_normal((6, 4)), rng.standard_normal(4)
    vectors = (text @ slopes + constant).astype(np.float32)
    found = Collaborative.fit(vectors, text)
    new = rng.standard_normal((50, 6)).astype(np.float32) + 3
    assert found.predict_from_text(new) == pytest.approx(new @ slopes + constant, abs=0.1)


def test_vectors_unrelated_to_text_are_predicted_as_their_mean() -> None:
    rng = np.random.default_rng(0)
    text, vectors = rng.standard_normal((2000, 3)), 5 + rng.standard_normal((2000, 2))
    found = Collaborative.fit(vectors.astype(np.float32), text.astype(np.float32))
    predicted = found.predict_from_text(np.zeros((1, 3), np.float32))
    assert predicted == pytest.approx(5, abs=0.2)


def test_raises_when_vectors_and_texts_differ_in_number() -> None:
    with pytest.raises(DataError, match="3 learned vectors do not go with 4 text embeddings"):
        Collaborative.fit(np.ones((3, 2), np.float32), np.ones((4, 2), np.float32))


@pytest.fixture(scope="module")
def shop() -> Dataset:
    return fetch("synthetic", synthetic=SyntheticConfig(users=100, items=60))


def test_ids_are_made_from_learned_vectors(shop: Dataset, tmp_path: Path) -> None:
    config = SidsConfig(quantizer=QuantizerConfig(levels=2, codes=8), unique="reassign")
    made, text = SemanticIds.make(shop, config), ItemText.make(shop, config.encoder)
    vectors = np.random.default_rng(0).standard_normal((60, 7)).astype(np.float32)
    remade = SemanticIds.from_learned(shop.items, vectors, text, config)
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
    predicted = again.learned.predict_from_text(more.embeddings[60:])
    assert np.array_equal(more.vectors[60:], predicted)


def test_length_of_learned_vectors_decides_digits(tmp_path: Path) -> None:
    """Items 2k and 2k + 1 have the same direction and differ in length alone."""
    rng = np.random.default_rng(0)
    directions = np.repeat(rng.standard_normal((40, 5)), 2, axis=0)
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    lengths = np.tile([1.0, 5.0], 40)[:, None]
    vectors = (directions * lengths).astype(np.float32)
    items = pl.DataFrame({"item_id": [f"i{n}" for n in range(80)]})
    log = items.with_columns(user_id=pl.lit("u"), position=pl.int_range(80))
    # The text embedding is the learned vector, so that the vectors of new items are predicted well.
    data = Dataset.from_frames(log, items, embeddings=vectors)
    quantizer = QuantizerConfig(levels=2, codes=16)
    config = SidsConfig(EncoderConfig(encoder="embeddings"), quantizer, unique="share")
    made = SemanticIds.make(data, config)
    assert made.quantizer.normalise
    assert np.array_equal(made.digits[::2], made.digits[1::2])
    text = ItemText.make(data, config.encoder)
    remade = SemanticIds.from_learned(items, vectors, text, config, seed=3)
    assert (remade.digits[::2] != remade.digits[1::2]).any(axis=1).all()
    assert remade.made["quantizer"]["components"] == 0
    assert remade.made["seed"] == 3
    remade.save(tmp_path / "sids")
    again = SemanticIds.load(tmp_path / "sids")
    assert not again.quantizer.normalise
    new = pl.DataFrame({"item_id": ["short", "long"]})
    more = again.encode_new(new, embeddings=vectors[:2])
    assert np.array_equal(more.digits[80:], again.digits[:2])
    found = report(more)
    assert found.error_after == pytest.approx(
        np.square(more.vectors - more.quantizer.decode(more.digits)).sum()
        / np.square(more.vectors).sum()
    )


@pytest.mark.parametrize("unique", ["append", "reassign", "share"])
def test_sixteen_levels_of_256_codes(unique: Policy, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    vectors = rng.standard_normal((400, 12)).astype(np.float32)
    vectors[100:130] = vectors[0]  # thirty items collide whatever the quantiser does
    items = pl.DataFrame({"item_id": [f"i{n}" for n in range(400)]})
    log = items.with_columns(user_id=pl.lit("u"), position=pl.int_range(400))
    config = SidsConfig(quantizer=QuantizerConfig(levels=16), unique=unique)
    data = Dataset.from_frames(log, items, embeddings=vectors)
    text = ItemText.make(data, config.encoder)
    made = SemanticIds.make(data, config)
    learned = SemanticIds.from_learned(items, vectors * 3, text, config)
    for number, sids in enumerate((made, learned)):
        assert sids.levels == (17 if unique == "append" else 16)
        sids.save(tmp_path / f"{number}")
        again = SemanticIds.load(tmp_path / f"{number}")
        assert np.array_equal(again.digits, sids.digits)
        more = again.encode_new(pl.DataFrame({"item_id": ["n"]}), embeddings=vectors[7:8] * 1.001)
        assert np.array_equal(more.digits[:400], sids.digits)
        for row in (0, 101, 399, 400):
            same = (more.digits == more.digits[row]).all(axis=1)
            assert (
                more.with_prefix(more.digits[row].tolist()).tolist()
                == np.flatnonzero(same).tolist()
            )
        found = report(more)
        assert found.largest_collision >= 31
        assert (found.unique_share_after == 1) == (unique != "share")
        assert len(portrait(more, "i0").prefixes) == more.levels
    draw(more, found, tmp_path / "report.png")
