"""Every endpoint, against what the library answers."""

from __future__ import annotations

from starlette.testclient import TestClient

from maskgr import Recommender


def test_recommends_as_the_library_does(client: TestClient, recommender: Recommender) -> None:
    history = recommender.items["item_id"][:3].to_list()
    answer = client.post("/v1/recommend", json={"history": history, "top": 5}).json()
    expected = recommender.recommend(history, 5)
    assert [item["item_id"] for item in answer["items"]] == [r.item_id for r in expected]


def test_listens(address: str) -> None:
    import httpx

    assert httpx.get(f"{address}/readyz").json() == {"status": "ready"}
