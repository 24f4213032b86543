"""Reasoning between `<think>` and `</think>`."""

import pytest

from frontend.parsers import OutputFormat
from frontend.pieces import Piece, Reasoning, Text
from tests.unit.frontend.parsers.outputs import Parsed, parse


@pytest.mark.parametrize(
    ("output", "opened", "expected"),
    [
        ("<think>\nTwo and two.\n</think>\n\nFour.", False, Parsed("Four.", "Two and two.", [])),
        ("Two and two.\n</think>\n\nFour.", True, Parsed("Four.", "Two and two.", [])),
        ("<think>\nTwo.</think>Four.", True, Parsed("Four.", "Two.", [])),
        ("<think>\n\n</think>\n\nFour.", False, Parsed("Four.", "", [])),
        ("\n<think>a", False, Parsed("", "a", [])),
        ("cut off ", True, Parsed("", "cut off", [])),
        ("cut off  </thi", True, Parsed("", "cut off  </thi", [])),
        ("a </thin b </think>", True, Parsed("", "a </thin b", [])),
        ("No thoughts <think>here</think>", False, Parsed("No thoughts <think>here</think>", "", [])),
        (" <thin", False, Parsed(" <thin", "", [])),
        ("", True, Parsed("", "", [])),
    ],
)
def test_reasoning_is_split_off(output: str, opened: bool, expected: Parsed) -> None:
    parser = OutputFormat(reasoning="think").parser()
    if opened:
        parser.begin_in_reasoning()
    assert parse(parser, [output]) == expected


def test_calls_in_reasoning_are_none_and_calls_behind_it_are() -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    parser = OutputFormat("hermes", ("f",), "think").parser()
    assert parse(parser, [f"<think>{call}</think>\n\n{call}"]) == Parsed("", call, [("f", "{}")])


def test_reasoning_and_text_are_streamed() -> None:
    parser = OutputFormat(reasoning="think").parser()
    said: list[list[Piece]] = [parser.push(part) for part in ("<th", "ink>a ", "b", "</think>", "\n", "c")]
    assert said == [[], [Reasoning("a")], [Reasoning(" b")], [], [], [Text("c")]]
