"""Outputs in the documented formats, and what pieces amount to."""

from typing import Any, NamedTuple

from frontend.parsers import OutputFormat
from frontend.pieces import OutputParser, Piece, Reasoning, Text, ToolArguments, ToolCallBegin


class Parsed(NamedTuple):
    """Text, reasoning, and the calls as (name, arguments text)."""

    text: str
    reasoning: str
    calls: list[tuple[str, str]]


def joined(pieces: list[Piece]) -> Parsed:
    """What a client has put together at the end; asserts that pieces come in an order that allows it."""
    text = reasoning = ""
    calls: list[tuple[str, str]] = []
    for piece in pieces:
        match piece:
            case Text(part):
                text += part
            case Reasoning(part):
                reasoning += part
            case ToolCallBegin(call, _, name):
                assert call == len(calls)
                calls.append((name, ""))
            case ToolArguments(call, part):
                assert call == len(calls) - 1
                calls[call] = (calls[call][0], calls[call][1] + part)
        assert not isinstance(piece, Text | Reasoning | ToolArguments) or piece.text
    return Parsed(text, reasoning, calls)


def parse(parser: OutputParser, parts: list[str]) -> Parsed:
    pieces = [piece for part in parts for piece in parser.push(part)]
    return joined(pieces + parser.finish())


def parse_as(tools: str, text: str, **options: Any) -> Parsed:
    """The whole text at once."""
    return parse(OutputFormat(tools, ("get_weather", "get_time"), **options).parser(), [text])
