"""What a request's output must match: OpenAI's `response_format`, and the names that vLLM's clients send."""

import json
from typing import Any

from ipc.messages import Grammar

from . import protocol
from .errors import ApiError

_WHITESPACE = "JSON is written with at most one space after a comma or colon"


def grammar_of(body: protocol.SamplingFields) -> tuple[Grammar | None, str]:
    """The grammar that a body asks for, and the parameter that it came in; None for free text."""
    found = [*_response_format(body.response_format), *_structured_outputs(body.structured_outputs), *_guided(body)]
    if not found:
        return None, ""
    if len(found) > 1:
        first, second = found[0][1], found[1][1]
        raise ApiError(400, f"{second}: only one grammar may be given, and there is {first} already", param=second)
    return found[0]


def _response_format(asked: protocol.ResponseFormat | None) -> list[tuple[Grammar, str]]:
    if asked is None or asked.type == "text":
        return []
    if asked.type == "json_object":
        return [(Grammar("json_object", ""), "response_format")]
    if asked.type != "json_schema":
        name = "response_format.type"
        raise ApiError(400, f"{name} must be text, json_object or json_schema, not {asked.type[:64]!r}", param=name)
    name = "response_format.json_schema"
    if asked.json_schema is None:
        raise ApiError(400, f"{name} is required with type json_schema", param=name)
    if asked.json_schema.schema is None:
        raise ApiError(400, f"{name}.schema is required", param=f"{name}.schema")
    return [(_json_schema(asked.json_schema.schema), f"{name}.schema")]


def _structured_outputs(asked: protocol.StructuredOutputs | None) -> list[tuple[Grammar, str]]:
    if asked is None:
        return []
    name = "structured_outputs"
    _refuse(f"{name}.structural_tag", asked.structural_tag)
    _refuse(f"{name}.whitespace_pattern", asked.whitespace_pattern, _WHITESPACE)
    instead = 'write "additionalProperties": false into the schema'
    _refuse(f"{name}.disable_additional_properties", asked.disable_additional_properties or None, instead)
    found = _named(f"{name}.", asked.json, asked.regex, asked.choice, asked.grammar)
    if asked.json_object:
        found.append((Grammar("json_object", ""), f"{name}.json_object"))
    if not found:
        raise ApiError(400, f"{name} needs one of json, json_object, regex, choice and grammar", param=name)
    return found


def _refuse(name: str, value: Any, why: str = "") -> None:
    """What would change the output in a way that is not done here; vLLM's clients send most of it as null."""
    if value is not None:
        raise ApiError(400, f"{name} is not supported" + (why and f": {why}"), param=name)


def _guided(body: protocol.SamplingFields) -> list[tuple[Grammar, str]]:
    _refuse("guided_whitespace_pattern", body.guided_whitespace_pattern, _WHITESPACE)
    return _named("guided_", body.guided_json, body.guided_regex, body.guided_choice, body.guided_grammar)


def _named(
    prefix: str, schema: protocol.JsonSchema | str | None, regex: str | None, choice: list[str] | None, lark: str | None
) -> list[tuple[Grammar, str]]:
    found = []
    if schema is not None:
        found.append((_json_schema(schema), f"{prefix}json"))
    if regex is not None:
        found.append((Grammar("regex", regex), f"{prefix}regex"))
    if choice is not None:
        found.append((Grammar("choice", _encode(choice)), f"{prefix}choice"))
    if lark is not None:
        found.append((Grammar("lark", lark), f"{prefix}grammar"))
    return found


def _json_schema(schema: protocol.JsonSchema | str) -> Grammar:
    return Grammar("json_schema", schema if isinstance(schema, str) else _encode(schema))


def _encode(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
