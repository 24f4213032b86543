"""Why a body does not fit its type: msgspec's ValidationError with the parameter's name and what is allowed there.

msgspec tells where the mismatch is, but of enums and of numbers that are too large not what would be right. That is
read from the type's JSON Schema with its bounds, the same that the OpenAPI document shows.
"""

import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import msgspec

from .bounds import add_bounds
from .errors import ApiError

Schema = dict[str, Any]

_AT = re.compile(r" - at (`key` in )?`\$\.?([^`]*)`$")
_MISSING = re.compile(r"Object missing required field `(\w+)`")
_ENUM = "Invalid enum value "
_RANGE = re.compile(r"(?:Number|Integer value) out of range|Expected `[^`]*(?:int|float)[^`]*` [<>]")
_STEP = re.compile(r"\w+|\[\d+\]|\[\.\.\.\]")
_VALUES = "[...]"  # the values of an object, whose keys msgspec does not tell
_MAX_SHOWN = 64  # characters of a value


def invalid_body(error: msgspec.ValidationError, kind: Any) -> ApiError:
    """400 for a body that does not fit `kind`, the type that it was decoded or converted to."""
    text = str(error)
    at = _AT.search(text)
    words, path = (text[: at.start()], at[2]) if at else (text, "")
    name = path.partition(_VALUES)[0]
    if missing := _MISSING.match(words):
        name = f"{name}.{missing[1]}" if name else missing[1]
        return ApiError(400, f"{name} is required", param=name)
    if not name:
        return ApiError(400, f"the body must be a JSON object: {words}")
    where = name if name == path else f"{name}: one of its values"
    if at and at[1]:
        where = f"{name}: one of its keys"
    elif allowed := _allowed(words, list(_places(kind, path))):
        return ApiError(400, f"{where} {allowed}", param=name)
    elif _RANGE.match(words):
        words = "the number is too large"
    return ApiError(400, f"{where}: {words}", param=name)


def _allowed(words: str, places: list[Schema]) -> str:
    """What must stand at a place with these schemas; "" where msgspec's words say it, or nothing is known."""
    if options := [str(option) for place in places for option in place.get("enum", ())]:
        if any(place.get("type") == "object" for place in places):
            options.append("an object")
        told = f"must be {'one of ' if len(options) > 1 else ''}{', '.join(options)}"
        if words.startswith(_ENUM):
            given = words.removeprefix(_ENUM)[1:-1]  # without msgspec's quotes, which escape nothing
            told += f", not {given[:_MAX_SHOWN]!r}"
        return told
    if _RANGE.match(words):
        return next((told for place in places if (told := _range(place))), "")
    return ""


def _range(place: Schema) -> str:
    if place.get("type") not in ("integer", "number") or "maximum" not in place:
        return ""
    high = _shown(place["maximum"])
    if "exclusiveMinimum" in place:
        return f"must be above {_shown(place['exclusiveMinimum'])} and at most {high}"
    return f"must be between {_shown(place['minimum'])} and {high}"


def _shown(bound: float) -> str:
    return str(bound) if isinstance(bound, int) else f"{bound:.7g}"


@cache
def _schemas(kind: Any) -> tuple[Schema, dict[str, Schema]]:
    (schema,), named = msgspec.json.schema_components([kind], ref_template="{name}")
    for name, component in named.items():
        add_bounds(name, component)
    return schema, named


def _places(kind: Any, path: str) -> Iterator[Schema]:
    """Schemas of what may stand at a path such as `messages[0].role`, unions taken apart."""
    schema, named = _schemas(kind)

    def branches(schema: Schema) -> Iterator[Schema]:
        if "$ref" in schema:
            yield from branches(named[schema["$ref"]])
        elif "anyOf" in schema:
            for branch in schema["anyOf"]:
                yield from branches(branch)
        else:
            yield schema

    places = list(branches(schema))
    for step in _STEP.findall(path):
        places = [branch for place in places if (inner := _inner(place, step)) for branch in branches(inner)]
    yield from places


def _inner(place: Schema, step: str) -> Schema | None:
    if step == _VALUES:
        found = place.get("additionalProperties")
    elif step.startswith("["):
        found = place.get("items")
    else:
        found = place.get("properties", {}).get(step)
    return found if isinstance(found, dict) else None
