"""What holds for every request: its ID, keys, the body's size and type, headers, log, metrics.

Plain ASGI: Starlette's `BaseHTTPMiddleware` costs more than a small model's answer.
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
import time
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from maskgr.serving.logs import log
from maskgr.serving.problems import ProblemError
from maskgr.serving.schemas import REQUEST_ID
from maskgr.serving.service import Service

CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' https: http: data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
SECURITY = [
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"content-security-policy", CSP.encode()),
]
QUIET = ("/livez", "/readyz", "/metrics")  # asked every few seconds; not worth a line each
ADMIN = "/v1/admin/"


class Manners:
    def __init__(self, app: ASGIApp, service: Service) -> None:
        self.app, self.service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        start, headers = time.monotonic(), Headers(scope=scope)
        state = scope.setdefault("state", {})
        given = headers.get("x-request-id", "")
        state["request_id"] = given if re.match(REQUEST_ID, given) else _new_id()
        state["start"], status = start, 500
        began = False

        async def answer(message: Message) -> None:
            nonlocal status, began
            if message["type"] == "http.response.start":
                status, began = message["status"], True
                self._add_headers(message["headers"], scope)
            await send(message)

        try:
            body = await self._checked(scope, headers, receive)
            await self.app(scope, _replayed(body, receive), answer)
        except ProblemError as problem:
            await problem.response(state["request_id"])(scope, receive, answer)
        except Exception:
            log(
                "internal error",
                level=logging.ERROR,
                exception=True,
                request_id=state["request_id"],
            )
            if began:
                raise
            bug = ProblemError(500, "the service has a bug; its log has the details for this ID")
            await bug.response(state["request_id"])(scope, receive, answer)
        finally:
            self._record(scope, status, time.monotonic() - start)

    async def _checked(self, scope: Scope, headers: Headers, receive: Receive) -> bytes:
        """The body, if the request may be answered at all."""
        path: str = scope["path"]
        if path.startswith("/v1/"):
            self._require_key(headers, admin=path.startswith(ADMIN))
        if scope["method"] not in ("POST", "PUT", "PATCH", "DELETE"):
            return b""
        if path.startswith("/v1/") and not path.startswith(ADMIN):
            self.service.batcher.require_room()  # before the work of reading the body
        limit = self.service.config.body_bytes
        declared = headers.get("content-length", "0")
        if declared.isdecimal() and int(declared) > limit:
            raise _too_large(limit)
        try:
            async with asyncio.timeout(self.service.config.seconds):
                body = await _read(receive, limit)
        except TimeoutError:
            raise ProblemError(
                408,
                "the body did not arrive in time; send it faster",
                headers={"Connection": "close"},
            ) from None
        media = headers.get("content-type", "").partition(";")[0].strip().lower()
        if body and media != "application/json":
            raise ProblemError(
                415,
                f"the body's type is {media or 'not given'}; send Content-Type: application/json",
            )
        return body

    def _require_key(self, headers: Headers, *, admin: bool) -> None:
        service = self.service
        if admin and not service.admin_keys:
            raise ProblemError(
                403, "reloading is off; start the service with --admin-key-file to allow it"
            )
        keys = service.admin_keys if admin else service.keys
        if not keys:
            return
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        given = headers.get("x-api-key") or (bearer if scheme.lower() == "bearer" else "")
        if not keys.hold(given.strip().encode("utf-8", "surrogateescape")):
            raise ProblemError(
                401,
                "this needs a valid key; send it as Authorization: Bearer KEY or X-API-Key: KEY",
                headers={"WWW-Authenticate": "Bearer"},
            )

    def _add_headers(self, headers: list[tuple[bytes, bytes]], scope: Scope) -> None:
        given = {name for name, _ in headers}
        headers.append((b"x-request-id", scope["state"]["request_id"].encode()))
        headers += [header for header in SECURITY if header[0] not in given]
        if b"cache-control" not in given:  # the page's files have an ETag
            fresh = b"no-store" if scope["path"].startswith("/v1/") else b"no-cache"
            headers.append((b"cache-control", fresh))
        if self.service.draining and b"connection" not in given:
            headers.append((b"connection", b"close"))  # the client opens the next one elsewhere

    def _record(self, scope: Scope, status: int, seconds: float) -> None:
        route: Any = scope.get("route")
        path = getattr(route, "path", "none")
        metrics = self.service.metrics
        metrics.requests.labels(path, _method(scope), str(status)).inc()
        metrics.duration.labels(path).observe(seconds)
        if scope["path"] in QUIET and status < 500:
            return
        log(
            "request",
            request_id=scope["state"]["request_id"],
            method=scope["method"],
            path=scope["path"],
            status=status,
            took_ms=round(1000 * seconds, 3),
            **scope["state"].get("logged", {}),
        )


def _new_id() -> str:
    """Tells requests apart, which needs no secret: the system's generator costs a tenth of a
    millisecond."""
    return f"{random.getrandbits(128):032x}"


def _method(scope: Scope) -> str:
    """A known name or `other`, so that nobody fills the metrics with names of their own."""
    known = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
    return scope["method"] if scope["method"] in known else "other"


async def _read(receive: Receive, limit: int) -> bytes:
    """The body, which may come in chunks of any number."""
    parts, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ProblemError(400, "the connection ended before the body did; send it whole")
        part = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise _too_large(limit)
        parts.append(part)
        if not message.get("more_body"):
            return b"".join(parts)


def _too_large(limit: int) -> ProblemError:
    return ProblemError(
        413,
        f"the body has more than {limit:,} bytes; send less at once",
        headers={"Connection": "close"},
    )


def _replayed(body: bytes, receive: Receive) -> Receive:
    """`receive` for the app: the body that was read, then what the connection says."""
    sent = False

    async def own() -> Message:
        nonlocal sent
        if sent:
            return await receive()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return own
