"""What sends requests: over HTTP, or over ZeroMQ with the SDK. Both fill an `Answer` as chunks come."""

from abc import ABC, abstractmethod
from typing import Any

from tools.loadgen.answer import Answer
from tools.loadgen.messages import Item, Target
from tools.loadgen.prompts import Prompts


class Client(ABC):
    """All methods belong to one event loop."""

    def __init__(self, target: Target, prompts: Prompts) -> None:
        self.target = target
        self.prompts = prompts

    @abstractmethod
    async def connect(self) -> None:
        """Raises `ConnectionError`."""

    @abstractmethod
    def prepare(self, item: Item) -> Any:
        """Everything of a request that can be made before it is due."""

    @abstractmethod
    async def send(self, prepared: Any, request_id: str, answer: Answer) -> None:
        """Send what `prepare` made, and fill the answer until its end. Raises nothing but what cancels it."""

    @abstractmethod
    async def close(self) -> None: ...


def most_tokens(target: Target, item: Item) -> int:
    """`max_tokens` of the request."""
    return item.output_length or target.text_output


def make_client(target: Target, prompts: Prompts) -> Client:
    """The client for a target; what the other one needs is not imported. ValueError for keys that are none."""
    if target.endpoints:
        from tools.loadgen.sdk import SdkClient

        return SdkClient(target, prompts)
    from tools.loadgen.http import HttpClient

    return HttpClient(target, prompts)
