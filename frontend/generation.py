"""One HTTP request's generation: all its prompts and choices as one sequence of batches, with usage and timing."""

import asyncio
import time
from collections.abc import Callable

from config.tenants import namespace_of
from ipc.engine_client import EngineClient, RequestOptions
from ipc.errors import RequestFailed
from ipc.messages import Delta, Finished, PromptInfo

from .errors import ApiError
from .metrics import Metrics
from .protocol import PromptTokensDetails, Usage
from .requests import Job, prompt_names
from .timelines import RequestTimeline

Batch = list[tuple[int, Delta | Finished]]  # choice index over all prompts, and what it got


class Generation:
    """Runs a job. Call `deliver` once, and `close()` whatever happens."""

    def __init__(
        self,
        client: EngineClient,
        job: Job,
        request_id: str,
        metrics: Metrics,
        tenant: str = "",
        route: str = "",
        arrival: float | None = None,
    ) -> None:
        """`route`: the pattern of the path that it came by, for metrics. `arrival`: when the request was there, on the
        monotonic clock; None: now.
        """
        self._metrics = metrics
        self._source = metrics.of(route, tenant)
        self._params = job.params
        self._lost: bool | None = False  # by an error of the engine; None: it was refused, so nothing was
        self._started = time.monotonic() if arrival is None else arrival
        self._last: dict[int, float] = {}  # when each choice last got tokens, from its first visible one on
        self._choices = job.params.n
        self._renamed = job.renamed
        self._shows_ids = job.return_token_ids
        self._ends: dict[int, Finished] = {}
        choices = len(job.prompts) * job.params.n
        self.timeline = RequestTimeline(request_id, self._started, choices, self._ends)
        options: RequestOptions = {
            **job.options,
            "external_id": request_id,
            "tenant": tenant,
            "namespace": namespace_of(tenant, job.cache_salt),
        }
        self._streams = [client.generate(prompt, job.params, **options) for prompt in job.prompts]

    async def deliver(self, take: Callable[[Batch], None]) -> None:
        """Call `take` with each batch, from the callback in which it arrives, until every choice has finished.

        Raises `ApiError` when the engine gives up, and what `take` raises.
        """

        def taking(first_index: int) -> Callable[[list[Delta | Finished]], None]:
            return lambda items: take(self._note(first_index, items))

        async def delivered(at: int) -> None:
            try:
                await self._streams[at].deliver(taking(at * self._choices))
            except RequestFailed as error:
                self._lost = True if error.failed.status >= 500 else None
                names = {**self._renamed, **prompt_names(at, len(self._streams))}
                raise ApiError.of_failed(error.failed).renamed(names) from None

        if len(self._streams) == 1:
            await delivered(0)
        else:
            await asyncio.gather(*map(delivered, range(len(self._streams))))
        longest = max(end.completion_tokens for end in self._ends.values())
        seconds = time.monotonic() - self._started
        self._metrics.request_finished(seconds, self._choices, self._params.max_tokens, longest)

    def _note(self, first_index: int, items: list[Delta | Finished]) -> Batch:
        now = time.monotonic()
        batch: Batch = []
        for item in items:
            index = first_index + item.index
            batch.append((index, item))
            if not isinstance(item, Delta):
                self._ends[index] = item
                self._metrics.choice_finished(item)
                self._source.choice_finished(item, self._params.max_tokens)
                continue
            tokens = len(item.token_ids) // 4
            last = self._last.get(index)
            if not tokens or (last is None and not item.text and not self._shows_ids):
                continue  # nothing that the client could see yet
            self._last[index] = now
            if last is None:
                self.timeline.first_output = self.timeline.first_output or now
                self._metrics.first_token.observe(now - self._started)
            else:
                self._metrics.inter_token.observe((now - last) / tokens)
        return batch

    def prompt_of(self, index: int) -> PromptInfo:
        """What a choice's prompt is, once the choice has begun; for jobs that ask for it."""
        info = self._streams[index // self._choices].prompt
        assert info is not None, "the engine tells of the prompt first"
        return info

    def usage(self) -> Usage:
        """Token counts once all choices have finished: each prompt counts once, whatever `n` is.

        A prompt's later choices may find what the first one has just computed in the prefix cache; what the cache held
        before is the least of the choices' counts.
        """
        prompt = cached = 0
        for at in range(len(self._streams)):
            ends = [self._ends[at * self._choices + choice] for choice in range(self._choices)]
            prompt += ends[0].prompt_tokens
            cached += min(end.cached_tokens for end in ends)
        completion = sum(end.completion_tokens for end in self._ends.values())
        return Usage(prompt, completion, prompt + completion, PromptTokensDetails(cached))

    def close(self) -> None:
        """End what still runs."""
        lost, self._lost = self._lost, None
        if lost is not None and (count := len(self._streams) * self._choices - len(self._ends)):
            self._metrics.choices_lost(count, failed=lost)
        for stream in self._streams:
            stream.abort()
