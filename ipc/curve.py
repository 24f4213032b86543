"""CURVE on sockets over TCP: what they are told of keys (RFC 26 of ZeroMQ)."""

from collections.abc import Mapping

import zmq
from msgspec import Struct

from .key_files import KeyPair


def new_key_pair() -> KeyPair:
    return KeyPair(*zmq.curve_keypair())


class ClientKeys(Struct, frozen=True):
    """What a client proves itself with, and the server's public key, by which it knows the server."""

    own: KeyPair
    server: bytes

    def secure(self, socket: "zmq.Socket[bytes]") -> None:
        socket.curve_publickey = self.own.public
        socket.curve_secretkey = self.own.secret
        socket.curve_serverkey = self.server


class ServerKeys(Struct, frozen=True):
    """The server's keys, and the clients that it lets in: names by public key in Z85."""

    own: KeyPair
    allowed: Mapping[bytes, str]

    def secure(self, socket: "zmq.Socket[bytes]") -> None:
        """`zap.Authenticator` has to be there before clients are."""
        socket.curve_server = True
        socket.curve_secretkey = self.own.secret
        socket.set(zmq.ZAP_DOMAIN, b"sdk")
        socket.set(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without an authenticator nobody comes in
