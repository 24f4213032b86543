"""Grammars of demanded calls, judged by llguidance itself and by jsonschema."""

import json
import random
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer

from frontend.parsers import TOOL_PARSERS, OutputFormat, call_parser
from frontend.parsers.grammar import ANY_ARGUMENTS, arguments_rule
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


def strict(tools: str, *, special: dict[str, int] | None = None, most: int | None = None, marks: Any = ()) -> str:
    """The grammar of an output in which `get_weather` is strict and `get_time` is not."""
    rules = {"get_weather": arguments_rule(WEATHER), "get_time": ANY_ARGUMENTS}
    source = LLMatcher.grammar_from_lark(call_parser(tools).free_grammar(rules, special or {}, most=most, marks=marks))
    assert LLMatcher.validate_grammar(source, TOKENIZER) == ""
    return source


GOOD = '{"city": "Bonn", "unit": "°C"}'
BAD = '{"city": "Bonn", "unit": "Kelvin"}'


def written(tools: str, name: str, arguments: str) -> str:
    """A call as a model of this format writes it."""
    key = "parameters" if tools == "llama3_json" else "arguments"
    call = f'{{"name": "{name}", "{key}": {arguments}}}'
    return {"hermes": f"<tool_call>\n{call}\n</tool_call>", "mistral": f"[TOOL_CALLS][{call}]"}.get(tools, call)


@pytest.mark.parametrize("tools", TOOL_PARSERS)
def test_a_strict_call_has_arguments_of_its_schema_and_text_is_free(tools: str) -> None:
    good, bad, time = (
        written(tools, *call) for call in (("get_weather", GOOD), ("get_weather", BAD), ("get_time", '{"zone": [1]}'))
    )
    free = ["", "Hello.", "1 < 2 {[/]} \n\\", "Ünï", "a <tool", "<tool_call", "[TOOL_CALLS", "\n\n x"]
    taken = [*free, good, time]
    refused = [bad, written(tools, "no_tool", "{}"), good.replace("name", "nam")]
    if tools != "llama3_json":
        taken += [f"One moment. {good}", f"{good}\n{time}\nThere.", f"<{good}", f"[{good}"]
        refused += [f"One moment. {bad}", f"{good}{bad}", f"{good}\n{good[:12]}"]
    if tools == "mistral":
        taken += [
            f"[TOOL_CALLS]get_weather{GOOD}",
            f"a[TOOL_CALLS]get_time[ARGS]{{}}[TOOL_CALLS]get_weather[ARGS]{GOOD}",
        ]
        refused += [f"[TOOL_CALLS]get_weather{BAD}", f"[TOOL_CALLS]get_weather[ARGS]{BAD}"]
    source = strict(tools)
    assert [text for text in taken if not _taken(source, text)] == []
    assert [text for text in refused if _taken(source, text)] == []


def _taken(source: str, text: str) -> bool:
    found = LLMatcher(TOKENIZER, source)
    tokens = TOKENIZER.tokenize_str(text)
    return found.try_consume_tokens(tokens) == len(tokens) and found.is_accepting()


@pytest.mark.parametrize("tools", TOOL_PARSERS)
def test_strict_calls_are_counted(tools: str) -> None:
    good = written(tools, "get_weather", GOOD)
    separator = "; " if tools == "llama3_json" else "\n"
    assert _taken(strict(tools, most=1), good)
    assert not _taken(strict(tools, most=1), f"{good}{separator}{good}")
    assert _taken(strict(tools), separator.join([good] * 3))


@pytest.mark.parametrize("tools", TOOL_PARSERS)
def test_whatever_a_stubborn_model_writes_its_calls_are_valid(tools: str) -> None:
    """It wants to write a bad call, and where it can't, it writes anything that it may."""
    parts = [written(tools, "get_weather", BAD), written(tools, "get_weather", '{"unit": 1}'), "Well, ", "[", "<", " "]
    for seed in range(5):
        choose = random.Random(seed)
        found = LLMatcher(TOKENIZER, strict(tools))
        wanted: list[int] = []
        output: list[int] = []
        while len(output) < 200 or not found.is_accepting():
            if found.is_stopped():
                break
            wanted = wanted or TOKENIZER.tokenize_str(choose.choice(parts))
            allowed = [token for token, bias in enumerate(found.compute_logit_bias()) if bias]
            allowed = [token for token in allowed if token != TOKENIZER.eos_token]
            token = wanted.pop(0)
            if token not in allowed:
                closing = [token for token in allowed if chr(token) in '"}],']
                token, wanted = choose.choice(closing or allowed), []
            assert found.consume_token(token)
            output.append(token)
            assert len(output) < 3000
        text = bytes(output).decode(errors="replace")
        parsed = parse(OutputFormat(tools, ("get_weather", "get_time"), enforced="calls").parser(), [text])
        for name, arguments in parsed.calls:
            jsonschema.validate(json.loads(arguments), WEATHER if name == "get_weather" else {})
        assert not any(opening in parsed.text for opening in ("<tool_call>", "[TOOL_CALLS]") if tools != "llama3_json")


@pytest.mark.parametrize("tools", ["hermes", "mistral"])
def test_markup_of_special_tokens_is_one_of_them_alone(tools: str) -> None:
    """Spelled with other tokens a parser would see it too, so that is no text."""
    opening = "<tool_call>" if tools == "hermes" else "[TOOL_CALLS]"
    source = call_parser(tools).free_grammar(
        {"f": arguments_rule(None)}, {opening: 7, "<think>": 8}, most=None, marks=["<think>"]
    )
    assert "<[7]> one" in source
    assert "<[8]>" in source
    assert LLMatcher.validate_grammar(LLMatcher.grammar_from_lark(source), TOKENIZER) == ""
    assert not _taken(LLMatcher.grammar_from_lark(source), f"a {opening}")
    assert _taken(LLMatcher.grammar_from_lark(source), "a b")
