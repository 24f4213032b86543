"""Compiles grammars in a process that may be killed: `python -m tokenizer_proc.grammar_child`.

A grammar comes from a client, so it may be slow or greedy. It is translated to llguidance's own form, compiled, and
asked for its first mask, here, with caps on time and memory. What passed is compiled again by the worker, which then
takes a few milliseconds.
"""

import json
import re
from pathlib import Path
from typing import cast

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from llguidance.gbnf_to_lark import any_to_lark

from config.grammar import GRAMMAR_LIMITS, TokenTable, read_token_table
from config.grammar_errors import readable
from ipc.messages import GrammarKind

from .child_frames import Answer, Done, Refused, serve, set_alarm, stop_alarm
from .grammar_requests import PLACE, Compile, Request, Setup
from .grammar_tokens import check_tokens
from .json_schemas import UnsupportedSchema, check_keywords

_EXCERPT = re.compile(r"\n +\d+ \| .*", re.DOTALL)  # of the Lark grammar, with which a message ends
# The model decides how text that the grammar forces is cut into tokens: llguidance would need the tokenizer for it.
_OPTIONS = '\n%llguidance {"no_forcing": true}\n'
# Compact, or as Python's json.dumps writes it: no other whitespace, in which small models lose themselves.
_JSON_FORM = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?", "lenient": False}


def translate(kind: GrammarKind, source: str) -> str:
    """A grammar in the form that `LLMatcher` takes; ValueError when it can't be one."""
    if kind == "lark":
        # GBNF, which others take under the same name, becomes Lark; llguidance sees it in more than what has its sign.
        lark = any_to_lark(source) if "::=" in source else source
    elif kind == "regex":
        (entry,) = json.loads(LLMatcher.grammar_from_regex(source))["grammars"]
        lark = entry["lark_grammar"]
    elif kind == "choice":
        lark = "start: " + " | ".join(json.dumps(text) for text in json.loads(source))
    else:
        lark = "start: %json " + json.dumps(_schema(source if kind == "json_schema" else '{"type": "object"}'))
    return json.dumps({"grammars": [{"lark_grammar": lark + _OPTIONS}]})


def _schema(source: str) -> dict[str, object]:
    schema = json.loads(source)
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise UnsupportedSchema("the schema allows nothing")
    if "x-guidance" in schema:
        raise UnsupportedSchema("x-guidance is not supported")
    check_keywords(schema)
    return {**schema, "x-guidance": _JSON_FORM}


class Compiler:
    """State of the child: the vocabulary."""

    def __init__(self) -> None:
        self._tokenizer: LLTokenizer | None = None
        self._table: TokenTable | None = None
        self._limits = LLParserLimits(**GRAMMAR_LIMITS)
        self._seconds = 0.0

    def answer(self, request: Request) -> Answer:
        try:
            if isinstance(request, Setup):
                table = self._table = read_token_table(Path(request.token_table))
                self._tokenizer = LLTokenizer(cast(TokenizerWrapper, table), eos_token=table.eos_token_ids or None)
                self._seconds = request.limit_seconds
                return Done("")
            set_alarm(self._seconds)
            try:
                return self._compile(request)
            finally:
                stop_alarm()
        except MemoryError:
            return Refused("it needs too much memory")
        except RecursionError:
            return Refused("it nests too deep")
        except Exception as error:  # whatever a grammar does wrong is the request's error, never this process's
            return Refused(_readable(str(error)))

    def _compile(self, request: Compile) -> Answer:
        assert self._tokenizer is not None
        assert self._table is not None
        if request.kind == "lark":
            check_tokens(request.source, self._table)
        grammar = translate(request.kind, request.source)
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
        if not matcher.is_error():
            matcher.compute_bitmask()  # a grammar that matches nothing shows it here
        if matcher.is_error():
            return Refused(_readable(matcher.get_error(), with_place=request.kind == "lark"))
        return Done(grammar)


def _readable(message: str, *, with_place: bool = False) -> str:
    """llguidance's message without the Lark around what the client wrote."""
    text = _EXCERPT.sub("", message).strip()
    return readable(text if with_place else PLACE.sub("", text, count=1))


if __name__ == "__main__":
    serve(msgspec.msgpack.Decoder(Request), Compiler().answer)
