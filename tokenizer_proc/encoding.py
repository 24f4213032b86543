"""Prompts to token ids, off the event loop unless the prompt is short."""

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from ipc.codec import unpack_ints
from ipc.messages import ChatPrompt, TextPrompt, TokenPrompt
from ipc.validation import InvalidRequest

from .templates import TemplateError, TemplateRenderer
from .vocabulary import Vocabulary

Prompt = TextPrompt | ChatPrompt | TokenPrompt
T = TypeVar("T")

_SHORT_CHARS = 200  # about 0.1 ms of encoding, which is what a thread's wake-up costs
_THREADS = 2  # so that one very long text does not stand before all others


class PromptEncoder:
    """Renders and encodes. The tokenizers library releases the GIL, so threads do not stop the loop."""

    def __init__(self, vocabulary: Vocabulary, renderer: TemplateRenderer | None, max_model_len: int) -> None:
        """`renderer` is None when the model has no chat template."""
        self._vocabulary = vocabulary
        self._max_model_len = max_model_len
        self._renderer = renderer
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="encode")
        # Totals since the start; see `ipc.stats_messages.TokenizerWork`.
        self.prompts = 0
        self.encode_seconds = 0.0
        self.encode_wait_seconds = 0.0
        self.renders = 0
        self.render_seconds = 0.0

    def encode_now(self, prompt: Prompt) -> Sequence[int] | None:
        """Token ids, where that takes no time worth yielding for; else None, and `encode` is to be awaited."""
        if isinstance(prompt, TokenPrompt):
            return unpack_ints(prompt.token_ids)
        if isinstance(prompt, TextPrompt) and len(prompt.text) <= _SHORT_CHARS:
            return self._encode_here(prompt.text, add_special_tokens=True)
        return None

    async def encode(self, prompt: Prompt) -> Sequence[int]:
        """Token ids; `InvalidRequest` when the chat template refuses the messages, or the text is hopelessly long."""
        if isinstance(prompt, TokenPrompt):
            return unpack_ints(prompt.token_ids)
        if isinstance(prompt, TextPrompt):
            return await self._encode_text(prompt.text, "prompt", add_special_tokens=True)
        return await self._encode_text(await self._render(prompt), "messages", add_special_tokens=False)

    async def tokenize(self, prompt: TextPrompt | ChatPrompt, *, add_special_tokens: bool) -> Sequence[int]:
        """Token ids of a prompt that nobody wants to run, so that it may be longer than the context.

        `InvalidRequest` when the chat template refuses the messages.
        """
        text = prompt.text if isinstance(prompt, TextPrompt) else await self._render(prompt)
        return await self._in_thread(lambda: self._vocabulary.encode(text, add_special_tokens=add_special_tokens))

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """The text of token ids, special tokens written out."""
        return await self._in_thread(lambda: self._vocabulary.decode(token_ids))

    async def _in_thread(self, work: Callable[[], T]) -> T:
        asked = time.perf_counter()
        result, begun, ended = await asyncio.get_running_loop().run_in_executor(self._threads, _timed, work)
        self._count(ended - begun, begun - asked)
        return result

    def _encode_here(self, text: str, *, add_special_tokens: bool) -> Sequence[int]:
        result, begun, ended = _timed(lambda: self._vocabulary.encode(text, add_special_tokens=add_special_tokens))
        self._count(ended - begun, 0.0)
        return result

    def _count(self, seconds: float, waited: float) -> None:
        self.prompts += 1
        self.encode_seconds += seconds
        self.encode_wait_seconds += waited

    async def _render(self, prompt: ChatPrompt) -> str:
        if self._renderer is None:
            raise InvalidRequest("this model has no chat template: use a plain prompt (/v1/completions)", "messages")
        asked = time.perf_counter()
        try:
            return await self._renderer.render(prompt)
        except TemplateError as error:
            raise InvalidRequest(str(error), "messages") from error
        finally:
            self.renders += 1
            self.render_seconds += time.perf_counter() - asked

    @property
    def render_wait_seconds(self) -> float:
        """That conversations waited for the child, since the start."""
        return 0.0 if self._renderer is None else self._renderer.waited

    async def _encode_text(self, text: str, name: str, *, add_special_tokens: bool) -> Sequence[int]:
        # Encoding megabytes takes seconds, for which others would wait.
        least = self._vocabulary.least_tokens(text)
        if least >= self._max_model_len:
            raise InvalidRequest(
                f"{name}: the prompt has at least {least} tokens, but prompt and output together may have at most "
                f"{self._max_model_len}",
                name,
                "context_length_exceeded",
            )
        if len(text) <= _SHORT_CHARS:
            return self._encode_here(text, add_special_tokens=add_special_tokens)
        return await self._in_thread(lambda: self._vocabulary.encode(text, add_special_tokens=add_special_tokens))

    async def close(self) -> None:
        """End the template's child and take no more work."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._renderer is not None:
            await self._renderer.close()


def _timed(work: Callable[[], T]) -> tuple[T, float, float]:
    """What `work` returns, and when it began and ended."""
    begun = time.perf_counter()
    result = work()
    return result, begun, time.perf_counter()
