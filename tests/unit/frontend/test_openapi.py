"""The OpenAPI document, judged by the validator of the specification and by the routes there are."""

import re
from typing import Any, cast

import jsonschema
import msgspec
import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator

from config.schema import ServerConfig
from frontend import protocol
from frontend.app import make_app
from frontend.console import Console
from frontend.openapi import make_document
from frontend.routes import ROUTES
from frontend.service import Service
from ipc.messages import ChatMessage, ChatPrompt, ModelInfo, SamplingParams, ToolCall
from ipc.validation import InvalidRequest, validate
from tools.bench_frontend.specification import frontend_spec

DOCUMENT = make_document(ROUTES, ["tiny"])
BODIES = [route for route in ROUTES if route.body is not None]


def test_it_is_valid() -> None:
    assert list(OpenAPIV31SpecValidator(DOCUMENT).iter_errors()) == []


def test_it_has_every_route_once() -> None:
    found = {(method.upper(), path) for path, methods in DOCUMENT["paths"].items() for method in methods}
    assert len(found) == len(ROUTES)
    assert ("GET", "/v1/models/{id}") in found
    names = [operation["operationId"] for methods in DOCUMENT["paths"].values() for operation in methods.values()]
    assert len(set(names)) == len(names)


def test_every_path_that_is_answered_is_described_or_named_as_left_out() -> None:
    spec = frontend_spec(ModelInfo(("m",), 100, 100, 0, True), "", "", "", 0, ServerConfig())
    service = Service(spec, cast(Any, None), cast(Any, None))
    app = make_app(
        service, cast(Any, None), cast(Any, None), cast(Any, None), Console(spec, service, lambda wanted: None)
    )
    answered = {resource.canonical for resource in app.router.resources()}
    named = set(re.findall(r"`(/[^`]*)`", DOCUMENT["info"]["description"]))
    assert named == answered - set(DOCUMENT["paths"])


@pytest.mark.parametrize("name", ["get_weather", "a" * 64, "", "a" * 65, "two words", "naïve"])
@pytest.mark.parametrize("kind", ["FunctionDefinition", "ResponsesTool", "MessagesTool"])
def test_names_of_functions_are_described_as_they_are_checked(kind: str, name: str) -> None:
    """The pattern is that of OpenAI's and Anthropic's references."""
    of = DOCUMENT["components"]["schemas"][kind]["properties"]["name"]
    (schema,) = [branch for branch in of.get("anyOf", [of]) if branch["type"] == "string"]
    allowed = re.fullmatch("[a-zA-Z0-9_-]{1,64}", name) is not None
    validator = jsonschema.Draft202012Validator(schema)
    assert validator.is_valid(name) == allowed
    message = ChatMessage("assistant", "", tool_calls=(ToolCall("1", name, "{}"),))
    model = ModelInfo(("m",), 100, 100, 0, has_chat_template=True)
    if allowed:
        validate(ChatPrompt((message,)), SamplingParams(), model)
    else:
        with pytest.raises(InvalidRequest, match="1 to 64 of the characters"):
            validate(ChatPrompt((message,)), SamplingParams(), model)


def test_only_bare_health_needs_no_key() -> None:
    free = {path for path, methods in DOCUMENT["paths"].items() if methods.get("get", {}).get("security") == [{}]}
    assert free >= {"/health/live", "/health/ready"}
    assert not any(path.startswith("/v1/") for path in free)


def request_schemas() -> list[tuple[str, dict[str, Any]]]:
    """Every object that a request can have, found from its body on."""
    schemas, found = DOCUMENT["components"]["schemas"], {}

    def visit(node: Any) -> None:
        if isinstance(node, dict):
            name = str(node.get("$ref", "")).rpartition("/")[2]
            if name and name not in found:
                found[name] = schemas[name]
                visit(schemas[name])
            for inner in node.values():
                visit(inner)
        elif isinstance(node, list):
            for inner in node:
                visit(inner)

    for route in BODIES:
        visit(DOCUMENT["paths"][route.path]["post"]["requestBody"])
    return list(found.items())


# Token ids or several prompts, of which each has a bound of its own.
PROMPTS = {("CompletionRequest", "prompt"), ("EmbeddingRequest", "input")}
# Accepted and without effect, or refused whatever they hold.
FREE = {"user", "metadata", "store", "best_of", "tools", "functions", "modalities", "audio", "tool_calls", "dimensions"}


@pytest.mark.parametrize(
    ("name", "schema"), request_schemas(), ids=lambda value: value if isinstance(value, str) else ""
)
def test_every_number_and_list_of_a_request_has_its_bound(name: str, schema: dict[str, Any]) -> None:
    bound = {"integer": "maximum", "number": "maximum", "array": "maxItems"}
    for field, of in schema.get("properties", {}).items():
        for branch in (of, *of.get("anyOf", ())):
            if branch.get("type") in bound and field not in FREE and (name, field) not in PROMPTS:
                assert bound[branch["type"]] in branch, f"{name}.{field}: frontend/bounds.py has no bound for it"


@pytest.mark.parametrize("route", BODIES, ids=lambda route: route.path)
def test_examples_fit_the_type(route: Any) -> None:
    content = DOCUMENT["paths"][route.path]["post"]["requestBody"]["content"]["application/json"]
    assert content["example"]["model"] == "tiny"
    msgspec.convert(content["example"], route.body)


def test_bounds_are_those_that_are_enforced() -> None:
    schema = DOCUMENT["components"]["schemas"]["ChatRequest"]["properties"]
    (temperature,) = [branch for branch in schema["temperature"]["anyOf"] if branch["type"] == "number"]
    assert (temperature["minimum"], temperature["maximum"]) == (0, 2)  # OpenAI's
    (n,) = [branch for branch in schema["n"]["anyOf"] if branch["type"] == "integer"]
    assert (n["minimum"], n["maximum"]) == (1, 16)
    assert set(protocol.ChatRequest.__struct_fields__) == set(schema)


@pytest.mark.parametrize(
    ("allowed", "valid"),
    [
        ({"mode": "auto", "tools": [{"type": "function", "function": {"name": "f"}}]}, True),
        ({"mode": "none", "tools": [{"type": "function", "function": {"name": "f"}}]}, False),
        ({"mode": "required", "tools": []}, False),
        ({"mode": "required", "tools": [{"type": "function", "function": {"name": "no good"}}]}, False),
    ],
)
def test_allowed_tools_of_chats_are_described(allowed: dict[str, Any], valid: bool) -> None:
    choice = {"$ref": "#/components/schemas/ToolChoice", "components": DOCUMENT["components"]}
    validator = jsonschema.Draft202012Validator(choice)
    assert validator.is_valid({"type": "allowed_tools", "allowed_tools": allowed}) == valid
