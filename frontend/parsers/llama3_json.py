"""Calls as Llama 3.1 to 3.3 write them: the output is `{"name": ..., "parameters": {...}}`, several separated by `;`.

`<|python_tag|>` may stand before them, and there alone a call may follow text.
Source: Meta's prompt formats for Llama 3.1 (JSON based tool calling) and the chat template of Llama 3.1 Instruct.
"""

from collections.abc import Mapping, Sequence

from config.markup import LLAMA3_TAG

from .calls import CallParser, Script
from .grammar import call_rules, free_text, literal, mark, repeated

_SPACE = r"[\s\x1c-\x1f]"  # what Python calls white space


class Llama3JsonParser(CallParser):
    """An object at the beginning is a call only with parameters and the name of one of the request's functions."""

    markup = (LLAMA3_TAG,)
    marked = False

    @classmethod
    def grammar(cls, tools: Mapping[str, str], special: Mapping[str, int], *, most: int) -> str:
        return f"start: one{repeated(literal('; '), most)}\none: call\n" + call_rules(tools, "parameters")

    @classmethod
    def free_grammar(
        cls, tools: Mapping[str, str], special: Mapping[str, int], *, most: int | None, marks: Sequence[str]
    ) -> str:
        """Nothing but its form tells a call from JSON, so what begins as an object is one."""
        tagged = f" | TEXT? {mark(LLAMA3_TAG, special)} calls" if LLAMA3_TAG in special else ""
        return (
            f"start: calls | TEXT?{tagged}\n"
            + f"calls: call{repeated(literal('; '), most, 'call')}\n"
            + free_text(LLAMA3_TAG, begin=rf"{_SPACE}*[^\s\x1c-\x1f{{]")
            + call_rules(tools, "parameters")
        )

    def _format(self) -> Script[None]:
        self._say((yield from self._white_space()))
        if self._char == "{":
            yield from self._calls_in_a_row("", unmarked=True)
        while (yield from self._text_until(LLAMA3_TAG)):
            space = yield from self._white_space()
            yield from self._calls_in_a_row(LLAMA3_TAG + space, unmarked=False)

    def _calls_in_a_row(self, before: str, *, unmarked: bool) -> Script[None]:
        while (yield from self._call(before, unmarked=unmarked)):
            before = yield from self._white_space()
            if self._char != ";":
                return
            before += ";"
            yield from self._advance()
            before += yield from self._white_space()
            if self._char != "{":
                self._give_up(before)
                return
