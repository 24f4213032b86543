"""The clients of the benchmark: one process, plain sockets, and no more parsing than counting needs.

    python -m tools.bench_frontend.client PORT CONNECTIONS TOKENS SECONDS

Each connection asks again as soon as it has its answer: for TOKENS streamed ones on average, between half and one and a
half times that, so that the streams do not all begin together again and again; or for one that is not streamed when
TOKENS is 1. On stdout comes one JSON object, `Counted`.
"""

import itertools
import json
import random
import selectors
import socket
import sys
import time
from array import array
from collections.abc import Iterator

import msgspec
from msgspec import Struct

from .engine import MODEL_NAME

_TOKEN = b" 0000"  # how the text of each begins, until the machine has run for three years
_EVENT = b'"content":" '
_DIGITS = 15
_END_OF_STREAM = b"0\r\n\r\n"  # of the chunked coding; it may be read behind the last chunk or alone
_END_OF_ANSWER = b"}}}"  # of usage, in an answer that does not stream
_WARM_UP_SECONDS = 1.0
_LATENCY_OF_ONE_IN = 8  # connections
_LENGTHS = 101  # different lengths of answers


class Counted(Struct):
    """What arrived after the warm-up."""

    seconds: float
    tokens: int
    events: int  # that brought them: fewer where a stream's tokens had to wait for each other
    requests: int
    latencies_us: list[int]  # from the engine's sending to here, of some connections' tokens
    request_us: list[int]  # from asking to the answer's end


class _Connection:
    def __init__(self, port: int, requests: Iterator[bytes]) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._requests = requests
        self.asked_at = 0.0
        self.read_at = 0.0

    def ask(self) -> None:
        self.asked_at = time.monotonic()
        self.socket.sendall(next(self._requests))


def request_bytes(tokens: int) -> bytes:
    """A short chat request for so many tokens."""
    body = {"model": MODEL_NAME, "messages": [{"role": "user", "content": "Hello there"}], "max_tokens": tokens}
    data = json.dumps(body | ({"stream": True} if tokens > 1 else {})).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: bench\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


def requests_for(tokens: int) -> Iterator[bytes]:
    """Requests without end, for so many tokens on average."""
    lengths = [tokens // 2 + tokens * at // _LENGTHS for at in range(_LENGTHS)] if tokens > 1 else [1]
    random.Random(0).shuffle(lengths)
    return itertools.cycle([request_bytes(length) for length in lengths])


def run(port: int, connections: int, tokens: int, seconds: float) -> Counted:
    """Ask on all connections at once, and count for so long."""
    end = _END_OF_STREAM if tokens > 1 else _END_OF_ANSWER
    selector = selectors.DefaultSelector()
    asking = requests_for(tokens)
    for at in range(connections):
        connection = _Connection(port, asking)
        selector.register(connection.socket, selectors.EVENT_READ, (connection, at % _LATENCY_OF_ONE_IN == 0))
        connection.ask()
    counted_tokens = counted_events = counted_requests = 0
    latencies, requests = array("q"), array("q")
    begin = time.monotonic() + _WARM_UP_SECONDS
    while (now := time.monotonic()) < begin + seconds:
        counting = now >= begin
        for key, _ in selector.select(0.1):
            connection, sampled = key.data
            data = connection.socket.recv(1 << 16)
            if not data:
                raise SystemExit("the frontend closed a connection")
            connection.read_at = now
            if counting:
                counted_tokens += data.count(_TOKEN)
                counted_events += data.count(_EVENT)
                if sampled and (last := data.rfind(_EVENT)) >= 0:
                    digits = data[last + len(_EVENT) : last + len(_EVENT) + _DIGITS]
                    if len(digits) == _DIGITS:
                        latencies.append(time.monotonic_ns() // 1000 - int(digits))
            if data.endswith(end):
                if counting:
                    counted_requests += 1
                    requests.append(int((time.monotonic() - connection.asked_at) * 1e6))
                connection.ask()
    silent = sum(key.data[0].read_at < begin + seconds / 2 for key in selector.get_map().values())
    if silent:  # what the others got would pass for what all of them can get
        raise SystemExit(f"{silent} of {connections} connections have got nothing for half of the time")
    elapsed = time.monotonic() - begin
    return Counted(elapsed, counted_tokens, counted_events, counted_requests, latencies.tolist(), requests.tolist())


if __name__ == "__main__":
    port, connections, tokens = map(int, sys.argv[1:4])
    sys.stdout.buffer.write(msgspec.json.encode(run(port, connections, tokens, float(sys.argv[4]))))
