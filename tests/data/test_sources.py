"""The registry of sources, and reading files that were put into the cache by hand."""

from __future__ import annotations

import gzip
import hashlib
import json
import urllib.error
import urllib.request
import zipfile
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pytest

from maskgr.data.open import fetch
from maskgr.data.sources import SOURCES, check_counts, read_source
from maskgr.errors import DataError, SourceError


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and no network."""

    def offline(*_: object, **__: object) -> None:
        raise urllib.error.URLError(OSError(101, "Network is unreachable"))

    monkeypatch.setenv("MASKGR_CACHE", str(tmp_path))
    monkeypatch.setattr(urllib.request, "urlopen", offline)
    return tmp_path


def place_beauty(cache: Path) -> Path:
    folder = cache / "raw" / "beauty"
    folder.mkdir(parents=True, exist_ok=True)
    review = {"reviewerID": "U1", "asin": "B00A", "unixReviewTime": 5}
    meta = {"asin": "B00A", "title": "A soap"}
    (folder / "reviews_Beauty_5.json.gz").write_bytes(gzip.compress(json.dumps(review).encode()))
    (folder / "meta_Beauty.json.gz").write_bytes(gzip.compress(repr(meta).encode()))
    return folder


def test_registry_has_the_published_counts() -> None:
    counts = {name: (s.users, s.items, s.interactions) for name, s in SOURCES.items()}
    assert counts == {
        "beauty": (22363, 12101, 198502),
        "sports": (35598, 18357, 296337),
        "toys": (19412, 11924, 167597),
        "ml-1m": (6040, 3416, 999611),
    }
    assert all(source.name == name for name, source in SOURCES.items())
    assert {source.k_core for source in SOURCES.values()} == {5}
    with pytest.raises(FrozenInstanceError):
        SOURCES["toys"].users = 0  # type: ignore[misc]


def test_registry_has_the_official_urls() -> None:
    amazon = "http://snap.stanford.edu/data/amazon/productGraph/categoryFiles/"
    assert {file.url for source in SOURCES.values() for file in source.files} == {
        amazon + "reviews_Beauty_5.json.gz",
        amazon + "meta_Beauty.json.gz",
        amazon + "reviews_Sports_and_Outdoors_5.json.gz",
        amazon + "meta_Sports_and_Outdoors.json.gz",
        amazon + "reviews_Toys_and_Games_5.json.gz",
        amazon + "meta_Toys_and_Games.json.gz",
        "https://files.grouplens.org/datasets/movielens/ml-1m.zip",
    }
    assert SOURCES["ml-1m"].files[0].md5 == "c4d9eecfca2ab87c1945afe126590906"


def test_files_put_in_the_cache_by_hand_are_read(cache: Path) -> None:
    place_beauty(cache)
    interactions, items = read_source(SOURCES["beauty"])
    assert interactions.rows() == [("U1", "B00A", 5)]
    assert items.select("item_id", "title").rows() == [("B00A", "A soap")]


def test_archive_put_in_the_cache_by_hand_is_read(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = cache / "raw" / "ml-1m" / "ml-1m.zip"
    file.parent.mkdir(parents=True)
    with zipfile.ZipFile(file, "w") as files:
        files.writestr("ml-1m/ratings.dat", "1::2::3::4\n")
        files.writestr("ml-1m/movies.dat", "2::Kite (1990)::War\n")
    source = SOURCES["ml-1m"]
    md5 = hashlib.md5(file.read_bytes()).hexdigest()
    imitation = replace(source, files=(replace(source.files[0], md5=md5),))
    monkeypatch.setitem(SOURCES, "ml-1m", imitation)
    interactions, items = read_source(SOURCES["ml-1m"])
    assert interactions.rows() == [("1", "2", 4)]
    assert items.rows() == [("2", "Kite", 1990, ["War"])]


def test_raises_when_archive_is_not_the_official_one(cache: Path) -> None:
    file = cache / "raw" / "ml-1m" / "ml-1m.zip"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"something else")
    with pytest.raises(SourceError, match=r"instead of c4d9eecfca2ab87c1945afe126590906 and was"):
        read_source(SOURCES["ml-1m"])


def test_raises_naming_where_to_put_the_file_when_offline(cache: Path) -> None:
    with pytest.raises(SourceError) as caught:
        read_source(SOURCES["beauty"])
    assert str(caught.value) == (
        "cannot download http://snap.stanford.edu/data/amazon/productGraph/categoryFiles/"
        "reviews_Beauty_5.json.gz (Network is unreachable); fetch it elsewhere and put it at "
        f"{cache / 'raw' / 'beauty' / 'reviews_Beauty_5.json.gz'}"
    )


def test_bad_file_can_be_replaced_by_hand(cache: Path) -> None:
    reviews = place_beauty(cache) / "reviews_Beauty_5.json.gz"
    reviews.write_bytes(reviews.read_bytes()[:-4])
    with pytest.raises(DataError, match="cut short"):
        read_source(SOURCES["beauty"])
    place_beauty(cache)
    assert len(read_source(SOURCES["beauty"])[0]) == 1


def test_raises_when_file_changed_after_first_use(cache: Path) -> None:
    meta = place_beauty(cache) / "meta_Beauty.json.gz"
    read_source(SOURCES["beauty"])
    meta.write_bytes(gzip.compress(b"{'asin': 'B00A', 'title': 'Another soap'}"))
    with pytest.raises(SourceError, match=r"meta_Beauty\.json\.gz has changed since it was first"):
        read_source(SOURCES["beauty"])


def test_raises_listing_the_sources_when_name_is_unknown() -> None:
    with pytest.raises(SourceError) as caught:
        fetch("books")
    assert str(caught.value) == (
        "'books' is neither a folder nor a source; "
        "the sources are synthetic, beauty, sports, toys, ml-1m"
    )


def test_published_counts_pass() -> None:
    for source in SOURCES.values():
        check_counts(source, source.users, source.items, source.interactions)


@pytest.mark.parametrize("wrong", [(1, 12101, 198502), (22363, 1, 198502), (22363, 12101, 1)])
def test_raises_when_counts_differ_from_the_published_ones(
    cache: Path, wrong: tuple[int, int, int]
) -> None:
    with pytest.raises(SourceError) as caught:
        check_counts(SOURCES["beauty"], *wrong)
    users, items, interactions = wrong
    assert str(caught.value) == (
        "beauty should have 22,363 users, 12,101 items and 198,502 interactions, but "
        f"{users:,} users, {items:,} items and {interactions:,} interactions were found; its raw "
        f"files are not the official ones: delete {cache / 'raw' / 'beauty'} and fetch them again"
    )
