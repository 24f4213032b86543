"""ZeroMQ links: framing, order, loss and back-pressure, the same on every edge.

A message travels as two frames: a header (incarnation and sequence number, both unsigned 64 bits) and the msgpack body.
The incarnation is the time at which the sender's session began, so of two sessions of one peer the later has the higher
number: messages of an older one are dropped, a newer one replaces it, and within one the numbers have no gaps. A ROUTER
begins its session with a peer only after it has heard from it, so its number is higher than the peer's own; what a
DEALER gets with a lower one was meant for a predecessor of the same name, and is dropped.

A peer that dies is noticed by its connection, not by a timeout: a DEALER hears it from its socket monitor, a ROUTER
(whose monitor does not say whom it lost) then probes each peer with an empty message that ROUTER_MANDATORY refuses to
send to one that is gone. The monitor can be ahead of the socket, so it probes several times. One `zmq.Context` per
process; all sockets are used from one thread only.
"""

import asyncio
import logging
import struct
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, TypeVar

import msgspec
import zmq
from zmq.utils.monitor import parse_monitor_message

from .codec import Decoder, encode
from .messages import EngineDetails, FromStats, Message, Stats

log = logging.getLogger(__name__)

In = TypeVar("In")

_HEADER = struct.Struct("<QQ")
_HWM = 4096  # messages queued inside ZeroMQ per peer, each way
_MAX_MESSAGE = 64 << 20  # bytes; a 4 MiB body becomes at most a few times as much
_MAX_BACKLOG = 8192  # messages kept here for a peer whose queue is full, before it is cut off
_MAX_INCARNATION = 1 << 63  # a clock of nanoseconds gets there in the year 2262
_MAX_ENDED = 1024  # ended sessions whose late messages are still recognised
_RETRY_SECONDS = 0.005
_PROBE_SECONDS = (0.01, 0.1, 1.0)  # between the probes for a peer that is gone


class LinkError(Exception):
    """A link that can no longer be trusted: a gap in its numbers, or a message that does not decode."""


def new_incarnation() -> int:
    """A number for a session that begins now."""
    return time.time_ns()


def _open(kind: int, *, max_message: int = _MAX_MESSAGE) -> "zmq.Socket[bytes]":
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
    socket.set(zmq.LINGER, 0)
    socket.set(zmq.SNDHWM, _HWM)
    socket.set(zmq.RCVHWM, _HWM)
    socket.set(zmq.MAXMSGSIZE, max_message)
    socket.set(zmq.IMMEDIATE, 1)  # queue nothing for a connection that does not exist
    socket.set(zmq.RECONNECT_IVL, 50)
    socket.set(zmq.RECONNECT_IVL_MAX, 500)
    return socket


class _Inbound:
    """Order of one peer's messages. Those of sessions before `oldest` are not wanted."""

    __slots__ = ("expected", "incarnation")

    def __init__(self, oldest: int) -> None:
        self.incarnation = oldest
        self.expected = 0

    def accept(self, header: bytes) -> bool:
        """True when the message is the next of its session, False when it belongs to an older one."""
        if len(header) != _HEADER.size:
            raise LinkError(f"header of {len(header)} bytes")
        incarnation, sequence = _HEADER.unpack(header)
        if incarnation < self.incarnation:
            return False
        if incarnation >= _MAX_INCARNATION:
            raise LinkError(f"incarnation {incarnation}")
        if incarnation > self.incarnation:
            self.incarnation, self.expected = incarnation, 0
        if sequence != self.expected:
            raise LinkError(f"message {sequence} where {self.expected} was due")
        self.expected += 1
        return True


class _Outbound:
    """Numbers and backlog of what is sent to one peer."""

    __slots__ = ("backlog", "incarnation", "sequence")

    def __init__(self, incarnation: int) -> None:
        self.incarnation = incarnation
        self.sequence = 0
        self.backlog: deque[tuple[bytes, bytes]] = deque()

    def frame(self, body: bytes) -> tuple[bytes, bytes]:
        header = _HEADER.pack(self.incarnation, self.sequence)
        self.sequence += 1
        return header, body


