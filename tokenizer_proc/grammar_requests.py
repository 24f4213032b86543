"""What the grammar compiler's child is asked; apart from it, so that only the child loads llguidance."""

from msgspec import Struct

from ipc.messages import GrammarKind


class Setup(Struct, tag=True, array_like=True, frozen=True):
    """First request: where the token table is, and the seconds that one grammar may take."""

    token_table: str
    limit_seconds: float


class Compile(Struct, tag=True, array_like=True, frozen=True):
    """Compile one grammar; the answer is its form for `LLMatcher`."""

    kind: GrammarKind
    source: str


Request = Setup | Compile
