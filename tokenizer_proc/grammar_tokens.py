"""Tokens that a Lark grammar names (`<|tag|>`, `<[7]>`, `<[1-5,9]>`, `<[^3]>`, `<[*]>`), in llguidance's dialect."""

import re

from config.grammar import TokenTable

# Strings, comments and regular expressions are skipped: what looks like a token there is text. An opening bracket ends
# what an earlier one has begun, so that many of them are no more work than one.
_PARTS = re.compile(
    r'"(?:\\.|[^"\\\n])*+"|//[^\n]*|/(?:\\.|[^/\\\n])++/|(?P<ids><\[[^\]\n<]*+\]>)|(?P<name><[^<>\s\[\]"]+>)'
)
_RANGE = re.compile(r"\s*([0-9]{1,10})\s*(?:-\s*([0-9]{1,10})\s*)?")


def check_tokens(lark: str, table: TokenTable) -> None:
    """Raise ValueError for a grammar that names an end-of-sequence token, with which the output ends, whole or not."""
    names = {table.tokens[token_id].decode(errors="replace") for token_id in table.eos_token_ids}
    for found in _PARTS.finditer(lark):
        ids = found["ids"]
        if found["name"] in names or (ids and any(_holds(ids[2:-2], token_id) for token_id in table.eos_token_ids)):
            raise ValueError(
                f"{found[0][:64]} is or includes an end-of-sequence token, which ends the output at once: leave it "
                "out, an output ends by itself where the grammar allows it"
            )


def _holds(ids: str, token_id: int) -> bool:
    """Whether the inside of `<[...]>` includes this token; what is no list of ranges is for llguidance to refuse."""
    if ids == "*":
        return True
    excluded = ids.startswith("^")
    ranges = filter(None, map(_RANGE.fullmatch, ids.removeprefix("^").split(",")))
    listed = any(int(found[1]) <= token_id <= int(found[2] or found[1]) for found in ranges)
    return listed != excluded
