"""Parsers of outputs, by the format that a model writes."""

from frontend.pieces import OutputParser, Piece, Text


class PlainParser(OutputParser):
    """All is text."""

    def push(self, text: str) -> list[Piece]:
        return [Text(text)] if text else []

    def finish(self) -> list[Piece]:
        return []
