"""A scripted tokenizer process on a real socket, for tests of its clients."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from ipc.channels import AsyncRouter
from ipc.codec import Decoder, pack_floats, pack_ints, unpack_ints
from ipc.messages import (
    Abort,
    Delta,
    Detokenize,
    Detokenized,
    Failed,
    Finished,
    Generate,
    Hello,
    ModelInfo,
    Outputs,
    PromptInfo,
    TextPrompt,
    Tokenize,
    Tokenized,
    ToTokenizer,
    Welcome,
)
from ipc.sessions import new_incarnation

MODEL = ModelInfo(("m",), 100, 1000, 0, True, pooling="mean")


class FakeTokenizer:
    """Answers by what the prompt says: a word each as a delta, "fail" with an error, from "hang" on with nothing.

    `refusals`: failures that the next generations get instead, one each; their `request_id` does not matter.
    """

    def __init__(self, endpoint: str, **options: Any) -> None:
        self.aborted: list[int] = []
        self.asked: list[Generate] = []
        self.refusals: list[Failed] = []
        self.router: AsyncRouter[ToTokenizer] = AsyncRouter(
            endpoint, Decoder(ToTokenizer), new_incarnation(), self.on_message, lambda peer: None, **options
        )
        self.router.start()

    def on_message(self, peer: bytes, message: ToTokenizer) -> None:
        if isinstance(message, Generate):
            self.asked.append(message)
            if self.refusals:
                refusal = self.refusals.pop(0)
                failed = Failed(message.request_id, *[getattr(refusal, name) for name in Failed.__struct_fields__[1:]])
                self.router.send(peer, Outputs((failed,)))
                return
        match message:
            case Hello():
                self.router.send(peer, Welcome(MODEL))
            case Abort(request_id):
                self.aborted.append(request_id)
            case Tokenize(request_id, TextPrompt(text)) if text != "hang":
                self.router.send(peer, Tokenized(request_id, pack_ints(map(ord, text)), tuple(text)))
            case Detokenize(request_id, token_ids):
                self.router.send(peer, Detokenized(request_id, "".join(map(chr, unpack_ints(token_ids)))))
            case Generate(request_id, TextPrompt(text)) if text == "fail":
                failed = Failed(request_id, 400, "prompt: no", "invalid_request_error", "prompt")
                self.router.send(peer, Outputs((Delta(request_id, 0, "part", b""), failed)))
            case Generate(request_id, TextPrompt(text)):
                self.answer(peer, message, text.split())
            case Generate():
                self.answer(peer, message, ["ok"])

    def answer(self, peer: bytes, message: Generate, words: list[str]) -> None:
        request_id = message.request_id
        if message.return_prompt or message.params.prompt_logprobs is not None:
            self.router.send(peer, Outputs((PromptInfo(request_id, pack_ints([1, 2]), "ab", b"", "a"),)))
        for index in range(message.params.n):
            for word in words:
                if word == "hang":
                    return
                self.router.send(peer, Outputs((Delta(request_id, index, word, b"\0\0\0\0"),)))
            embedding = pack_floats([0.6, 0.8]) if message.pooling else b""
            end = Finished(request_id, index, "stop", None, 3, len(words), index, embedding)
            self.router.send(peer, Outputs((end,)))


@contextlib.contextmanager
def served(endpoint: str) -> Iterator[FakeTokenizer]:
    """A scripted tokenizer on a thread of its own, for the blocking client."""
    started = threading.Event()
    holder: list[FakeTokenizer] = []
    loop = asyncio.new_event_loop()

    async def start() -> None:
        holder.append(FakeTokenizer(endpoint))
        started.set()

    def work() -> None:
        loop.run_until_complete(start())
        loop.run_forever()
        holder[0].router.close()
        loop.close()

    thread = threading.Thread(target=work)
    thread.start()
    assert started.wait(5)
    try:
        yield holder[0]
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
