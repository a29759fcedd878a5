"""One cluster of two CPUs for all tests here: starting it is what takes the time."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from maskgr import Recommender
from maskgr.errors import RequestError
from maskgr.models.base import train_config
from maskgr.serving.actors import TRIES, map_rows, spread
from maskgr.serving.shards import recommend_folder
from tests.conftest import Outcome
from tests.models.tiny import shop


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray = pytest.importorskip("ray")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        ray.init(
            "local",
            num_cpus=2,
            object_store_memory=80 * 2**20,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="CRITICAL",
        )
        yield
        ray.shutdown()


@pytest.mark.usefixtures("cluster")
def test_folder_has_the_bytes_of_the_plain_engine(
    maskgr: Callable[..., Outcome], tmp_path: Path
) -> None:
    config = train_config("tiny", ["fit.steps=2", "validations=1"], model="sasrec")
    recommender = Recommender.train(shop(), config=config)
    recommender.save(tmp_path / "run")
    source, out, plain = (tmp_path / name for name in ("in", "out", "plain"))
    source.mkdir()
    for n in range(4):
        users = [f"u{n}-{k}" for k in range(20 * n)]
        histories = [[f"i{k % 14:02}", f"i{n:02}"] for k in range(20 * n)]
        frame = pl.DataFrame({"user_id": users, "history": histories}, {"user_id": pl.String,
                             "history": pl.List(pl.String)})  # fmt: skip
        frame.write_parquet(source / f"{n}.parquet")
    (source / "bad.jsonl").write_text("nonsense\n")
    words = ("recommend", tmp_path / "run", "--input", source, "--output", out, "--top", 3)
    outcome = maskgr(*words, "--engine", "ray", "--actors", 1)
    assert outcome.code == 2
    assert outcome.err == (
        f'error: {source}/bad.jsonl, line 1 is not {{"user_id": ..., "history": [...]}}; mend it; '
        "the other 4 files are done, and the same command goes on\n"
    )
    (source / "bad.jsonl").unlink()
    assert recommend_folder(recommender, source, plain, 3).users == 120
    files = {own.name: own.read_bytes() for own in plain.iterdir()}
    (out / "2.parquet").unlink()
    assert maskgr(*words).out.startswith("120 users in 4 files (3 were there); ")  # either engine
    # The command names every option, so its keys differ; the rows do not.
    for name in files:
        assert pl.read_parquet(out / name).equals(pl.read_parquet(plain / name))


@pytest.mark.usefixtures("cluster")
def test_row_is_tried_again_when_its_actor_dies(tmp_path: Path) -> None:
    def start(cpus: int, folder: str) -> Callable[[Mapping[str, Any]], int]:
        def work(row: Mapping[str, Any]) -> int:
            tries = os.open(f"{folder}/{row['number']}", os.O_APPEND | os.O_CREAT | os.O_WRONLY)
            os.write(tries, b".")
            if os.fstat(tries).st_size <= row["deaths"]:
                os.kill(os.getpid(), signal.SIGKILL)
            return 10 * row["number"] + cpus

        return work

    rows = [{"deaths": deaths} for deaths in (0, 1, 99, 0)]
    found = dict(map_rows(start, (str(tmp_path),), rows))  # two actors on two CPUs
    assert found == {0: 1, 1: 11, 2: None, 3: 31}
    assert [len((tmp_path / str(n)).read_bytes()) for n in range(4)] == [1, 2, TRIES, 1]


@pytest.mark.usefixtures("cluster")
def test_texts_have_the_vectors_of_the_plain_engine(
    maskgr: Callable[..., Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "shop"
    maskgr("data", "fetch", "synthetic", "--set", "users=40", "--set", "items=90", "--out", data)
    words = ("--levels", 2, "--codes", 8, "--set", "batch_size=5")  # five calls
    for name, more in (("ray", ("--engine", "ray", "--actors", 1)), ("plain", ())):
        monkeypatch.setenv("MASKGR_CACHE", str(tmp_path / f"cache-{name}"))
        outcome = maskgr("sids", data, "--out", tmp_path / name, *words, *more)
        assert outcome.code == 0, outcome.err
        assert list((tmp_path / f"cache-{name}").rglob("part-*"))
    one, two = ((tmp_path / name / "embeddings.npy").read_bytes() for name in ("ray", "plain"))
    assert one == two
    outcome = maskgr("sids", data, "--out", tmp_path / "x", "--engine", "ray", "--device", "cuda")
    assert "--engine ray works on CPUs; leave --device cuda out" in outcome.err


@pytest.mark.usefixtures("cluster")
def test_raises_when_the_actors_do_not_fit() -> None:
    with pytest.raises(RequestError, match="--actors 3 does not fit the 2 CPUs of the Ray cluster"):
        next(map_rows(lambda cpus: len, (), [{}], actors=3))


@pytest.mark.parametrize(
    ("asked", "rows", "nodes", "expected"),
    [
        (None, 9, [2], (2, 1)),
        (1, 9, [2], (1, 2)),
        (None, 1, [8], (1, 8)),  # one row: nobody to share with
        (3, 9, [16, 16], (3, 8)),  # not 10: one would fit neither machine
        (None, 99, [4, 2, 0], (6, 1)),
    ],
)
def test_actors_fit_the_machines(
    asked: int | None, rows: int, nodes: list[int], expected: tuple[int, int]
) -> None:
    assert spread(asked, rows, nodes) == expected


def test_raises_when_ray_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(RequestError, match=r"install it with: pip install 'maskgr\[ray\]'"):
        next(map_rows(lambda cpus: len, (), [{}]))
