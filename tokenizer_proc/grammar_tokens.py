"""Tokens that a Lark grammar names (`<|tag|>`, `<[7]>`, `<[1-5,9]>`, `<[^3]>`, `<[*]>`), in llguidance's dialect."""

import re

from config.grammar import TokenTable

# Strings, comments and regular expressions are skipped: what looks like a token there is text.
_PARTS = re.compile(
    r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/(?:\\.|[^/\\\n])+/|(?P<ids><\[[^\]\n]*\]>)|(?P<name><[^<>\s\[\]"]+>)'
)


def check_tokens(lark: str, table: TokenTable) -> None:
    """Raise ValueError for a grammar that names an end-of-sequence token, with which the output ends, whole or not."""
    ends = {table.tokens[token_id].decode(errors="replace"): token_id for token_id in table.eos_token_ids}
    for found in _PARTS.finditer(lark):
        name, ids = found["name"], found["ids"]
        if name in ends or (ids and any(_holds(ids[2:-2], token_id) for token_id in ends.values())):
            raise ValueError(
                f"{found[0][:64]} is or includes an end-of-sequence token, which ends the output at once: leave it "
                "out, an output ends by itself where the grammar allows it"
            )


def _holds(ids: str, token_id: int) -> bool:
    """Whether the inside of `<[...]>` includes this token."""
    if ids == "*":
        return True
    excluded = ids.startswith("^")
    listed = False
    for part in ids.removeprefix("^").split(","):
        first, _, last = part.partition("-")
        if first.strip().isdecimal() and (last or first).strip().isdecimal():
            listed = listed or int(first) <= token_id <= int(last or first)
    return listed != excluded
