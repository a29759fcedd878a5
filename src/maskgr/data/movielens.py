"""Reads MovieLens 1M, ratings and movies, from the official zip file."""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path

import polars as pl

from maskgr.errors import DataError

_RATINGS = "ml-1m/ratings.dat"
_MOVIES = "ml-1m/movies.dat"
_RATING = r"^(?<user_id>[^:]+)::(?<item_id>[^:]+)::[^:]+::(?<timestamp>[0-9]{1,18})$"
_MOVIE = r"^(?<item_id>[^:]+)::(?<title>.+)::(?<genres>[^:]*)$"
_TITLE_AND_YEAR = r"^\s*(?<title>.*\S)\s*\((?<year>[0-9]{4})\)\s*$"


def read_ml_1m(archive: Path) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Interactions in file order, and the rated movies in order of first appearance.

    Every rating is an interaction, high or low. A movie without a description has nulls.
    """
    interactions = _table(archive, _RATINGS, _RATING).with_columns(
        pl.col("timestamp").cast(pl.Int64)
    )
    movies = _describe(_table(archive, _MOVIES, _MOVIE))
    rated = interactions.select(pl.col("item_id").unique(maintain_order=True))
    return interactions, rated.join(movies, on="item_id", how="left", maintain_order="left")


def _describe(movies: pl.DataFrame) -> pl.DataFrame:
    parts = pl.col("title").str.extract_groups(_TITLE_AND_YEAR).struct
    genres = pl.col("genres")
    return movies.unique("item_id", keep="first", maintain_order=True).select(
        "item_id",
        pl.coalesce(parts.field("title"), pl.col("title").str.strip_chars()).alias("title"),
        parts.field("year").cast(pl.Int64),
        pl.when(genres != "").then(genres.str.split("|")).alias("genres"),
    )


def _table(archive: Path, member: str, pattern: str) -> pl.DataFrame:
    """Matches `pattern` on every line of an archive member; its named groups become columns."""
    # Split as bytes: str.splitlines would also split at characters such as \x85.
    lines = [line.decode("latin-1") for line in _read(archive, member).splitlines()]
    groups = pl.Series("line", lines, dtype=pl.String).str.extract_groups(pattern)
    table = groups.struct.unnest()
    malformed = table["item_id"].is_null()
    if malformed.any():
        number = int(malformed.arg_true()[0])
        raise DataError(
            f"{archive}: {member}, line {number + 1} is malformed ({lines[number][:80]!r}); "
            "delete the archive and fetch it again"
        )
    if table.is_empty():
        raise DataError(f"{archive}: {member} is empty; delete the archive and fetch it again")
    return table


def _read(archive: Path, member: str) -> bytes:
    try:
        with zipfile.ZipFile(archive) as files:
            return files.read(member)
    except FileNotFoundError:
        raise DataError(f"there is no file {archive}; fetch it first") from None
    except KeyError:
        raise DataError(
            f"{archive} has no {member}, so it is not the official ml-1m.zip; "
            "delete it and fetch it again"
        ) from None
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError) as error:
        raise DataError(
            f"{archive} cannot be read as a zip ({error}); delete it and fetch it again"
        ) from error
