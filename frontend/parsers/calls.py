"""What parsers of tool calls have in common: text with markup in it, and calls that are JSON objects.

A parser is written as a script: a generator that is sent one character after the other, and an empty string when the
output has ended. So it cannot depend on how the text was cut into deltas. Each part of a script begins and ends with
`self._char` being the first character that it has not used.
"""

import secrets
from abc import abstractmethod
from collections.abc import Collection, Generator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, ClassVar, TypeVar

import msgspec
from msgspec.structs import replace

from frontend.pieces import OutputParser, Piece, Reasoning, Text, ToolArguments, ToolCallBegin

from .json_object import ObjectScanner, decoded_string

if TYPE_CHECKING:
    from . import Enforced

T = TypeVar("T")
Script = Generator[None, str, T]


class CallParser(OutputParser):
    """Text and tool calls. White space beside a call belongs to the markup."""

    markup: ClassVar[tuple[str, ...]]  # what may be a special token of the vocabulary
    marked: ClassVar[bool] = True  # markup stands before each call; else one may begin where the output does

    def __init__(self, names: Collection[str], most: int | None = None, enforced: "Enforced" = "") -> None:
        """`names`: of the functions that the request has. Calls beyond `most` are left out.

        With `enforced` what has begun as a call is one, so where the output is cut inside it there is no text to show.
        """
        self._names = names
        self._most = most
        self._enforced = enforced
        self._pieces: list[Piece] = []
        self._gap: list[str] = []  # white space that is text if more text follows
        self._behind_call = False
        self._spoken = False  # whether there has been text
        self._calls = 0
        self._watched = ""  # while all that has come is decided: the character with which markup begins
        self._char = ""
        self._script: Script[None] | None = self._whole()
        next(self._script)

    @classmethod
    @abstractmethod
    def grammar(cls, tools: Mapping[str, str], special: Mapping[str, int], *, most: int) -> str:
        """A Lark grammar (llguidance's) of an output that is 1 to `most` calls and nothing else.

        `tools`: rule bodies that match the arguments, by function name. `special`: ids of special tokens by text.
        """

    @classmethod
    @abstractmethod
    def free_grammar(
        cls, tools: Mapping[str, str], special: Mapping[str, int], *, most: int | None, marks: Sequence[str]
    ) -> str:
        """Likewise of an output that is free until a call begins; what the parser takes for a call matches `tools`.

        There may be `most` calls, or any number. `marks`: special tokens that may stand in the text.
        """

    @abstractmethod
    def _format(self) -> Script[None]:
        """The output, from its first character to its end."""

    def push(self, text: str) -> list[Piece]:
        """Pieces that are certain now."""
        if self._watched and text and self._watched not in text:
            self._say(text)
        else:
            for char in text:
                self._send(char)
        return self._take()

    def finish(self) -> list[Piece]:
        """What is left at the end."""
        self._send("")
        if self._gap and not self._behind_call:
            self._pieces.append(Text("".join(self._gap)))
            self._gap = []
        return self._take()

    def _send(self, char: str) -> None:
        if self._script is None:
            return
        try:
            self._script.send(char)
        except StopIteration:
            self._script = None

    def _take(self) -> list[Piece]:
        pieces, self._pieces = _merged(self._pieces), []
        if self._enforced == "output":  # text is markup that was cut off
            pieces = [piece for piece in pieces if not isinstance(piece, Text)]
        if self._most is None or self._calls <= self._most:
            return pieces
        return [piece for piece in pieces if isinstance(piece, Text | Reasoning) or piece.call < self._most]

    def _whole(self) -> Script[None]:
        yield from self._advance()
        yield from self._format()

    def _advance(self) -> Script[None]:
        self._char = yield

    # --- text ---

    def _say(self, text: str) -> None:
        """Text; white space at its end waits for what follows. Behind a call it only keeps texts apart."""
        shown = text.rstrip()
        space = text[len(shown) :]
        if not shown:
            self._gap += [space] if space else []
            return
        before = "".join(self._gap) + shown
        self._pieces.append(Text(before.lstrip() if self._behind_call and not self._spoken else before))
        self._gap = [space] if space else []
        self._behind_call = False
        self._spoken = True

    def _give_up(self, written: str) -> None:
        """What was read as a call is none: it is text, unless it only lacks its end."""
        if self._char or not self._enforced:
            self._say(written)

    def _text_until(self, mark: str) -> Script[bool]:
        """Say all text before `mark`, and skip that; False when the output ends without.

        The first character of a mark does not occur again in it.
        """
        matched = 0
        while True:
            if self._char == mark[matched]:
                matched += 1
                if matched == len(mark):
                    self._watched = ""
                    yield from self._advance()
                    return True
            elif matched:
                self._say(mark[:matched])
                matched = 0
                continue
            elif not self._char:
                return False
            else:
                self._say(self._char)
            self._watched = "" if matched else mark[0]
            yield from self._advance()

    def _white_space(self) -> Script[str]:
        skipped = []
        while self._char and self._char.isspace():
            skipped.append(self._char)
            yield from self._advance()
        return "".join(skipped)

    def _skip_mark(self, mark: str) -> Script[bool]:
        """Skip `mark` if it is what comes; else what looked like it is text. At the end a part of it counts as it."""
        for at, expected in enumerate(mark):
            if self._char != expected:
                if at and self._char:
                    self._say(mark[:at])
                return False
            yield from self._advance()
        return True

    # --- calls ---

    def _call(self, before: str, *, unmarked: bool = False) -> Script[bool]:
        """One call; when it is none, `before` and what was read of it are text, and the answer is False.

        `unmarked`: nothing but its form tells it from text that is JSON, so it must have arguments and a known name.
        """
        reader = _CallReader(self._names if unmarked else None)
        return (yield from self._read(reader, before))

    def _read(self, reader: "_CallReader | _ArgumentsReader", written: str) -> Script[bool]:
        begun = False
        read = [written]
        while self._char:
            understood = reader.step(self._char)
            if reader.text:
                if not begun:
                    begun = True
                    self._begin(reader.name)
                self._pieces.append(ToolArguments(self._calls - 1, reader.text))
                reader.text = ""
            if not understood:
                break
            if not begun:
                read.append(self._char)
            yield from self._advance()
            if reader.complete:
                return True
        if not begun:
            self._give_up("".join(read))
        # Broken behind its arguments, a call is still one.
        return begun and reader.has_arguments

    def _arguments(self, name: str, before: str) -> Script[bool]:
        """As `_call`, where the markup has told the name and the object is the arguments alone."""
        return (yield from self._read(_ArgumentsReader(name), before))

    def _begin(self, name: str) -> None:
        self._gap = []
        self._behind_call = True
        self._pieces.append(ToolCallBegin(self._calls, self._new_id(), name))
        self._calls += 1

    def _new_id(self) -> str:
        return f"call_{secrets.token_hex(12)}"


