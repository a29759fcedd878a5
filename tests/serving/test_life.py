"""Reload and shutdown while requests come in: no request fails, no answer mixes two models."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import polars as pl
import pytest

from maskgr import Dataset, Recommender
from maskgr.serving.served import Served
from tests.conftest import Outcome
from tests.serving.conftest import client_of, running

ADMIN = {"X-API-Key": "admin"}
CLIENTS = 6


def popular(first: str) -> Recommender:
    """A model that recommends `first` before all; its items' titles name it."""
    log = [("u", item, n) for n, item in enumerate("abcdef")]
    log += [(f"v{n}", first, m) for n in range(3) for m in range(5)]
    frame = pl.DataFrame(log, schema=["user_id", "item_id", "position"], orient="row")
    items = pl.DataFrame(
        {"item_id": list("abcdef"), "title": [f"{i} of {first}" for i in "abcdef"]}
    )
    return Recommender.train(Dataset.from_frames(frame, items), model="popularity")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Models that recommend a and b first, and one that is damaged."""
    for first in ("a", "b", "damaged"):
        popular(first[0]).save(tmp_path / "models" / first)
    weights = tmp_path / "models" / "damaged" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"!")
    popular("a").save(tmp_path / "outside")
    (tmp_path / "models" / "link").symlink_to(tmp_path / "outside")
    return tmp_path / "models"


def test_reload_replaces_the_model(root: Path) -> None:
    models = [Served.load("shop", root / "a")]
    with client_of(models, admin_keys=("admin",), root=root) as client:
        before = client.post("/v1/recommend", json={"top": 1}).json()
        answer = client.post("/v1/admin/reload", json={"path": "b"}, headers=ADMIN)
        assert answer.status_code == 200
        assert answer.json()["previous"] == before["model"]
        after = client.post("/v1/recommend", json={"top": 1}).json()
        assert after["model"] == answer.json()["model"]
        assert [before["items"][0]["item_id"], after["items"][0]["item_id"]] == ["a", "b"]
        popular("c").save(root / "b")  # trained anew in the same folder
        answer = client.post("/v1/admin/reload", json={}, headers=ADMIN)
        assert answer.status_code == 200, answer.text
        again = answer.json()
        assert again["model"]["version"] != after["model"]["version"]
        assert client.post("/v1/recommend", json={}).json()["items"][0]["item_id"] == "c"
        text = client.get("/metrics").text
        assert 'maskgr_reloads_total{model="shop",result="done"} 2.0' in text
        assert text.count("maskgr_model_info{") == 1
        assert client.get("/v1/model").json()["version"] == again["model"]["version"]


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("damaged", "has changed since it was written"),
        ("nothing", "there is no folder"),
        ("..", "not below the folder of models"),
        ("../outside", "not below the folder of models"),
        ("link", "not below the folder of models"),
        ("/etc", "not below the folder of models"),
        ("a\0b", "leave path out"),
        ("x" * 500, "old model stays"),
    ],
)
def test_the_old_model_stays_when_a_reload_fails(root: Path, path: str, sentence: str) -> None:
    models = [Served.load("shop", root / "a")]
    with client_of(models, admin_keys=("admin",), root=root) as client:
        answer = client.post("/v1/admin/reload", json={"path": path}, headers=ADMIN)
        assert answer.status_code == 422
        assert sentence in answer.json()["detail"]
        assert answer.json()["detail"].endswith("the old model stays")
        assert client.get("/v1/model").json()["version"] == models[0].version
        assert (
            'maskgr_reloads_total{model="shop",result="failed"} 1.0' in client.get("/metrics").text
        )


def test_reloading_needs_its_own_key(root: Path) -> None:
    models = [Served.load("shop", root / "a")]
    with client_of(models, keys=("user",), admin_keys=("admin",), root=root) as client:
        for headers in ({}, {"X-API-Key": "user"}):
            assert client.post("/v1/admin/reload", json={}, headers=headers).status_code == 401
    with client_of(models, root=root) as client:
        refused = client.post("/v1/admin/reload", json={}, headers=ADMIN)
        assert refused.status_code == 403
        assert "--admin-key-file" in refused.json()["detail"]


@contextmanager
def load(ask: Callable[[httpx.Client], bool]) -> Iterator[None]:
    """Clients that each `ask` again and again, on connections they keep, until one says stop."""
    done = threading.Event()

    def work() -> None:
        with httpx.Client(timeout=60) as client:
            while not done.is_set() and ask(client):
                pass

    with ThreadPoolExecutor(CLIENTS) as pool:
        working = [pool.submit(work) for _ in range(CLIENTS)]
        try:
            yield
        finally:
            done.set()
        for one in working:
            one.result()


def test_reload_under_load_loses_no_request_and_mixes_no_answer(root: Path) -> None:
    models = [Served.load("shop", root / "a")]
    answers: list[dict[str, Any]] = []
    with running(models, admin_keys=("admin",), root=root) as url:

        def ask(client: httpx.Client) -> bool:
            answer = client.post(f"{url}/v1/recommend", json={"top": 6, "exclude_seen": False})
            assert answer.status_code == 200, answer.text
            answers.append(answer.json())
            return True

        first = {models[0].version: "a"}
        with load(ask):
            for name in "bababa":
                body = {"path": name}
                answer = httpx.post(
                    f"{url}/v1/admin/reload", json=body, headers=ADMIN, timeout=60
                ).json()
                first[answer["model"]["version"]] = name
                seen = len(answers)
                while len(answers) < seen + 2 * CLIENTS:
                    pass
    assert {answer["model"]["version"] for answer in answers} == set(first)
    for answer in answers:
        leader = first[answer["model"]["version"]]
        assert answer["items"][0]["item_id"] == leader
        assert all(item["fields"]["title"].endswith(f"of {leader}") for item in answer["items"])


def test_sigterm_under_load_finishes_what_was_asked_and_exits_with_0(root: Path) -> None:
    command = [sys.executable, "-m", "maskgr", "serve", str(root / "a"), "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ})
    assert process.stderr is not None
    try:
        url = next(line for line in process.stderr if line.startswith("http://")).strip()
        lines: list[str] = []
        reader = threading.Thread(target=lambda: lines.extend(process.stderr or ()))
        reader.start()
        answers, told = [], threading.Event()

        def ask(client: httpx.Client) -> bool:
            answer = client.post(f"{url}/v1/recommend", json={"top": 2})
            assert answer.status_code == 200, answer.text
            answers.append(answer.json())
            if len(answers) > 10 * CLIENTS and not told.is_set():
                told.set()
                process.send_signal(signal.SIGTERM)
            return answer.headers.get("connection") != "close"  # asks elsewhere from then on

        with load(ask):
            assert told.wait(60)
            while httpx.get(f"{url}/livez").headers.get("connection") != "close":
                pass
            assert httpx.get(f"{url}/readyz").status_code == 503
            assert process.wait(60) == 0
        reader.join()
    finally:
        process.kill()
        process.wait()
    events = [json.loads(line) for line in lines]
    assert [e["event"] for e in events if e["event"] != "request"] == [
        "ready",
        "draining",
        "stopped",
    ]
    finished = [e for e in events if e.get("path") == "/v1/recommend"]
    assert len(finished) == len(answers)
    assert {e["status"] for e in finished} == {200}


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "give a run to serve, or --demo"),
        (["--demo", "x"], "give a run to serve, or --demo"),
        (["nothing"], "there is no folder nothing"),
        (["x", "--key-file", "none"], "No such file"),
        (["x", "--key-file", "empty"], "empty has no key; write one a line"),
        (["x", "--host", "203.0.113.1"], "cannot listen at 203.0.113.1, port 0"),
        (["one=a", "one=b"], "two models have one name"),
    ],
)
def test_mistakes_of_the_command(
    maskgr: Callable[..., Outcome],
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    sentence: str,
) -> None:
    monkeypatch.chdir(root)
    (root / "empty").write_text("# no key\n\n")
    outcome = maskgr("serve", "--port", "0", *words)
    assert outcome.code == 2
    assert re.search(sentence, outcome.err), outcome.err
    assert "Traceback" not in outcome.err


def test_the_demo_is_trained_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from maskgr.serving import demo

    trained: list[str] = []

    small = popular("a")

    def train(data: Dataset, *, config: Any, progress: bool) -> Recommender:
        trained.append(config.name)
        return small

    monkeypatch.setattr(demo.Recommender, "train", train)
    names = [served.name for served in demo.demo_models(progress=False)]
    assert names == trained == ["maskgr", "neighbours"]
    assert [served.name for served in demo.demo_models(progress=False)] == names
    assert len(trained) == 2
