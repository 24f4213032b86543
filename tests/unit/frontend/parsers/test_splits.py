"""What comes out does not depend on how the text was cut, nothing is lost, and nothing raises."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frontend.parsers import TOOL_PARSERS, OutputFormat
from frontend.parsers.json_object import ObjectScanner
from frontend.pieces import Reasoning, Text
from tests.unit.frontend.parsers.outputs import Parsed, parse

NAMES = ("f", "get_time")
_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
_objects = st.dictionaries(st.text(max_size=4), _json, max_size=3)
_fragments = st.sampled_from(
    [
        "<tool_call>",
        "</tool_call>",
        "<think>",
        "</think>",
        "<|python_tag|>",
        "[TOOL_CALLS]",
        "[ARGS]",
        '{"name": "f", "arguments": ',
        '{"name": "get_time", "parameters": ',
        "<tool_",
        "</",
        "[",
        "]",
        "{",
        "}",
        '"',
        ":",
        ",",
        ";",
        "\n",
        " ",
        "f",
        "1e5",
        "tru",
        "\\u00",
        "ü😀",
        " \n" * 20,
        "1" * 40,
        "0" * 40,
    ]
)
_outputs = st.lists(_fragments | st.text(max_size=3) | _objects.map(json.dumps), max_size=12).map("".join)


@pytest.mark.parametrize("reasoning", ["", "think"])
@pytest.mark.parametrize("tools", ["", *TOOL_PARSERS])
@given(output=_outputs, cuts=st.lists(st.integers(0, 300)), opened=st.booleans())
@settings(max_examples=50, deadline=None)
def test_any_split_gives_the_same(tools: str, reasoning: str, output: str, cuts: list[int], opened: bool) -> None:
    def parsed(parts: list[str]) -> Parsed:
        parser = OutputFormat(tools, NAMES, reasoning).parser()
        if opened:
            parser.begin_in_reasoning()
        return parse(parser, parts)

    whole = parsed([output])
    ends = sorted({*cuts, len(output)})
    assert parsed([output[at:end] for at, end in zip([0, *ends], ends, strict=False)]) == whole
    assert parsed(list(output)) == whole
    assert len(whole.text) <= len(output)
    if tools == reasoning == "":
        assert whole.text == output


def _written(tools: str, name: str, arguments: dict[str, Any]) -> str:
    key = "parameters" if tools == "llama3_json" else "arguments"
    call = json.dumps({"name": name, key: arguments}, ensure_ascii=False)
    return {"hermes": f"<tool_call>\n{call}\n</tool_call>", "mistral": f"[TOOL_CALLS][{call}]"}.get(tools, call)


@pytest.mark.parametrize("tools", TOOL_PARSERS)
@given(arguments=_objects, cuts=st.sets(st.integers(1, 60)))
@settings(max_examples=50, deadline=None)
def test_arguments_come_back_as_the_same_json(tools: str, arguments: dict[str, Any], cuts: set[int]) -> None:
    output = _written(tools, "f", arguments)
    ends = sorted(cut for cut in cuts if cut < len(output))
    parts = [output[at:end] for at, end in zip([0, *ends], [*ends, len(output)], strict=True)]
    parsed = parse(OutputFormat(tools, NAMES).parser(), parts)
    assert parsed.text == parsed.reasoning == ""
    ((name, text),) = parsed.calls
    assert name == "f"
    assert json.loads(text) == arguments
    assert text == json.dumps(arguments, ensure_ascii=False)


@given(before=st.text(alphabet="ab \n", min_size=1), arguments=_objects)
@settings(max_examples=40, deadline=None)
def test_markup_never_shows_as_text(before: str, arguments: dict[str, Any]) -> None:
    output = before + _written("hermes", "f", arguments)
    parser = OutputFormat("hermes", NAMES).parser()
    shown = ""
    for char in output:
        shown += "".join(piece.text for piece in parser.push(char) if isinstance(piece, Text | Reasoning))
        assert before.startswith(shown)


@given(text=_objects.map(json.dumps) | _outputs)
@settings(max_examples=150, deadline=None)
def test_the_scanner_takes_what_pythons_parser_takes(text: str) -> None:
    """Python's `json` is the judge, but for NaN and Infinity, which are no JSON."""
    scanner = ObjectScanner()
    taken = 0
    while taken < len(text) and not scanner.done and scanner.step(text[taken]):
        taken += 1

    def no_constant(name: str) -> Any:
        raise ValueError(name)

    try:
        value, end = json.JSONDecoder(strict=False, parse_constant=no_constant).raw_decode(text.lstrip(" \t\r\n"))
        end += len(text) - len(text.lstrip(" \t\r\n"))
    except ValueError:
        value, end = None, 0
    if isinstance(value, dict):
        assert scanner.done
        assert taken == end
    else:
        assert not scanner.done