def _merged(pieces: list[Piece]) -> list[Piece]:
    """Neighbours that say more of the same as one piece."""
    if len(pieces) < 2:
        return pieces
    merged: list[Piece] = []
    for _, group in groupby(pieces, lambda piece: (type(piece), getattr(piece, "call", 0))):
        first, *others = group
        if others and not isinstance(first, ToolCallBegin):
            first = replace(first, text="".join([first.text, *(getattr(other, "text", "") for other in others)]))
        merged.append(first)
    return merged


class _CallReader:
    """A call as a JSON object with a name and arguments, in either order."""

    def __init__(self, names: Collection[str] | None) -> None:
        """With `names` it must have one of them, and arguments."""
        self._names = names
        self._scanner = ObjectScanner()
        self._key: str | None = None  # of the value that is being read
        self._value: list[str] = []
        self._streams = False  # that value is the arguments, and goes out as it comes
        self._early = ""  # arguments that are known before the name, or as a whole
        self.name = ""
        self.text = ""  # of the arguments, certain since it was last emptied
        self.has_arguments = False  # all of them
        self.complete = False

    def step(self, char: str) -> bool:
        """Take one character; False when this is no call, or cannot go on with it."""
        before = self._scanner.in_value
        if not self._scanner.step(char):
            return False
        now = self._scanner.in_value
        if now and not before:
            self._key = decoded_string(f'"{self._scanner.key}"')
            self._value = []
            self._streams = char == "{" and self._is_arguments and bool(self.name)
        if before or now:
            written = self._scanner.escaped(char)
            if self._streams:
                self.text += written
            else:
                self._value.append(written)
            if before and not now and not self._end_value():
                return False
        if self._scanner.done:
            return self._end()
        return True

    @property
    def _is_arguments(self) -> bool:
        return self._key in ("arguments", "parameters") and not self.has_arguments

    def _end_value(self) -> bool:
        if self._streams:
            self.has_arguments = True
            self._streams = False
        elif self._key == "name" and not self.name:
            self.name = decoded_string("".join(self._value)) or ""
            if not self.name or (self._names is not None and self.name not in self._names):
                return False
        elif self._is_arguments:
            self._early = self._as_object("".join(self._value))
            self.has_arguments = bool(self._early)
            return self.has_arguments
        return True

    @staticmethod
    def _as_object(value: str) -> str:
        """Arguments that are null, or an object inside a string, as the object; empty when they are something else."""
        if value == "null":
            return "{}"
        if value.startswith('"'):
            value = (decoded_string(value) or "").strip()
        try:
            msgspec.json.decode(value, type=dict[str, msgspec.Raw])
        except (msgspec.DecodeError, RecursionError):
            return ""
        return value

    def _end(self) -> bool:
        if not self.name or (self._names is not None and not self.has_arguments):
            return False
        if self._early or not self.has_arguments:
            self.text = self._early or "{}"
            self.has_arguments = True
        self.complete = True
        return True


class _ArgumentsReader:
    """The arguments of a call whose name is known."""

    def __init__(self, name: str) -> None:
        self._scanner = ObjectScanner()
        self.name = name
        self.text = ""
        self.complete = False

    @property
    def has_arguments(self) -> bool:
        return self.complete

    def step(self, char: str) -> bool:
        if not self._scanner.step(char):
            return False
        self.text += self._scanner.escaped(char)
        self.complete = self._scanner.done
        return True
