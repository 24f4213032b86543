"""Calls as Hermes, Qwen 2.5 and Qwen 3 write them: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

Source: github.com/NousResearch/Hermes-Function-Calling, and the chat template of Qwen2.5-Instruct.
"""

from collections.abc import Mapping, Sequence

from config.markup import HERMES_CLOSING, HERMES_OPENING

from .calls import CallParser, Script
from .grammar import call_rules, calls_in_text, literal, mark, repeated


class HermesParser(CallParser):
    """Text and calls in any order."""

    markup = (HERMES_OPENING, HERMES_CLOSING)

    @classmethod
    def grammar(cls, tools: Mapping[str, str], special: Mapping[str, int], *, most: int) -> str:
        line = literal("\n")
        return (
            f"start: one{repeated(line, most)}\n"
            f"one: {mark(HERMES_OPENING, special)} {line} call {line} {mark(HERMES_CLOSING, special)}\n"
            + call_rules(tools, "arguments")
        )

    @classmethod
    def free_grammar(
        cls, tools: Mapping[str, str], special: Mapping[str, int], *, most: int | None, marks: Sequence[str]
    ) -> str:
        line = literal("\n")
        return (
            calls_in_text(HERMES_OPENING, special, most=most, marks=marks)
            + f"one: {line} call {line} {mark(HERMES_CLOSING, special)}\n"
            + call_rules(tools, "arguments")
        )

    def _format(self) -> Script[None]:
        while (yield from self._text_until(HERMES_OPENING)):
            space = yield from self._white_space()
            if (yield from self._call(HERMES_OPENING + space)):
                yield from self._white_space()
                yield from self._skip_mark(HERMES_CLOSING)
