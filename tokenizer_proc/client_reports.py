"""What clients' processes tell of themselves, kept for the scheduler's diagnosis."""

import math

from ipc.messages import ClientReport

MAX_CLIENTS = 64  # whose reports are kept
_MAX_NAME = 64  # characters
_MAX_COUNT = 1 << 53


class ClientReports:
    """The newest of each client; what makes no sense is dropped."""

    def __init__(self) -> None:
        self._newest: dict[bytes, ClientReport] = {}

    def take(self, peer: bytes, report: ClientReport) -> None:
        """A client has sent one."""
        numbers = (report.cpu_seconds, report.lag_looks, report.lag_seconds, report.slow, report.backlog)
        sound = len(report.name) <= _MAX_NAME and all(0 <= value <= _MAX_COUNT for value in numbers)
        if sound and math.isfinite(math.fsum(numbers)) and (peer in self._newest or len(self._newest) < MAX_CLIENTS):
            self._newest[peer] = report

    def forget(self, peer: bytes) -> None:
        """The client is gone."""
        self._newest.pop(peer, None)

    @property
    def newest(self) -> tuple[ClientReport, ...]:
        return tuple(self._newest.values())
