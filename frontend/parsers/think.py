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
        self._gap: list[str] = []  # white space that belongs to what follows, if that is not markup
        self._held = ""  # undecided text behind that, which does not begin with white space

    def begin_in_reasoning(self) -> None:
        """Reasoning from the first character; an opening tag there is skipped."""
        if self._state == "before" and not self._held and not self._gap:
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
        self._skip_white_space()
        while self._held.startswith(REASONING_OPENING):
            self._state = "opened"
            self._held = self._held[len(REASONING_OPENING) :]
            self._skip_white_space()
        undecided = REASONING_OPENING.startswith(self._held)
        if self._state == "before":
            return [] if undecided else self._go_on_with_answer()
        self._gap = []
        if not undecided:
            self._state = "reasoning"
        return []

    def _skip_white_space(self) -> None:
        """Move the white space at the beginning of `_held` to `_gap`."""
        rest = self._held.lstrip()
        if len(rest) < len(self._held):
            self._gap.append(self._held[: len(self._held) - len(rest)])
            self._held = rest

    def _look_for_closing(self) -> list[Piece]:
        text, closing, rest = self._held.partition(REASONING_CLOSING)
        if not closing:
            at = text.rfind(REASONING_CLOSING[0])
            if at >= 0 and REASONING_CLOSING.startswith(text[at:]):
                text, rest = text[:at], text[at:]
        self._held = rest
        shown = text.rstrip()
        pieces: list[Piece] = [Reasoning("".join(self._gap) + shown)] if shown else []
        if shown or closing:
            self._gap = []
        if closing:
            self._state = "closed"
        elif len(shown) < len(text):
            self._gap.append(text[len(shown) :])
        return pieces

    def _go_on_with_answer(self) -> list[Piece]:
        self._state = "answer"
        return self._answer.push(self._take_held())

    def _take_held(self) -> str:
        text = "".join([*self._gap, self._held])
        self._gap, self._held = [], ""
        return text

    def finish(self) -> list[Piece]:
        """What is left at the end."""
        text = self._take_held()
        if self._state in ("before", "answer"):
            return [*self._answer.push(text), *self._answer.finish()]
        text = text.rstrip()
        pieces: list[Piece] = [Reasoning(text)] if text and self._state != "closed" else []
        return pieces + self._answer.finish()
