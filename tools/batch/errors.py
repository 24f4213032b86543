"""What ends a batch early."""

import signal


class BatchError(Exception):
    """The batch cannot start or go on; the text says why, for a person."""


class StoppedBySignal(Exception):
    """Somebody asked the batch to stop; everything it started has ended."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(f"stopped by {number.name}")
        self.number = number
