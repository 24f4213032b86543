"""Tokens that were sampled, or that a device may still be sampling."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ipc.engine_messages import RawLogprobs

Tokens = NDArray[np.int64]  # [S]; -1 in a row whose grammar leaves no token
Logprobs = tuple[RawLogprobs | None, ...]  # S, or none


class Drawn(ABC):
    @abstractmethod
    def ready(self) -> bool:
        """Whether `result` would not wait."""

    @abstractmethod
    def result(self) -> tuple[Tokens, Logprobs]:
        """Wait for the tokens. Raises FloatingPointError when the logits were NaN."""


@dataclass(slots=True, frozen=True)
class Known(Drawn):
    token_ids: Tokens
    logprobs: Logprobs = ()

    def ready(self) -> bool:
        return True

    def result(self) -> tuple[Tokens, Logprobs]:
        return self.token_ids, self.logprobs
