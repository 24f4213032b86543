"""ZeroMQ links between processes: order, loss and back-pressure, the same on every edge.

A ROUTER begins its session with a peer (see `sessions`) only after it has heard from it, so its number is higher than
the peer's own; what a DEALER gets with a lower one was meant for a predecessor of the same name, and is dropped.

A peer that dies is noticed by its connection, not by a timeout: a DEALER hears it from its socket monitor, a ROUTER
(whose monitor does not say whom it lost) then probes each peer with an empty message that ROUTER_MANDATORY refuses to
send to one that is gone. The monitor can be ahead of the socket, so it probes several times.

A ROUTER that ends a session by itself, whose connection stands, tells the peer so, which begins a new one: else it
would wait for ever. That is a single frame with the number of the peer's session (8 bytes); an empty one is a probe.
"""

import asyncio
import logging
import struct
import time
from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar

import msgspec
import zmq

from .codec import Decoder, encode
from .curve import ClientKeys, ServerKeys
from .messages import Message
from .sessions import Inbound, LinkError, Outbound, new_incarnation
from .sockets import AsyncSocket, make_remote, open_socket

log = logging.getLogger(__name__)

In = TypeVar("In")

_MAX_BACKLOG = 8192  # messages kept here for a peer whose queue is full, before it is cut off
_MAX_ENDED = 1024  # ended sessions whose late messages are still recognised
_FAILED_HANDSHAKES = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH,
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
)
_HANDSHAKES = zmq.EVENT_HANDSHAKE_SUCCEEDED | sum(_FAILED_HANDSHAKES)
_MIN_BROKEN_HANDSHAKES = 5  # in a row; a server that ends can break one off as well
_NEXT_HANDSHAKE_SECONDS = 0.5  # after one that the server has refused
_PROBE_SECONDS = (0.01, 0.1, 1.0)  # between the probes for a peer that is gone
_ENDED = struct.Struct("<Q")  # tells a peer which session has been ended
_TELL_SECONDS = 0.5  # between attempts to tell a peer that does not read


class BindError(Exception):
    """An endpoint at which this process cannot listen; the text says why."""


