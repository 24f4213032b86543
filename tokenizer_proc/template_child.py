"""Renders chat templates in a process that may be killed: `python -m tokenizer_proc.template_child`.

A template comes with the model, so it may be slow, endless or greedy. It runs in Jinja's immutable sandbox, here, with
caps on time, memory and output. The first request carries the template.
"""

import json
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import msgspec
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from msgspec import Struct

from .child_frames import Answer, Done, Refused, serve, set_alarm, stop_alarm

MAX_OUTPUT_CHARS = 4 << 20


class Setup(Struct, tag=True, array_like=True, frozen=True):
    """First request: the template, the texts of special tokens, and the seconds one rendering may take."""

    template: str
    special_tokens: dict[str, str]
    limit_seconds: float


class Render(Struct, tag=True, array_like=True, frozen=True):
    """Render one conversation; each message is what the template sees as a mapping."""

    messages: list[dict[str, Any]]
    add_generation_prompt: bool
    tools: list[Any] | None = None
    variables: dict[str, Any] = {}  # further names, of which none hides one that the template has anyway


Request = Setup | Render


class TemplateComplaint(jinja2.TemplateError):
    """Raised by the template itself, through `raise_exception`."""


class _Generation(Extension):
    """`{% generation %}` marks the assistant's part for training; for rendering it is transparent."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it this way

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _complain(message: str) -> NoReturn:
    raise TemplateComplaint(message)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    # Jinja's own filter escapes for HTML, which a prompt must not be.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def compile_template(source: str) -> jinja2.Template:
    """Compile as transformers' `apply_chat_template` does: same whitespace rules, functions and filters."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _complain
    environment.globals["strftime_now"] = _now
    return environment.from_string(source)


class Renderer:
    """State of the child: the compiled template."""

    def __init__(self) -> None:
        self._template: jinja2.Template | None = None
        self._variables: dict[str, str] = {}
        self._limit = 0.0

    def answer(self, request: Request) -> Answer:
        try:
            if isinstance(request, Setup):
                self._template = compile_template(request.template)
                self._variables = request.special_tokens
                self._limit = request.limit_seconds
                return Done("")
            return self._render(request)
        except TemplateComplaint as error:
            return Refused(str(error))
        except MemoryError:
            return Refused("the chat template needs too much memory for these messages")
        except RecursionError:
            return Refused("the chat template nests too deep for these messages")
        except Exception as error:  # whatever a template does wrong is the request's error, never this process's
            return Refused(f"the chat template failed: {error}")

    def _render(self, request: Render) -> Answer:
        if self._template is None:
            return Refused("there is no chat template")
        set_alarm(self._limit)
        try:
            pieces: list[str] = []
            size = 0
            variables = {
                **request.variables,
                **self._variables,
                "messages": request.messages,
                "tools": request.tools,
                "documents": None,
                "add_generation_prompt": request.add_generation_prompt,
            }
            for piece in self._template.generate(variables):
                size += len(piece)
                if size > MAX_OUTPUT_CHARS:
                    return Refused(f"the rendered chat is longer than {MAX_OUTPUT_CHARS} characters")
                pieces.append(piece)
            return Done("".join(pieces))
        finally:
            stop_alarm()


if __name__ == "__main__":
    serve(msgspec.msgpack.Decoder(Request), Renderer().answer)
