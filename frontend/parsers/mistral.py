"""Calls as Mistral's models write them: `[TOOL_CALLS]`, then a JSON list of calls.

Newer ones (tokenizer versions 11 and 13) write `[TOOL_CALLS]name{...}` or `[TOOL_CALLS]name[ARGS]{...}` for each call.
Source: the tokenizer versions of mistral-common. Their templates want ids of calls to be 9 letters or digits.
"""

import secrets
import string
from collections.abc import Mapping, Sequence

from config.markup import MISTRAL_ARGUMENTS, MISTRAL_OPENING

from .calls import CallParser, Script
from .grammar import arguments_name, call_rules, calls_in_text, literal, mark, repeated

_NAME = frozenset(string.ascii_letters + string.digits + "_-.")
_ID = string.ascii_letters + string.digits
_ID_LENGTH = 9


class MistralParser(CallParser):
    """Text, then calls."""

    markup = (MISTRAL_OPENING, MISTRAL_ARGUMENTS)

    @classmethod
    def grammar(cls, tools: Mapping[str, str], special: Mapping[str, int], *, most: int) -> str:
        return (
            f"start: {mark(MISTRAL_OPENING, special)} {literal('[')} "
            f"one{repeated(literal(', '), most)} {literal(']')}\n"
            f"one: call\n" + call_rules(tools, "arguments")
        )

    @classmethod
    def free_grammar(
        cls, tools: Mapping[str, str], special: Mapping[str, int], *, most: int | None, marks: Sequence[str]
    ) -> str:
        named = (
            f"{literal(name)} {mark(MISTRAL_ARGUMENTS, special)}? {arguments_name(at)}" for at, name in enumerate(tools)
        )
        listed = f"{literal('[')} call{repeated(literal(', '), most, 'call')} {literal(']')}"
        return (
            calls_in_text(MISTRAL_OPENING, special, most=most, marks=marks)
            + f"one: {literal(' ')}? {listed} | named\n"
            + f"named: {' | '.join(named)}\n"
            + call_rules(tools, "arguments")
        )

    def _format(self) -> Script[None]:
        while (yield from self._text_until(MISTRAL_OPENING)):
            space = yield from self._white_space()
            if self._char == "[":
                yield from self._list(MISTRAL_OPENING + space)
            else:
                yield from self._named(MISTRAL_OPENING + space)

    def _list(self, before: str) -> Script[None]:
        while True:
            before += self._char
            yield from self._advance()
            before += yield from self._white_space()
            if not (yield from self._call(before)):
                return
            before = yield from self._white_space()
            if self._char != ",":
                break
        yield from self._skip_mark("]")

    def _named(self, before: str) -> Script[None]:
        letters = []
        while self._char in _NAME:
            letters.append(self._char)
            yield from self._advance()
        name = "".join(letters)
        before += name
        if not name:
            self._give_up(before)
            return
        for expected in MISTRAL_ARGUMENTS if self._char == "[" else "":
            if self._char != expected:
                self._give_up(before)
                return
            before += self._char
            yield from self._advance()
        before += yield from self._white_space()
        yield from self._arguments(name, before)

    def _new_id(self) -> str:
        return "".join(secrets.choice(_ID) for _ in range(_ID_LENGTH))
