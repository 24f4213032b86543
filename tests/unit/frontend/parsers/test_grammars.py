"""Grammars of demanded calls, judged by llguidance itself and by jsonschema."""

import json
import random
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer

from frontend.parsers import TOOL_PARSERS, OutputFormat, call_parser
from frontend.parsers.grammar import arguments_rule
from tests.unit.frontend.parsers.outputs import joined, parse

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 8},
        "unit": {"$ref": "#/$defs/Unit"},
        "days": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "maxItems": 2},
    },
    "required": ["city", "unit"],
    "$defs": {"Unit": {"enum": ["°C", "°F"]}},
}
CHOICE = {"type": "object", "anyOf": [{"properties": {"a": {"const": 1}}, "required": ["a"]}]}
TOOLS: dict[str, dict[str, Any] | None] = {"get_weather": WEATHER, "get_weather_2": CHOICE, "get_time": None}
TOKENIZER = LLTokenizer("byte")  # a token for each byte, and the end


def matcher(tools: str, *, most: int, **functions: dict[str, Any] | None) -> LLMatcher:
    rules = {name: arguments_rule(parameters) for name, parameters in (functions or TOOLS).items()}
    source = LLMatcher.grammar_from_lark(call_parser(tools).grammar(rules, {}, most=most))
    assert LLMatcher.validate_grammar(source, TOKENIZER) == ""
    return LLMatcher(TOKENIZER, source)


def accepts(tools: str, text: str, *, most: int = 4) -> bool:
    found = matcher(tools, most=most)
    tokens = TOKENIZER.tokenize_str(text)
    return found.try_consume_tokens(tokens) == len(tokens) and found.is_accepting()


def sample(found: LLMatcher, seed: int) -> str:
    """What a model of random bytes writes under the grammar, preferring to end."""
    choose = random.Random(seed)
    written: list[int] = []
    while not found.is_stopped():
        allowed = [token for token, bias in enumerate(found.compute_logit_bias()) if bias]
        if TOKENIZER.eos_token in allowed:
            break
        # Closing brackets and quotes more often, so that it ends soon.
        likely = [token for token in allowed if chr(token) in '"}],']
        token = choose.choice(likely if likely and choose.random() < 0.5 else allowed)
        assert found.consume_token(token)
        written.append(token)
        assert len(written) < 3000
    return bytes(written).decode()


@pytest.mark.parametrize("tools", TOOL_PARSERS)
def test_whatever_is_sampled_is_calls_with_valid_arguments(tools: str) -> None:
    for seed in range(6):
        output = sample(matcher(tools, most=3), seed)
        parsed = parse(OutputFormat(tools, tuple(TOOLS)).parser(), [output])
        assert parsed.text == ""
        assert 1 <= len(parsed.calls) <= 3
        for name, arguments in parsed.calls:
            jsonschema.validate(json.loads(arguments), TOOLS[name] or {"maxProperties": 0})


@pytest.mark.parametrize("tools", TOOL_PARSERS)
@pytest.mark.parametrize(
    "parameters", [None, {}, {"type": "object"}, {"type": "object", "properties": {}}, {"properties": {}}]
)
def test_b063_without_parameters_the_arguments_are_an_empty_object(tools: str, parameters: Any) -> None:
    output = sample(matcher(tools, most=1, get_time=parameters), 0)
    pieces = OutputFormat(tools, ("get_time",)).parser().push(output)
    assert joined(pieces).calls == [("get_time", "{}")]


def test_names_that_the_schema_speaks_of_stay_free() -> None:
    assert '"additionalProperties": false' in arguments_rule({"properties": {"a": {}}})
    for free in ({"additionalProperties": True}, {"patternProperties": {"^x": {}}}, {"anyOf": [{}]}, {"$ref": "#/a"}):
        rule = arguments_rule({"properties": {"a": {}}, **free})
        assert json.loads(rule.removeprefix("%json "))["properties"] == {"a": {}}
        assert '"additionalProperties": false' not in rule


def test_the_forms_that_models_write_are_accepted() -> None:
    time = '{"name": "get_time", "arguments": {}}'
    weather = '{"name": "get_weather", "arguments": {"city": "Bonn", "unit": "°C"}}'
    assert accepts("hermes", f"<tool_call>\n{weather}\n</tool_call>\n<tool_call>\n{time}\n</tool_call>")
    assert not accepts("hermes", f"<tool_call>\n{weather}\n</tool_call>\n<tool_call>\n{time}\n</tool_call>", most=1)
    assert not accepts("hermes", f"Sure: <tool_call>\n{time}\n</tool_call>")
    assert not accepts("hermes", '<tool_call>\n{"name": "get_weather", "arguments": {}}\n</tool_call>')
    assert accepts("mistral", f"[TOOL_CALLS][{weather}, {time}]")
    llama = '{"name": "get_time", "parameters": {}}'
    assert accepts("llama3_json", f"{llama}; {llama}")


def test_markup_that_is_a_special_token_is_asked_for_by_its_id() -> None:
    source = call_parser("mistral").grammar({"f": arguments_rule(None)}, {"[TOOL_CALLS]": 5}, most=1)
    assert source.startswith('start: <[5]> "[" one "]"\n')
    assert LLMatcher.validate_grammar(LLMatcher.grammar_from_lark(source), TOKENIZER) == ""
