"""A long run of anything costs a parser work in proportion to its length, however it is cut."""

from collections.abc import Iterator
from typing import SupportsIndex

import pytest

from frontend.parsers import TOOL_PARSERS, OutputFormat
from frontend.pieces import ToolCallBegin
from tests.unit.frontend.parsers.outputs import joined

LENGTH = 600
CALLS = {
    "hermes": '<tool_call>{"name": "f", "arguments": %s}</tool_call>',
    "mistral": '[TOOL_CALLS][{"name": "f", "arguments": %s}]',
    "llama3_json": '{"name": "f", "parameters": %s}',
}
LATE_NAMES = {
    "hermes": '<tool_call>{"arguments": %s, "name": "f"}</tool_call>',
    "mistral": '[TOOL_CALLS][{"arguments": %s, "name": "f"}]',
    "llama3_json": '{"parameters": %s, "name": "f"}',
}
SPACES = " \n" * (LENGTH // 2)
RUNS = {
    "text": "a" * LENGTH,
    "white space": f"a{SPACES}b",
    "white space at the beginning": f"{SPACES}a",
    "white space at the end": f"a{SPACES}",
    "reasoning": f"<think>{SPACES}{'a' * LENGTH}{SPACES}b</think>{SPACES}c",
    "unfinished markup": "<" * LENGTH,
    "brackets": "[" * LENGTH,
}
ARGUMENTS = {
    "digits": '{"a": %s}' % ("1" * LENGTH),
    "digits of a fraction": '{"a": 0.%s}' % ("0" * LENGTH),
    "digits of an exponent": '{"a": 1e%s}' % ("1" * LENGTH),
    "a string": '{"a": "%s"}' % ("b" * LENGTH),
    "a key": '{"%s": 1}' % ("k" * LENGTH),
    "white space in an object": f'{{{SPACES}"a":{SPACES}1{SPACES}}}',
    "lists": f'{{"a": [{"[]," * (LENGTH // 3)}[]]}}',
}


class Counted(str):
    """A text that counts the characters which are copied when it, or what is made from it, is put behind another."""

    __slots__ = ()
    copied = 0

    def __add__(self, other: str) -> "Counted":
        Counted.copied += len(self) + len(other)
        return Counted(str.__add__(self, other))

    def __radd__(self, other: str) -> "Counted":
        Counted.copied += len(other) + len(self)
        return Counted(str.__add__(other, self))

    def __iter__(self) -> Iterator[str]:
        return map(Counted, str.__iter__(self))

    def __getitem__(self, at: "SupportsIndex | slice") -> "Counted":
        part = Counted(str.__getitem__(self, at))
        Counted.copied += len(part)
        return part

    def rstrip(self, chars: str | None = None, /) -> "Counted":
        return Counted(str.rstrip(self, chars))

    def lstrip(self, chars: str | None = None, /) -> "Counted":
        return Counted(str.lstrip(self, chars))


def copied(output: OutputFormat, text: str, size: int) -> int:
    """Characters copied while this output is parsed, `size` characters at a time. Asserts that it comes out alike."""
    parser, whole = output.parser(), output.parser()
    Counted.copied = 0
    pieces = [piece for at in range(0, len(text), size) for piece in parser.push(Counted(text[at : at + size]))]
    pieces += parser.finish()
    count = Counted.copied
    assert joined(pieces) == joined(whole.push(text) + whole.finish())
    return count


@pytest.mark.parametrize("size", [1, LENGTH])
@pytest.mark.parametrize("tools", ["", *TOOL_PARSERS])
@pytest.mark.parametrize("run", RUNS)
def test_runs_of_text_are_linear(run: str, tools: str, size: int) -> None:
    text = RUNS[run]
    assert copied(OutputFormat(tools, ("f",), "think"), text, size) <= 12 * len(text)


@pytest.mark.parametrize("size", [1, LENGTH])
@pytest.mark.parametrize("form", [CALLS, LATE_NAMES])
@pytest.mark.parametrize("tools", TOOL_PARSERS)
@pytest.mark.parametrize("run", ARGUMENTS)
def test_runs_in_a_call_are_linear(run: str, tools: str, form: dict[str, str], size: int) -> None:
    text = form[tools] % ARGUMENTS[run]
    assert copied(OutputFormat(tools, ("f",)), text, size) <= 12 * len(text)
    parser = OutputFormat(tools, ("f",)).parser()
    assert any(isinstance(piece, ToolCallBegin) for piece in parser.push(text)), "what is measured is a call"


@pytest.mark.parametrize("tools", TOOL_PARSERS)
def test_what_looks_like_a_call_and_is_none_is_linear(tools: str) -> None:
    text = CALLS[tools] % f"{{{SPACES}"
    assert copied(OutputFormat(tools, ("f",)), text, 1) <= 12 * len(text)
