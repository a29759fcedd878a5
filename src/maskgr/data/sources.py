"""The public datasets of the paper: their URLs, readers and published counts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from maskgr.data.amazon import read_amazon
from maskgr.data.download import cache_folder, fetch_file, forget_checksum
from maskgr.data.movielens import read_ml_1m
from maskgr.errors import DataError, SourceError

_AMAZON = "http://snap.stanford.edu/data/amazon/productGraph/categoryFiles"


@dataclass(frozen=True)
class RemoteFile:
    url: str
    md5: str | None = None  # None if none is published


@dataclass(frozen=True)
class Source:
    name: str
    files: tuple[RemoteFile, ...]
    k_core: int
    users: int  # counts after the k-core
    items: int
    interactions: int
    text: tuple[str, ...]  # columns of the items
    read: Callable[..., tuple[pl.DataFrame, pl.DataFrame]]  # paths of `files` -> log, items

    @property
    def folder(self) -> Path:
        """Folder of the raw files; a user may put them there by hand."""
        return cache_folder() / "raw" / self.name


def _amazon(name: str, category: str, users: int, items: int, interactions: int) -> Source:
    names = (f"reviews_{category}_5.json.gz", f"meta_{category}.json.gz")
    return Source(
        name=name,
        files=tuple(RemoteFile(f"{_AMAZON}/{file}") for file in names),
        k_core=5,
        users=users,
        items=items,
        interactions=interactions,
        text=("title", "brand", "categories", "description", "price"),
        read=read_amazon,
    )


_ML_1M = Source(
    name="ml-1m",
    files=(
        RemoteFile(
            "https://files.grouplens.org/datasets/movielens/ml-1m.zip",
            md5="c4d9eecfca2ab87c1945afe126590906",
        ),
    ),
    k_core=5,
    users=6_040,
    items=3_416,
    interactions=999_611,
    text=("title", "year", "genres"),
    read=read_ml_1m,
)

SOURCES: dict[str, Source] = {
    source.name: source
    for source in (
        _amazon("beauty", "Beauty", 22_363, 12_101, 198_502),
        _amazon("sports", "Sports_and_Outdoors", 35_598, 18_357, 296_337),
        _amazon("toys", "Toys_and_Games", 19_412, 11_924, 167_597),
        _ML_1M,
    )
}


def read_source(source: Source, *, progress: bool = True) -> tuple[pl.DataFrame, pl.DataFrame]:
    """The raw interactions and items of a source, downloaded on first use."""
    paths = []
    for file in source.files:
        target = source.folder / file.url.rpartition("/")[2]
        paths.append(fetch_file(file.url, target, md5=file.md5, progress=progress))
    try:
        return source.read(*paths)
    except DataError:
        # The recorded checksums are of bad files; good ones must be able to replace them.
        for path in paths:
            forget_checksum(path)
        raise


def check_counts(source: Source, users: int, items: int, interactions: int) -> None:
    """Raises if the counts after the k-core differ from the published ones."""
    expected = (source.users, source.items, source.interactions)
    found = (users, items, interactions)
    if found != expected:
        raise SourceError(
            f"{source.name} should have {_counts(*expected)}, but {_counts(*found)} were found; "
            f"its raw files are not the official ones: delete {source.folder} and fetch them again"
        )


def _counts(users: int, items: int, interactions: int) -> str:
    return f"{users:,} users, {items:,} items and {interactions:,} interactions"
