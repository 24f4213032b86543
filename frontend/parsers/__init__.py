"""Parsers of outputs, by the format that a model writes. Each is imported when it is first used.

A format of tool calls is a module with a `CallParser`: see `frontend.parsers.calls`, and `config.schema.ToolParserName`
for the setting.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Literal

from msgspec import Struct

from frontend.pieces import OutputParser, Piece, Text

if TYPE_CHECKING:
    from .calls import CallParser
    from .think import ThinkParser

TOOL_PARSERS = {  # module and class, by the name of the format
    "hermes": ("hermes", "HermesParser"),
    "llama3_json": ("llama3_json", "Llama3JsonParser"),
    "mistral": ("mistral", "MistralParser"),
}
REASONING_PARSERS = {"think": ("think", "ThinkParser")}

# What a grammar holds to the format: nothing, each call once it has begun, or all of the output, which is calls alone.
Enforced = Literal["", "calls", "output"]


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


def reasoning_parser(name: str) -> "type[ThinkParser]":
    """Likewise, of a format of reasoning."""
    module, class_name = REASONING_PARSERS[name]
    found: type[ThinkParser] = getattr(import_module(f"{__name__}.{module}"), class_name)
    return found


class OutputFormat(Struct, frozen=True):
    """How the outputs of a request are written; an empty name means that there is nothing of the kind."""

    tools: str = ""
    names: tuple[str, ...] = ()  # of the request's functions
    reasoning: str = ""
    most_calls: int | None = None  # further ones are left out
    enforced: Enforced = ""

    @property
    def plain(self) -> bool:
        """Whether all is text."""
        return not self.tools and not self.reasoning

    def parser(self) -> OutputParser:
        """A new parser, for one choice."""
        parser: OutputParser = PlainParser()
        if self.tools:
            parser = call_parser(self.tools)(self.names, self.most_calls, self.enforced)
        if self.reasoning:
            parser = reasoning_parser(self.reasoning)(parser)
        return parser

    def markup(self) -> tuple[str, ...]:
        """Texts that mark an output up. Those that are special tokens must be shown for the parser to see them."""
        marks: tuple[str, ...] = call_parser(self.tools).markup if self.tools else ()
        if self.reasoning:
            marks += reasoning_parser(self.reasoning).markup
        return marks
