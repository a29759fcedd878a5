"""The document is true: what it allows is answered as it says, whatever is sent."""

from __future__ import annotations

from typing import Any

import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from starlette.testclient import TestClient

from maskgr.serving.app import create_app
from maskgr.serving.problems import TITLES
from maskgr.serving.served import Served
from maskgr.serving.service import Service, ServiceConfig

EXAMPLES = 10  # of each endpoint, valid and again invalid
PLAIN = ("/livez", "/readyz", "/metrics")
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]


def test_generated_requests_are_answered_as_documented(models: list[Served]) -> None:
    service = Service(models, ServiceConfig(seconds=120, window=0))
    schema = schemathesis.openapi.from_asgi("/openapi.json", create_app(service))
    tested = 0
    for found in schema.get_all_operations():
        operation = found.ok()
        for mode in GenerationMode:
            if operation.path in PLAIN and mode is GenerationMode.NEGATIVE:
                continue  # nothing can be wrong

            @settings(
                max_examples=EXAMPLES,
                deadline=None,
                derandomize=True,
                database=None,
                suppress_health_check=list(HealthCheck),
            )
            @given(case=operation.as_strategy(generation_mode=mode))
            def check(case: Any) -> None:
                case.call_and_validate(checks=CHECKS)

            check()
            tested += 1
    service.batcher.close()
    assert tested == 2 * 10 + len(PLAIN)


def test_problems_and_keys_are_documented(models: list[Served]) -> None:
    service = Service(models, ServiceConfig(keys=("k",)))
    document = TestClient(create_app(service)).get("/openapi.json").json()
    service.batcher.close()
    assert set(document["components"]["securitySchemes"]) == {"bearer", "key"}
    documented = set()
    for path, methods in document["paths"].items():
        for operation in methods.values():
            assert ("security" in operation) == path.startswith("/v1/")
            for status, answer in operation["responses"].items():
                if status != "200":
                    documented.add(int(status))
                    assert list(answer["content"]) == ["application/problem+json"]
    assert documented == set(TITLES)
    assert "HTTPValidationError" not in document["components"]["schemas"]
