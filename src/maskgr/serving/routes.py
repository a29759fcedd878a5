"""The endpoints. Answers are encoded here and returned as they are: what `response_model` says is
for the documentation, and checked by the tests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal, cast

from fastapi import APIRouter, Path, Query, Request
from pydantic import ValidationError
from starlette.responses import Response, StreamingResponse

from maskgr.errors import MaskGRError
from maskgr.serving import schemas
from maskgr.serving.answers import (
    Asked,
    explain_answer,
    explain_job,
    finite,
    milliseconds,
    recommend_answer,
    recommend_job,
    sessions_answer,
    sessions_job,
    sids_answer,
)
from maskgr.serving.batching import Job, Timed
from maskgr.serving.problems import MEDIA, ProblemError
from maskgr.serving.served import Served
from maskgr.serving.service import Service

router = APIRouter()
EVENTS = "text/event-stream"

ModelParameter = Annotated[
    str | None, Query(alias="model", description="A name from /v1/model; default: the first.")
]
ItemPath = Annotated[str, Path(description="An item's ID; slashes stay as they are.")]


def problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """`responses` of a route, each a Problem."""
    schema = {"$ref": "#/components/schemas/Problem"}
    return {
        status: {"description": "A problem (RFC 9457)", "content": {MEDIA: {"schema": schema}}}
        for status in statuses
    }


READ = problems(401, 404, 405, 422, 429, 500, 503, 504)
ASK = problems(400, 401, 405, 408, 413, 415, 422, 429, 500, 503, 504)
ADMIN = problems(400, 401, 403, 405, 408, 409, 413, 415, 422, 500, 503)


def service_of(request: Request) -> Service:
    return cast(Service, request.app.state.service)


def encoded(answer: Any) -> bytes:
    return json.dumps(answer, ensure_ascii=False, allow_nan=False, default=str).encode()


def answered(answer: Any) -> Response:
    return Response(encoded(answer), media_type="application/json")


def _asked(request: Request, body: schemas.Ask) -> Asked:
    state = request.state
    state.request_id = body.request_id or state.request_id
    served = service_of(request).model(body.model, "#/model")
    return Asked.check(served, body, state.request_id, state.start)


async def _run(request: Request, asked: Asked, job: Job) -> Timed:
    timed = await service_of(request).batcher.submit(job)
    request.state.logged = {
        "model": asked.served.name,
        "version": asked.served.version,
        "queue_ms": milliseconds(timed.waited),
        "model_ms": milliseconds(timed.computed),
    }
    return timed


async def _recommend_job(asked: Asked, deadline: float) -> Job:
    """A condition looks at every item, so it does not hold up the event loop."""
    if asked.body.where is None:
        return recommend_job(asked, deadline)
    return await asyncio.to_thread(recommend_job, asked, deadline)


@router.post(
    "/v1/recommend", response_model=schemas.RecommendAnswer, responses=ASK, tags=["recommend"]
)
async def recommend(request: Request, body: schemas.RecommendRequest) -> Response:
    """The next items for a history, or for a user of the training data."""
    asked = _asked(request, body)
    job = await _recommend_job(asked, service_of(request).deadline(asked.start))
    return answered(recommend_answer(asked, await _run(request, asked, job)))


@router.post(
    "/v1/recommend/batch", response_model=schemas.BatchAnswer, responses=ASK, tags=["recommend"]
)
async def recommend_batch(request: Request, body: schemas.BatchRequest) -> Response:
    """Up to 256 requests at once; each has its answer or its own problem."""
    service, state = service_of(request), request.state
    state.request_id = body.request_id or state.request_id
    results: list[dict[str, Any]] = [{}] * len(body.requests)
    jobs: dict[int, tuple[Asked, Job]] = {}
    for place, one in enumerate(body.requests):
        try:
            own = _checked(one)
            served = service.model(own.model, "#/model")
            asked = Asked.check(served, own, own.request_id or state.request_id, state.start)
            jobs[place] = asked, await _recommend_job(asked, service.deadline(state.start))
        except (ProblemError, MaskGRError) as error:
            results[place] = _failed(error, state.request_id)
    if jobs:
        futures = await service.batcher.submit_all([job for _, job in jobs.values()])
        for (place, (asked, _)), future in zip(jobs.items(), futures, strict=True):
            try:
                answer = recommend_answer(asked, future.result())
                results[place] = {"status": 200, "answer": answer}
            except (ProblemError, MaskGRError) as error:
                results[place] = _failed(error, asked.request_id)
    took = milliseconds(asyncio.get_running_loop().time() - state.start)
    return answered({"request_id": state.request_id, "results": results, "took_ms": took})


def _checked(one: Any) -> schemas.RecommendRequest:
    try:
        return schemas.RecommendRequest.model_validate(one)
    except ValidationError as error:
        raise ProblemError.invalid(error) from None


def _failed(error: ProblemError | MaskGRError, request_id: str) -> dict[str, Any]:
    problem = error if isinstance(error, ProblemError) else ProblemError(422, str(error))
    return {"status": problem.status, "problem": problem.to_dict(request_id)}


@router.post(
    "/v1/sessions", response_model=schemas.SessionsAnswer, responses=ASK, tags=["recommend"]
)
async def sessions(request: Request, body: schemas.SessionsRequest) -> Response:
    """The next few items, decoded together, as sequences."""
    asked = _asked(request, body)
    job = sessions_job(asked, body, service_of(request).deadline(asked.start))
    return answered(sessions_answer(asked, await _run(request, asked, job)))


@router.post(
    "/v1/explain",
    response_model=schemas.ExplainAnswer,
    responses=ASK
    | {200: {"content": {EVENTS: {"schema": {"type": "string"}}}, "description": "Successful"}},
    tags=["explain"],
)
async def explain(request: Request, body: schemas.ExplainRequest) -> Response:
    """How the items of /v1/recommend are generated, step by step.

    With `Accept: text/event-stream` each step is an event `step` ({"number": 1, "beams": [...]}),
    and what remains of the answer is the event `answer`.
    """
    asked = _asked(request, body)
    job = explain_job(asked, body, service_of(request).deadline(asked.start))
    answer = explain_answer(asked, await _run(request, asked, job))
    if EVENTS in request.headers.get("accept", ""):
        return StreamingResponse(_events(answer), media_type=EVENTS)
    return answered(answer)


def _events(answer: dict[str, Any]) -> Iterator[bytes]:
    steps = answer.pop("steps")
    for number, beams in enumerate(steps, 1):
        yield b"event: step\ndata: " + encoded({"number": number, "beams": beams}) + b"\n\n"
    yield b"event: answer\ndata: " + encoded(answer) + b"\n\n"


@router.get(
    "/v1/similar/{item_id:path}",
    response_model=schemas.SimilarAnswer,
    responses=READ,
    tags=["items"],
)
async def similar(
    request: Request,
    item_id: ItemPath,
    top: Annotated[int, Query(ge=1, le=schemas.TOP)] = 10,
    by: Literal["vectors", "sids"] = "vectors",
    where: Annotated[str | None, Query(max_length=2_000)] = None,
    name: ModelParameter = None,
) -> Response:
    """Items like this one, by learned vectors or by the digits they share."""
    service = service_of(request)
    served = service.model(name, "model")
    own = served.ids[_number(served, item_id)]

    def run(_: list[None]) -> list[Any]:
        most = min(top, len(served.ids))
        return [served.recommender.similar_items(own, most, by=by, where=where)]

    timed = await service.batcher.submit(
        Job(None, run, None, service.deadline(request.state.start))
    )
    found = [
        {**served.item(served.numbers[str(other)]), "score": finite(score)}
        for other, score in timed.value
    ]
    return answered({"model": served.about, "item_id": own, "by": by, "items": found})


@router.get("/v1/items", response_model=schemas.ItemsAnswer, responses=READ, tags=["items"])
async def items(
    request: Request,
    q: Annotated[str, Query(max_length=200, description="Words that an item must have.")] = "",
    id: Annotated[
        list[str], Query(max_length=schemas.HISTORY, description="These items instead.")
    ] = [],  # noqa: B006
    cursor: Annotated[str | None, Query(max_length=20, pattern="^[0-9]+$")] = None,
    limit: Annotated[int, Query(ge=1, le=schemas.PAGE)] = 20,
    name: ModelParameter = None,
) -> Response:
    """Search the catalogue by ID and text columns; `next` is the cursor of the next page."""
    served = service_of(request).model(name, "model")
    if id:
        rows, total, more = [_number(served, one) for one in id], len(id), None
    else:
        rows, total, more = await asyncio.to_thread(served.search, q, int(cursor or 0), limit)
    return answered(
        {
            "model": served.about,
            "items": [served.item(row) for row in rows],
            "next": None if more is None else str(more),
            "total": total,
        }
    )


@router.get(
    "/v1/items/{item_id:path}", response_model=schemas.ItemAnswer, responses=READ, tags=["items"]
)
async def item(request: Request, item_id: ItemPath, name: ModelParameter = None) -> Response:
    """One item with its columns and its semantic ID."""
    served = service_of(request).model(name, "model")
    return answered({**served.item(_number(served, item_id)), "model": served.about})


def _number(served: Served, item_id: str) -> int:
    number = served.number(item_id)
    if number is None:
        raise ProblemError(404, f"there is no item {item_id!r}; search for it at /v1/items?q=")
    return number


@router.get("/v1/sids", response_model=schemas.SidsAnswer, responses=READ, tags=["items"])
async def sids(
    request: Request,
    prefix: Annotated[
        str,
        Query(
            max_length=400,
            pattern=r"^((\d{1,9}|\*)(,(\d{1,9}|\*))*)?$",
            description="First digits of a semantic ID: 12,7; * is any digit.",
        ),
    ] = "",
    examples: Annotated[int, Query(ge=0, le=schemas.EXAMPLES)] = 3,
    name: ModelParameter = None,
) -> Response:
    """The tree of semantic IDs: the codes behind a prefix, how many items each has, examples."""
    served = service_of(request).model(name, "model")
    digits = [None if d == "*" else int(d) for d in prefix.split(",")] if prefix else []
    return answered(await asyncio.to_thread(sids_answer, served, digits, examples))


@router.get("/v1/model", response_model=schemas.ModelsAnswer, responses=READ, tags=["service"])
async def model(request: Request, name: ModelParameter = None) -> Response:
    """The models, what they can do, and their own settings."""
    service = service_of(request)
    chosen = service.model(name, "model").description
    every = [served.description for served in service.models.values()]
    return answered({**chosen, "models": every})


@router.post(
    "/v1/admin/reload", response_model=schemas.ReloadAnswer, responses=ADMIN, tags=["service"]
)
async def reload(request: Request, body: schemas.ReloadRequest) -> Response:
    """Replaces a model without a pause: checked, loaded and warmed up beside the old one."""
    return answered(await service_of(request).reload(body.model, body.path))


@router.get("/livez", response_model=schemas.Health, responses=problems(405), tags=["service"])
async def livez() -> Response:
    """The process runs."""
    return answered({"status": "alive"})


@router.get(
    "/readyz", response_model=schemas.Health, responses=problems(405, 503), tags=["service"]
)
async def readyz(request: Request) -> Response:
    """Requests are welcome; 503 from SIGTERM on."""
    if service_of(request).draining:
        raise ProblemError(503, "the service is shutting down; ask another one")
    return answered({"status": "ready"})


@router.get(
    "/metrics",
    responses=problems(405)
    | {200: {"content": {"text/plain": {"schema": {"type": "string"}}}, "description": "Metrics"}},
    response_class=Response,
    tags=["service"],
)
async def metrics(request: Request) -> Response:
    """For Prometheus."""
    return Response(
        service_of(request).metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8"
    )
