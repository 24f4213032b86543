"""From a line of a batch to its answer: what HTTP would have answered, with the patience of a good HTTP client."""

import asyncio
from dataclasses import dataclass

from frontend.body import decode_body
from frontend.errors import ApiError
from frontend.generation import Batch, Generation
from frontend.metrics import Metrics
from frontend.protocol import chat_decoder, completion_decoder
from frontend.requests import chat_job, completion_job
from frontend.responses import ChatResponder, CompletionResponder, Responder
from frontend.together import check_together
from ipc.engine_client import EngineClient
from ipc.messages import ModelInfo
from tools.batch.errors import BatchError
from tools.batch.requests_file import BatchLine

_TRIES = 5
_LONGEST_PAUSE = 16.0  # seconds
_RESTART_SECONDS = 3600.0  # the launcher gives up long before, by --ready-timeout; this bounds what it cannot see


@dataclass(frozen=True)
class Answer:
    """`body` is the JSON of the response, `tokens` its number of output tokens, `retry_after` seconds."""

    status: int
    body: bytes
    tokens: int = 0
    retry_after: float = 0.0


class Answerer:
    """Answers lines through one client, and sends again what the engine could not take (429) or has lost (503)."""

    def __init__(self, client: EngineClient, model: ModelInfo) -> None:
        self._client = client
        self._model = model
        self._metrics = Metrics()

    async def answer(self, line: BatchLine) -> Answer:
        """The answer, or the error of the last try. Raises `BatchError` when the engine does not come back."""
        tries = 0
        pause = 1.0
        while True:
            answer = await self._once(line)
            if answer.status not in (429, 503):
                return answer
            # A queue full of this batch's own requests becomes free again: waiting for that is no failed try.
            tries += answer.status == 503 or self._client.live_requests == 0
            if tries >= _TRIES:
                return answer
            await asyncio.sleep(max(pause, answer.retry_after))
            pause = min(2 * pause, _LONGEST_PAUSE)
            try:
                await self._client.connect(_RESTART_SECONDS)
            except TimeoutError:
                raise BatchError(f"the engine did not come back within {_RESTART_SECONDS:g} seconds") from None

    async def _once(self, line: BatchLine) -> Answer:
        generation: Generation | None = None
        responder: Responder
        try:
            if line.url == "/v1/chat/completions":
                job = chat_job(decode_body(bytes(line.body), chat_decoder)[0], self._model)
                responder = ChatResponder(job, "")
            else:
                job = completion_job(decode_body(bytes(line.body), completion_decoder)[0], self._model)
                responder = CompletionResponder(job, "")
            await check_together(self._client, job.prompts, job.params.n, "prompt")
            generation = Generation(self._client, job, line.custom_id[:128], self._metrics)
            responder.prompt_of = generation.prompt_of
            batches: list[Batch] = []
            await generation.deliver(batches.append)
            usage = generation.usage()
            return Answer(200, responder.whole(batches, usage), usage.completion_tokens)
        except ApiError as error:
            return Answer(error.status, error.encode(), retry_after=error.retry_after or 0.0)
        finally:
            if generation is not None:
                generation.close()
