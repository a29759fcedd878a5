"""Similar items, embeddings and digits, against brute force."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest

from maskgr import Recommender
from maskgr.errors import RequestError
from maskgr.models.base import HasItemVectors, HasSids
from tests.models.test_all_models import NETWORKS, short_config
from tests.models.tiny import ITEMS, shop

IDS = [f"i{n:02}" for n in range(ITEMS)]


@pytest.fixture(scope="module")
def recommenders() -> dict[str, Recommender]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("maskgr.training.fit._plot", lambda run: None)
        configs = {name: short_config(name, "fit.steps=2", "validations=1") for name in NETWORKS}
        configs["digits"] = short_config("maskgr", "fit.steps=2", "validations=1", "vectors=digits")
        return {name: Recommender.train(shop(), config=own) for name, own in configs.items()}


@pytest.mark.parametrize("name", [*NETWORKS, "digits"])
def test_similar_by_vectors_is_the_order_of_cosines(
    recommenders: dict[str, Recommender], name: str
) -> None:
    rec = recommenders[name]
    frame = rec.embeddings()
    assert frame["item_id"].to_list() == IDS
    vectors = frame["embedding"].to_numpy()
    assert vectors.shape[0] == ITEMS
    assert np.isfinite(vectors).all()
    assert isinstance(rec.model, HasItemVectors)
    np.testing.assert_array_equal(rec.model.item_vectors(np.array([3, 1])), vectors[[3, 1]])
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    cosines = unit @ unit[5]
    expected = sorted((n for n in range(ITEMS) if n != 5), key=lambda n: -cosines[n])
    found = rec.similar_items("i05", top=ITEMS)
    np.testing.assert_allclose([f.score for f in found], cosines[expected], atol=1e-5)
    assert {f.item_id for f in found} == set(IDS) - {"i05"}


@pytest.mark.parametrize("name", ["maskgr", "maskgr-paper", "tiger"])
def test_similar_by_sids_counts_shared_digits_then_distance(
    recommenders: dict[str, Recommender], name: str
) -> None:
    rec = recommenders[name]
    assert isinstance(rec.model, HasSids)
    sids = rec.model.semantic_ids()
    levels = len(sids.quantizer.codebook_sizes)
    decoded = sids.quantizer.decode(sids.digits[:, :levels])

    def score(n: int) -> float:
        same = [
            a == b for a, b in zip(sids.digits[n, :levels], sids.digits[5, :levels], strict=True)
        ]
        shared = same.index(False) if False in same else levels
        distance = np.linalg.norm(decoded[n] - decoded[5]) / np.linalg.norm(decoded[5])
        return shared + 1 / (2 + distance)

    scores = np.array([score(n) for n in range(ITEMS)])
    expected = sorted((n for n in range(ITEMS) if n != 5), key=lambda n: -scores[n])
    found = rec.similar_items("i05", top=ITEMS, by="sids")
    np.testing.assert_allclose([f.score for f in found], scores[expected], rtol=1e-5)
    for top in (1, 3, 8):  # reconstructions of what cannot be among them are not compared
        assert rec.similar_items("i05", top=top, by="sids") == found[:top]
    left = [f for f in found if f.item_id in IDS[6:9]]
    assert rec.similar_items("i05", top=2, by="sids", allow=IDS[5:9]) == left[:2]


def test_filters_hold_for_similar_items(recommenders: dict[str, Recommender]) -> None:
    rec = recommenders["sasrec"]
    found = rec.similar_items("i05", allow=["i05", "i06", "i07", "i08"], deny=["i07"])
    assert {f.item_id for f in found} == {"i06", "i08"}
    few = rec.similar_items("i05", where=pl.col("item_id") < "i03")
    assert {f.item_id for f in few} == {"i00", "i01", "i02"}
    assert rec.similar_items("i05", allow=["i05"]) == []
    assert len(rec.similar_items("i05", top=3)) == 3


def test_digits_and_prefixes(recommenders: dict[str, Recommender]) -> None:
    rec = recommenders["maskgr"]
    digits = rec.digits_of("i05")
    assert digits is not None
    same = rec.items_with_prefix(digits[:1])
    assert "i05" in same
    assert same == [own for own in IDS if (rec.digits_of(own) or ())[:1] == digits[:1]]
    assert rec.items_with_prefix([]) == IDS
    assert recommenders["sasrec"].digits_of("i05") is None


def test_raises_when_similarity_is_impossible(recommenders: dict[str, Recommender]) -> None:
    rec = recommenders["sasrec"]
    with pytest.raises(RequestError, match=r"SASRec cannot give semantic IDs; maskgr.* can"):
        rec.similar_items("i05", by="sids")
    with pytest.raises(RequestError, match="by is 'magic'; choose one of vectors, sids"):
        rec.similar_items("i05", by="magic")  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="item 'x' of this request is not in the catalogue"):
        rec.similar_items("x")
    with pytest.raises(RequestError, match="cannot give 15 items of a catalogue of 14"):
        rec.similar_items("i05", top=15)
    popular = Recommender.train(shop(), model="popularity")
    with pytest.raises(RequestError, match="Popularity cannot give item vectors; maskgr"):
        popular.similar_items("i05")
    with pytest.raises(RequestError, match="Popularity cannot give item vectors"):
        popular.embeddings()
