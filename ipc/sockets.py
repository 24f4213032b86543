"""ZeroMQ sockets with the options that all links have, and how one is driven by an asyncio loop.

One `zmq.Context` per process; all sockets are used from one thread only.
"""

import asyncio
from collections.abc import Callable

import zmq
from zmq.utils.monitor import parse_monitor_message

_HWM = 4096  # messages queued inside ZeroMQ per peer, each way
_MAX_MESSAGE = 64 << 20  # bytes; a 4 MiB body becomes at most a few times as much
_RETRY_SECONDS = 0.005
_HEARTBEAT_MS = 5000  # between signs of life over TCP, where a peer can vanish without a word
_HEARTBEAT_TIMEOUT_MS = 15000


def open_socket(kind: int) -> "zmq.Socket[bytes]":
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
    socket.set(zmq.LINGER, 0)
    socket.set(zmq.SNDHWM, _HWM)
    socket.set(zmq.RCVHWM, _HWM)
    socket.set(zmq.MAXMSGSIZE, _MAX_MESSAGE)
    socket.set(zmq.IMMEDIATE, 1)  # queue nothing for a connection that does not exist
    socket.set(zmq.RECONNECT_IVL, 50)
    socket.set(zmq.RECONNECT_IVL_MAX, 500)
    return socket


def make_remote(socket: "zmq.Socket[bytes]", endpoint: str) -> None:
    """For peers on other machines: find out within seconds that one is gone."""
    if "[" in endpoint:
        socket.set(zmq.IPV6, 1)
    socket.set(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
    socket.set(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)
    socket.set(zmq.HEARTBEAT_TTL, _HEARTBEAT_TIMEOUT_MS)


class AsyncSocket:
    """A socket on an asyncio loop: wake-ups, draining, and its monitor.

    With `with_user`, the frames of each message are followed by the name under which its sender was let in.
    """

    def __init__(self, socket: "zmq.Socket[bytes]", events: int, *, with_user: bool = False) -> None:
        self.socket = socket
        self._receive = self._receive_with_user if with_user else self._receive_frames
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
                frames = self._receive()
            except zmq.Again:
                return
            self._on_frames(frames)

    def _receive_frames(self) -> list[bytes]:
        return self.socket.recv_multipart(zmq.NOBLOCK)

    def _receive_with_user(self) -> list[bytes]:
        frames = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
        return [*(frame.bytes for frame in frames), str(frames[-1].get("User-Id")).encode()]

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
