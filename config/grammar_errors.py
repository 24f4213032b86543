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
    (re.compile(r"Expected f64 for"), "Expected a number for"),
)


def readable(message: str) -> str:
    """The message, without names of llguidance's own parts and options, and of a bounded length."""
    text = message.strip()
    for pattern, words in _WORDS:
        text = pattern.sub(words, text)
    text = text.strip() or "it cannot be used"
    return text if len(text) <= _MAX_CHARS else text[:_MAX_CHARS] + "..."
