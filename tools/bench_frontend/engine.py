"""The engine of the benchmark: a process that answers at a given pace, with the time in each token.

    python -m tools.bench_frontend.engine ENDPOINT STEP_SECONDS

As from the real tokenizer process, what a step has for all streams is one message. A request for one token is answered
at once. It ends with its standard input.
"""

import asyncio
import os
import sys
import threading
import time
from typing import Any

from ipc.channels import AsyncRouter
from ipc.codec import Decoder, pack_ints
from ipc.messages import (
    Abort,
    Delta,
    Finished,
    Generate,
    Hello,
    Message,
    ModelInfo,
    Outputs,
    ToTokenizer,
    Welcome,
)

MODEL_NAME = "bench"
MODEL = ModelInfo((MODEL_NAME,), max_model_len=1 << 20, vocab_size=1000, created=0, has_chat_template=True)
_ONE_TOKEN = pack_ints([7])


def stamp() -> str:
    """The text of a token: now, in microseconds of the clock that all processes share."""
    return f" {time.monotonic_ns() // 1000:015d}"


class Engine:
    """Answers; `step_seconds` is the time between two tokens of a stream."""

    def __init__(self, endpoint: str, step_seconds: float) -> None:
        self._step_seconds = step_seconds
        self._left: dict[tuple[bytes, int], int] = {}  # tokens to come, by peer and request
        self._asked: dict[tuple[bytes, int], int] = {}
        decoder: Decoder[Any] = Decoder(ToTokenizer)
        self._router = AsyncRouter(endpoint, decoder, 1, self._on_message, lambda peer: None)

    async def run(self) -> None:
        """Until the process ends."""
        self._router.start()
        due = time.monotonic()
        while True:
            due += self._step_seconds
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            self._step()

    def _on_message(self, peer: bytes, message: Message) -> None:
        match message:
            case Hello():
                self._router.send(peer, Welcome(MODEL))
            case Abort(request_id):
                self._left.pop((peer, request_id), None)
            case Generate(request_id, _, params):
                tokens = params.max_tokens or 1
                if tokens > 1:
                    self._left[peer, request_id] = self._asked[peer, request_id] = tokens
                    return
                delta = Delta(request_id, 0, stamp(), _ONE_TOKEN)
                self._router.send(peer, Outputs((delta, Finished(request_id, 0, "length", None, 5, 1, 0))))

    def _step(self) -> None:
        by_peer: dict[bytes, list[Delta | Finished]] = {}
        text = stamp()
        ended = []
        for key, left in self._left.items():
            peer, request_id = key
            items = by_peer.setdefault(peer, [])
            items.append(Delta(request_id, 0, text, _ONE_TOKEN))
            self._left[key] = left - 1
            if left == 1:
                ended.append(key)
                items.append(Finished(request_id, 0, "length", None, 5, self._asked.pop(key), 0))
        for key in ended:
            del self._left[key]
        for peer, items in by_peer.items():
            self._router.send(peer, Outputs(tuple(items)))


def _end_with_stdin() -> None:
    sys.stdin.buffer.read()
    os._exit(0)


if __name__ == "__main__":
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    asyncio.run(Engine(sys.argv[1], float(sys.argv[2])).run())
