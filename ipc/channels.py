"""ZeroMQ links between processes: order, loss and back-pressure, the same on every edge.

A ROUTER begins its session with a peer (see `sessions`) only after it has heard from it, so its number is higher than
the peer's own; what a DEALER gets with a lower one was meant for a predecessor of the same name, and is dropped.

A peer that dies is noticed by its connection, not by a timeout: a DEALER hears it from its socket monitor, a ROUTER
(whose monitor does not say whom it lost) then probes each peer with an empty message that ROUTER_MANDATORY refuses to
send to one that is gone. The monitor can be ahead of the socket, so it probes several times.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar

import msgspec
import zmq

from .codec import Decoder, encode
from .messages import Message
from .sessions import Inbound, LinkError, Outbound, new_incarnation
from .sockets import AsyncSocket, open_socket

log = logging.getLogger(__name__)

In = TypeVar("In")

_MAX_BACKLOG = 8192  # messages kept here for a peer whose queue is full, before it is cut off
_MAX_ENDED = 1024  # ended sessions whose late messages are still recognised
_PROBE_SECONDS = (0.01, 0.1, 1.0)  # between the probes for a peer that is gone


class AsyncRouter(Generic[In]):
    """The bound end of an edge: many peers, each known by its routing id.

    `on_message(peer, message)` and `on_lost(peer)` are called on the loop. A peer whose messages cannot be trusted is
    cut off and reported as lost. `send` never blocks: a full peer is buffered up to a bound and then cut off as well.
    With `strict`, such a peer is a LinkError instead: for peers without which this process cannot go on.
    """

    def __init__(
        self,
        endpoint: str,
        decoder: Decoder[In],
        incarnation: int,
        on_message: Callable[[bytes, In], None],
        on_lost: Callable[[bytes], None],
        *,
        strict: bool = False,
    ) -> None:
        self._decoder = decoder
        self._incarnation = incarnation
        self._strict = strict
        self._on_message = on_message
        self._on_lost = on_lost
        self._inbound: dict[bytes, Inbound] = {}
        self._outbound: dict[bytes, Outbound] = {}
        self._next_probe: asyncio.TimerHandle | None = None
        self._ended: dict[bytes, int] = {}  # oldest session still wanted; in order, so that the first can be forgotten
        socket = open_socket(zmq.ROUTER)
        socket.set(zmq.ROUTER_MANDATORY, 1)
        socket.set(zmq.ROUTER_HANDOVER, 1)
        self._io = AsyncSocket(socket, zmq.EVENT_DISCONNECTED)
        socket.bind(endpoint)

    def start(self) -> None:
        """Begin to receive; needs a running loop."""
        self._io.start(self._on_frames, self._on_event)

    def incarnation_of(self, peer: bytes) -> int:
        """Number of the peer's present session. KeyError for one that is gone."""
        return self._inbound[peer].incarnation

    def send(self, peer: bytes, message: Message) -> bool:
        """Send, or buffer; False when the peer is gone (its loss has then been reported)."""
        inbound = self._inbound.get(peer)
        if inbound is None:
            return False
        outbound = self._outbound.get(peer)
        if outbound is None:
            # Above the peer's own number, even where the clock has been set back.
            incarnation = max(self._incarnation, new_incarnation(), inbound.incarnation + 1)
            outbound = self._outbound[peer] = Outbound(incarnation)
        frames = outbound.frame(encode(message))
        if not outbound.backlog and self._try_send(peer, frames):
            return peer in self._inbound
        if peer not in self._inbound:
            return False
        outbound.backlog.append(frames)
        if len(outbound.backlog) > _MAX_BACKLOG:
            self._cut_off(peer, f"{len(outbound.backlog)} messages wait, and it does not read")
            return False
        self._io.retry_later(self._retry)
        return True

    def _try_send(self, peer: bytes, frames: tuple[bytes, bytes]) -> bool:
        """True when the frames are out of our hands: sent, or the peer is gone."""
        try:
            self._io.socket.send_multipart((peer, *frames), zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._lose(peer)
        self._io.sent()
        return True

    def _retry(self) -> None:
        waiting = False
        for peer, outbound in list(self._outbound.items()):
            while outbound.backlog and peer in self._inbound:
                if not self._try_send(peer, outbound.backlog[0]):
                    waiting = True
                    break
                outbound.backlog.popleft()
        if waiting:
            self._io.retry_later(self._retry)

    def _cut_off(self, peer: bytes, why: str) -> None:
        """Send nothing more to this peer in its present session, and hear nothing more of it."""
        if self._strict:
            raise LinkError(f"{peer!r}: {why}")
        log.warning("a peer is cut off: %s", why)
        self._lose(peer)

    def _lose(self, peer: bytes) -> None:
        self._outbound.pop(peer, None)
        known = self._inbound.pop(peer, None)
        if known is None:
            return
        self._ended.pop(peer, None)
        self._ended[peer] = known.incarnation + 1
        if len(self._ended) > _MAX_ENDED:
            del self._ended[next(iter(self._ended))]
        self._on_lost(peer)

    def _on_frames(self, frames: list[bytes]) -> None:
        peer = frames[0]
        known = self._inbound.get(peer)
        inbound = known or Inbound(self._ended.get(peer, 0))
        session = inbound.incarnation
        try:
            if len(frames) != 3:
                raise LinkError(f"{len(frames)} frames")
            if not inbound.accept(frames[1]):
                return
            message = self._decoder(frames[2])
        except (LinkError, msgspec.DecodeError) as error:
            self._inbound[peer] = inbound
            self._cut_off(peer, str(error))
            return
        self._inbound[peer] = inbound
        if known is not None and inbound.incarnation != session:
            # The same peer in a new session: what the old one left is void.
            self._outbound.pop(peer, None)
            self._on_lost(peer)
        self._on_message(peer, message)

    def _on_event(self, event: int) -> None:
        if self._next_probe is not None:
            self._next_probe.cancel()
        self._probe(0)

    def _probe(self, number: int) -> None:
        """Find out who is gone, now and a few times more."""
        for peer in list(self._inbound):
            try:
                self._io.socket.send_multipart((peer, b""), zmq.NOBLOCK)
            except zmq.Again:
                continue
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:
                    raise
                self._lose(peer)
        self._io.sent()
        self._next_probe = None
        if number < len(_PROBE_SECONDS):
            self._next_probe = self._io.later(_PROBE_SECONDS[number], partial(self._probe, number + 1))

    def close(self) -> None:
        self._io.close()


class AsyncDealer(Generic[In]):
    """The connecting end of an edge.

    `on_connected()` runs each time a connection stands (say hello there), `on_lost()` when it breaks; ZeroMQ then
    connects again by itself, in a new session. While there is no connection, `send` refuses.
    """

    def __init__(
        self,
        endpoint: str,
        decoder: Decoder[In],
        identity: bytes,
        on_message: Callable[[In], None],
        on_connected: Callable[[], None],
        on_lost: Callable[[], None],
        incarnation: int = 0,
    ) -> None:
        self._decoder = decoder
        self._on_message = on_message
        self._on_connected = on_connected
        self._on_lost = on_lost
        self._outbound = Outbound(incarnation or new_incarnation())
        self._inbound = Inbound(self._outbound.incarnation)
        self.connected = False
        socket = open_socket(zmq.DEALER)
        socket.set(zmq.IDENTITY, identity)
        self._io = AsyncSocket(socket, zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._endpoint = endpoint

    def start(self) -> None:
        """Connect and begin to receive; needs a running loop."""
        self._io.start(self._on_frames, self._on_event)
        self._io.socket.connect(self._endpoint)

    def send(self, message: Message) -> bool:
        """Send, or buffer up to a bound; False when there is no connection or no room."""
        if not self.connected or len(self._outbound.backlog) >= _MAX_BACKLOG:
            return False
        frames = self._outbound.frame(encode(message))
        if self._outbound.backlog or not self._try_send(frames):
            self._outbound.backlog.append(frames)
            self._io.retry_later(self._retry)
        return True

    def _try_send(self, frames: tuple[bytes, bytes]) -> bool:
        try:
            self._io.socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            return False
        self._io.sent()
        return True

    def _retry(self) -> None:
        backlog = self._outbound.backlog
        while backlog and self._try_send(backlog[0]):
            backlog.popleft()
        if backlog:
            self._io.retry_later(self._retry)

    def _on_frames(self, frames: list[bytes]) -> None:
        if len(frames) == 1 and not frames[0]:
            return  # a probe
        if len(frames) != 2:
            raise LinkError(f"{len(frames)} frames from {self._endpoint}")
        if self._inbound.accept(frames[0]):
            self._on_message(self._decoder(frames[1]))

    def _on_event(self, event: int) -> None:
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED and not self.connected:
            self.connected = True
            self._on_connected()
        elif event == zmq.EVENT_DISCONNECTED and self.connected:
            self.connected = False
            self._outbound = Outbound(new_incarnation())
            self._inbound = Inbound(self._outbound.incarnation)
            self._on_lost()

    def close(self) -> None:
        self._io.close()


class BlockingDealer(Generic[In]):
    """The connecting end for a thread that has nothing to do but answer."""

    def __init__(self, endpoint: str, identity: bytes, decoder: Decoder[In], incarnation: int = 0) -> None:
        self._decoder = decoder
        self._outbound = Outbound(incarnation or new_incarnation())
        self._inbound = Inbound(self._outbound.incarnation)
        self._socket = open_socket(zmq.DEALER)
        self._socket.set(zmq.IDENTITY, identity)
        self._socket.connect(endpoint)

    def send(self, message: Message) -> None:
        """Send, waiting for the connection or for room when there is none."""
        self._socket.send_multipart(self._outbound.frame(encode(message)))

    def recv(self, timeout: float | None = None) -> In | None:
        """The next message, or None after `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            wait = None if deadline is None else max(0, int((deadline - time.monotonic()) * 1000))
            if not self._socket.poll(wait):
                return None
            frames = self._socket.recv_multipart()
            if len(frames) == 1 and not frames[0]:
                continue  # a probe
            if len(frames) != 2:
                raise LinkError(f"{len(frames)} frames")
            if self._inbound.accept(frames[0]):
                return self._decoder(frames[1])

    def close(self) -> None:
        self._socket.close(0)
