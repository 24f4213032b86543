"""Parts of Lark grammars, in llguidance's dialect, for outputs that are tool calls."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

# What json.dumps writes, which is what models have seen; free white space would let small ones drift into it.
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_FREE = ("$ref", "$dynamicRef", "additionalProperties", "patternProperties", "unevaluatedProperties")
_ANY = r"(.|\n)"  # character, as a regular expression
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


ANY_ARGUMENTS = f"%json {json.dumps({'type': 'object', 'x-guidance': _SPACING})}"


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


def repeated(separator: str, most: int | None, rule: str = "one") -> str:
    """What follows a first `rule`: up to `most - 1` more, each behind the term `separator`; None: any number."""
    return "" if most == 1 else f" ({separator} {rule}){'*' if most is None else f'{{0,{most - 1}}}'}"


def free_text(without: str, *, begin: str = _ANY) -> str:
    """A terminal `TEXT`: any text but the empty one that does not have `without` in it, and begins with `begin`.

    `begin` is a regular expression for the first characters. Special tokens are no text.
    """
    return f"TEXT: /{begin}{_ANY}*/ & ~/{_ANY}*{_escaped(without)}{_ANY}*/\n"


def calls_in_text(opening: str, special: Mapping[str, int], *, most: int | None, marks: Sequence[str]) -> str:
    """Rules of an output that is free text with `most` times `opening` and a rule `one` in it.

    The text itself does not have `opening`, so whatever a parser takes for a call is one. `marks`: special tokens that
    may stand in it.
    """
    shown = " | ".join(mark(text, special) for text in marks)
    text = f"(TEXT? ({shown}))* TEXT?" if shown else "TEXT?"
    often = "*" if most is None else f"{{0,{most}}}"
    rules = f"text: {text}\n" + free_text(opening)
    if opening in special:
        return f"start: (text {mark(opening, special)} one){often} text\n" + rules
    begun = f"(TEXT? ({shown}))* before" if shown else "before"
    # Lazy: it ends with the first opening, behind which the call must follow.
    return f"start: ({begun} one){often} text\nbefore[lazy]: /{_ANY}*{_escaped(opening)}/\n" + rules


def _escaped(text: str) -> str:
    return re.escape(text).replace("/", r"\/")
