"""The batcher alone, then that answers do not depend on who else asks."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from typing import Any

import httpx
import pytest

from maskgr import Recommender
from maskgr.serving.app import create_app
from maskgr.serving.batching import Batcher, Job
from maskgr.serving.problems import ProblemError
from maskgr.serving.served import Served
from maskgr.serving.service import Service, ServiceConfig


class Recorder:
    """Doubles numbers, and knows which came together."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.hold = threading.Event()
        self.hold.set()

    def __call__(self, numbers: list[int]) -> list[int]:
        self.hold.wait()
        self.batches.append(numbers)
        if -1 in numbers:
            raise ValueError("minus one")
        return [2 * number for number in numbers]

    def job(self, number: int, key: Any = "a", seconds: float = 30) -> Job:
        return Job(key, self, number, time.monotonic() + seconds)


def together(batcher: Batcher, jobs: Sequence[Job]) -> list[Any]:
    """The value or error of each of the jobs, submitted at once."""

    async def ask() -> list[Any]:
        futures = await batcher.submit_all(jobs)
        return [future.exception() or future.result().value for future in futures]

    try:
        return asyncio.run(ask())
    finally:
        batcher.close()


def test_jobs_of_one_key_are_answered_together_and_others_apart() -> None:
    run = Recorder()
    jobs = [run.job(number, "ab"[number % 2]) for number in range(6)]
    assert together(Batcher(window=0.2), jobs) == [0, 2, 4, 6, 8, 10]
    assert run.batches == [[0, 2, 4], [1, 3, 5]]


def test_jobs_without_a_key_are_answered_alone_and_batches_have_a_largest_size() -> None:
    run = Recorder()
    assert together(Batcher(), [run.job(n, None) for n in range(3)]) == [0, 2, 4]
    assert run.batches == [[0], [1], [2]]
    run = Recorder()
    together(Batcher(largest=2, window=0.2), [run.job(n) for n in range(5)])
    assert run.batches == [[0, 1], [2, 3], [4]]


def test_a_job_that_fails_does_not_fail_those_beside_it() -> None:
    run = Recorder()
    found = together(Batcher(window=0.2), [run.job(n) for n in (1, -1, 3)])
    assert found[0] == 2
    assert found[2] == 6
    assert isinstance(found[1], ValueError)
    assert run.batches == [[1, -1, 3], [1], [-1], [3]]


def test_a_full_queue_refuses_all_or_none_and_says_when_to_come_back() -> None:
    run, batcher = Recorder(), Batcher(queue=4)
    with pytest.raises(ProblemError) as refused:
        together(batcher, [run.job(n) for n in range(5)])
    assert refused.value.status == 429
    assert refused.value.headers == {"Retry-After": "1"}
    assert run.batches == []


def test_a_job_that_is_late_is_given_up_and_not_computed() -> None:
    run, batcher = Recorder(), Batcher(window=0)
    run.hold.clear()

    async def ask() -> list[Any]:
        running = asyncio.create_task(batcher.submit(run.job(1)))
        await asyncio.sleep(0.05)  # the thread has it
        late = asyncio.create_task(batcher.submit(run.job(2, seconds=0.05)))
        await asyncio.sleep(0.2)
        run.hold.set()
        return await asyncio.gather(running, late, return_exceptions=True)

    first, late = asyncio.run(ask())
    batcher.close()
    assert first.value == 2
    assert isinstance(late, ProblemError)
    assert late.status == 504
    assert run.batches == [[1]]


def test_close_answers_what_waits() -> None:
    run, batcher = Recorder(), Batcher(window=30)

    async def ask() -> Any:
        waiting = asyncio.create_task(batcher.submit(run.job(4)))
        await asyncio.sleep(0.05)
        await asyncio.to_thread(batcher.close)
        return (await waiting).value

    assert asyncio.run(ask()) == 8


def varied(recommender: Recommender) -> list[dict[str, Any]]:
    """Requests that differ in everything that may differ."""
    ids = recommender.items["item_id"].to_list()
    histories = [ids[start : start + length] for start, length in enumerate((0, 1, 3, 9, 25, 60))]
    ways: list[dict[str, Any]] = [
        {},
        {"top": 3},
        {"top": 60},
        {"exclude_seen": False},
        {"exclude_seen": True, "deny": ids[40:60]},
        {"allow": ids[::2], "top": 30},
        {"allow": ids[::2], "deny": ids[:50:2], "top": 30},
        {"steps": 1},
        {"steps": 2, "order": "random", "beams": 4, "top": 12},
        {"order": "left-to-right", "beams": 7},
        {"model": "popularity", "top": 200},
        {"model": "popularity", "deny": ids[:5], "exclude_seen": True},
    ]
    return [{"history": history, **way} for history in histories for way in ways]


def answers(
    models: list[Served], bodies: list[dict[str, Any]], **config: Any
) -> tuple[list[Any], str]:
    """To all bodies at once, and the metrics."""
    service = Service(models, ServiceConfig(seconds=300, **config))

    async def ask() -> list[Any]:
        transport = httpx.ASGITransport(create_app(service))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            asked = [client.post("/v1/recommend", json=body) for body in bodies]
            return [answer.json() for answer in await asyncio.gather(*asked)]

    found = asyncio.run(ask())
    service.batcher.close()
    return found, service.metrics.text().decode()


def expected(recommender: Recommender, body: dict[str, Any]) -> list[Any]:
    options = dict(body)
    steps = {k: options.pop(k) for k in ("steps", "order", "beams") if k in options}
    options.pop("model", None)
    decoding = recommender.decoding(**steps) if steps else None
    return recommender.recommend([options.pop("history")], **options, decoding=decoding)[0]


def test_batched_answers_are_those_of_the_library_one_at_a_time(models: list[Served]) -> None:
    own = {served.name: served.recommender for served in models}
    bodies = varied(own["shop"])
    found, metrics = answers(models, bodies, window=0.2)
    assert f"maskgr_batch_size_sum {len(bodies)}.0" in metrics
    for body, answer in zip(bodies, found, strict=True):
        right = expected(own[body.get("model", "shop")], body)
        assert [item["item_id"] for item in answer["items"]] == [r.item_id for r in right]
        scores = [item["score"] for item in answer["items"]]
        assert scores == pytest.approx([r.score for r in right], abs=1e-4)


def test_requests_that_differ_in_top_and_seen_items_make_one_batch(models: list[Served]) -> None:
    bodies = [{"top": 1 + n, "exclude_seen": n % 2 == 0, "deny": []} for n in range(30)]
    _, metrics = answers(models, bodies, window=60, largest=30)  # waits until all are there
    assert "maskgr_batch_size_count 1.0" in metrics
    assert "maskgr_batch_size_sum 30.0" in metrics
