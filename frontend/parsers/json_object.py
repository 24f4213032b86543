"""One JSON object, read as its text arrives (RFC 8259)."""

import re
from typing import Literal

import msgspec

_WHITE_SPACE = " \t\r\n"
_ESCAPES = '"\\/bfnrt'
_DIGITS = "0123456789"
_HEX = "0123456789abcdefABCDEF"
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_NUMBER_SO_FAR = re.compile(r"-?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*|(?:\.[0-9]+)?[eE][+-]?[0-9]*)?)?")
_LITERALS = ("true", "false", "null")
_CLOSING = {"{": "}", "[": "]"}

_State = Literal[
    "value",
    "value or end",
    "key",
    "key or end",
    "colon",
    "comma or end",
    "string",
    "escape",
    "hex",
    "number",
    "literal",
]


class ObjectScanner:
    """Follows the text of one object, a character at a time.

    A control character inside a string, which JSON forbids but models write, is let through: see `escaped`.
    """

    def __init__(self) -> None:
        self._state: _State = "value"
        self._open: list[str] = []  # brackets, outermost first
        self._token = ""  # of a number (long runs of digits cut), a literal or the digits of an escape, so far
        self._in_key = False
        self._key: list[str] = []  # as written
        self.done = False

    def step(self, char: str) -> bool:
        """Take one character; False when no object can go on with it, after which this scanner is of no more use."""
        match self._state:
            case "string":
                return self._in_string(char)
            case "escape":
                self._state = "hex" if char == "u" else "string"
                self._token = ""
                return char == "u" or char in _ESCAPES
            case "hex":
                self._token += char
                if len(self._token) == 4:
                    self._state = "string"
                return char in _HEX
            case "literal":
                self._token += char
                if self._token in _LITERALS:
                    self._state = "comma or end"
                    return True
                return any(literal.startswith(self._token) for literal in _LITERALS)
            case "number":
                if char in _DIGITS and len(self._token) > 1 and self._token[-2:].isdecimal():
                    return True  # behind two digits there may be any number of them, so the token need not grow
                if _NUMBER_SO_FAR.fullmatch(self._token + char):
                    self._token += char
                    return True
                if not _NUMBER.fullmatch(self._token):
                    return False
                self._state = "comma or end"
        return char in _WHITE_SPACE or self._structure(char)

    def _in_string(self, char: str) -> bool:
        if char == "\\":
            self._state = "escape"
        elif char == '"':
            self._state = "colon" if self._in_key else "comma or end"
            return True
        if self._in_key and len(self._open) == 1:
            self._key.append(char)
        return True

    def _structure(self, char: str) -> bool:
        """A character between the values."""
        state = self._state
        if state == "colon":
            self._state = "value"
            return char == ":"
        if state == "comma or end" and char == ",":
            self._state = "key" if self._open[-1] == "{" else "value"
            return True
        if state in ("comma or end", "key or end", "value or end") and char == _CLOSING[self._open[-1]]:
            self._open.pop()
            self._state = "comma or end"
            self.done = not self._open
            return True
        if state in ("key", "key or end"):
            self._begin_string(in_key=True)
            return char == '"'
        return state in ("value", "value or end") and self._begin_value(char)

    def _begin_value(self, char: str) -> bool:
        if char == "{":
            self._open.append(char)
            self._state = "key or end"
        elif not self._open:
            return False  # what is read is an object
        elif char == "[":
            self._open.append(char)
            self._state = "value or end"
        elif char == '"':
            self._begin_string(in_key=False)
        elif char in "tfn":
            self._state, self._token = "literal", char
        elif char == "-" or char.isdecimal():
            self._state, self._token = "number", char
            return _NUMBER_SO_FAR.fullmatch(char) is not None
        else:
            return False
        return True

    def _begin_string(self, *, in_key: bool) -> None:
        self._state, self._in_key = "string", in_key
        if in_key and len(self._open) == 1:
            self._key = []

    @property
    def in_value(self) -> bool:
        """Whether a value of the object itself has begun and may go on."""
        if len(self._open) != 1:
            return len(self._open) > 1
        in_text = self._state in ("string", "escape", "hex") and not self._in_key
        return in_text or self._state in ("number", "literal")

    @property
    def key(self) -> str:
        """The last key of the object itself, as it is written."""
        return "".join(self._key)

    def escaped(self, char: str) -> str:
        """The character just taken as valid JSON has it there."""
        return f"\\u{ord(char):04x}" if char < " " and self._state == "string" else char


def decoded_string(text: str) -> str | None:
    """What a JSON text stands for, if that is a string."""
    try:
        return msgspec.json.decode(text, type=str)
    except (msgspec.DecodeError, UnicodeEncodeError):
        return None
