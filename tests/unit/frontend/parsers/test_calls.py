"""Tool calls in the formats that models' own documents define."""

import json
from typing import get_args

import pytest

from config.schema import ReasoningParserName, ToolParserName
from frontend.parsers import REASONING_PARSERS, TOOL_PARSERS, OutputFormat, call_parser
from tests.unit.frontend.parsers.outputs import Parsed, parse, parse_as

PARIS = ("get_weather", '{"city": "Paris"}')
TIME = ("get_time", "{}")

# From the models' documents: Hermes-2-Pro's model card and Qwen's function-call guide; Meta's prompt formats for
# Llama 3.1; mistral-common's tokenizers v3, v11 and v13.
DOCUMENTED = [
    ("hermes", '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>', "", [PARIS]),
    ("hermes", '<tool_call>\n{"arguments": {"city": "Paris"}, "name": "get_weather"}\n</tool_call>', "", [PARIS]),
    (
        "hermes",
        'I look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>',
        "I look.",
        [PARIS, TIME],
    ),
    ("llama3_json", '{"name": "get_weather", "parameters": {"city": "Paris"}}', "", [PARIS]),
    ("llama3_json", '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris"}}', "", [PARIS]),
    (
        "llama3_json",
        '{"name": "get_weather", "parameters": {"city": "Paris"}}; {"name": "get_time", "parameters": {}}',
        "",
        [PARIS, TIME],
    ),
    ("mistral", '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}}]', "", [PARIS]),
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}, "id": "VvvODy9mT"}, '
        '{"name": "get_time", "arguments": {}}]',
        "",
        [PARIS, TIME],
    ),
    ("mistral", 'Yes.[TOOL_CALLS]get_weather{"city": "Paris"}', "Yes.", [PARIS]),
    (
        "mistral",
        '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}[TOOL_CALLS]get_time[ARGS]{}',
        "",
        [PARIS, TIME],
    ),
]


@pytest.mark.parametrize(("tools", "output", "text", "calls"), DOCUMENTED)
def test_documented_outputs(tools: str, output: str, text: str, calls: list[tuple[str, str]]) -> None:
    assert parse_as(tools, output) == Parsed(text, "", calls)


@pytest.mark.parametrize(
    "output",
    [
        '<tool_call>{"name": "get_time"}</tool_call>',
        '<tool_call>{"name": "get_time", "arguments": null}</tool_call>',
        '<tool_call>{"name": "get_time", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "get_time", "arguments": "{}"}</tool_call>',
    ],
)
def test_b063_a_call_without_parameters_has_an_empty_object(output: str) -> None:
    assert parse_as("hermes", output) == Parsed("", "", [TIME])


@pytest.mark.parametrize(
    ("tools", "output"),
    [
        ("hermes", "no call"),
        ("hermes", "  white space stays \n"),
        ("hermes", "a < b and <tool_cal and <tool_calls>"),
        ("hermes", "<tool_call>"),
        ("hermes", "<tool_call>\nnot json\n</tool_call>"),
        ("hermes", '<tool_call>{"name": 5}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": "text"}</tool_call>'),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", '),
        ("hermes", '<tool_call><tool_call>{"name": tru}'),
        ("llama3_json", '{"answer": 42}'),
        ("llama3_json", '{"name": "Ann", "parameters": {}}'),  # no function of the request
        ("llama3_json", '{"name": "get_time"}'),
        ("llama3_json", ' {"name": "get_time", "parameters": 5}'),
        ("llama3_json", 'Say {"name": "get_time", "parameters": {}}'),
        ("llama3_json", '<|python_tag|>brave_search.call(query="x")'),
        ("mistral", "[TOOL_CALLS] nothing"),
        ("mistral", "[TOOL_CALLS][1, 2]"),
        ("mistral", "[TOOL_CALLS]get_time[ARG]{}"),
        ("mistral", "a [TOOL_CAL"),
    ],
)
def test_what_is_no_call_is_text(tools: str, output: str) -> None:
    assert parse_as(tools, output) == Parsed(output, "", [])


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        # Broken inside the arguments: what has gone out cannot be taken back.
        ('<tool_call>{"name": "f", "arguments": {"a": oops}}', Parsed("oops}}", "", [("f", '{"a": ')])),
        # Behind them the call is whole.
        ('<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>', Parsed("", "", [("f", '{"a": 1}')])),
        ('<tool_call>{"name": "f", "arguments": {}}</tool_', Parsed("", "", [("f", "{}")])),
        ('<tool_call>{"name": "f", "arguments": {}} bye', Parsed("bye", "", [("f", "{}")])),
        # Cut by the length limit.
        ('<tool_call>{"name": "f", "arguments": {"a": "b', Parsed("", "", [("f", '{"a": "b')])),
        # Text on both sides stays apart.
        ('One. <tool_call>{"name": "f"}</tool_call>\nTwo.\n', Parsed("One.\nTwo.\n", "", [("f", "{}")])),
    ],
)
def test_broken_and_cut_calls(output: str, expected: Parsed) -> None:
    assert parse_as("hermes", output) == expected


def test_control_characters_that_models_write_are_escaped() -> None:
    output = '<tool_call>{"name": "f", "arguments": {"text": "a\nb\tc"}}</tool_call>'
    ((_, arguments),) = parse_as("hermes", output).calls
    assert json.loads(arguments) == {"text": "a\nb\tc"}


def test_calls_beyond_the_most_are_left_out() -> None:
    output = "".join(f'<tool_call>{{"name": "f", "arguments": {{"n": {n}}}}}</tool_call>' for n in range(3)) + "Done."
    assert parse_as("hermes", output, most_calls=1) == Parsed("Done.", "", [("f", '{"n": 0}')])


def test_arguments_come_as_they_are_written() -> None:
    parser = OutputFormat("hermes", ("f",)).parser()
    assert parser.push('<tool_call>{"name": "f", "argu') == []
    begin, arguments = parser.push('ments": {"a": "so f')
    assert (begin.name, arguments.text) == ("f", '{"a": "so f')  # type: ignore[union-attr]
    (more,) = parser.push("ar")
    assert more.text == "ar"  # type: ignore[union-attr]


def test_ids_are_what_the_templates_take() -> None:
    def first_id(tools: str, output: str) -> str:
        (begin, *_) = OutputFormat(tools).parser().push(output)
        return begin.id  # type: ignore[union-attr]

    assert first_id("hermes", '<tool_call>{"name": "f"}').startswith("call_")
    # Mistral's template raises an exception for any other length.
    mistral = first_id("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {}}]')
    assert len(mistral) == 9
    assert mistral.isalnum()


def test_every_setting_has_its_parser() -> None:
    assert set(get_args(ToolParserName)) == {"auto", "none", *TOOL_PARSERS}
    assert set(get_args(ReasoningParserName)) == {"auto", "none", *REASONING_PARSERS}
    for name in TOOL_PARSERS:
        assert parse(call_parser(name)(()), ["text"]).text == "text"
