"""Mistakes: every one is a problem with one sentence, and a pointer where there is a place."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from maskgr.serving.app import create_app
from maskgr.serving.problems import MEDIA
from maskgr.serving.served import Served
from maskgr.serving.service import Service, ServiceConfig
from tests.serving.conftest import client_of

POSTS = ["/v1/recommend", "/v1/recommend/batch", "/v1/sessions", "/v1/explain"]


def check(answer: httpx.Response, status: int, sentence: str, pointer: str | None = None) -> None:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == MEDIA
    problem = answer.json()
    assert problem["status"] == status
    assert sentence in problem["detail"]
    assert problem["instance"].endswith(answer.headers["x-request-id"])
    if pointer is not None:
        assert pointer in [error["pointer"] for error in problem["errors"]]


@pytest.mark.parametrize(
    ("body", "pointer", "sentence"),
    [
        ({"history": ["ghost"]}, "#/history/0", "item 'ghost' of history is not in the catalogue"),
        ({"deny": ["SKU-00001", "x"]}, "#/deny/1", "item 'x' of deny is not in the catalogue"),
        ({"allow": ["x"]}, "#/allow/0", "item 'x' of allow is not in the catalogue"),
        ({"allow": []}, None, "leave no item; allow more"),
        ({"fields": ["colour"]}, "#/fields", "no column 'colour'; they have: title"),
        ({"model": "none"}, "#/model", "no model 'none'; the models are shop, popularity"),
        ({"top": 0}, "#/top", "greater than or equal to 1"),
        ({"top": 501}, "#/top", "less than or equal to 500"),
        ({"top": 2.5}, "#/top", "valid integer"),
        ({"top": "3"}, "#/top", "valid integer"),
        ({"top": True}, "#/top", "valid integer"),
        ({"history": "SKU"}, "#/history", "valid array"),
        ({"history": [1.5]}, "#/history/0", "valid"),
        ({"history": [None]}, "#/history/0", "valid"),
        ({"history": ["a"] * 1001}, "#/history", "1001 entries; give at most 1000"),
        ({"histroy": []}, "#/histroy", "there is no key histroy"),
        ({"order": "best"}, "#/order", "'random', 'greedy' or 'left-to-right'"),
        ({"steps": 9}, None, "9 steps cannot reveal 3 digits; give 1 to 3"),
        ({"beams": 0}, "#/beams", "greater than or equal to 1"),
        ({"retrieval": "dense"}, None, "has no dense retrieval"),
        ({"unknown": "x"}, "#/unknown", "'raise' or 'skip'"),
        ({"request_id": "two words"}, "#/request_id", "match pattern"),
        ({"model": "popularity", "steps": 2}, None, "cannot decode digits"),
        ([], "#", "not a JSON object"),
        (7, "#", "not a JSON object"),
        ("text", "#", "not a JSON object"),
    ],
)
def test_values_that_cannot_be_used(
    client: TestClient, body: Any, pointer: str | None, sentence: str
) -> None:
    check(client.post("/v1/recommend", json=body), 422, sentence, pointer)


def test_bodies_that_are_not_json(client: TestClient) -> None:
    for content in (b"{", b"\xff\xfe", b"{'a': 1}", b"[" * 100_000):
        answer = client.post(
            "/v1/recommend", content=content, headers={"Content-Type": "application/json"}
        )
        check(answer, 400, "send a JSON object")
    for headers in ({"Content-Type": "text/plain"}, {}):
        answer = client.post("/v1/recommend", content=b"{}", headers=headers)
        check(answer, 415, "send Content-Type: application/json")
    check(client.post("/v1/recommend"), 400, "send a JSON object")


def test_addresses_and_methods(client: TestClient) -> None:
    check(client.get("/v1/nothing"), 404, "nothing at /v1/nothing")
    check(client.get("/page/nothing.js"), 404, "nothing at")
    check(client.get("/v1/items/ghost"), 404, "there is no item 'ghost'")
    check(client.get("/v1/similar/ghost"), 404, "there is no item 'ghost'")
    check(client.get("/v1/recommend"), 405, "does not answer GET")
    check(client.delete("/v1/model"), 405, "does not answer DELETE")
    check(client.get("/v1/items", params={"limit": 0}), 422, "limit", "limit")
    check(client.get("/v1/items", params={"id": ["ghost"]}), 404, "there is no item 'ghost'")
    check(client.get("/v1/sids", params={"prefix": "1,x"}), 422, "prefix", "prefix")
    check(client.get("/v1/sids", params={"prefix": "1,1,1,1"}), 422, "at most 3", "prefix")
    check(client.get("/v1/sids", params={"model": "popularity"}), 422, "no semantic IDs")
    check(client.get("/v1/model", params={"model": "x"}), 422, "no model 'x'", "model")


def test_large_bodies_are_refused_also_in_chunks(models: list[Served]) -> None:
    with client_of(models, body_bytes=1_000) as client:
        headers = {"Content-Type": "application/json"}
        body = json.dumps({"history": [], "where": "x" * 2_000}).encode()
        check(client.post("/v1/recommend", content=body, headers=headers), 413, "1,000 bytes")

        def chunks() -> Iterator[bytes]:
            for start in range(0, len(body), 100):
                yield body[start : start + 100]

        check(client.post("/v1/recommend", content=chunks(), headers=headers), 413, "1,000 bytes")
        assert client.post("/v1/recommend", json={"top": 1}).status_code == 200


def test_late_answers_and_full_queues(models: list[Served]) -> None:
    with client_of(models, seconds=0) as client:
        for address in POSTS:
            body = {"requests": [{}]} if address.endswith("batch") else {}
            answer = client.post(address, json=body)
            if address.endswith("batch"):
                assert answer.json()["results"][0]["status"] == 504
            else:
                check(answer, 504, "longer than the time limit")
    with client_of(models, queue=0) as client:
        answer = client.post("/v1/recommend", json={})
        check(answer, 429, "try again in a second")
        assert answer.headers["retry-after"] == "1"
        assert client.get("/readyz").status_code == 200
    with client_of(models, queue=3) as client:
        answer = client.post("/v1/recommend/batch", json={"requests": [{}] * 4})
        check(answer, 429, "of at most 3")


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"X-API-Key": "wrong"},
        {"X-API-Key": ""},
        {"X-API-Key": "admin"},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "Basic right"},
        {"Authorization": "right"},
        {"Authorization": "Bearer r\xfcght"},
    ],
)
def test_wrong_keys(models: list[Served], headers: dict[str, str]) -> None:
    own = {name: value.encode("latin-1") for name, value in headers.items()}
    with client_of(models, keys=("right", "other"), admin_keys=("admin",)) as client:
        answer = client.post("/v1/recommend", json={}, headers=own)
        check(answer, 401, "Authorization: Bearer KEY or X-API-Key: KEY")
        assert answer.headers["www-authenticate"] == "Bearer"
        assert client.get("/v1/model", headers=own).status_code == 401
        for public in ("/livez", "/readyz", "/metrics", "/docs", "/openapi.json", "/"):
            assert client.get(public, headers=own).status_code == 200


def test_right_keys_and_that_they_are_never_logged(
    models: list[Served], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    with client_of(models, keys=("right", "other")) as client:
        for headers in (
            {"X-API-Key": "right"},
            {"X-API-Key": "other"},
            {"Authorization": "Bearer right"},
            {"authorization": "bearer  other"},
        ):
            assert client.get("/v1/model", headers=headers).status_code == 200
        client.get("/v1/model", headers={"X-API-Key": "guessed"})
    logged = " ".join(f"{r.getMessage()} {vars(r).get('values')}" for r in caplog.records)
    assert "/v1/model" in logged
    assert not any(key in logged for key in ("right", "other", "guessed"))


def test_an_error_of_the_service_has_no_details_in_the_answer(
    models: list[Served], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("maskgr.serving.routes.recommend_job", lambda *_: 1 / 0)
    with client_of(models) as client:
        check(client.post("/v1/recommend", json={}), 500, "the service has a bug")
    assert "ZeroDivisionError" in caplog.text


def malformed(count: int) -> Iterator[tuple[str, bytes]]:
    """Addresses and bodies that no service can answer, from a seed."""
    rng = random.Random(0)
    wrong: dict[str, list[Any]] = {
        "history": [7, "x", {}, [[]], [{}], [1.5], [None], [True], ["ghost"], ["a"] * 1001],
        "user_id": [1.5, [], {}, True],
        "top": [0, -1, 501, 1.5, "1", [], {}, None, True, 10**30, 1e400],
        "allow": ["x", 1, {}, [1.5], [None], ["ghost"], []],
        "deny": ["x", 1, {}, [1.5], None, ["ghost"]],
        "where": [1, [], {}, True, "x" * 2001],
        "exclude_seen": [1, "yes", [], {}],
        "unknown": ["x", 1, None, []],
        "order": ["best", 1, [], {}],
        "steps": [0, -1, 4.5, "1", 65, [], {}, True, 10],
        "beams": [0, -1, 4.5, "1", 201, [], {}, True],
        "fields": ["title", 1, {}, [1], ["ghost"]],
        "model": ["ghost", 1, [], {}],
        "request_id": ["", "two words", "x" * 129, "é", 1, []],
        "ghost": [1, None],
    }
    for _ in range(count):
        address = rng.choice([p for p in POSTS if not p.endswith("batch")])
        body: dict[str, Any] = {"top": 2, "history": []}
        for key in rng.sample(sorted(wrong), rng.randint(1, 3)):
            body[key] = rng.choice(wrong[key])
        text = json.dumps(body).encode()
        kind = rng.random()
        if kind < 0.2:
            text = text[: rng.randrange(len(text))]
        elif kind < 0.3:
            text = rng.randbytes(rng.randint(1, 40))
        elif kind < 0.35:
            text = json.dumps({"requests": rng.choice([[], 1, None, [{}] * 257])}).encode()
            address = "/v1/recommend/batch"
        yield address, text


def test_2000_malformed_bodies_are_refused_with_a_sentence(models: list[Served]) -> None:
    service = Service(models, ServiceConfig(seconds=120))

    async def ask() -> set[int]:
        transport = httpx.ASGITransport(create_app(service))
        statuses = set()
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            for address, body in malformed(2_000):
                headers = {"Content-Type": "application/json"}
                answer = await client.post(address, content=body, headers=headers)
                statuses.add(answer.status_code)
                assert 400 <= answer.status_code < 500, (address, body, answer.text)
                detail = answer.json()["detail"]
                assert ";" in detail or "at most" in detail, (body, detail)
                assert len(detail) < 400
        return statuses

    assert asyncio.run(ask()) == {400, 422}
    service.batcher.close()
