"""Reasoning between `<think>` and `</think>` at the beginning of an output, as DeepSeek-R1, Qwen 3 and others write it.

Some chat templates end the prompt with the opening tag; then all is reasoning up to the closing one.
"""

from typing import ClassVar

from config.markup import REASONING_CLOSING, REASONING_OPENING
from frontend.pieces import OutputParser, Piece, Reasoning


class ThinkParser(OutputParser):
    """Reasoning, without the white space around it; what follows is for another parser."""

    markup: ClassVar[tuple[str, ...]] = (REASONING_OPENING, REASONING_CLOSING)

    def __init__(self, answer: OutputParser) -> None:
        """`answer` parses what follows the reasoning."""
        self._answer = answer
        self._state = "before"  # "before", "opened", "reasoning", "closed", "answer"
        self._held = ""  # undecided

    def begin_in_reasoning(self) -> None:
        """Reasoning from the first character; an opening tag there is skipped."""
        if self._state == "before" and not self._held:
            self._state = "opened"

    def push(self, text: str) -> list[Piece]:
        """Pieces that are certain now."""
        if self._state == "answer":
            return self._answer.push(text)
        self._held += text
        pieces: list[Piece] = []
        if self._state in ("before", "opened"):
            pieces += self._look_for_opening()
        if self._state == "reasoning":
            pieces += self._look_for_closing()
        if self._state == "closed":
            self._held = self._held.lstrip()
            if self._held:
                pieces += self._go_on_with_answer()
        return pieces

    def _look_for_opening(self) -> list[Piece]:
        start = self._held.lstrip()
        while start.startswith(REASONING_OPENING):
            self._state = "opened"
            start = start[len(REASONING_OPENING) :].lstrip()
        undecided = REASONING_OPENING.startswith(start)
        if self._state == "before":
            return [] if undecided else self._go_on_with_answer()
        self._held = start
        if not undecided:
            self._state = "reasoning"
        return []

    def _look_for_closing(self) -> list[Piece]:
        text, closing, rest = self._held.partition(REASONING_CLOSING)
        if closing:
            text = text.rstrip()
            self._state = "closed"
            self._held = rest
        else:
            text = self._decided(text)
            self._held = self._held[len(text) :]
        return [Reasoning(text)] if text else []

    @staticmethod
    def _decided(text: str) -> str:
        """`text` without white space at its end, or a part of the closing tag and white space before it."""
        at = text.rfind(REASONING_CLOSING[0])
        if at >= 0 and REASONING_CLOSING.startswith(text[at:]):
            text = text[:at]
        return text.rstrip()

    def _go_on_with_answer(self) -> list[Piece]:
        self._state = "answer"
        text, self._held = self._held, ""
        return self._answer.push(text)

    def finish(self) -> list[Piece]:
        """What is left at the end."""
        text, self._held = self._held, ""
        if self._state in ("before", "answer"):
            return [*self._answer.push(text), *self._answer.finish()]
        text = text.strip()
        pieces: list[Piece] = [Reasoning(text)] if text and self._state != "closed" else []
        return pieces + self._answer.finish()
