"""The two ends of a pipe to a process that may be killed: what `KillableChild` sends, and the loop that answers it.

Requests arrive on stdin and answers leave on stdout, one at a time: a little-endian 32-bit length, then msgpack. The
first request is the set-up. End of file on stdin ends the process; should it be busy then, its alarm clock does.
"""

import resource
import signal
import struct
import sys
from collections.abc import Callable
from typing import BinaryIO, TypeVar

import msgspec
from msgspec import Struct

LENGTH = struct.Struct("<I")
MAX_FRAME_BYTES = 256 << 20  # a request after decoding; the HTTP body that it came in is far smaller
_MAX_MEMORY_BYTES = 1 << 30  # address space of the process
_GRACE_SECONDS = 0.5  # the parent kills at the limit; the alarm is for when there is no parent left

Request = TypeVar("Request")


class Done(Struct, tag=True, array_like=True, frozen=True):
    """What was asked for; for the set-up, empty."""

    text: str


class Refused(Struct, tag=True, array_like=True, frozen=True):
    """It could not be done; `message` is fit for the client."""

    message: str


Answer = Done | Refused


def set_alarm(seconds: float) -> None:
    """Let the kernel end this process when what it does now takes longer than the parent would wait."""
    signal.setitimer(signal.ITIMER_REAL, seconds + _GRACE_SECONDS)


def stop_alarm() -> None:
    signal.setitimer(signal.ITIMER_REAL, 0)


def _read_exactly(stream: BinaryIO, size: int) -> bytes | None:
    data = stream.read(size)
    return data if len(data) == size else None


def _answer_all(decoder: msgspec.msgpack.Decoder[Request], answer: Callable[[Request], Answer]) -> None:
    inbound, outbound = sys.stdin.buffer, sys.stdout.buffer
    while (header := _read_exactly(inbound, LENGTH.size)) is not None:
        body = _read_exactly(inbound, LENGTH.unpack(header)[0])
        if body is None:
            return
        frame = msgspec.msgpack.encode(answer(decoder.decode(body)))
        outbound.write(LENGTH.pack(len(frame)) + frame)
        outbound.flush()


def serve(decoder: msgspec.msgpack.Decoder[Request], answer: Callable[[Request], Answer]) -> None:
    """Answer requests until end of file, with a cap on memory."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # the kernel ends the process, whatever Python is doing
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the launcher; this process ends with its parent
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY_BYTES, _MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _answer_all(decoder, answer)