class _AsyncSocket:
    """A socket on an asyncio loop: wake-ups, draining, and its monitor."""

    def __init__(self, socket: "zmq.Socket[bytes]", events: int) -> None:
        self.socket = socket
        self._monitor = socket.get_monitor_socket(events)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._retrying = False
        self._on_frames: Callable[[list[bytes]], None] = lambda frames: None
        self._on_event: Callable[[int], None] = lambda event: None

    def start(self, on_frames: Callable[[list[bytes]], None], on_event: Callable[[int], None]) -> None:
        self._on_frames, self._on_event = on_frames, on_event
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self.socket.fileno(), self.drain)
        self._loop.add_reader(self._monitor.fileno(), self._drain_monitor)
        self._loop.call_soon(self.drain)
        self._loop.call_soon(self._drain_monitor)

    def drain(self) -> None:
        """Take in everything that has arrived."""
        # The descriptor is edge-triggered: everything there must be taken before the next wake-up counts.
        while self._loop is not None:
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._on_frames(frames)

    def _drain_monitor(self) -> None:
        while self._loop is not None:
            try:
                frames = self._monitor.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._on_event(int(parse_monitor_message(frames)["event"]))

    def sent(self) -> None:
        """To be called after each send, which can swallow the wake-up of an arriving message."""
        if self._loop is not None and int(self.socket.get(zmq.EVENTS)) & zmq.POLLIN:
            self._loop.call_soon(self.drain)

    def retry_later(self, retry: Callable[[], None]) -> None:
        """Call `retry` in a moment: once, however often this is asked for meanwhile, and not after `close`."""
        if self._loop is not None and not self._retrying:
            self._retrying = True
            self._loop.call_later(_RETRY_SECONDS, self._run_retry, retry)

    def _run_retry(self, retry: Callable[[], None]) -> None:
        self._retrying = False
        self._run_if_open(retry)

    def later(self, seconds: float, action: Callable[[], None]) -> asyncio.TimerHandle:
        """Call `action` after so many seconds, unless this is closed by then."""
        assert self._loop is not None
        return self._loop.call_later(seconds, self._run_if_open, action)

    def _run_if_open(self, action: Callable[[], None]) -> None:
        if self._loop is not None:
            action()

    def close(self) -> None:
        if self._loop is not None:
            self._loop.remove_reader(self.socket.fileno())
            self._loop.remove_reader(self._monitor.fileno())
            self._loop = None
        self.socket.disable_monitor()
        self._monitor.close(0)
        self.socket.close(0)


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
        self._inbound: dict[bytes, _Inbound] = {}
        self._outbound: dict[bytes, _Outbound] = {}
        self._next_probe: asyncio.TimerHandle | None = None
        self._ended: dict[bytes, int] = {}  # oldest session still wanted; in order, so that the first can be forgotten
        socket = _open(zmq.ROUTER)
        socket.set(zmq.ROUTER_MANDATORY, 1)
        socket.set(zmq.ROUTER_HANDOVER, 1)
        self._io = _AsyncSocket(socket, zmq.EVENT_DISCONNECTED)
        socket.bind(endpoint)

    def start(self) -> None:
        """Begin to receive; needs a running loop."""
        self._io.start(self._on_frames, self._on_event)

    @property
    def peers(self) -> tuple[bytes, ...]:
        return tuple(self._inbound)

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
            outbound = self._outbound[peer] = _Outbound(incarnation)
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
        inbound = known or _Inbound(self._ended.get(peer, 0))
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
        self._outbound = _Outbound(incarnation or new_incarnation())
        self._inbound = _Inbound(self._outbound.incarnation)
        self.connected = False
        socket = _open(zmq.DEALER)
        socket.set(zmq.IDENTITY, identity)
        self._io = _AsyncSocket(socket, zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
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
            self._outbound = _Outbound(new_incarnation())
            self._inbound = _Inbound(self._outbound.incarnation)
            self._on_lost()

    def close(self) -> None:
        self._io.close()


class BlockingDealer(Generic[In]):
    """The connecting end for a thread that has nothing to do but answer."""

    def __init__(self, endpoint: str, identity: bytes, decoder: Decoder[In], incarnation: int = 0) -> None:
        self._decoder = decoder
        self._outbound = _Outbound(incarnation or new_incarnation())
        self._inbound = _Inbound(self._outbound.incarnation)
        self._socket = _open(zmq.DEALER)
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


_STATS = b"stats"  # topics: the first frame
_DETAILS = b"details"


class StatsPublisher:
    """Sends the scheduler's counters to all who listen, details to those who ask; what nobody takes is dropped."""

    def __init__(self, endpoint: str) -> None:
        self._socket = _open(zmq.XPUB)  # unlike PUB it tells who subscribes to what
        self._socket.bind(endpoint)
        self._watched = False

    @property
    def watched(self) -> bool:
        """Whether anybody asks for details. One who is gone, however it went, does not."""
        while True:
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return self._watched
            if frame[1:] == _DETAILS:
                self._watched = frame[0] == 1

    def send(self, stats: Stats) -> None:
        self._socket.send_multipart((_STATS, encode(stats)), zmq.NOBLOCK)

    def send_details(self, details: EngineDetails) -> None:
        self._socket.send_multipart((_DETAILS, encode(details)), zmq.NOBLOCK)

    def close(self) -> None:
        self._socket.close(0)


class StatsSubscriber:
    """Calls `on_stats` on the loop with the newest counters, and `on_lost` when their sender is gone.

    `on_details` gets what is sent while details are asked for, and perhaps a last one soon after.
    """

    def __init__(
        self,
        endpoint: str,
        on_stats: Callable[[Stats], None],
        on_lost: Callable[[], None],
        on_details: Callable[[EngineDetails], None] = lambda details: None,
    ) -> None:
        self._decoder: Decoder[FromStats] = Decoder(FromStats)
        self._on_stats = on_stats
        self._on_lost = on_lost
        self._on_details = on_details
        self._endpoint = endpoint
        socket = _open(zmq.SUB)
        socket.set(zmq.SUBSCRIBE, _STATS)
        self._io = _AsyncSocket(socket, zmq.EVENT_DISCONNECTED)

    def start(self) -> None:
        self._io.start(self._on_frames, self._on_event)
        self._io.socket.connect(self._endpoint)

    def ask_for_details(self, wanted: bool) -> None:
        """Begin or end to get details; the sender's successors hear of it too."""
        self._io.socket.set(zmq.SUBSCRIBE if wanted else zmq.UNSUBSCRIBE, _DETAILS)

    def _on_frames(self, frames: list[Any]) -> None:
        message = self._decoder(frames[1])
        if isinstance(message, Stats):
            self._on_stats(message)
        else:
            self._on_details(message)

    def _on_event(self, event: int) -> None:
        self._io.drain()  # the last counters of a sender must not come after its loss
        self._on_lost()

    def close(self) -> None:
        self._io.close()
