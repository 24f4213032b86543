"""Renders chat templates in a process that may be killed: `python -m tokenizer_proc.template_child`.

A template comes with the model, so it may be slow, endless or greedy. It runs in Jinja's immutable sandbox, here, with
caps on time, memory and output. Requests arrive on stdin and answers leave on stdout, one at a time: a little-endian
32-bit length, then msgpack. The first request carries the template. End of file on stdin ends the process; should it be
rendering at that time, its alarm clock does.
"""

import json
import resource
import signal
import struct
import sys
from datetime import datetime
from typing import Any, BinaryIO, NoReturn

import jinja2
import msgspec
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from msgspec import Struct

LENGTH = struct.Struct("<I")
MAX_OUTPUT_CHARS = 4 << 20
MAX_FRAME_BYTES = 256 << 20  # a chat request after decoding; the HTTP body that it came in is far smaller
_MAX_MEMORY_BYTES = 1 << 30  # address space of this process
_GRACE_SECONDS = 0.5  # the parent kills at the limit; the alarm is for when there is no parent left


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


class Rendered(Struct, tag=True, array_like=True, frozen=True):
    """The prompt text; for `Setup`, empty."""

    text: str


class Refused(Struct, tag=True, array_like=True, frozen=True):
    """The template did not render; `message` is fit for the client."""

    message: str


Request = Setup | Render
Answer = Rendered | Refused


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
                return Rendered("")
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
        signal.setitimer(signal.ITIMER_REAL, self._limit + _GRACE_SECONDS)
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
            return Rendered("".join(pieces))
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)


def _read_exactly(stream: BinaryIO, size: int) -> bytes | None:
    data = stream.read(size)
    return data if len(data) == size else None


def serve(inbound: BinaryIO, outbound: BinaryIO) -> None:
    """Answer requests until end of file."""
    renderer = Renderer()
    decoder = msgspec.msgpack.Decoder(Request)
    while (header := _read_exactly(inbound, LENGTH.size)) is not None:
        body = _read_exactly(inbound, LENGTH.unpack(header)[0])
        if body is None:
            return
        answer = msgspec.msgpack.encode(renderer.answer(decoder.decode(body)))
        outbound.write(LENGTH.pack(len(answer)) + answer)
        outbound.flush()


def main() -> None:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # the kernel ends the process, whatever Python is doing
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the launcher; this process ends with its parent
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY_BYTES, _MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    serve(sys.stdin.buffer, sys.stdout.buffer)


if __name__ == "__main__":
    main()
