"""What the grammar compiler's child is asked; apart from it, so that only the child loads llguidance."""

import re

from msgspec import Struct

from ipc.messages import GrammarKind

# How an error about a Lark grammar says where in it something is wrong: line and column.
PLACE = re.compile(r"at (\d+)\(\d+\): (?:failed to compile JSON schema: )?")


class Setup(Struct, tag=True, array_like=True, frozen=True):
    """First request: where the token table is, and the seconds that one grammar may take."""

    token_table: str
    limit_seconds: float


class Compile(Struct, tag=True, array_like=True, frozen=True):
    """Compile one grammar; the answer is its form for `LLMatcher`."""

    kind: GrammarKind
    source: str


Request = Setup | Compile