class AsyncRouter(Generic[In]):
    """The bound end of an edge: many peers, each known by its routing id.

    `on_message(peer, message)` and `on_lost(peer)` are called on the loop. A peer whose messages cannot be trusted is
    cut off and reported as lost. `send` never blocks: a full peer is buffered up to a bound and then cut off as well.
    With `strict`, such a peer is a LinkError instead: for peers without which this process cannot go on.

    With `remote`, peers are on other machines, or another user's: nobody can take over a session by its routing id, and
    who is silent is lost. `keys` says who of them may connect (see `zap`).
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
        remote: bool = False,
        keys: ServerKeys | None = None,
    ) -> None:
        """`BindError` when nobody can connect to the endpoint."""
        self._decoder = decoder
        self._incarnation = incarnation
        self._strict = strict
        self._on_message = on_message
        self._on_lost = on_lost
        self._inbound: dict[bytes, Inbound] = {}
        self._outbound: dict[bytes, Outbound] = {}
        self._next_probe: asyncio.TimerHandle | None = None
        self._ended: dict[bytes, int] = {}  # oldest session still wanted; in order, so that the first can be forgotten
        self._untold: dict[bytes, int] = {}  # sessions that were ended here, and the peers do not know yet
        self._next_tell: asyncio.TimerHandle | None = None
        socket = open_socket(zmq.ROUTER)
        socket.set(zmq.ROUTER_MANDATORY, 1)
        socket.set(zmq.ROUTER_HANDOVER, 0 if remote else 1)
        if remote:
            make_remote(socket, endpoint)
        if keys is not None:
            keys.secure(socket)
        self._users: dict[bytes, str] | None = None if keys is None else {}
        self._io = AsyncSocket(socket, zmq.EVENT_DISCONNECTED, with_user=keys is not None)
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            self._io.close()
            raise BindError(f"{endpoint}: {error.strerror}") from None

    def start(self) -> None:
        """Begin to receive; needs a running loop."""
        self._io.start(self._on_frames, self._on_event)

    def incarnation_of(self, peer: bytes) -> int:
        """Number of the peer's present session. KeyError for one that is gone."""
        return self._inbound[peer].incarnation

    def user_of(self, peer: bytes) -> str:
        """The name of the key that a peer in session was let in with; "" without `keys`."""
        return "" if self._users is None else self._users[peer]

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
        known = self._inbound.get(peer)
        if known is not None:
            self._untold[peer] = known.incarnation
        self._lose(peer)
        self._tell()

    def _tell(self) -> None:
        """Tell peers that their sessions have been ended; again later those whose queues are full."""
        for peer, session in list(self._untold.items()):
            try:
                self._io.socket.send_multipart((peer, _ENDED.pack(session)), zmq.NOBLOCK)
            except zmq.Again:
                continue
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:
                    raise
            del self._untold[peer]
        self._io.sent()
        if self._next_tell is not None:
            self._next_tell.cancel()
        self._next_tell = self._io.later(_TELL_SECONDS, self._tell) if self._untold else None

    def _lose(self, peer: bytes) -> None:
        self._outbound.pop(peer, None)
        known = self._inbound.pop(peer, None)
        if self._users is not None:
            self._users.pop(peer, None)
        if known is None:
            return
        self._ended.pop(peer, None)
        self._ended[peer] = known.incarnation + 1
        if len(self._ended) > _MAX_ENDED:
            del self._ended[next(iter(self._ended))]
        self._on_lost(peer)

    def _on_frames(self, frames: list[bytes]) -> None:
        peer = frames[0]
        user = "" if self._users is None else frames.pop().decode()
        if self._users is not None and self._users.get(peer, user) != user:
            self._lose(peer)  # another client behind the name of one that is gone
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
        self._untold.pop(peer, None)  # it has begun anew by itself
        if self._users is not None:
            self._users[peer] = user
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

    Without an `identity`, the router names each connection. With `remote`, a silent peer is lost. `on_refused(reason)`
    runs when the peers do not agree on who they are, which from broken handshakes alone is concluded only before the
    first connection stood; connecting goes on all the same. `on_unreadable(reason)` runs when what the router sends
    cannot be trusted: the session is lost, and another one is tried; without it that is an error (LinkError,
    DecodeError) on the loop.
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
        *,
        remote: bool = False,
        keys: ClientKeys | None = None,
        on_refused: Callable[[str], None] | None = None,
        on_unreadable: Callable[[str], None] | None = None,
    ) -> None:
        self._decoder = decoder
        self._on_message = on_message
        self._on_connected = on_connected
        self._on_lost = on_lost
        self._outbound = Outbound(incarnation or new_incarnation())
        self._inbound = Inbound(self._outbound.incarnation)
        self.connected = False
        self._on_refused = on_refused
        self._on_unreadable = on_unreadable
        self._encrypted = keys is not None
        self._broken_handshakes = 0  # in a row
        self._stood = False
        socket = open_socket(zmq.DEALER)
        if identity:
            socket.set(zmq.IDENTITY, identity)
        if remote:
            make_remote(socket, endpoint)
        if keys is not None:
            keys.secure(socket)
        self._io = AsyncSocket(socket, zmq.EVENT_DISCONNECTED | _HANDSHAKES)
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
        if len(frames) == 1 and len(frames[0]) == _ENDED.size:
            if self.connected and frames[0] == _ENDED.pack(self._outbound.incarnation):
                self._lose()
                self._begin()
            return
        try:
            if len(frames) != 2:
                raise LinkError(f"{len(frames)} frames from {self._endpoint}")
            if not self._inbound.accept(frames[0]):
                return
            message = self._decoder(frames[1])
        except (LinkError, msgspec.DecodeError) as error:
            if self._on_unreadable is None:
                raise
            if self.connected:
                self._lose()
                self._on_unreadable(
                    f"what {self._endpoint} sends cannot be read, it may be of another version: {error}"
                )
                self._io.later(_NEXT_HANDSHAKE_SECONDS, self._connect_again)
            return
        self._on_message(message)

    def _begin(self) -> None:
        self.connected = self._stood = True
        self._on_connected()

    def _lose(self) -> None:
        self.connected = False
        self._outbound = Outbound(new_incarnation())
        self._inbound = Inbound(self._outbound.incarnation)
        self._on_lost()

    def _on_event(self, event: int) -> None:
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED and not self.connected:
            self._broken_handshakes = 0
            self._begin()
        elif event in _FAILED_HANDSHAKES:
            self._on_failed_handshake(event)
        elif event == zmq.EVENT_DISCONNECTED and self.connected:
            self._lose()

    def _on_failed_handshake(self, event: int) -> None:
        reason = None
        if event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
            self._broken_handshakes += 1
            # To a server that has been one it means that it restarts, behind a proxy whose port stays open meanwhile.
            if self._broken_handshakes >= _MIN_BROKEN_HANDSHAKES and not self._stood:
                why = "its public key is another one" if self._encrypted else "it is no server for clients of the SDK"
                reason = f"the server breaks off each handshake: {why}"
        else:
            self._io.later(_NEXT_HANDSHAKE_SECONDS, self._connect_again)
            if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                reason = "the server does not know this client's key (--sdk-keys)"
            else:
                reason = "only one side of the connection uses keys (--sdk-keys)"
        if reason is not None and self._on_refused is not None:
            self._on_refused(reason)

    def _connect_again(self) -> None:
        """ZeroMQ does so by itself, but not once a peer has refused it."""
        self._io.socket.disconnect(self._endpoint)  # or the same address would be ignored
        self._io.socket.connect(self._endpoint)

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
