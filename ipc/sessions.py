"""Sessions of a link: framing, order and loss, the same on every edge.

A message travels as two frames: a header (incarnation and sequence number, both unsigned 64 bits) and the msgpack body.
The incarnation is the time at which the sender's session began, so of two sessions of one peer the later has the higher
number: messages of an older one are dropped, a newer one replaces it, and within one the numbers have no gaps.
"""

import struct
import time
from collections import deque

_HEADER = struct.Struct("<QQ")
_MAX_INCARNATION = 1 << 63  # a clock of nanoseconds gets there in the year 2262


class LinkError(Exception):
    """A link that can no longer be trusted: a gap in its numbers, or a message that does not decode."""


def new_incarnation() -> int:
    """A number for a session that begins now."""
    return time.time_ns()


class Inbound:
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


class Outbound:
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
