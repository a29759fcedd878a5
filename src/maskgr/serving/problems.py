"""Errors as RFC 9457 problems: application/problem+json with one sentence that says what to do."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from http import HTTPStatus
from typing import Any

from pydantic import ValidationError
from starlette.responses import Response

MEDIA = "application/problem+json"
TITLES = {
    400: "The body is not JSON",
    401: "A key is needed",
    403: "Not allowed",
    404: "Not found",
    405: "Method not allowed",
    408: "The request came too slowly",
    409: "Another reload is under way",
    413: "The body is too large",
    415: "The body is not declared as JSON",
    422: "The request cannot be answered",
    429: "Too many requests",
    500: "An error of the service",
    503: "Not ready",
    504: "Out of time",
}
MOST = 20  # mistakes that are listed


class ProblemError(Exception):
    """An answer that is an error; `errors` are pairs of a JSON pointer and a sentence."""

    def __init__(
        self,
        status: int,
        detail: str,
        *,
        errors: Iterable[tuple[str, str]] = (),
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(detail)
        self.status, self.detail, self.headers = status, detail, dict(headers or {})
        self.errors = list(errors)

    @classmethod
    def at(cls, pointer: str, detail: str, status: int = 422) -> ProblemError:
        return cls(status, detail, errors=[(pointer, detail)])

    @classmethod
    def invalid(cls, error: ValidationError) -> ProblemError:
        """The mistakes that pydantic found in a body."""
        found = error.errors(include_url=False, include_input=False)
        return cls.of_errors([("body", *e["loc"]) for e in found], found)

    @classmethod
    def of_errors(
        cls, places: Iterable[tuple[Any, ...]], errors: Iterable[Mapping[str, Any]]
    ) -> ProblemError:
        """From FastAPI's or pydantic's list of errors and where each is: ("body", "history", 3)."""
        found = list(errors)
        if any(error["type"] == "json_invalid" for error in found):
            why = found[0].get("ctx", {}).get("error", "it cannot be parsed")
            return cls(400, f"the body is not JSON ({why}); send a JSON object")
        pointed = dict.fromkeys(
            (pointer(place), _sentence(place, error))
            for place, error in zip(places, found, strict=True)
        )
        return cls(422, next(iter(pointed))[1], errors=list(pointed)[:MOST])

    def to_dict(self, request_id: str | None) -> dict[str, Any]:
        return {
            "type": "about:blank",
            "title": TITLES.get(self.status, HTTPStatus(self.status).phrase),
            "status": self.status,
            "detail": self.detail,
            "instance": request_id and f"urn:maskgr:request:{request_id}",
            "errors": [{"pointer": place, "detail": detail} for place, detail in self.errors],
        }

    def response(self, request_id: str | None) -> Response:
        content = json.dumps(self.to_dict(request_id))
        return Response(content, self.status, self.headers, media_type=MEDIA)


def pointer(place: tuple[Any, ...]) -> str:
    """("body", "history", 3, "str") as #/history/3; a parameter is its name."""
    where, *keys = place
    if where != "body":
        return str(keys[0]) if keys else str(where)
    # pydantic appends which member of a union it tried: no key of the body
    kept = [key for key in keys if key not in ("str", "int", "constrained-str")]
    return "#" + "".join(f"/{str(k).replace('~', '~0').replace('/', '~1')}" for k in kept)


def _sentence(place: tuple[Any, ...], error: Mapping[str, Any]) -> str:
    name, kind, context = pointer(place).removeprefix("#/"), error["type"], error.get("ctx", {})
    if name in ("", "#"):
        return "the body is not a JSON object; send one as /docs shows"
    if kind == "missing":
        return f"{name} is missing; give it"
    if kind == "extra_forbidden":
        return f"there is no key {name}; remove it, or see /docs for the keys"
    if kind in ("too_long", "too_short"):
        most = context.get("max_length", context.get("min_length"))
        word = "at most" if kind == "too_long" else "at least"
        return f"{name} has {context.get('actual_length')} entries; give {word} {most}"
    said = str(error["msg"])
    return f"{name}: {said[:1].lower()}{said[1:]}; see /docs"
