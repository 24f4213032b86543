"""Requests over ZeroMQ with the client SDK, without HTTP and JSON."""

import time

import msgspec

from frontend.timelines import RequestTimeline
from ipc.codec import pack_ints
from ipc.curve import ClientKeys
from ipc.engine_client import EngineClient, Prompt
from ipc.errors import AuthenticationFailed, ConnectionLost, RequestFailed
from ipc.key_files import check_server_key, read_key_file
from ipc.messages import ChatMessage, ChatPrompt, Delta, Finished, ModelInfo, SamplingParams, TextPrompt, TokenPrompt
from tools.loadgen.answer import Answer
from tools.loadgen.clients import Client, most_tokens
from tools.loadgen.messages import Item, Target
from tools.loadgen.prompts import Prompts

CONNECT_SECONDS = 10.0


def engine_client(target: Target) -> EngineClient:
    """A client for the target's addresses, with its keys; ValueError, in a line that names the flag, for wrong keys."""
    if not target.key_file:
        return EngineClient(target.endpoints)
    try:
        server_key = check_server_key(target.server_key)
    except ValueError as error:
        raise ValueError(f"--sdk-server-key: {error}") from None
    try:
        return EngineClient(target.endpoints, ClientKeys(read_key_file(target.key_file), server_key))
    except ValueError as error:
        raise ValueError(f"--sdk-key {error}") from None


async def connected(client: EngineClient, target: Target) -> ModelInfo:
    """Wait until an engine is ready; ConnectionError, in a line for the user, when none can be had."""
    addresses = ",".join(target.endpoints)
    try:
        return await client.connect(CONNECT_SECONDS)
    except TimeoutError:
        raise ConnectionError(f"--sdk {addresses}: no engine there") from None
    except RequestFailed as error:
        wants_keys = isinstance(error, AuthenticationFailed) and not target.key_file
        advice = "; --sdk-key and --sdk-server-key give this client keys" if wants_keys else ""
        raise ConnectionError(f"--sdk {addresses}: {error.message}{advice}") from None


class SdkClient(Client):
    def __init__(self, target: Target, prompts: Prompts) -> None:
        super().__init__(target, prompts)
        self._client = engine_client(target)

    async def connect(self) -> None:
        await connected(self._client, self.target)

    def prepare(self, item: Item) -> tuple[Prompt, SamplingParams]:
        params = SamplingParams(
            max_tokens=most_tokens(self.target, item),
            temperature=self.target.temperature,
            ignore_eos=bool(item.output_length),
            stop_on_loop=0 if item.output_length else None,
        )
        prompt: Prompt
        if self.target.api == "tokens" and not item.text:
            prompt = TokenPrompt(pack_ints(self.prompts.token_ids(item)))
        elif self.target.api == "chat":
            prompt = ChatPrompt((ChatMessage("user", item.text or self.prompts.text(item)),))
        else:
            prompt = TextPrompt(item.text or self.prompts.text(item))
        return prompt, params

    async def send(self, prepared: tuple[Prompt, SamplingParams], request_id: str, answer: Answer) -> None:
        prompt, params = prepared
        stream = self._client.generate(prompt, params, external_id=request_id)

        def take(items: list[Delta | Finished]) -> None:
            now = time.monotonic()
            tokens = sum(len(item.token_ids) // 4 for item in items if isinstance(item, Delta))
            if tokens:
                answer.chunk(now, tokens)
            for item in items:
                if isinstance(item, Finished):
                    take_end(item, request_id, answer, timings=self.target.timings)

        try:
            await stream.deliver(take)
        except RequestFailed as error:
            lost = isinstance(error, ConnectionLost) or not stream.sent
            if lost or (answer.times and error.failed.code == "engine_unavailable"):
                answer.fail("truncated" if answer.times else "connection", error.failed.message)
            else:
                answer.fail_with_status(error.failed.status, error.failed.message)
        finally:
            stream.abort()

    async def close(self) -> None:
        await self._client.close()


def take_end(item: Finished, request_id: str, answer: Answer, *, timings: bool) -> None:
    """Put the end of a choice into the answer; its timeline in the form that HTTP has."""
    answer.finish_reason, answer.done = item.reason, True
    answer.prompt_tokens, answer.completion_tokens = item.prompt_tokens, item.completion_tokens
    answer.cached_tokens = item.cached_tokens
    if timings and item.timings is not None:
        timeline = RequestTimeline(request_id, item.timings.received, 1, {item.index: item})
        answer.timings = msgspec.to_builtins(timeline.timings())
