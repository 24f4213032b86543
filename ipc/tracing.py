"""How processes tell of their work to whoever takes a trace, and tell nothing while nobody does.

Each process has a socket of its own for it (XPUB), which says when somebody begins and ends to listen: one who is gone,
however it went, listens no more.
"""

from collections.abc import Callable, Iterable

import zmq

from .codec import Decoder, encode
from .sockets import AsyncSocket, open_socket
from .trace_messages import Trace, TracedDetokenizing, TracedEncoding, TracedPlanning, TracedRequest, TracedStep

TraceItem = TracedRequest | TracedEncoding | TracedDetokenizing | TracedPlanning | TracedStep

FLUSH_SECONDS = 0.1
MAX_ITEMS = 20_000  # between two flushes
_SUBSCRIBED = 1  # first byte of what an XPUB socket receives


class Tracer:
    """One process's side. Ask `wanted` before `add`: while it is False, tracing costs no more than that."""

    def __init__(self, process: str, endpoint: str) -> None:
        """`process`: role and index. With an empty `endpoint` nobody can listen."""
        self.wanted = False
        self._process = process
        self._endpoint = endpoint
        self._items: list[TraceItem] = []
        self._lost = 0
        self._flushing = False
        self._io = AsyncSocket(open_socket(zmq.XPUB), zmq.EVENT_DISCONNECTED) if endpoint else None

    def start(self) -> None:
        """Let others listen; to be called on the loop."""
        if self._io is not None:
            self._io.socket.bind(self._endpoint)
            self._io.start(self._on_frames, lambda event: None)

    def add(self, item: TraceItem) -> None:
        if len(self._items) < MAX_ITEMS:
            self._items.append(item)
        else:
            self._lost += 1

    def _on_frames(self, frames: list[bytes]) -> None:
        wanted = frames[0][:1] == bytes([_SUBSCRIBED])
        if wanted and not self.wanted:
            self._forget()
        self.wanted = wanted
        if wanted and not self._flushing:
            self._flushing = True
            self._flush_later()

    def _flush_later(self) -> None:
        assert self._io is not None
        self._io.later(FLUSH_SECONDS, self._flush)

    def _flush(self) -> None:
        assert self._io is not None
        items, lost = tuple(self._items), self._lost
        self._forget()
        if not self.wanted:
            self._flushing = False
            return
        if items:
            self._io.socket.send(encode(Trace(self._process, items, lost)), zmq.NOBLOCK)
            self._io.sent()
        self._flush_later()

    def _forget(self) -> None:
        self._items.clear()
        self._lost = 0

    def close(self) -> None:
        self.wanted = False
        if self._io is not None:
            self._io.close()


class TraceListener:
    """Calls `on_trace` on the loop with what the processes behind the endpoints tell, from `start` until `close`."""

    def __init__(self, endpoints: Iterable[str], on_trace: Callable[[Trace], None]) -> None:
        self._decoder: Decoder[Trace] = Decoder(Trace)
        self._on_trace = on_trace
        self._endpoints = list(endpoints)
        socket = open_socket(zmq.SUB)
        socket.set(zmq.SUBSCRIBE, b"")
        self._io = AsyncSocket(socket, zmq.EVENT_DISCONNECTED)

    def start(self) -> None:
        self._io.start(lambda frames: self._on_trace(self._decoder(frames[0])), lambda event: None)
        for endpoint in self._endpoints:
            self._io.socket.connect(endpoint)

    def close(self) -> None:
        self._io.close()
