"""Parsers of outputs, by the format that a model writes. Each is imported when it is first used.

A format of tool calls is a module with a `CallParser`: see `frontend.parsers.calls`, and `config.schema.ToolParserName`
for the setting.
"""

from collections.abc import Collection
from importlib import import_module
from typing import TYPE_CHECKING

from frontend.pieces import OutputParser, Piece, Text

if TYPE_CHECKING:
    from .calls import CallParser

TOOL_PARSERS = {  # module and class, by the name of the format
    "hermes": ("hermes", "HermesParser"),
    "llama3_json": ("llama3_json", "Llama3JsonParser"),
    "mistral": ("mistral", "MistralParser"),
}
REASONING_PARSERS = ("think",)


class PlainParser(OutputParser):
    """All is text."""

    def push(self, text: str) -> list[Piece]:
        return [Text(text)] if text else []

    def finish(self) -> list[Piece]:
        return []


def call_parser(name: str) -> "type[CallParser]":
    """The parser of a format of tool calls."""
    module, class_name = TOOL_PARSERS[name]
    found: type[CallParser] = getattr(import_module(f"{__name__}.{module}"), class_name)
    return found


def make_parser(tool_format: str, names: Collection[str], reasoning_format: str) -> OutputParser:
    """A parser for one choice. `names`: of the request's functions. An empty format means that there is none."""
    parser: OutputParser = call_parser(tool_format)(names) if tool_format else PlainParser()
    if reasoning_format:
        from .think import ThinkParser

        parser = ThinkParser(parser)
    return parser


def markup(tool_format: str, reasoning_format: str) -> tuple[str, ...]:
    """Texts that mark up an output; where they are special tokens, they must be shown for the parser to see them."""
    marks: tuple[str, ...] = call_parser(tool_format).markup if tool_format else ()
    if reasoning_format:
        from .think import MARKUP

        marks += MARKUP
    return marks
