"""schemathesis asks what the OpenAPI document says that can be asked, and compares the answers with it."""

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi import checks as openapi_checks

from frontend.routes import ROUTES

from ..fake_engine import FakeEngine
from .process import Frontend, wait_until
from .test_lifecycle import STATS

CHECKS = [
    schemathesis.checks.not_a_server_error,
    openapi_checks.status_code_conformance,
    openapi_checks.content_type_conformance,
    openapi_checks.response_headers_conformance,
    openapi_checks.response_schema_conformance,
]


def load(frontend: Frontend) -> Any:
    return schemathesis.openapi.from_dict(frontend.request("GET", "/openapi.json").json())


MODES = [GenerationMode.POSITIVE, GenerationMode.NEGATIVE]
OPERATIONS = [
    # Without a body there is nothing that could be wrong: every text is a path.
    (route.method, route.path.replace("{id:.+}", "{id}"), mode)
    for route in ROUTES
    for mode in (MODES if route.body is not None else MODES[:1])
]


@pytest.mark.parametrize(("method", "path", "mode"), OPERATIONS, ids=lambda value: getattr(value, "value", value))
def test_answers_are_what_the_document_says(
    frontend: Frontend, engine: FakeEngine, method: str, path: str, mode: GenerationMode
) -> None:
    engine.publish(STATS)
    operation = load(frontend)[path][method]
    url = f"http://127.0.0.1:{frontend.port}"

    @given(operation.as_strategy(generation_mode=mode), st.booleans())
    @settings(max_examples=10, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    def check(case: Any, served: bool) -> None:
        if served and isinstance(case.body, dict) and "model" in case.body:
            case.body["model"] = "tiny"
        if path == "/debug/trace":
            case.query = {**(case.query or {}), "seconds": 0.1}
        response = case.call(base_url=url, timeout=20)
        case.validate_response(response, checks=CHECKS)

    check()
    engine.publish(STATS)  # what it said before may be long ago
    wait_until(lambda: frontend.request("GET", "/health/ready").status == 200)
