"""llguidance's messages in words that its callers' clients understand."""

import re

_MAX_CHARS = 500
# What it says, and what is told instead; applied one after the other. It may quote 100,000 characters of what a client
# wrote, so none begins with a repetition.
_WORDS = (
    (re.compile(r"<(?:non-)?verbose/>.*", re.DOTALL), ""),
    (re.compile(r"^(?:NoExtensionBias|NoExtension)\b.*", re.DOTALL), "no output can match it"),
    (re.compile(r"^(?:LexerTooComplex|ParserTooComplex)\b"), "it is too complex"),
    (re.compile(r"; following special tokens are available:.*", re.DOTALL), ""),
    (re.compile(r"\. Enable 'coerce_one_of' option.*", re.DOTALL), " where their parts may overlap"),
    (re.compile(r"Regex is empty: .*", re.DOTALL), "no text meets all that is said of it"),
    (
        re.compile(r"Failed to generate regex for (?:integer|float) range: .*", re.DOTALL),
        "a minimum or maximum of a number is too large: use at most 17 digits before its decimal point",
    ),
    (
        re.compile(r"regex parse error:.*exceed the maximum number of nested parentheses/brackets \(250\)", re.DOTALL),
        "a pattern has more than 250 nested groups, or a minimum or maximum that many digits behind its decimal point",
    ),
    (re.compile(r"^invalid multiple of$"), "multipleOf must be above 0"),
    (re.compile(r"Expected f64 for"), "Expected a number for"),
)


def readable(message: str) -> str:
    """The message, without names of llguidance's own parts and options, and of a bounded length."""
    text = message.strip()
    for pattern, words in _WORDS:
        text = pattern.sub(words, text)
    text = text.strip() or "it cannot be used"
    return text if len(text) <= _MAX_CHARS else text[:_MAX_CHARS] + "..."
