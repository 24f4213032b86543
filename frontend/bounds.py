"""The bounds of requests in the words of JSON Schema, for the OpenAPI document and for errors about bodies
that do not fit their type. `ipc.validation` is what enforces them.

What depends on the model (token ids, `top_k`, lengths) has only the part here that does not.
"""

from typing import Any

from ipc import validation

from . import requests

_INT64 = 1 << 63
_TOKEN_ID = {"minimum": 0, "maximum": (1 << 31) - 1}
_PENALTY = {"minimum": -validation.MAX_PENALTY, "maximum": validation.MAX_PENALTY}
_LENGTH = {"minimum": 1, "maximum": _INT64 - 1}
_CHOICES = {"minItems": 1, "maxItems": validation.MAX_GRAMMAR_CHOICES, "items": {"type": "string", "minLength": 1}}
_IDS = {"type": "integer", **_TOKEN_ID}
_PROMPTS = {"minItems": 1, "items": {"anyOf": [{"type": "string"}, _IDS, {"type": "array", "items": _IDS}]}}
_LOGPROBS = {"minimum": 0, "maximum": validation.MAX_LOGPROBS}

# By property and JSON type: a property may be of several, such as `logprobs` of the two endpoints.
_BOUNDS: dict[str, dict[str, dict[str, Any]]] = {
    "max_tokens": {"integer": _LENGTH},
    "max_completion_tokens": {"integer": _LENGTH},
    "max_output_tokens": {"integer": _LENGTH},
    "stop_sequences": {
        "array": {
            "maxItems": validation.MAX_STOP_STRINGS,
            "items": {"type": "string", "maxLength": validation.MAX_STOP_BYTES},
        },
    },
    "min_tokens": {"integer": {"minimum": 0, "maximum": _INT64 - 1}},
    "temperature": {"number": {"minimum": 0, "maximum": validation.MAX_TEMPERATURE}},
    "top_p": {"number": {"exclusiveMinimum": 0, "maximum": 1}},
    "min_p": {"number": {"minimum": 0, "maximum": 1}},
    "top_k": {"integer": {"minimum": -1, "maximum": (1 << 31) - 1}},
    "n": {"integer": {"minimum": 1, "maximum": validation.MAX_CHOICES}},
    "seed": {"integer": {"minimum": -_INT64, "maximum": _INT64 - 1}},
    "presence_penalty": {"number": _PENALTY},
    "frequency_penalty": {"number": _PENALTY},
    "repetition_penalty": {
        "number": {"minimum": validation.MIN_REPETITION_PENALTY, "maximum": validation.MAX_REPETITION_PENALTY}
    },
    "logit_bias": {
        "object": {
            "maxProperties": validation.MAX_LOGIT_BIAS,
            "propertyNames": {"pattern": "^[0-9]{1,19}$"},
            "additionalProperties": {
                "type": "number",
                "minimum": -validation.MAX_BIAS,
                "maximum": validation.MAX_BIAS,
            },
        }
    },
    "stop": {
        "string": {"maxLength": validation.MAX_STOP_BYTES},
        "array": {
            "maxItems": validation.MAX_STOP_STRINGS,
            "items": {"type": "string", "maxLength": validation.MAX_STOP_BYTES},
        },
    },
    "stop_token_ids": {
        "array": {"maxItems": validation.MAX_STOP_TOKENS, "items": _IDS},
    },
    "allowed_token_ids": {"array": {"maxItems": (1 << 31) - 1, "items": _IDS}},
    "bad_words": {
        "array": {
            "maxItems": validation.MAX_BAD_WORDS,
            "items": {"type": "string", "maxLength": validation.MAX_BAD_WORD_BYTES},
        },
    },
    "prompt_logprobs": {"integer": _LOGPROBS},
    "choice": {"array": _CHOICES},
    "guided_choice": {"array": _CHOICES},
    "tokens": {"array": {"maxItems": validation.MAX_DETOKENIZE, "items": _IDS}},
    "logprobs": {"integer": _LOGPROBS},
    "top_logprobs": {"integer": _LOGPROBS},
    "stop_on_loop": {"integer": {"minimum": 0, "maximum": validation.MAX_LOOP_REPEATS, "not": {"const": 1}}},
    "priority": {"integer": {"minimum": -validation.MAX_PRIORITY, "maximum": validation.MAX_PRIORITY}},
    "ttft_target_ms": {
        "number": {"minimum": validation.MIN_TTFT_TARGET_MS, "maximum": validation.MAX_TTFT_TARGET_MS},
    },
    "cache_pin_seconds": {"number": {"minimum": 0, "maximum": validation.MAX_PIN_SECONDS}},
    "cache_salt": {"string": {"maxLength": requests.MAX_SALT}},
    "messages": {"array": {"minItems": 1, "maxItems": validation.MAX_MESSAGES}},
    "content": {"array": {"maxItems": requests.MAX_PARTS}},
    "tool_call_id": {"string": {"maxLength": validation.MAX_TOOL_CALL_ID}},
    "prompt": {"string": {"minLength": 1}, "array": _PROMPTS},
}


# Of single types, where a property is bounded otherwise than elsewhere.
_OF_TYPE: dict[tuple[str, str], dict[str, dict[str, Any]]] = {
    ("MessagesRequest", "temperature"): {"number": {"minimum": 0, "maximum": 1}},
    ("CompletionRequest", "max_tokens"): {"integer": {**_LENGTH, "minimum": 0}},
    ("EmbeddingRequest", "input"): {"string": {"minLength": 1}, "array": _PROMPTS},
    ("ChatRequest", "tools"): {"array": {"maxItems": validation.MAX_TOOLS}},
    ("AllowedTools", "tools"): {"array": {"minItems": 1}},
    ("Message", "name"): {"string": {"maxLength": validation.MAX_NAME}},
    ("ToolCall", "id"): {"string": {"maxLength": validation.MAX_TOOL_CALL_ID}},
    # Of functions: those that a request defines, that it chooses, and that an earlier turn called.
    **{
        (kind, "name"): {"string": {"pattern": f"^{validation.TOOL_NAME.pattern}$"}}
        for kind in (
            "FunctionDefinition",
            "NamedFunction",
            "FunctionCall",
            "ResponsesTool",
            "ResponsesToolChoice",
            "ResponsesToolName",
            "InputItem",
            "MessagesTool",
            "MessagesToolChoice",
            "MessageBlock",
        )
    },
}


def add_bounds(kind: str, schema: dict[str, Any]) -> None:
    """Write the bounds into the schema of `kind`, a type of requests."""
    for name, property in schema.get("properties", {}).items():
        bounds = _OF_TYPE.get((kind, name)) or _BOUNDS.get(name, {})
        for branch in (property, *property.get("anyOf", ())):
            branch.update(bounds.get(branch.get("type"), {}))
