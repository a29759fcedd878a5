"""Every endpoint, against what the library answers."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from maskgr import Dataset, Recommender
from maskgr.explain import explain
from maskgr.serving.logs import log_to_stderr
from maskgr.serving.served import Served
from tests.serving.conftest import client_of


def ids(answer: dict[str, Any]) -> list[Any]:
    return [item["item_id"] for item in answer["items"]]


@pytest.fixture
def history(recommender: Recommender) -> list[str]:
    return recommender.items["item_id"][10:14].to_list()


def ask(client: TestClient, address: str, **body: Any) -> dict[str, Any]:
    answer = client.post(address, json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_recommends_as_the_library_does(
    client: TestClient, recommender: Recommender, history: list[str]
) -> None:
    answer = ask(client, "/v1/recommend", history=history, top=5, where="price < 50")
    expected = recommender.recommend(history, 5, where="price < 50")
    assert ids(answer) == [r.item_id for r in expected]
    assert [i["score"] for i in answer["items"]] == pytest.approx([r.score for r in expected])
    assert answer["model"] == {"name": "shop", "version": "one"}
    assert answer["retrieval"] == "generative"
    assert answer["decoding"] == {"order": "greedy", "steps": 3, "beams": 20}
    assert answer["took_ms"] >= answer["timings_ms"]["model"] > 0
    first = answer["items"][0]
    row = recommender.items.filter(item_id=first["item_id"]).row(0, named=True)
    assert first["fields"] == {name: row[name] for name in row if name != "item_id"}
    assert tuple(first["sid"]) == recommender.digits_of(first["item_id"])


def test_options_and_filters_have_their_effect(
    client: TestClient, recommender: Recommender, history: list[str]
) -> None:
    every = recommender.items["item_id"].to_list()
    answer = ask(
        client,
        "/v1/recommend",
        history=[*history, "ghost"],
        unknown="skip",
        steps=1,
        top=4,
        deny=every[:50],
        allow=every[40:90],
        fields=["title"],
    )
    assert set(ids(answer)) <= set(every[50:90])
    assert answer["unknown"] == ["ghost"]
    assert answer["decoding"]["steps"] == 1
    assert list(answer["items"][0]["fields"]) == ["title"]
    assert ask(client, "/v1/recommend", fields=[], top=1)["items"][0]["fields"] == {}
    assert ask(client, "/v1/recommend", deny=every)["items"] == []
    assert len(ask(client, "/v1/recommend", top=500, exclude_seen=False)["items"]) == len(every)
    other = ask(client, "/v1/recommend", model="popularity", history=history)
    assert other["model"] == {"name": "popularity", "version": "two"}
    assert (other["retrieval"], other["decoding"]) == ("ranking", None)
    assert other["items"][0]["sid"] is None
    wrong = client.post("/v1/recommend", json={"where": "colour = 'red'"})
    assert wrong.status_code == 422
    assert "no column colour" in wrong.json()["detail"]
    assert wrong.json()["errors"][0]["pointer"] == "#/where"


def test_users_of_the_training_data_need_no_history(
    client: TestClient, shop: Dataset, recommender: Recommender
) -> None:
    user = shop.users[3]
    answer = ask(client, "/v1/recommend", user_id=user, top=3)
    assert ids(answer) == [r.item_id for r in recommender.recommend_users([user], 3)[0]]
    unknown = client.post("/v1/recommend", json={"user_id": "nobody"})
    assert unknown.status_code == 422
    assert "user 'nobody' has no history here" in unknown.json()["detail"]
    assert unknown.json()["errors"][0]["pointer"] == "#/user_id"
    both = client.post("/v1/recommend", json={"user_id": user, "history": []})
    assert both.json()["errors"][0]["pointer"] == "#/user_id"


def test_request_ids_come_back(client: TestClient, history: list[str]) -> None:
    answer = client.post("/v1/recommend", json={"request_id": "a-1"}, headers={"X-Request-ID": "b"})
    assert answer.json()["request_id"] == answer.headers["x-request-id"] == "a-1"
    answer = client.post("/v1/recommend", json={}, headers={"X-Request-ID": "b"})
    assert answer.json()["request_id"] == answer.headers["x-request-id"] == "b"
    answer = client.get("/livez", headers={"X-Request-ID": "two words"})
    assert re.fullmatch("[0-9a-f]{32}", answer.headers["x-request-id"])


def test_a_batch_has_an_answer_or_a_problem_for_each(
    client: TestClient, recommender: Recommender, history: list[str]
) -> None:
    requests: list[Any] = [
        {"history": history, "top": 3, "request_id": "mine"},
        {"history": ["ghost"]},
        {"top": "x"},
        5,
        {"model": "popularity", "top": 2},
        {"steps": 9},
    ]
    found = ask(client, "/v1/recommend/batch", requests=requests, request_id="all")
    assert found["request_id"] == "all"
    results = found["results"]
    assert [r["status"] for r in results] == [200, 422, 422, 422, 200, 422]
    expected = recommender.recommend(history, 3)
    assert ids(results[0]["answer"]) == [r.item_id for r in expected]
    assert results[0]["answer"]["request_id"] == "mine"
    assert results[1]["problem"]["errors"][0]["pointer"] == "#/history/0"
    assert results[2]["problem"]["errors"][0]["pointer"] == "#/top"
    assert "not a JSON object" in results[3]["problem"]["detail"]
    assert "9 steps cannot reveal 3 digits" in results[5]["problem"]["detail"]


def test_sessions_are_those_of_the_library(
    client: TestClient, recommender: Recommender, history: list[str]
) -> None:
    answer = ask(client, "/v1/sessions", history=history, items=1, top=3, deny=history[:1])
    expected = recommender.sessions(history, 1, 3, deny=history[:1])
    found = [tuple(i["item_id"] for i in s["items"]) for s in answer["sessions"]]
    assert found == [session.item_ids for session in expected]
    refused = client.post("/v1/sessions", json={"model": "popularity"})
    assert "cannot plan sessions" in refused.json()["detail"]


def test_explains_as_the_library_does(
    client: TestClient, recommender: Recommender, history: list[str]
) -> None:
    body = {"history": history, "steps": 2, "beams": 4, "top": 3, "examples": 2}
    answer = ask(client, "/v1/explain", **body)
    decoding = recommender.decoding(steps=2, beams=4)
    expected = explain(recommender, history, 3, decoding=decoding)
    assert ids(answer) == [r.item_id for r in expected.results]
    assert [len(step) for step in answer["steps"]] == [len(step) for step in expected.steps]
    beam = answer["steps"][0][0]
    assert beam["digits"] == list(expected.steps[0][0].digits)
    for item in beam["examples"]:
        shown = zip(item["sid"], beam["digits"], strict=True)
        assert all(digit in (own, None) for own, digit in shown)
    assert len(beam["examples"]) == min(2, beam["remaining"])
    near = answer["items"][0]["nearest"]
    assert {n["item_id"] for n in near} <= set(history)
    similar = {
        r.item_id: r.score for r in recommender.similar_items(ids(answer)[0], 199, by="vectors")
    }
    assert [n["similarity"] for n in near] == pytest.approx(
        sorted((similar[i] for i in history), reverse=True)[:3], abs=1e-3
    )


def test_explains_as_events(client: TestClient, history: list[str]) -> None:
    body = {"history": history, "steps": 3, "top": 2}
    whole = ask(client, "/v1/explain", **body)
    answer = client.post("/v1/explain", json=body, headers={"Accept": "text/event-stream"})
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = [block.split("\n") for block in answer.text.strip().split("\n\n")]
    assert [event[0] for event in events] == ["event: step"] * 3 + ["event: answer"]
    data = [json.loads(event[1].removeprefix("data: ")) for event in events]
    assert [step["beams"] for step in data[:3]] == whole["steps"]
    assert [step["number"] for step in data[:3]] == [1, 2, 3]
    assert data[3]["items"] == whole["items"]


@pytest.mark.parametrize("by", ["vectors", "sids"])
def test_similar_items(client: TestClient, recommender: Recommender, by: Any) -> None:
    answer = client.get("/v1/similar/a/b c%3F", params={"top": 4, "by": by}).json()
    assert answer["item_id"] == "a/b c?"
    expected = recommender.similar_items("a/b c?", 4, by=by)
    assert ids(answer) == [r.item_id for r in expected]
    refused = client.get("/v1/similar/a/b c%3F", params={"model": "popularity"})
    assert refused.status_code == 422


def test_search_pages_through_the_catalogue(client: TestClient, shop: Dataset) -> None:
    found: list[Any] = []
    cursor = None
    while True:
        parameters = {"q": "CLASSIC e", "limit": 2, **({"cursor": cursor} if cursor else {})}
        page = client.get("/v1/items", params=parameters).json()
        found += ids(page)
        cursor = page["next"]
        if cursor is None:
            break
    text = shop.items.select("item_id", "title", "description").rows()
    expected = [row[0] for row in text if all(w in " ".join(row).lower() for w in ("classic", "e"))]
    assert found == expected
    assert page["total"] == len(expected) > 2
    every = client.get("/v1/items", params={"limit": 100}).json()
    assert len(every["items"]) == 100
    assert every["total"] == 200
    for behind in ("10000", "9" * 20):
        assert client.get("/v1/items", params={"cursor": behind}).json()["items"] == []


def test_items_by_id(client: TestClient) -> None:
    item = client.get("/v1/items/a/b c%3F").json()
    assert item["item_id"] == "a/b c?"
    assert item["fields"]["image_url"] is None
    several = client.get("/v1/items", params={"id": ["a/b c?", "SKU-00001"]}).json()
    assert ids(several) == ["a/b c?", "SKU-00001"]


def test_the_tree_of_semantic_ids_counts_every_item(
    client: TestClient, recommender: Recommender
) -> None:
    digits = recommender.model.semantic_ids().digits  # type: ignore[attr-defined]
    root = client.get("/v1/sids").json()
    assert root["count"] == sum(child["count"] for child in root["children"]) == 200
    counts = [child["count"] for child in root["children"]]
    assert counts == sorted(counts, reverse=True)
    first = root["children"][0]
    assert all(item["sid"][0] == first["code"] for item in first["examples"])
    for prefix in ([first["code"]], [None, int(digits[0, 1])], digits[0].tolist()):
        text = ",".join("*" if digit is None else str(digit) for digit in prefix)
        found = client.get("/v1/sids", params={"prefix": text, "examples": 1}).json()
        asked = [(level, d) for level, d in enumerate(prefix) if d is not None]
        rows = np.all([digits[:, level] == digit for level, digit in asked], axis=0)
        assert found["count"] == rows.sum()
        assert (found["prefix"], found["level"]) == (prefix, len(prefix))
        assert bool(found["items"]) == (len(prefix) == 3)
        assert sum(child["count"] for child in found["children"]) in (0, found["count"])


def test_the_model_describes_itself(client: TestClient, recommender: Recommender) -> None:
    answer = client.get("/v1/model").json()
    assert [own["name"] for own in answer["models"]] == ["shop", "popularity"]
    assert (answer["name"], answer["kind"], answer["items"]) == ("shop", "maskgr", 200)
    assert (answer["levels"], answer["codes"]) == (3, [8, 8, 8])
    assert answer["decodes"]
    assert answer["similar"] == ["vectors", "sids"]
    for user in answer["example_users"]:
        assert user["history"] == recommender.history_of(user["user_id"])[-12:]
    other = client.get("/v1/model", params={"model": "popularity"}).json()
    assert (other["levels"], other["decodes"], other["similar"]) == (None, False, [])


def test_health_metrics_and_documents(client: TestClient) -> None:
    assert client.get("/livez").json() == {"status": "alive"}
    assert client.get("/readyz").json() == {"status": "ready"}
    client.post("/v1/recommend", json={})
    client.get("/v1/items/SKU-00001")
    text = client.get("/metrics").text
    for line in (
        'maskgr_requests_total{method="POST",route="/v1/recommend",status="200"} 1.0',
        'maskgr_requests_total{method="GET",route="/v1/items/{item_id:path}",status="200"} 1.0',
        'maskgr_request_duration_seconds_count{route="/v1/recommend"} 1.0',
        "maskgr_queue_length 0.0",
        "maskgr_batch_size_count 1.0",
        'maskgr_model_info{kind="maskgr",name="shop",version="one"} 1.0',
    ):
        assert line in text
    page = client.get("/docs")
    for path in client.get("/openapi.json").json()["paths"]:
        assert path in page.text
    assert "<script" not in page.text
    assert "http://" not in page.text.replace("localhost", "")
    assert "https://" not in page.text


def test_every_answer_has_security_headers(client: TestClient) -> None:
    for address in ("/", "/docs", "/v1/model", "/nothing"):
        headers = client.get(address).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert headers["x-content-type-options"] == "nosniff"


def test_requests_are_logged_as_json_with_their_id(
    models: list[Served], capfd: pytest.CaptureFixture[str]
) -> None:
    log_to_stderr()
    with client_of(models) as client:
        client.post("/v1/recommend", json={"request_id": "r-1", "history": ["SKU-00001"]})
        client.get("/livez")
    (line,) = [json.loads(line) for line in capfd.readouterr().err.splitlines()]
    assert line["event"] == "request"
    assert line["request_id"] == "r-1"
    assert (line["status"], line["path"], line["version"]) == (200, "/v1/recommend", "one")
    assert "SKU-00001" not in json.dumps(line)
