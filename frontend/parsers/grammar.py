"""Parts of Lark grammars, in llguidance's dialect, for outputs that are tool calls."""

import json
from collections.abc import Mapping
from typing import Any

# What json.dumps writes, which is what models have seen; free white space would let small ones drift into it.
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_FREE = ("$ref", "$dynamicRef", "additionalProperties", "patternProperties", "unevaluatedProperties")
_COMBINING = ("allOf", "anyOf", "oneOf", "if", "not", "dependentSchemas")


def literal(text: str) -> str:
    """A grammar's term for exactly this text."""
    return json.dumps(text)


def mark(text: str, special: Mapping[str, int]) -> str:
    """The term for markup: the special token where the vocabulary has it as one, which text does not match."""
    return f"<[{special[text]}]>" if text in special else literal(text)


def arguments_rule(parameters: dict[str, Any] | None) -> str:
    """The body of a rule that matches the arguments for a function's `parameters`, a JSON schema.

    Names that the schema does not list are not generated unless it speaks of them, so a function without parameters
    gets `{}`.
    """
    schema = dict(parameters or {})
    if not any(name in schema for name in (*_FREE, *_COMBINING)):
        if not schema.get("properties"):
            return literal("{}")
        schema["additionalProperties"] = False
    schema["type"] = "object"
    schema["x-guidance"] = _SPACING
    return f"%json {json.dumps(schema)}"


def arguments_name(at: int) -> str:
    """The name of the rule for the arguments of the `at`-th function; it begins a line of its own."""
    return f"arguments_{at}"


def call_rules(tools: Mapping[str, str], arguments_key: str) -> str:
    """Rule `call`, one object with the name and the arguments of one of the `tools` (rule bodies by name)."""
    names = list(tools)
    calls = [
        " ".join([literal(f'{{"name": "{name}", "{arguments_key}": '), arguments_name(at), literal("}")])
        for at, name in enumerate(names)
    ]
    rules = [f"call: {' | '.join(calls)}"]
    rules += [f"{arguments_name(at)}: {tools[name]}" for at, name in enumerate(names)]
    return "\n".join(rules) + "\n"


def repeated(separator: str, most: int) -> str:
    """What follows a first `one`: up to `most - 1` more, each behind the term `separator`."""
    return f" ({separator} one){{0,{most - 1}}}" if most > 1 else ""
