from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest

from maskgr import Dataset
from maskgr.data.config import DataConfig, SyntheticConfig
from maskgr.data.open import fetch
from maskgr.errors import ArtefactError, DataError, RequestError
from maskgr.sids.config import EncoderConfig, Policy, QuantizerConfig, SidsConfig
from maskgr.sids.report import report
from maskgr.sids.semantic_ids import SemanticIds

SMALL = QuantizerConfig(levels=3, codes=8, components=0)
TEXT = EncoderConfig(encoder="wordllama")
OWN = EncoderConfig(encoder="embeddings")


def dataset(items: int = 60, texts: list[str] | None = None) -> Dataset:
    """Clustered vectors, so that digits mean something and some items collide."""
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(6, 5))
    vectors = centres[np.arange(items) % 6] + 0.05 * rng.normal(size=(items, 5))
    vectors[1] = vectors[0]  # a collision for certain
    ids = [f"i{n}" for n in range(items)]
    table = pl.DataFrame(
        {"item_id": ids, "title": texts or [f"thing {n % 6}" for n in range(items)]}
    )
    log = pl.DataFrame({"user_id": "u", "item_id": ids, "position": range(items)})
    return Dataset.from_frames(log, table, embeddings=vectors)


def made(
    unique: Policy = "append", quantizer: QuantizerConfig = SMALL, seed: int = 0
) -> SemanticIds:
    return SemanticIds.make(dataset(), SidsConfig(OWN, quantizer, unique), seed=seed)


@pytest.mark.parametrize("unique", ["append", "reassign"])
def test_every_item_has_its_own_tuple(unique: Policy) -> None:
    sids = made(unique)
    assert len(np.unique(sids.digits, axis=0)) == 60
    assert sids.levels == (4 if unique == "append" else 3)
    assert (sids.digits < np.array(sids.codebook_sizes)).all()
    for row, digits in enumerate(sids.digits):
        assert sids.with_prefix(digits.tolist()).tolist() == [row]


def test_shared_tuples_keep_all_their_items() -> None:
    sids = made("share")
    assert sids.with_prefix(sids.digits[0].tolist()).tolist()[:2] == [0, 1]


def test_with_prefix_finds_the_same_items_as_a_scan() -> None:
    sids = made()
    for length in range(sids.levels + 1):
        for row in range(0, 60, 7):
            prefix = sids.digits[row, :length]
            expected = np.flatnonzero((sids.digits[:, :length] == prefix).all(axis=1))
            assert sids.with_prefix(prefix.tolist()).tolist() == expected.tolist()
    assert sids.with_prefix([99]).tolist() == []
    with pytest.raises(RequestError, match="at most 4 digits, not 5"):
        sids.with_prefix([0] * 5)


def test_same_seed_same_ids() -> None:
    assert np.array_equal(made(seed=1).digits, made(seed=1).digits)
    assert not np.array_equal(made(seed=1).digits, made().digits)
    assert made(seed=1).made["seed"] == 1


@pytest.mark.parametrize("unique", ["append", "reassign", "share"])
def test_new_items_get_ids_and_old_ones_keep_theirs(unique: Policy) -> None:
    sids = made(unique)
    new = pl.DataFrame({"item_id": ["n0", "n1"], "title": ["thing 0", None]})
    vectors = sids.embeddings[[0, 5]] + 0.001
    more = sids.encode_new(new, embeddings=vectors)
    assert np.array_equal(more.digits[:60], sids.digits)
    assert more.items["item_id"].to_list()[60:] == ["n0", "n1"]
    assert (more.digits < np.array(sids.codebook_sizes)).all()
    # A new item is filed where its like are.
    assert more.digits[60, 0] == sids.digits[0, 0]
    if unique != "share":
        assert len(np.unique(more.digits, axis=0)) == 62


def test_raises_when_new_items_are_old_repeated_or_of_another_width() -> None:
    sids = made()
    for ids in (["i3"], ["n", "n"], [None]):
        frame = pl.DataFrame({"item_id": ids}, schema={"item_id": pl.String})
        with pytest.raises(DataError, match="old, repeated or without an ID"):
            sids.encode_new(frame, embeddings=np.ones((len(ids), 5)))
    with pytest.raises(DataError, match="have 3 dimensions where the old ones have 5"):
        sids.encode_new(pl.DataFrame({"item_id": ["n"]}), embeddings=np.ones((1, 3)))
    with pytest.raises(DataError, match="no column item_id"):
        sids.encode_new(pl.DataFrame({"sku": ["n"]}))
    none = pl.DataFrame(schema={"item_id": pl.String})
    with pytest.raises(DataError, match="no items to encode"):
        sids.encode_new(none, embeddings=np.empty((0, 5)))


