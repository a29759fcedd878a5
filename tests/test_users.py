"""Users' histories in a recommender, in memory and stored."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from maskgr import Recommender
from maskgr.artefact import sha256
from maskgr.data.sequences import Sequences
from maskgr.errors import ArtefactError, RequestError
from maskgr.users import Users
from tests.models.tiny import shop


def test_users_are_stored_and_read_when_needed(tmp_path: Path) -> None:
    data = shop()
    rec = Recommender.train(data, model="popularity")
    rec.save(tmp_path / "run")
    again = Recommender.load(tmp_path / "run")
    assert "_table" not in vars(again.users)  # nothing is read yet
    assert again.users.ids.equals(data.users)
    assert again.users.histories == data.histories
    # Held-out items are in it.
    expected = data.item_ids.gather(data.histories[3]).to_list()
    assert again.history_of("u3") == rec.history_of("u3") == expected


def test_users_get_what_their_histories_get() -> None:
    rec = Recommender.train(shop(), model="neighbours")
    users = ["u7", "u0", "u7"]
    histories = [rec.history_of(user) for user in users]
    assert rec.recommend_users(users, 4) == rec.recommend(histories, 4)
    how = {"deny": ["i03"], "exclude_seen": False, "where": "item_id > 'i01'"}
    assert rec.recommend_users(users, 4, **how) == rec.recommend(histories, 4, **how)  # type: ignore[arg-type]
    assert rec.recommend_users([]) == []


@pytest.mark.parametrize("ids", [["b", "a", "c"], [30, -5, 7]])
def test_rows_are_found_by_id(ids: list[object]) -> None:
    users = Users.of(pl.Series("user_id", ids), Sequences.of([[1], [], [2, 3]]))
    assert [users.row(own) for own in ids] == [0, 1, 2]
    assert users.rows([ids[2], ids[0]]).tolist() == [2, 0]
    assert users.row(str(ids[1])) == 1  # as a command line has it
    for stranger in ("z", None, 4.5, {"a": 1}, [], 2**80):
        with pytest.raises(RequestError, match=r"user .* has no history here; check the ID"):
            users.row(stranger)
        with pytest.raises(RequestError, match=r"user .* has no history here"):
            users.rows([stranger])


def test_empty_histories_and_no_users_are_stored(tmp_path: Path) -> None:
    from maskgr.artefact import sha256

    for users in (
        Users.of(pl.Series("user_id", [1, 2, 3]), Sequences.of([[], [4, 4, 1], []])),
        Users.none(),
    ):
        users.save(tmp_path)
        file = tmp_path / "users.parquet"
        again = Users.load(file, sha256(file))
        assert again.ids.equals(users.ids)
        assert again.histories == users.histories
        assert again.histories.values.dtype == np.int32


def test_raises_when_the_file_was_replaced_meanwhile(tmp_path: Path) -> None:
    Recommender.train(shop(), model="popularity").save(tmp_path / "run")
    rec = Recommender.load(tmp_path / "run")
    (tmp_path / "run" / "users.parquet").write_bytes(b"other")
    with pytest.raises(ArtefactError, match=r"users\.parquet has changed since .*; load it again"):
        rec.history_of("u0")


def test_weights_of_events_are_saved_with_the_histories(tmp_path: Path) -> None:
    weights = np.array([1, 0, 0.5], dtype=np.float32)
    histories = replace(Sequences.of([[2, 0], [], [1]]), weights=weights)
    Users.of(pl.Series("user_id", ["a", "b", "c"]), histories).save(tmp_path)
    file = tmp_path / "users.parquet"
    assert Users.load(file, sha256(file)).histories == histories
