"""Reading small archives in the format of ml-1m.zip."""

from __future__ import annotations

import zipfile
from pathlib import Path

import polars as pl
import pytest

from maskgr.data.movielens import read_ml_1m
from maskgr.errors import DataError

RATINGS = "7::20::5::978300760\n3::10::1::978302109\n7::10::4::978301968\n"
MOVIES = (
    "10::Kite, The (1995)::Animation|Children's|Comedy\n"
    "20::Día del papalote: Part 2 (Le Cerf-volant) (1962)::Drama\n"
    "30::Unseen (2000)::War\n"
)


def archive(folder: Path, ratings: str = RATINGS, movies: str | bytes = MOVIES) -> Path:
    file = folder / "ml-1m.zip"
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as files:
        files.writestr("ml-1m/README", "hello")
        files.writestr("ml-1m/ratings.dat", ratings)
        files.writestr(
            "ml-1m/movies.dat", movies.encode("latin-1") if isinstance(movies, str) else movies
        )
    return file


def test_ratings_keep_file_order(tmp_path: Path) -> None:
    interactions, _ = read_ml_1m(archive(tmp_path))
    assert interactions.schema == {
        "user_id": pl.String,
        "item_id": pl.String,
        "timestamp": pl.Int64,
    }
    assert interactions.rows() == [
        ("7", "20", 978300760),
        ("3", "10", 978302109),
        ("7", "10", 978301968),
    ]


def test_movies_are_those_rated_in_order_of_first_appearance(tmp_path: Path) -> None:
    _, items = read_ml_1m(archive(tmp_path))
    assert items.schema == {
        "item_id": pl.String,
        "title": pl.String,
        "year": pl.Int64,
        "genres": pl.List(pl.String),
    }
    assert items.rows() == [
        ("20", "Día del papalote: Part 2 (Le Cerf-volant)", 1962, ["Drama"]),
        ("10", "Kite, The", 1995, ["Animation", "Children's", "Comedy"]),
    ]


def test_archive_is_not_extracted(tmp_path: Path) -> None:
    read_ml_1m(archive(tmp_path))
    assert [file.name for file in tmp_path.iterdir()] == ["ml-1m.zip"]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("1::Untitled (19)::Drama", ("1", "Untitled (19)", None, ["Drama"])),
        ("1:: 1984 (1984) ::Drama", ("1", "1984", 1984, ["Drama"])),
        ("1::(1984)::Drama", ("1", "(1984)", None, ["Drama"])),
        ("1::Odd :: One (1990)::", ("1", "Odd :: One", 1990, None)),
        ("2::Another (1990)::War", ("1", None, None, None)),
    ],
)
def test_unusual_movie_lines_are_parsed(
    tmp_path: Path, line: str, expected: tuple[object, ...]
) -> None:
    _, items = read_ml_1m(archive(tmp_path, ratings="1::1::5::9\n", movies=line))
    assert items.rows() == [expected]


def test_unicode_line_break_does_not_end_a_line(tmp_path: Path) -> None:
    movies = b"1::Wait\x85for it (1990)::War\r\n2::Second (1991)::War\r\n"
    _, items = read_ml_1m(archive(tmp_path, ratings="1::2::5::9\r\n1::1::5::9\r\n", movies=movies))
    assert items["title"].to_list() == ["Second", "Wait\x85for it"]


def test_movie_listed_twice_is_one_item(tmp_path: Path) -> None:
    movies = "1::First (1990)::War\n1::Second (1991)::War\n"
    _, items = read_ml_1m(archive(tmp_path, ratings="1::1::5::9\n", movies=movies))
    assert items["title"].to_list() == ["First"]


@pytest.mark.parametrize("line", ["7::20::5", "7::20::5::soon", "", "7::::5::9", "7::1::5::-9"])
def test_raises_naming_member_and_line_of_a_malformed_rating(tmp_path: Path, line: str) -> None:
    with pytest.raises(DataError) as caught:
        read_ml_1m(archive(tmp_path, ratings=f"1::1::1::1\n{line}\n1::1::1::1\n"))
    assert str(caught.value) == (
        f"{tmp_path / 'ml-1m.zip'}: ml-1m/ratings.dat, line 2 is malformed ({line!r}); "
        "delete the archive and fetch it again"
    )


def test_raises_naming_member_and_line_of_a_malformed_movie(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"ml-1m/movies\.dat, line 4 is malformed \('40::Kite'\)"):
        read_ml_1m(archive(tmp_path, movies=MOVIES + "40::Kite\n"))


def test_raises_when_member_is_empty(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"ml-1m/ratings\.dat is empty"):
        read_ml_1m(archive(tmp_path, ratings=""))


def test_raises_when_member_is_missing(tmp_path: Path) -> None:
    file = tmp_path / "ml-1m.zip"
    with zipfile.ZipFile(file, "w") as files:
        files.writestr("ml-1m/ratings.dat", RATINGS)
    with pytest.raises(DataError, match=r"ml-1m\.zip has no ml-1m/movies\.dat, so it is not"):
        read_ml_1m(file)


def test_raises_when_file_is_not_a_zip(tmp_path: Path) -> None:
    file = tmp_path / "ml-1m.zip"
    file.write_text("<html>please log in</html>")
    with pytest.raises(DataError, match=r"cannot be read as a zip \(File is not a zip file\)"):
        read_ml_1m(file)


def test_raises_when_zip_is_damaged(tmp_path: Path) -> None:
    file = tmp_path / "ml-1m.zip"
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as files:
        files.writestr("ml-1m/ratings.dat", RATINGS)
    file.write_bytes(file.read_bytes().replace(b"978300760", b"978300761"))
    with pytest.raises(DataError, match=r"cannot be read as a zip \(Bad CRC-32"):
        read_ml_1m(file)


def test_raises_when_zip_is_missing(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"there is no file .*ml-1m\.zip; fetch it first"):
        read_ml_1m(tmp_path / "ml-1m.zip")
