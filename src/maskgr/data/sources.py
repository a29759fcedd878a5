"""The public datasets of the paper: where they are, how to read them, how large they must be."""

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
    name: str
    url: str
    md5: str | None  # where one is published


@dataclass(frozen=True)
class Source:
    name: str
    about: str
    files: tuple[RemoteFile, ...]
    k_core: int
    users: int  # counts after the k-core
    items: int
    interactions: int
    # Called with the paths of `files`, in order; returns interactions and items.
    read: Callable[..., tuple[pl.DataFrame, pl.DataFrame]]

    @property
    def folder(self) -> Path:
        """Where the raw files are, or can be put by hand."""
        return cache_folder() / "raw" / self.name


def _amazon(name: str, category: str, users: int, items: int, interactions: int) -> Source:
    names = (f"reviews_{category}_5.json.gz", f"meta_{category}.json.gz")
    return Source(
        name=name,
        about=f"Amazon 2014, {category.replace('_', ' ')}: 5-core reviews and product metadata",
        files=tuple(RemoteFile(file, f"{_AMAZON}/{file}", md5=None) for file in names),
        k_core=5,
        users=users,
        items=items,
        interactions=interactions,
        read=read_amazon,
    )


_ML_1M = Source(
    name="ml-1m",
    about="MovieLens 1M: ratings, and the movies' titles, years and genres",
    files=(
        RemoteFile(
            "ml-1m.zip",
            "https://files.grouplens.org/datasets/movielens/ml-1m.zip",
            md5="c4d9eecfca2ab87c1945afe126590906",
        ),
    ),
    k_core=5,
    users=6_040,
    items=3_416,
    interactions=999_611,
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


def read_source(name: str, *, progress: bool = True) -> tuple[pl.DataFrame, pl.DataFrame]:
    """The raw interactions and items of a built-in source, downloaded on first use."""
    if name not in SOURCES:
        raise SourceError(f"there is no source {name!r}; the sources are {', '.join(SOURCES)}")
    source = SOURCES[name]
    paths = [
        fetch_file(file.url, source.folder / file.name, md5=file.md5, progress=progress)
        for file in source.files
    ]
    try:
        return source.read(*paths)
    except DataError:
        # Their checksums are those of bad files, and must not bar the good ones that replace them.
        for path in paths:
            forget_checksum(path)
        raise


def check_counts(source: Source, users: int, items: int, interactions: int) -> None:
    """Raises unless the counts after the k-core are the published ones."""
    expected = (source.users, source.items, source.interactions)
    found = (users, items, interactions)
    if found != expected:
        raise SourceError(
            f"{source.name} should have {_counts(*expected)}, but {_counts(*found)} were found; "
            f"its raw files are not the official ones: delete {source.folder} and fetch them again"
        )


def _counts(users: int, items: int, interactions: int) -> str:
    return f"{users:,} users, {items:,} items and {interactions:,} interactions"
