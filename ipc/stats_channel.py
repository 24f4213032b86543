"""The scheduler's counters, published to all who listen, and its details, to those who ask."""

from collections.abc import Callable
from typing import Any

import zmq

from .codec import Decoder, encode
from .sockets import AsyncSocket, open_socket
from .stats_messages import Diagnosis, EngineDetails, FromStats, Stats

_STATS = b"stats"  # topics: the first frame
_DETAILS = b"details"
_DIAGNOSIS = b"diagnosis"


class StatsPublisher:
    """Sends the scheduler's counters to all who listen, details and diagnoses to those who ask; what nobody takes is
    dropped."""

    def __init__(self, endpoint: str) -> None:
        self._socket = open_socket(zmq.XPUB)  # unlike PUB it tells who subscribes to what
        self._socket.bind(endpoint)
        self._wanted: set[bytes] = set()

    @property
    def watched(self) -> bool:
        """Whether anybody asks for details. One who is gone, however it went, does not."""
        return self._is_wanted(_DETAILS)

    @property
    def diagnosis_wanted(self) -> bool:
        """Whether anybody asks for diagnoses."""
        return self._is_wanted(_DIAGNOSIS)

    def _is_wanted(self, topic: bytes) -> bool:
        while True:
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return topic in self._wanted
            if frame[0] == 1:
                self._wanted.add(frame[1:])
            else:
                self._wanted.discard(frame[1:])

    def send(self, stats: Stats) -> None:
        self._socket.send_multipart((_STATS, encode(stats)), zmq.NOBLOCK)

    def send_details(self, details: EngineDetails) -> None:
        self._socket.send_multipart((_DETAILS, encode(details)), zmq.NOBLOCK)

    def send_diagnosis(self, diagnosis: Diagnosis) -> None:
        self._socket.send_multipart((_DIAGNOSIS, encode(diagnosis)), zmq.NOBLOCK)

    def close(self) -> None:
        self._socket.close(0)


class StatsSubscriber:
    """Calls `on_stats` on the loop with the newest counters, and `on_lost` when their sender is gone.

    `on_details` gets what is sent while details are asked for, and perhaps a last one soon after; so does
    `on_diagnosis`.
    """

    def __init__(
        self,
        endpoint: str,
        on_stats: Callable[[Stats], None],
        on_lost: Callable[[], None],
        on_details: Callable[[EngineDetails], None] = lambda details: None,
        on_diagnosis: Callable[[Diagnosis], None] = lambda diagnosis: None,
    ) -> None:
        self._decoder: Decoder[FromStats] = Decoder(FromStats)
        self._on_stats = on_stats
        self._on_lost = on_lost
        self._on_details = on_details
        self._on_diagnosis = on_diagnosis
        self._endpoint = endpoint
        socket = open_socket(zmq.SUB)
        socket.set(zmq.SUBSCRIBE, _STATS)
        self._io = AsyncSocket(socket, zmq.EVENT_DISCONNECTED)

    def start(self) -> None:
        self._io.start(self._on_frames, self._on_event)
        self._io.socket.connect(self._endpoint)

    def ask_for_details(self, wanted: bool) -> None:
        """Begin or end to get details; the sender's successors hear of it too."""
        self._ask_for(_DETAILS, wanted)

    def ask_for_diagnosis(self, wanted: bool) -> None:
        """Likewise, diagnoses."""
        self._ask_for(_DIAGNOSIS, wanted)

    def _ask_for(self, topic: bytes, wanted: bool) -> None:
        self._io.socket.set(zmq.SUBSCRIBE if wanted else zmq.UNSUBSCRIBE, topic)

    def _on_frames(self, frames: list[Any]) -> None:
        message = self._decoder(frames[1])
        if isinstance(message, Stats):
            self._on_stats(message)
        elif isinstance(message, EngineDetails):
            self._on_details(message)
        else:
            self._on_diagnosis(message)

    def _on_event(self, event: int) -> None:
        self._io.drain()  # the last counters of a sender must not come after its loss
        self._on_lost()

    def close(self) -> None:
        self._io.close()
