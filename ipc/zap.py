"""Who may connect to the CURVE sockets of this process, by the protocol of RFC 27 of ZeroMQ."""

from collections.abc import Mapping

import zmq
from zmq.utils import z85

from .sockets import AsyncSocket, open_socket

_ADDRESS = "inproc://zeromq.zap.01"
_FRAMES = 7  # version, request id, domain, address, routing id, mechanism, the client's public key


class Authenticator:
    """Answers libzmq's question for each handshake; there can be one in a process.

    `allowed`: names by public key in Z85. A message of an admitted client then carries its name as `User-Id`.
    """

    def __init__(self, allowed: Mapping[bytes, str]) -> None:
        self._names = {z85.decode(key): name.encode() for key, name in allowed.items()}
        socket = open_socket(zmq.REP)
        socket.bind(_ADDRESS)
        self._io = AsyncSocket(socket, zmq.EVENT_DISCONNECTED)

    def start(self) -> None:
        """Begin to answer; needs a running loop."""
        self._io.start(self._on_frames, lambda event: None)

    def _on_frames(self, frames: list[bytes]) -> None:
        name = self._names.get(frames[6]) if len(frames) == _FRAMES and frames[5] == b"CURVE" else None
        status, text = (b"400", b"unknown key") if name is None else (b"200", b"OK")
        self._io.socket.send_multipart([b"1.0", frames[1], status, text, name or b"", b""])
        self._io.sent()

    def close(self) -> None:
        self._io.socket.unbind(_ADDRESS)  # at once, so that another one can be there
        self._io.close()
