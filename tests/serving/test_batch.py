from __future__ import annotations

import gzip
import json
import math
import sys
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from maskgr import Dataset, Recommender
from maskgr.errors import ArtefactError, DataError, RequestError
from maskgr.recommender import Session
from maskgr.serving import batch, histories
from maskgr.serving.batch import recommend_all, recommend_file
from tests.models.tiny import shop


@pytest.fixture
def recommender() -> Recommender:
    log = [("u", item, n) for n, item in enumerate("abcdef")]
    frame = pl.DataFrame(log, schema=["user_id", "item_id", "position"], orient="row")
    return Recommender.train(Dataset.from_frames(frame), model="popularity")


def write(file: Path, users: int) -> None:
    rows = [{"user_id": f"u{n}", "history": ["abcdef"[n % 6]]} for n in range(users)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_writes_one_line_per_user_in_the_order_of_the_input(
    recommender: Recommender, tmp_path: Path
) -> None:
    write(tmp_path / "in.jsonl", 30)
    done = recommend_file(recommender, tmp_path / "in.jsonl", tmp_path / "out" / "o.jsonl", 2)
    rows = [json.loads(line) for line in (tmp_path / "out" / "o.jsonl").read_text().splitlines()]
    assert done == len(rows) == 30
    assert [row["user_id"] for row in rows] == [f"u{n}" for n in range(30)]
    for row, item in zip(rows, "abcdef" * 5, strict=True):
        assert row["items"] == [r.item_id for r in recommender.recommend([item], 2)]
        assert len(row["scores"]) == 2
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["o.jsonl"]


def test_goes_on_where_it_was_interrupted(
    recommender: Recommender, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch, "CHUNK", 10)
    source, whole, target = (tmp_path / name for name in ("in.jsonl", "whole", "out"))
    write(source, 45)
    recommend_file(recommender, source, whole, 3)
    parts = interrupt(recommender, source, target, monkeypatch)
    done = [file.name for file in parts.iterdir()]
    assert len(done) == 2
    # Another request does not go on with that folder.
    assert recommend_file(recommender, source, tmp_path / "out", 2) == 45
    assert all(len(json.loads(line)["items"]) == 2 for line in target.read_text().splitlines())
    assert [file.name for file in parts.iterdir()] == done
    assert recommend_file(recommender, source, target, 3) == 45
    assert target.read_bytes() == whole.read_bytes()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["in.jsonl", "out", "whole"]


def interrupt(
    recommender: Recommender, source: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """The folder that is left where the third chunk is never written."""
    with monkeypatch.context() as patch:
        add = batch._Sink.add
        patch.setattr(
            batch._Sink,
            "add",
            lambda self, *words: sys.exit(1) if self.done == 20 else add(self, *words),
        )
        with pytest.raises(SystemExit):
            recommend_file(recommender, source, target, 3)
    (parts,) = target.parent.glob(f"{target.name}.*.parts")
    return parts


@pytest.mark.parametrize("name", ["o.parquet", "o.jsonl"])
@pytest.mark.parametrize("damage", ["flipped", "gone"])
def test_a_damaged_part_is_named_and_done_again(
    recommender: Recommender,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    damage: str,
) -> None:
    monkeypatch.setattr(batch, "CHUNK", 10)
    source, target = tmp_path / "in.jsonl", tmp_path / name
    write(source, 45)
    recommend_file(recommender, source, target, 3)
    whole = target.read_bytes()
    parts = interrupt(recommender, source, target, monkeypatch)
    first, second = sorted(parts.iterdir())
    if damage == "gone":
        first.unlink()
    else:
        content = first.read_bytes()
        first.write_bytes(content[:50] + bytes([content[50] ^ 1]) + content[51:])
    with pytest.warns(UserWarning, match=(second if damage == "gone" else first).name):
        assert recommend_file(recommender, source, target, 3) == 45
    assert target.read_bytes() == whole


def test_parts_are_removed_where_a_later_line_is_refused(
    recommender: Recommender, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch, "CHUNK", 10)
    source = tmp_path / "in.jsonl"
    write(source, 25)
    source.write_text(source.read_text() + "[" * 100_000 + "\n")
    with pytest.raises(DataError, match="line 26 is not"):
        recommend_file(recommender, source, tmp_path / "out.parquet", 1)
    assert [file.name for file in tmp_path.iterdir()] == ["in.jsonl"]


def test_users_of_several_types_are_refused(recommender: Recommender, tmp_path: Path) -> None:
    rows = [{"user_id": user, "history": ["a"]} for user in (1, "one")]
    (tmp_path / "in").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError, match="line 2: user_id is 'one' where earlier"):
        recommend_file(recommender, tmp_path / "in", tmp_path / "o.parquet", 1)


def test_writes_sessions(
    recommender: Recommender, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def sessions(self: Recommender, histories: list[Any], items: int, top: int, **how: Any) -> Any:
        asked.append((histories, items, top, how))
        return [[Session(("b", "c"), -1.5), Session(("c", "b"), -math.inf)] for _ in histories]

    monkeypatch.setattr(Recommender, "sessions", sessions)
    write(tmp_path / "in", 2)
    how: dict[str, Any] = {"exclude_seen": False, "unknown": "skip"}
    done = recommend_file(recommender, tmp_path / "in", tmp_path / "o", 2, session=2, **how)
    rows = [json.loads(line) for line in (tmp_path / "o").read_text().splitlines()]
    assert done == 2
    expected = {"sessions": [["b", "c"], ["c", "b"]], "scores": [-1.5, None]}
    assert rows == [{"user_id": user, **expected} for user in ("u0", "u1")]
    assert asked == [([["a"], ["b"]], 2, 2, how)]


def test_reads_gzip(recommender: Recommender, tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", 3)
    packed = tmp_path / "in.jsonl.gz"
    packed.write_bytes(gzip.compress((tmp_path / "in.jsonl").read_bytes()))
    assert recommend_file(recommender, packed, tmp_path / "o", 1) == 3
    packed.write_bytes(packed.read_bytes()[:-12])
    with pytest.raises(DataError, match=r"cannot read .*in\.jsonl\.gz"):
        recommend_file(recommender, packed, tmp_path / "p", 1)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("nonsense", r"line 2 is not \{\"user_id\""),
        ('{"user_id": 1}', "line 2 is not"),
        ("[1, 2]", "line 2 is not"),
        ('{"user_id": 1, "history": "a"}', "line 2: history is not a list"),
        ('{"user_id": [1], "history": []}', "line 2: user_id is no text and no number of 64 bits"),
        (
            '{"user_id": "1", "history": []}',
            "line 2: user_id is '1' where earlier lines have anoth",
        ),
    ],
)
def test_raises_with_the_number_of_a_bad_line(
    recommender: Recommender, tmp_path: Path, line: str, expected: str
) -> None:
    good = '{"user_id": 1, "history": ["a"]}\n'
    (tmp_path / "in").write_text(good + line + "\n")
    with pytest.raises(DataError, match=expected):
        recommend_file(recommender, tmp_path / "in", tmp_path / "out", 1)
    assert not (tmp_path / "out").exists()


def test_raises_when_file_is_missing_or_item_is_unknown(
    recommender: Recommender, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match="there is no file"):
        recommend_file(recommender, tmp_path / "nothing", tmp_path / "out", 1)
    good = '{"user_id": 1, "history": ["a"]}\n'
    (tmp_path / "in").write_text(good * 5 + good.replace("a", "ghost") + good)
    with pytest.raises(DataError, match="in, line 6: item 'ghost' of the history is not in"):
        recommend_file(recommender, tmp_path / "in", tmp_path / "out", 1)
    assert recommend_file(recommender, tmp_path / "in", tmp_path / "out", 1, unknown="skip") == 7


@pytest.mark.parametrize("name", ["o.parquet", "o.jsonl"])
def test_all_users_go_into_a_file(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch, "CHUNK", 10)
    rec = Recommender.train(shop(), model="neighbours")
    options: dict[str, Any] = {"deny": ["i03"], "where": "item_id <> 'i04'"}
    assert recommend_all(rec, tmp_path / name, 3, **options) == 24
    read = pl.read_parquet if name.endswith("parquet") else pl.read_ndjson
    found = read(tmp_path / name)
    assert found["user_id"].to_list() == rec.users.ids.to_list()
    expected = rec.recommend_users(rec.users.ids.to_list(), 3, **options)
    assert found["items"].to_list() == [[r.item_id for r in row] for row in expected]
    assert found["scores"].to_list() == [[round(r.score, 5) for r in row] for row in expected]
    assert [file.name for file in tmp_path.iterdir()] == [name]


def test_parquet_goes_on_where_it_was_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch, "CHUNK", 10)
    rec = Recommender.train(shop(), model="popularity")
    recommend_all(rec, tmp_path / "whole.parquet", 3)
    asked = []
    whole = Recommender.recommend_numbers

    def interrupted(self: Recommender, histories: Any, *words: Any, **how: Any) -> Any:
        asked.append(len(histories))
        if len(asked) == 2:
            raise KeyboardInterrupt
        return whole(self, histories, *words, **how)

    monkeypatch.setattr(Recommender, "recommend_numbers", interrupted)
    with pytest.raises(KeyboardInterrupt):
        recommend_all(rec, tmp_path / "o.parquet", 3)
    assert not (tmp_path / "o.parquet").exists()
    assert recommend_all(rec, tmp_path / "o.parquet", 3) == 24
    assert asked == [10, 10, 10, 4]  # the first ten are not asked for again
    assert pl.read_parquet(tmp_path / "o.parquet").equals(
        pl.read_parquet(tmp_path / "whole.parquet")
    )
    assert sorted(file.name for file in tmp_path.iterdir()) == ["o.parquet", "whole.parquet"]


