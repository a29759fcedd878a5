from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from maskgr import Recommender
from maskgr.errors import DataError, RequestError
from maskgr.serving import shards
from maskgr.serving.batch import recommend_file
from maskgr.serving.shards import Done, recommend_folder
from tests.conftest import Outcome
from tests.models.tiny import shop


@pytest.fixture(scope="module")
def recommender() -> Recommender:
    return Recommender.train(shop(), model="popularity")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Files of all three kinds, and names that are no data."""
    folder = tmp_path / "in"
    folder.mkdir()
    rows = [{"user_id": f"u{n}", "history": [f"i{n:02}"]} for n in range(9)]
    lines = "".join(json.dumps(row) + "\n" for row in rows[:4])
    pl.DataFrame(rows).write_parquet(folder / "a[0].parquet")
    (folder / "b.jsonl").write_text(lines)
    (folder / "c.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (folder / "_SUCCESS").write_text("")
    (folder / ".b.crc").write_text("")
    return folder


def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that are worked on from now on."""
    names: list[str] = []
    whole = shards.recommend_as

    def noted(recommender: Recommender, source: Path, *words: Any) -> int:
        names.append(source.name)
        return whole(recommender, source, *words)

    monkeypatch.setattr(shards, "recommend_as", noted)
    return names


def test_every_file_has_its_result_and_a_rerun_makes_those_that_are_missing(
    recommender: Recommender, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    assert recommend_folder(recommender, source, out, 2) == Done(17, 3, 0)
    names = ["a[0].parquet", "b.parquet", "c.parquet"]
    assert sorted(own.name for own in out.iterdir()) == names
    contents = {name: (out / name).read_bytes() for name in names}
    for own, name in zip(sorted(source.glob("[a-z]*")), names, strict=True):
        recommend_file(recommender, own, tmp_path / "one.parquet", 2)
        assert (tmp_path / "one.parquet").read_bytes() == contents[name]
    (out / "b.parquet").unlink()
    again = asked(monkeypatch)
    assert recommend_folder(recommender, source, out, 2) == Done(17, 3, 2)
    assert again == ["b.jsonl"]
    assert {name: (out / name).read_bytes() for name in names} == contents


def test_results_of_something_else_are_refused(
    recommender: Recommender, source: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    recommend_folder(recommender, source, out, 2)
    (out / "_notes").write_text("")  # not data
    expected = "is no result of this model with these settings and this input; delete it"
    other = Recommender.train(shop(), model="neighbours")
    for model, top in ((other, 2), (recommender, 3)):
        with pytest.raises(RequestError, match=rf"a\[0\]\.parquet {expected}"):
            recommend_folder(model, source, out, top)
    with (source / "b.jsonl").open("a") as file:
        file.write("\n")
    with pytest.raises(RequestError, match=rf"b\.parquet {expected}"):
        recommend_folder(recommender, source, out, 2)
    (source / "b.jsonl").unlink()
    with pytest.raises(RequestError, match=rf"b\.parquet {expected}"):
        recommend_folder(recommender, source, out, 2)
    (out / "b.parquet").rename(out / "a[0].parquet")
    with pytest.raises(RequestError, match=rf"a\[0\]\.parquet {expected}"):
        recommend_folder(recommender, source, out, 2)


def test_bad_file_is_named_when_the_others_are_done(
    recommender: Recommender, source: Path, tmp_path: Path
) -> None:
    pl.DataFrame({"user_id": [1, 2], "history": [["i01"], ["ghost"]]}).write_parquet(
        source / "aa.parquet"
    )
    with pytest.raises(
        DataError,
        match=r"in/aa\.parquet, row 2: item 'ghost' .*; the other 3 files are done, and the same",
    ):
        recommend_folder(recommender, source, tmp_path / "out", 2)
    pl.DataFrame({"user_id": [1], "history": [["i01"]]}).write_parquet(source / "aa.parquet")
    assert recommend_folder(recommender, source, tmp_path / "out", 2) == Done(18, 4, 3)


def test_raises_for_a_wrong_option_before_any_file(
    recommender: Recommender, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    again = asked(monkeypatch)
    with pytest.raises(RequestError, match="cannot give 99 items"):
        recommend_folder(recommender, source, tmp_path / "out", 99)
    with pytest.raises(RequestError, match="item 'ghost' of the deny list"):
        recommend_folder(recommender, source, tmp_path / "out", 2, deny=["ghost"])
    assert not again


def test_raises_for_a_folder_that_is_not_files_of_histories(
    recommender: Recommender, source: Path, tmp_path: Path
) -> None:
    def refused(kind: type[Exception], expected: str, target: str = "out") -> None:
        with pytest.raises(kind, match=expected):
            recommend_folder(recommender, source, tmp_path / target, 2)

    (tmp_path / "file").write_text("")
    refused(RequestError, "file is a file, and .*in is a folder", "file")
    refused(RequestError, "in is in the input", "in")
    refused(RequestError, "out is in the input", "in/out")
    (source / "b.parquet").write_text("")
    refused(DataError, r"b\.jsonl and .*b\.parquet would both become b\.parquet; rename one")
    (source / "b.parquet").rename(source / "notes.csv")
    refused(DataError, r"notes\.csv is no \.parquet, \.jsonl, \.jsonl\.gz; give a folder of files")
    (source / "notes.csv").unlink()
    (source / "day=1").mkdir()
    refused(DataError, "day=1 is a folder; give a folder of files")
    for own in source.glob("[a-c]*"):
        own.unlink()
    (source / "day=1").rmdir()
    refused(DataError, r"in has no \.parquet, \.jsonl, \.jsonl\.gz file")


def test_command(
    maskgr: Callable[..., Outcome], recommender: Recommender, source: Path, tmp_path: Path
) -> None:
    recommender.save(tmp_path / "run")
    words = ("recommend", tmp_path / "run", "--input", source, "--output", tmp_path / "out")
    assert maskgr(*words).out == f"17 users in 3 files; saved to {tmp_path / 'out'}\n"
    assert maskgr(*words).out.startswith("17 users in 3 files (3 were there); ")
    for more, expected in (
        (("--actors", 2), "--actors goes with --engine ray"),
        (("--top", 3), "is no result of this model with these settings"),
    ):
        outcome = maskgr(*words, *more)
        assert outcome.code == 2
        assert expected in outcome.err
    words = ("recommend", tmp_path / "run", "--engine", "ray", "--output", tmp_path / "o")
    for way in (("--all-users",), ("--input", source / "b.jsonl")):
        assert "--engine ray needs a folder of files as --input" in maskgr(*words, *way).err
