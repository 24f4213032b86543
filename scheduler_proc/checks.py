"""Whether a request may come in: what is wrong with it, what is full, and what its first token would be late for."""

from array import array

from config.schema import SchedulerConfig
from ipc.engine_messages import Submit
from ipc.messages import Failed
from scheduler_proc.admission import Outages, TtftPredictor, retry_after
from scheduler_proc.kv_manager import KVManager
from scheduler_proc.planner import Planner
from scheduler_proc.request import Request


class Checks:
    """Refusals, each as the `Failed` that the client gets."""

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVManager,
        planner: Planner,
        predictor: TtftPredictor,
        outages: Outages,
        max_model_len: int,
        vocab_size: int,
    ) -> None:
        self._config = config
        self._kv = kv
        self._planner = planner
        self._predictor = predictor
        self._outages = outages
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._ttft_target = None if config.ttft_target_ms is None else config.ttft_target_ms / 1e3
        self.queued_tokens = 0  # prompt tokens of requests that have never started; the core keeps it
        self.refused_deadline = 0

    def duplicate(self, submit: Submit) -> Failed:
        """A request id of a live request."""
        return _invalid(submit, f"request_id {submit.request_id} is already in use", "request_id")

    def refusal(self, request: Request, submit: Submit) -> Failed | None:
        """Why a request cannot be taken, or None; sets its TTFT target where it has none of its own."""
        refusal = self._impossible(request.tokens, submit) or self._full(request, submit)
        if refusal is None:
            request.uncached = request.num_prompt - self._kv.cached_tokens(request)
            refusal = self._late(request, submit)
        return refusal

    def _impossible(self, tokens: "array[int]", submit: Submit) -> Failed | None:
        """A request that could never run is refused at once, and blocks nobody."""
        if not tokens:
            return _invalid(submit, "prompt: it must have at least one token", "prompt")
        if min(tokens) < 0 or max(tokens) >= self._vocab_size:
            return _invalid(submit, f"prompt: token ids must be from 0 to {self._vocab_size - 1}", "prompt")
        if submit.max_tokens < 1:
            return _invalid(submit, f"max_tokens: {submit.max_tokens} is below 1", "max_tokens")
        total = len(tokens) + submit.max_tokens
        if total > self._max_model_len:
            return _invalid(
                submit,
                f"max_tokens: the prompt's {len(tokens)} tokens plus {submit.max_tokens} exceed the context of "
                f"{self._max_model_len}",
                "max_tokens",
            )
        blocks = self._kv.blocks_for(total)
        if blocks > self._kv.pool.total:
            return _invalid(
                submit,
                f"max_tokens: prompt and output of {total} tokens need {blocks} KV blocks, the whole pool has "
                f"{self._kv.pool.total}",
                "max_tokens",
            )
        return None

    def _full(self, request: Request, submit: Submit) -> Failed | None:
        waiting = len(self._planner.policy)
        if waiting >= self._config.max_queue_requests:
            limit = self._config.max_queue_requests
            message = f"{waiting} requests wait already, --max-queue-requests is {limit}; try again later"
            return _busy(submit, message, "queue_full", self._drained(request.arrival))
        if waiting and self.queued_tokens + request.num_prompt > self._config.max_queue_tokens:
            limit = self._config.max_queue_tokens
            message = f"{self.queued_tokens} prompt tokens wait already, --max-queue-tokens is {limit}; try again later"
            return _busy(submit, message, "queue_full", self._drained(request.arrival))
        return None

    def _drained(self, now: float) -> int:
        """Seconds until all that waits now has started; of its prompts as if nothing were cached, and all of a size."""
        waiting = len(self._planner.policy)
        typical = self.queued_tokens // waiting
        return retry_after(self._predict(typical, self.queued_tokens - typical, waiting - 1, waiting, now), 0.0)

    def _predict(self, own_tokens: int, tokens_ahead: int, requests_ahead: int, fitting: int, now: float) -> float:
        """`TtftPredictor.predict` with what is known of the running requests; `fitting`: see `_fitting`."""
        planner = self._planner
        return self._predictor.predict(
            own_tokens=own_tokens,
            tokens_ahead=tokens_ahead + planner.missing_tokens,
            requests_ahead=requests_ahead,
            running=planner.num_running,
            free_rows=min(planner.free_rows, fitting),
            decode_context=planner.decode_context,
            delay=max(self._outages.left(now), planner.start_delay(now)),
        )

    def _late(self, request: Request, submit: Submit) -> Failed | None:
        """A request that would miss its TTFT target is better told so now than after it has waited."""
        if request.ttft_target is None:
            request.ttft_target = self._ttft_target
        if request.ttft_target is None:
            return None
        ahead = self._planner.policy.ahead_of(request)
        tokens_ahead = sum(other.uncached for other in ahead)
        fitting = self._fitting([*ahead, request])
        predicted = self._predict(request.uncached, tokens_ahead, len(ahead), fitting, request.arrival)
        if predicted <= request.ttft_target:
            return None
        self.refused_deadline += 1
        if (alone := self._idle_seconds(request)) > request.ttft_target:
            return _unreachable(submit, alone, request.ttft_target)
        message = (
            f"the first token would take about {predicted:.1f} s, longer than the target of {request.ttft_target:g} s; "
            "try again later"
        )
        return _busy(submit, message, "ttft_target", retry_after(predicted, request.ttft_target))

    def _idle_seconds(self, request: Request) -> float:
        """When the first token would come if nothing else were there: if that is too late, no other time is better."""
        return self._predictor.predict(
            own_tokens=request.uncached,
            tokens_ahead=0,
            requests_ahead=0,
            running=0,
            free_rows=1,
            decode_context=0,
            delay=self._planner.idle_delay,
        )

    def _fitting(self, requests: list[Request]) -> int:
        """How many of these could start with the blocks that can be had now, all taken to be of one size."""
        wanted = sum(self._kv.blocks_for(self._planner.positions(request)) for request in requests)
        return len(requests) * max(0, self._kv.num_available) // max(1, wanted)


def _invalid(submit: Submit, message: str, param: str) -> Failed:
    return Failed(submit.request_id, 400, message, "invalid_request_error", param)


def _unreachable(submit: Submit, seconds: float, target: float) -> Failed:
    """For a TTFT target that no idle engine meets: nothing to be tried again later, hence no 429."""
    late = (
        f"the first token would take about {seconds:.2g} s even with nothing else to do, and the target is {target:g} s"
    )
    if submit.ttft_target_ms is None:
        message, param = f"prompt: {late} (--ttft-target-ms); a request can set a ttft_target_ms of its own", "prompt"
    else:
        message, param = f"ttft_target_ms: {late}", "ttft_target_ms"
    return Failed(submit.request_id, 400, message, "invalid_request_error", param, "ttft_target_unreachable")


def _busy(submit: Submit, message: str, code: str, seconds: float) -> Failed:
    return Failed(submit.request_id, 429, message, "rate_limit_error", None, code, seconds)