def test_half_a_character_is_refused(recommender: Recommender, tmp_path: Path) -> None:
    (tmp_path / "in").write_text('{"user_id": "\\ud800", "history": ["a"]}\n')
    with pytest.raises(DataError, match="line 1 is not"):
        recommend_file(recommender, tmp_path / "in", tmp_path / "o", 1)


def test_raises_when_the_output_is_the_input(recommender: Recommender, tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", 3)
    before = (tmp_path / "in.jsonl").read_bytes()
    (tmp_path / "link").symlink_to(tmp_path / "in.jsonl")
    for target in (tmp_path / "in.jsonl", tmp_path / "link", tmp_path / "x" / ".." / "in.jsonl"):
        with pytest.raises(RequestError, match="is the input, which would be lost; give another"):
            recommend_file(recommender, tmp_path / "in.jsonl", target, 1)
    assert (tmp_path / "in.jsonl").read_bytes() == before


def test_raises_when_the_output_cannot_be_written(recommender: Recommender, tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", 3)
    (tmp_path / "file").write_text("")
    with pytest.raises(ArtefactError, match=r"cannot write .*file/o\.jsonl: "):
        recommend_file(recommender, tmp_path / "in.jsonl", tmp_path / "file" / "o.jsonl", 1)


def test_reads_parquet_in_pieces_and_keeps_the_types(
    recommender: Recommender, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch, "CHUNK", 4)
    monkeypatch.setattr(histories, "READ", 10)
    users = pl.Series("user_id", range(23), pl.UInt16)
    frame = pl.DataFrame([users, pl.Series("history", [["abcdef"[n % 6]] for n in range(23)])])
    source, target = tmp_path / "in.parquet", tmp_path / "o.parquet"
    frame.write_parquet(source, row_group_size=7)
    assert recommend_file(recommender, source, target, 2) == 23
    found = pl.read_parquet(target)
    assert found["user_id"].equals(users)
    expected = recommender.recommend(frame["history"].to_list(), 2)
    assert found["items"].to_list() == [[r.item_id for r in row] for row in expected]
    frame.clear().write_parquet(source)  # no user at all
    assert recommend_file(recommender, source, target, 2) == 0
    assert pl.read_parquet(target).schema == found.schema


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        (
            {"user_id": [1], "items": [["a"]]},
            r"in.parquet has no column history \(it has: user_id,",
        ),
        ({"user_id": [1], "history": ["a"]}, "in.parquet: the column history is String; write lis"),
        ({"user_id": [1, 2], "history": [["a"], None]}, "in.parquet, row 2: history is not a list"),
        ({"user_id": [1, 2], "history": [["a"], ["x"]]}, "in.parquet, row 2: item 'x' of the hist"),
        (None, "cannot read .*in.parquet: "),
    ],
)
def test_raises_with_what_is_wrong_with_a_parquet_file(
    recommender: Recommender, tmp_path: Path, columns: dict[str, Any] | None, expected: str
) -> None:
    source = tmp_path / "in.parquet"
    if columns is None:
        source.write_bytes(b"PAR1 and no more")
    else:
        pl.DataFrame(columns).write_parquet(source)
    with pytest.raises(DataError, match=expected):
        recommend_file(recommender, source, tmp_path / "o.parquet", 1)
    assert not (tmp_path / "o.parquet").exists()
