"""Which JSON schemas are refused although llguidance compiles them: it would generate more than they allow.

llguidance names the keywords that it does not implement, but lets pass those that its draft of the standard (2020-12
unless `$schema` says otherwise) does not know. For a standard's reader those mean nothing; whoever wrote them meant
something.
"""

from collections.abc import Iterator
from typing import Any

_MAPS = {"properties", "patternProperties", "$defs", "definitions"}
_LISTS = {"anyOf", "oneOf", "allOf", "prefixItems"}
_SCHEMAS = {"items", "additionalItems", "additionalProperties"}  # "items" of older drafts may be a list
_VALUES = {
    *("$ref", "const", "enum", "type", "minItems", "maxItems", "required", "minProperties", "maxProperties"),
    *("minLength", "maxLength", "pattern", "format", "multipleOf"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
}
_ANNOTATIONS = {
    *("$anchor", "$schema", "$id", "id", "$comment", "title", "description", "default", "readOnly", "writeOnly"),
    *("deprecated", "examples", "example", "contentMediaType", "contentEncoding", "discriminator"),
}
# Known to the standard, but not to llguidance, which says so itself.
_LEFT_TO_LLGUIDANCE = {
    *("not", "if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems", "propertyNames"),
    *("dependentRequired", "dependentSchemas", "unevaluatedItems", "unevaluatedProperties", "contentSchema"),
    *("$dynamicRef", "$dynamicAnchor", "$vocabulary"),
}
_KNOWN = _MAPS | _LISTS | _SCHEMAS | _VALUES | _ANNOTATIONS | _LEFT_TO_LLGUIDANCE


class UnsupportedSchema(ValueError):
    """The text says what is not supported, for the client."""


def check_keywords(schema: Any) -> None:
    """Raise `UnsupportedSchema` for a schema that would be weakened."""
    todo = [schema]
    while todo:
        node = todo.pop()
        if not isinstance(node, dict):
            continue  # true and false; anything else is for llguidance to refuse
        for name in node:
            if name not in _KNOWN and not name.startswith("x-"):
                raise UnsupportedSchema(f"unknown keyword {name[:64]!r} in the schema")
        _check_properties(node)
        todo.extend(_subschemas(node))


def _check_properties(node: dict[str, Any]) -> None:
    """Names of properties that are not listed may repeat in the output, and then count once."""
    least = node.get("minProperties", 0)
    required = node.get("required", [])
    if isinstance(least, int) and isinstance(required, list) and least > max(1, len(required)):
        raise UnsupportedSchema("minProperties above the number of required properties is not supported")


def _subschemas(node: dict[str, Any]) -> Iterator[Any]:
    for name in _MAPS:
        if isinstance(found := node.get(name), dict):
            yield from found.values()
    for name in _LISTS | _SCHEMAS:
        found = node.get(name)
        if isinstance(found, list):
            yield from found
        elif found is not None:
            yield found
