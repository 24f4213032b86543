"""The client SDK for code without asyncio.

with Client("ipc:///run/tokenmill.sock") as client:
    print(client.generate("Once upon a time", max_tokens=20).text)
    for chunk in client.stream([{"role": "user", "content": "Name three rivers."}]):
        print(chunk.text, end="")
"""

import asyncio
import concurrent.futures
import contextlib
import os
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from typing import Any, TypeVar, Unpack

from .client import DEFAULT_TIMEOUT, AsyncClient, ClientOptions, CompletionStream
from .errors import Cancelled, cancelled
from .inputs import CallOptions, GenerateOptions, PromptLike
from .messages import ModelInfo, Pooling, SamplingParams
from .results import Chunk, Completion, Embedding, Score, Tokens

T = TypeVar("T")


class _Loop:
    """An event loop on a thread of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._process = os.getpid()
        self._posting = threading.Lock()  # nothing may be posted behind the loop's end: nobody would answer it
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="tokenmill-client", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._loop.run_forever()
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`; it is cancelled when this thread stops to wait. `Cancelled` when the loop has ended,
        RuntimeError in a forked process, which has no such thread."""
        if self.forked:
            work.close()
            raise RuntimeError("this client was made in another process: after a fork, each process needs its own")
        with self._posting:
            if self._stopped:
                work.close()
                raise cancelled(0)
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise cancelled(0) from None
        finally:
            future.cancel()

    @property
    def forked(self) -> bool:
        return self._process != os.getpid()

    def post(self, action: Callable[[], object]) -> None:
        """Run `action` there soon; nothing when the loop has ended."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(action)

    def stop(self) -> None:
        """End it and whatever still waits there; nothing, when it has been ended."""

        async def cancel_others() -> None:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

        with self._posting:
            if self._stopped:
                return
            self._stopped = True
            last = asyncio.run_coroutine_threadsafe(cancel_others(), self._loop)
        last.result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()


class BlockingStream:
    """An answer as it comes; see `CompletionStream`. Leaving the loop aborts the request, as does the block's end."""

    def __init__(self, loop: _Loop, stream: CompletionStream) -> None:
        self._loop = loop
        self._stream = stream

    @property
    def attempts(self) -> int:
        """How often the request has been sent."""
        return self._stream.attempts

    def __iter__(self) -> Iterator[Chunk]:
        try:
            while (chunks := self._loop.call(self._stream.next_chunks())) is not None:
                yield from chunks
        finally:
            self.abort()

    def completion(self) -> Completion:
        """The whole answer, what has been iterated over included. `Cancelled` when it was left before its end."""
        return self._loop.call(self._stream.completion())

    def abort(self) -> None:
        """End the request. Does nothing once it has ended."""
        self._loop.post(self._stream.abort)  # without waiting: a forgotten stream may be collected on that very thread

    def __enter__(self) -> "BlockingStream":
        return self

    def __exit__(self, *exception: object) -> None:
        self.abort()


class Client:
    """The blocking client: an `AsyncClient` on a thread of its own; usable from several threads."""

    def __init__(
        self,
        address: str | Sequence[str],
        timeout: float | None = DEFAULT_TIMEOUT,
        **options: Unpack[ClientOptions],
    ) -> None:
        """Connect and wait until a server is ready, at most `timeout` seconds; else as `AsyncClient`, `connect`."""
        self._client = AsyncClient(address, **options)
        self._loop = _Loop()
        try:
            self.model: ModelInfo = self._loop.call(self._client.connect(timeout))
        except BaseException:
            self.close()
            raise

    def stream(
        self, prompt: PromptLike, params: SamplingParams | None = None, **options: Unpack[GenerateOptions]
    ) -> BlockingStream:
        """See `AsyncClient.stream`."""
        return BlockingStream(self._loop, self._client.stream(prompt, params, **options))

    def generate(
        self, prompt: PromptLike, params: SamplingParams | None = None, **options: Unpack[GenerateOptions]
    ) -> Completion:
        """See `AsyncClient.generate`."""
        return self._loop.call(self._client.generate(prompt, params, **options))

    def embed(self, prompt: PromptLike, pooling: Pooling = "", **options: Unpack[CallOptions]) -> Embedding:
        """See `AsyncClient.embed`."""
        return self._loop.call(self._client.embed(prompt, pooling, **options))

    def score(self, prompt: PromptLike, top: int = 0, **options: Unpack[CallOptions]) -> Score:
        """See `AsyncClient.score`."""
        return self._loop.call(self._client.score(prompt, top, **options))

    def tokenize(
        self,
        prompt: PromptLike,
        *,
        add_special_tokens: bool = True,
        return_token_strs: bool = False,
        deadline: float | None = None,
    ) -> Tokens:
        """See `AsyncClient.tokenize`."""
        return self._loop.call(
            self._client.tokenize(
                prompt,
                add_special_tokens=add_special_tokens,
                return_token_strs=return_token_strs,
                deadline=deadline,
            )
        )

    def detokenize(self, token_ids: Iterable[int], *, deadline: float | None = None) -> str:
        """See `AsyncClient.detokenize`."""
        return self._loop.call(self._client.detokenize(token_ids, deadline=deadline))

    def close(self) -> None:
        """Abort what runs (whoever waits gets `Cancelled`) and disconnect. Does nothing in a forked process."""
        if self._loop.forked:
            return
        with contextlib.suppress(Cancelled):  # closed already
            self._loop.call(self._client.close())
            self._loop.stop()

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
