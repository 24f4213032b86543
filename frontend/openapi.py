"""The OpenAPI 3.1 document: made from the table of routes, the structs of bodies and answers, and the bounds.

https://spec.openapis.org/oas/v3.1.0
"""

import copy
import re
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from aiohttp import web

from .bounds import add_bounds
from .protocol import ErrorResponse
from .route import Route

DOCUMENT: web.AppKey[bytes] = web.AppKey("document", bytes)

_SCHEMAS = "#/components/schemas/{name}"
_PARAMETER = re.compile(r"\{(\w+)(?::[^{}]*)?\}")
_VERSION = "1"
_ABOUT = (
    "The HTTP API of an LLM serving engine, compatible with OpenAI's. Not described here: `/v1/responses/{id}` and "
    "what is below it, which answers 404 to every method, since responses are not stored; and the web console (`/`, "
    "`/console/static/{name}`, `/console/events`), whose form may change with each version."
)
_STREAM_TEXT = (
    "Server-sent events, with `stream: true`: `data: ` and a JSON object in each; what ends the stream is part of the "
    "protocol (OpenAI's: `data: [DONE]`). Comments keep silent connections alive. When it fails after it began, "
    'the last event says so (OpenAI\'s: `data: {"error": ...}`).'
)
_ERRORS = {
    400: "The request breaks a rule; the message names the parameter and what is allowed",
    401: "An API key is needed, or the one sent is not one of the server's",
    404: "No such model, or no such path",
    408: "The body did not arrive in time",
    413: "The body is too large",
    415: "The body is compressed, or comes in another transfer coding than chunked",
    417: "An expectation other than 100-continue",
    429: "Too much is waiting, or the first token would come too late",
    500: "The request could not be computed, or there is a defect",
    503: "The engine is starting, recovering, shutting down or lost",
}
_WITHOUT_BODY = (400, 401, 404, 417, 500, 503)
_WITH_RETRY_AFTER = (429, 503)


async def openapi(request: web.Request) -> web.StreamResponse:
    """GET /openapi.json"""
    return web.Response(body=request.app[DOCUMENT], content_type="application/json")


def encode_document(routes: Sequence[Route], models: Sequence[str]) -> bytes:
    """The document as JSON; `models` are names for the examples."""
    return msgspec.json.encode(make_document(routes, models))


def make_document(routes: Sequence[Route], models: Sequence[str]) -> dict[str, Any]:
    """The document, for a server of these models."""
    bodies = [route.body for route in routes if route.body is not None]
    answers = [route.answer for route in routes if not isinstance(route.answer, str)]
    errors = list(dict.fromkeys(route.error for route in routes))
    _, request_schemas = msgspec.json.schema_components(bodies, ref_template=_SCHEMAS)
    _, answer_schemas = msgspec.json.schema_components([*answers, *errors], ref_template=_SCHEMAS)
    for name, schema in request_schemas.items():
        add_bounds(name, schema)
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        path = _PARAMETER.sub(r"{\1}", route.path)
        paths.setdefault(path, {})[route.method.lower()] = _operation(route, models)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "tokenmill",
            "version": _VERSION,
            "description": _ABOUT,
        },
        "paths": paths,
        "components": {
            "schemas": {**answer_schemas, **request_schemas},
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
            "headers": _headers(),
            "responses": {str(status): _error(status, text) for status, text in _ERRORS.items()},
        },
    }


def _operation(route: Route, models: Sequence[str]) -> dict[str, Any]:
    statuses = _ERRORS if route.body is not None else (*_WITHOUT_BODY, *((429,) if route.busy else ()))
    name = getattr(route.handler, "__name__", route.path)
    operation: dict[str, Any] = {
        "operationId": name,
        "summary": route.summary,
        "security": [{"bearer": []}, {"x-api-key": []}, {}] if route.needs_key else [{}],
        "responses": {
            "200": _success(route),
            **_errors(route, statuses),
        },
    }
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in _PARAMETER.findall(route.path)
    ]
    parameters += [
        {"name": given.name, "in": given.place, "description": given.summary, "schema": given.schema}
        for given in route.parameters
    ]
    if parameters:
        operation["parameters"] = parameters
    if route.body is not None:
        content: dict[str, Any] = {"schema": _reference(route.body)}
        if route.example is not None:
            content["example"] = {"model": models[0] if models else "", **copy.deepcopy(route.example)}
        operation["requestBody"] = {"required": True, "content": {"application/json": content}}
    return operation


def _errors(route: Route, statuses: Iterable[int]) -> dict[str, Any]:
    if route.error is ErrorResponse:
        return {str(status): {"$ref": f"#/components/responses/{status}"} for status in statuses}
    told = {status: route.overloaded if status == 503 else status for status in statuses}
    return {str(told[status]): _error(status, _ERRORS[status], route.error) for status in statuses}


def _success(route: Route) -> dict[str, Any]:
    if isinstance(route.answer, str):
        kind: dict[str, Any] = {"type": "object"} if route.answer == "application/json" else {"type": "string"}
        content = {route.answer: {"schema": kind}}
    else:
        content = {"application/json": {"schema": _reference(route.answer)}}
    if route.streams:
        # Without a type: some take it for that of the whole text, others for that of an event with `data` and `event`.
        content["text/event-stream"] = {"schema": {"description": _STREAM_TEXT}}
    headers = {"x-request-id": {"$ref": "#/components/headers/x-request-id"}}
    if route.body is not None:
        headers["x-tokenmill-ignored"] = {"$ref": "#/components/headers/x-tokenmill-ignored"}
    return {"description": route.summary, "headers": headers, "content": content}


def _reference(kind: Any) -> Any:
    (reference,), _ = msgspec.json.schema_components([kind], ref_template=_SCHEMAS)
    return reference


def _error(status: int, text: str, form: Any = ErrorResponse) -> dict[str, Any]:
    headers = {"x-request-id": {"$ref": "#/components/headers/x-request-id"}}
    if status in _WITH_RETRY_AFTER:
        headers["Retry-After"] = {"$ref": "#/components/headers/Retry-After"}
    return {
        "description": text,
        "headers": headers,
        "content": {"application/json": {"schema": _reference(form)}},
    }


def _headers() -> dict[str, Any]:
    texts = {
        "x-request-id": "The name of this request in logs: the one that was sent along, or a new one",
        "Retry-After": "Seconds after which it is worth another try",
        "x-tokenmill-ignored": "Fields of the body that had no effect, percent-encoded",
    }
    whole = {"type": "integer", "minimum": 1}
    return {
        name: {"description": text, "schema": whole if name == "Retry-After" else {"type": "string"}}
        for name, text in texts.items()
    }