@pytest.mark.parametrize("quantizer", ["residual-kmeans", "pq", "opq", "random", "item-id"])
def test_loaded_ids_equal_the_saved_ones(tmp_path: Path, quantizer: str) -> None:
    config = QuantizerConfig(quantizer=quantizer, levels=3, codes=8)  # type: ignore[arg-type]
    sids = made(quantizer=config)
    sids.save(tmp_path / "sids", report={"items": 60})
    again = SemanticIds.load(tmp_path / "sids")
    assert np.array_equal(again.digits, sids.digits)
    assert np.array_equal(again.embeddings, sids.embeddings)
    assert again.items.equals(sids.items)
    assert (again.codebook_sizes, again.unique) == (sids.codebook_sizes, sids.unique)
    assert again.encoder == sids.encoder
    assert again.made == sids.made
    assert np.array_equal(
        again.quantizer.encode(sids.embeddings), sids.quantizer.encode(sids.embeddings)
    )


def test_raises_when_a_saved_file_is_truncated_or_missing(tmp_path: Path) -> None:
    made().save(tmp_path / "sids")
    for name in ("digits.parquet", "quantizer.safetensors", "embeddings.npy"):
        file = tmp_path / "sids" / name
        whole = file.read_bytes()
        file.write_bytes(whole[: len(whole) // 2])
        with pytest.raises(ArtefactError, match=rf"{name} has .* bytes where .* were written"):
            SemanticIds.load(tmp_path / "sids")
        file.write_bytes(whole)
    (tmp_path / "sids" / "quantizer.json").unlink()
    with pytest.raises(ArtefactError, match=r"quantizer\.json is missing"):
        SemanticIds.load(tmp_path / "sids")


def test_row_of_an_item_by_its_id() -> None:
    assert made().row("i7") == 7
    with pytest.raises(RequestError, match="item 'ghost' has no semantic ID here"):
        made().row("ghost")


def test_ids_from_text_agree_with_categories() -> None:
    shop = fetch("synthetic", synthetic=SyntheticConfig(users=50, items=90))
    config = SidsConfig(quantizer=QuantizerConfig(levels=2, codes=16))
    sids = SemanticIds.make(shop, config)
    assert sids.embeddings.shape == (90, 256)
    found = {a.column: a for a in report(sids).agreement}["categories"]
    assert found.same_first_digit is not None
    assert found.same_first_digit > 5 * found.chance


def test_raises_when_ids_cannot_be_made() -> None:
    with pytest.raises(RequestError, match="no device 'gpu'"):
        SemanticIds.make(dataset(), device="gpu")
    for seed in (-1, 2**31):
        with pytest.raises(RequestError, match=f"seed is {seed}; give a whole number from 0 to"):
            SemanticIds.make(dataset(), seed=seed)


@pytest.mark.parametrize("unique", ["append", "reassign", "share"])
@pytest.mark.parametrize("texts", [["same"] * 60, [""] * 60, ["a", "b", "c"] * 20])
def test_items_with_few_different_texts_have_ids_of_few_codes(
    texts: list[str], unique: Policy
) -> None:
    with pytest.warns(UserWarning, match=r"60 items have \d different embeddings"):
        sids = SemanticIds.make(dataset(texts=texts), SidsConfig(TEXT, SMALL, unique))
    assert set(sids.codebook_sizes[:3]) == {len(set(texts))}
    own = len(np.unique(sids.digits, axis=0))
    assert own == (len(set(texts)) if unique == "share" else 60)
    assert sids.unique == ("append" if unique == "reassign" else unique)
    with pytest.warns(UserWarning, match="too few for 256 codes"):
        assert SemanticIds.make(dataset(), SidsConfig(OWN)).codebook_sizes[0] == 59


def test_new_items_are_read_by_the_text_columns_of_the_dataset() -> None:
    table = pl.DataFrame(
        {"item_id": ["a", "b"], "title": ["red tent", "blue kettle"], "brand": ["Zig", "Zag"]}
    )
    log = pl.DataFrame({"user_id": "u", "item_id": ["a", "b"], "position": [0, 1]})
    data = Dataset.from_frames(log, table, config=DataConfig(text=("title",)))
    sids = SemanticIds.make(data, SidsConfig(TEXT, QuantizerConfig(levels=1, codes=2), "share"))
    assert sids.encoder.text == ("title",)
    new = pl.DataFrame({"item_id": ["c"], "title": ["red tent"], "brand": ["other"]})
    grown = sids.encode_new(new)
    assert np.array_equal(grown.embeddings[2], grown.embeddings[0])
