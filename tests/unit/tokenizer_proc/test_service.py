"""Requests through the service: what the scheduler is asked, and what clients hear."""

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import pytest
from msgspec import structs

from ipc.codec import pack_int64s, pack_ints, unpack_floats, unpack_ints
from ipc.engine_messages import AbortRequests, RowOutput, StepOutputs, StopRequest, Submit, ToScheduler
from ipc.messages import (
    Abort,
    ChatMessage,
    ChatPrompt,
    ChoiceTimings,
    Delta,
    Failed,
    Finished,
    Generate,
    Hello,
    ModelInfo,
    Outputs,
    Paused,
    SamplingParams,
    TextPrompt,
    ToClient,
    TokenPrompt,
    Welcome,
)
from ipc.sessions import LinkError
from tests.unit.tokenizer_proc.vocabularies import byte_level_vocabulary
from tokenizer_proc.encoding import Prompt, PromptEncoder
from tokenizer_proc.grammars import GrammarCompiler
from tokenizer_proc.ingress import Limits
from tokenizer_proc.service import Service

VOCABULARY = byte_level_vocabulary()
MODEL = ModelInfo(("m",), 64, VOCABULARY.size + 2, 1, True)
EOS = VOCABULARY.tokenizer.token_to_id("<|end|>")
HELLO = VOCABULARY.encode("hello", add_special_tokens=False)[0]
PEER = b"client"


class FakeEncoder(PromptEncoder):
    """Lets a test decide when a chat prompt is encoded, and to what."""

    def __init__(self) -> None:
        super().__init__(VOCABULARY, None, MODEL.max_model_len)
        self.release = asyncio.Event()
        self.error: Exception | None = None

    async def encode(self, prompt: Prompt) -> Sequence[int]:
        await self.release.wait()
        if self.error is not None:
            raise self.error
        return [HELLO]


class Bench:
    """A service whose peers are lists."""

    def __init__(
        self,
        *,
        ready: bool = True,
        encoder: PromptEncoder | None = None,
        pool_tokens: int = 1000,
        model: ModelInfo = MODEL,
        stop_on_loop: int = 0,
        max_new_tokens: int | None = None,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        self.sent: list[tuple[bytes, ToClient]] = []
        self.asked: list[ToScheduler] = []
        self.idle = 0
        self.reachable = True
        self.service = Service(
            VOCABULARY,
            encoder or PromptEncoder(VOCABULARY, None, model.max_model_len),
            Limits(model, (EOS,), pool_tokens, stop_on_loop, max_new_tokens),
            max_encoding=2,
            to_client=lambda peer, message: self.sent.append((peer, message)) is None,
            to_scheduler=self._ask,
            on_idle=self._on_idle,
            grammars=grammars,
        )
        if ready:
            self.service.scheduler_ready()

    def _ask(self, message: ToScheduler) -> bool:
        if self.reachable:
            self.asked.append(message)
        return self.reachable

    def _on_idle(self) -> None:
        self.idle += 1

    def generate(self, request_id: int = 1, prompt: Prompt | None = None, peer: bytes = PEER, **params: Any) -> None:
        self.service.from_client(
            peer, Generate(request_id, prompt or TextPrompt("hello"), SamplingParams(**params), "trace-7", "ns")
        )

    def step(self, *rows: RowOutput | Failed, plain: Sequence[tuple[int, int]] = ()) -> None:
        """One step's outputs; `plain` has pairs of request id and token."""
        ids, tokens = pack_int64s(i for i, _ in plain), pack_ints(token for _, token in plain)
        self.service.from_scheduler(StepOutputs(rows, ids, tokens))

    @property
    def submits(self) -> list[Submit]:
        return [message for message in self.asked if isinstance(message, Submit)]

    @property
    def aborts(self) -> list[int]:
        return [i for message in self.asked if isinstance(message, AbortRequests) for i in message.request_ids]

    def items(self, peer: bytes = PEER) -> list[Delta | Finished | Failed]:
        outputs = [message for to, message in self.sent if to == peer and isinstance(message, Outputs)]
        return [item for message in outputs for item in message.items]

    def failure(self) -> Failed:
        (failed,) = self.items()
        assert isinstance(failed, Failed)
        return failed


def row(request_id: int, *ids: int, **fields: Any) -> RowOutput:
    return RowOutput(request_id, pack_ints(ids), **fields)


def test_submit_has_what_the_client_asked_for() -> None:
    bench = Bench()
    bench.generate(
        temperature=0.5, top_k=-1, seed=-1, logit_bias={3: -2.0, 1: 5.0}, stop_token_ids=(9,), min_tokens=2, logprobs=0
    )
    (submit,) = bench.submits
    assert list(unpack_ints(submit.token_ids)) == [HELLO]
    assert submit.max_tokens == 63
    assert sorted(unpack_ints(submit.stop_token_ids)) == sorted([9, EOS])
    assert (submit.namespace, submit.external_id) == ("ns", "trace-7")
    sampling = submit.sampling
    assert (sampling.temperature, sampling.top_k, sampling.logprobs) == (0.5, 0, 0)
    assert sampling.seed == (1 << 64) - 1
    assert list(unpack_ints(sampling.bias_ids)) == [3, 1]
    assert list(unpack_floats(sampling.bias_values)) == [-2.0, 5.0]
    assert sampling.banned_ids == submit.stop_token_ids


def test_submit_has_what_the_scheduler_decides_by_for_each_choice() -> None:
    bench = Bench(stop_on_loop=9)
    options: dict[str, Any] = {"tenant": "t", "priority": -4, "ttft_target_ms": 80.0, "cache_pin_seconds": 2.5}
    prompt = TextPrompt("hello")
    bench.service.from_client(PEER, Generate(1, prompt, SamplingParams(n=2, stop_on_loop=3), namespace="ns", **options))
    bench.service.from_client(PEER, Generate(2, prompt, SamplingParams(stop_on_loop=0)))
    bench.service.from_client(PEER, Generate(3, prompt, SamplingParams()))
    for submit in bench.submits[:2]:
        assert {name: getattr(submit, name) for name in options} == options
        assert submit.namespace == "ns"
    assert [submit.stop_on_loop for submit in bench.submits] == [3, 3, 0, 9], "the server's where none is given"
    plain = bench.submits[3]
    assert (plain.tenant, plain.priority, plain.ttft_target_ms, plain.cache_pin_seconds) == ("", 0, None, 0.0)


@pytest.mark.parametrize(
    ("options", "limit"),
    [
        ({"priority": -1_000_001}, "1000000"),
        ({"ttft_target_ms": float("inf")}, "3600000"),
        ({"cache_pin_seconds": float("nan")}, "3600"),
        ({"namespace": "n" * 129}, "128"),
        ({"tenant": "n" * 129}, "128"),
        ({"external_id": "n" * 129}, "128"),
    ],
    ids=str,
)
def test_bad_options_are_refused_by_name_and_limit(options: dict[str, Any], limit: str) -> None:
    bench = Bench()
    bench.service.from_client(PEER, Generate(1, TextPrompt("hello"), SamplingParams(), **options))
    failed = bench.failure()
    assert (failed.status, [failed.param]) == (400, list(options))
    assert limit in failed.message
    assert bench.asked == []


def test_defaults() -> None:
    bench = Bench()
    bench.generate()
    (submit,) = bench.submits
    assert submit.sampling.logprobs == -1
    assert submit.sampling.banned_ids == b""


def test_b028_ignore_eos_keeps_the_named_stop_tokens() -> None:
    bench = Bench()
    bench.generate(ignore_eos=True, stop_token_ids=(9,))
    assert list(unpack_ints(bench.submits[0].stop_token_ids)) == [9]


def test_the_default_output_length_also_fits_the_kv_pool() -> None:
    bench = Bench(pool_tokens=32)
    bench.generate()
    assert bench.submits[0].max_tokens == 31


def test_choices_have_seeds_of_their_own() -> None:
    bench = Bench()
    bench.generate(n=3, seed=5)
    assert [submit.sampling.seed for submit in bench.submits] == [5, 6, 7]
    assert {submit.external_id for submit in bench.submits} == {"trace-7"}
    assert len({submit.request_id for submit in bench.submits}) == 3
    bench.generate(2, n=16)
    seeds = [submit.sampling.seed for submit in bench.submits[3:]]
    assert len(set(seeds)) == 16
    assert max(seeds) >= 1 << 32  # all 64 bits are drawn


@pytest.mark.parametrize(
    ("prompt", "params", "param", "words"),
    [
        (TextPrompt(""), {}, "prompt", ["empty"]),
        (TokenPrompt(b""), {}, "prompt", ["empty"]),
        (TokenPrompt(pack_ints([-1])), {}, "prompt", ["-1"]),
        (TokenPrompt(pack_ints([MODEL.vocab_size])), {}, "prompt", [str(MODEL.vocab_size)]),
        (TextPrompt("a" * 64), {}, "prompt", ["64 tokens"]),
        (TextPrompt("a" * 60), {"max_tokens": 5}, "max_tokens", ["60 tokens", "max_tokens is 5", "64"]),
        (TextPrompt("a" * 60), {"min_tokens": 5}, "min_tokens", ["5", "4"]),
        (TextPrompt("a"), {"temperature": float("nan")}, "temperature", ["temperature"]),
        (TextPrompt("a"), {"stop": ("",)}, "stop", ["stop"]),
        (TextPrompt("a"), {"stop_token_ids": (MODEL.vocab_size,)}, "stop_token_ids", ["stop_token_ids"]),
        (TextPrompt("a"), {"n": 17}, "n", ["16"]),
    ],
)
def test_bad_requests_are_refused_by_name(prompt: Prompt, params: dict[str, Any], param: str, words: list[str]) -> None:
    bench = Bench()
    bench.generate(prompt=prompt, **params)
    failed = bench.failure()
    assert (failed.status, failed.type, failed.param) == (400, "invalid_request_error", param)
    for word in words:
        assert word in failed.message
    assert not bench.submits
    assert bench.service.live_requests == 0


def test_the_context_may_be_filled_to_the_last_token() -> None:
    bench = Bench()
    bench.generate(prompt=TextPrompt("a" * 60), max_tokens=4)
    assert bench.submits[0].max_tokens == 4


def test_the_last_row_of_the_embedding_is_a_valid_id() -> None:
    bench = Bench()
    bench.generate(prompt=TokenPrompt(pack_ints([MODEL.vocab_size - 1])))
    assert len(bench.submits) == 1


def test_one_message_a_step_and_client() -> None:
    bench = Bench()
    bench.generate(1)
    bench.generate(2)
    bench.generate(3, peer=b"other")
    one, two, three = (submit.request_id for submit in bench.submits)
    bench.step(row(one, HELLO), row(two, HELLO), row(three, HELLO))
    assert [(peer, len(message.items)) for peer, message in bench.sent if isinstance(message, Outputs)] == [
        (PEER, 2),
        (b"other", 1),
    ]


def test_plain_rows_and_others_come_in_one_message() -> None:
    bench = Bench()
    for request_id in (1, 2, 3):
        bench.generate(request_id)
    bench.generate(4, peer=b"other")
    one, two, three, four = (submit.request_id for submit in bench.submits)
    bench.step(row(two, HELLO, finish="length"), plain=[(three, HELLO), (four, HELLO), (one, HELLO)])
    assert [(type(item), item.request_id) for item in bench.items()] == [
        (Delta, 2),
        (Finished, 2),
        (Delta, 3),
        (Delta, 1),
    ]
    (delta,) = bench.items(b"other")
    assert isinstance(delta, Delta)
    assert (delta.text, list(unpack_ints(delta.token_ids))) == ("hello", [HELLO])
    assert len([message for _, message in bench.sent if isinstance(message, Outputs)]) == 2


def test_a_plain_row_can_complete_a_stop_string() -> None:
    bench = Bench()
    bench.generate(stop=("ll",))
    (submit,) = bench.submits
    bench.step(plain=[(submit.request_id, HELLO)])
    assert bench.asked[-1] == StopRequest(submit.request_id)
    before = bench.items()
    bench.step(plain=[(submit.request_id, HELLO)])
    bench.step(row(submit.request_id, EOS, finish="stop", stop_token=EOS))
    assert bench.items() == before
    assert isinstance(before[-1], Finished)
    assert (bench.aborts, bench.service.unknown_outputs, bench.service.live_requests) == ([], 0, 0)


@pytest.mark.parametrize("plain", [False, True])
def test_b074_a_row_after_the_schedulers_own_end_is_of_an_unknown_request(plain: bool) -> None:
    bench = Bench()
    bench.generate()
    (submit,) = bench.submits
    bench.step(row(submit.request_id, HELLO, finish="length"))
    before = bench.items()
    if plain:
        bench.step(plain=[(submit.request_id, HELLO)])
    else:
        bench.step(row(submit.request_id, HELLO))
    assert bench.items() == before
    assert bench.aborts == [submit.request_id]
    assert bench.service.unknown_outputs == 1


def test_b074_a_plain_row_of_an_unknown_request_is_aborted_once() -> None:
    bench = Bench()
    bench.generate()
    (submit,) = bench.submits
    bench.step(plain=[(99, HELLO), (submit.request_id, HELLO), (-(2**63), HELLO), (99, HELLO)])
    bench.step(plain=[(99, HELLO)])
    assert bench.aborts == [99, -(2**63)]
    assert bench.service.unknown_outputs == 2
    assert len(bench.items()) == 1


@pytest.mark.parametrize(
    ("ids", "tokens"),
    [
        (pack_int64s([1]), b""),
        (b"", pack_ints([1])),
        (pack_int64s([1, 2]), pack_ints([1])),
        (pack_int64s([1]), pack_ints([1, 2])),
        (b"1234", pack_ints([1])),
        (pack_int64s([1]), b"123"),
    ],
)
def test_columns_that_do_not_match_break_the_link_before_anything_is_taken(ids: bytes, tokens: bytes) -> None:
    bench = Bench()
    bench.generate()
    with pytest.raises(LinkError, match="step outputs"):
        bench.service.from_scheduler(StepOutputs((row(bench.submits[0].request_id, HELLO),), ids, tokens))
    assert bench.items() == []


def test_a_request_ends_when_all_its_choices_have() -> None:
    bench = Bench()
    bench.generate(n=2)
    one, two = (submit.request_id for submit in bench.submits)
    bench.step(row(one, HELLO, finish="length", cached_tokens=1))
    assert bench.service.live_requests == 1
    bench.step(row(two, EOS, finish="stop", stop_token=EOS))
    assert bench.service.live_requests == 0
    finished = [item for item in bench.items() if isinstance(item, Finished)]
    assert [(f.index, f.reason, f.completion_tokens, f.cached_tokens) for f in finished] == [
        (0, "length", 1, 1),
        (1, "stop", 1, 0),
    ]


def test_a_stop_string_is_told_to_the_scheduler_and_ends_the_output() -> None:
    bench = Bench()
    bench.generate(stop=("ll",))
    (submit,) = bench.submits
    bench.step(row(submit.request_id, HELLO))
    assert bench.asked[-1] == StopRequest(submit.request_id)
    before = bench.items()
    # What was in flight arrives late, and its finish reason changes nothing.
    bench.step(row(submit.request_id, HELLO), row(submit.request_id, EOS, finish="stop", stop_token=EOS))
    assert bench.items() == before
    assert isinstance(before[-1], Finished)
    assert (before[-1].reason, before[-1].stop_reason) == ("stop", "ll")
    assert bench.aborts == []
    assert bench.service.unknown_outputs == 0


def test_only_who_has_stop_strings_is_told_timings_before_the_end() -> None:
    bench = Bench()
    bench.generate(1)
    bench.generate(2, stop=("ll",), n=2)
    assert [submit.tells_timings for submit in bench.submits] == [False, True, True]


def test_a_choice_is_received_tokenized_and_finished_in_this_order() -> None:
    async def body() -> None:
        encoder = FakeEncoder()
        bench = Bench(encoder=encoder)
        before = time.monotonic()
        bench.generate(1, ChatPrompt((ChatMessage("user", "hello"),)))
        received_by = time.monotonic()
        await asyncio.sleep(0)
        encoder.release.set()
        tokenized_from = time.monotonic()
        while not bench.submits:
            await asyncio.sleep(0)
        scheduler = ChoiceTimings(time.monotonic(), 4.0, 5.0, 6.0)
        bench.step(row(bench.submits[0].request_id, HELLO, finish="length", timings=scheduler))
        finished = bench.items()[-1]
        assert isinstance(finished, Finished)
        timings = finished.timings
        assert timings is not None
        assert before <= timings.received <= received_by <= tokenized_from <= timings.tokenized
        assert timings.tokenized <= scheduler.queued <= timings.finished <= time.monotonic()
        assert timings.clock_offset == pytest.approx(time.time() - time.monotonic(), abs=1.0)
        assert timings.scheduler == scheduler

    asyncio.run(body())


def test_b074_an_unknown_request_is_aborted_once() -> None:
    bench = Bench()
    bench.step(row(99, HELLO), row(99, HELLO))
    bench.step(row(99, HELLO))
    assert bench.aborts == [99]
    assert bench.service.unknown_outputs == 1


def test_b070_a_duplicate_request_id_is_refused_and_the_first_goes_on() -> None:
    bench = Bench()
    bench.generate(5)
    bench.generate(5)
    failed = bench.failure()
    assert (failed.status, failed.param) == (400, "request_id")
    (submit,) = bench.submits
    bench.step(row(submit.request_id, HELLO, finish="length"))
    assert isinstance(bench.items()[-1], Finished)
    bench.generate(5)  # free again
    assert len(bench.submits) == 2
    bench.generate(5, peer=b"other")  # another client counts for itself
    assert len(bench.submits) == 3


def test_abort_and_client_loss_reach_the_scheduler() -> None:
    bench = Bench()
    bench.generate(1, n=2)
    bench.generate(2)
    bench.generate(3, peer=b"other")
    bench.service.from_client(PEER, Abort(1))
    assert bench.aborts == [submit.request_id for submit in bench.submits[:2]]
    bench.service.from_client(PEER, Abort(1))
    bench.service.client_lost(PEER)
    assert bench.aborts == [submit.request_id for submit in bench.submits[:3]]
    assert bench.service.live_requests == 1
    bench.step(row(bench.submits[0].request_id, HELLO))
    assert bench.items() == []


def test_a_failed_choice_fails_the_request_and_aborts_the_others() -> None:
    bench = Bench()
    bench.generate(n=3)
    ids = [submit.request_id for submit in bench.submits]
    bench.step(Failed(ids[1], 429, "full", "rate_limit_error", retry_after=1.0))
    assert bench.failure() == Failed(1, 429, "full", "rate_limit_error", retry_after=1.0)
    assert bench.aborts == [ids[0], ids[2]]
    assert bench.service.live_requests == 0


@pytest.mark.parametrize("code", ["queue_full", "ttft_target"])
def test_a_refusal_comes_through_as_the_scheduler_said_it(code: str) -> None:
    bench = Bench()
    bench.generate()
    refusal = Failed(bench.submits[0].request_id, 429, "no", "rate_limit_error", code=code, retry_after=2.25)
    bench.step(refusal)
    assert bench.failure() == structs.replace(refusal, request_id=1)
    assert bench.aborts == []


def test_a_broken_row_fails_its_request_alone() -> None:
    bench = Bench()
    bench.generate(1)
    bench.generate(2)
    one, two = (submit.request_id for submit in bench.submits)
    bench.step(RowOutput(one, b"abc"), row(two, HELLO))
    failed, delta = bench.items()
    assert isinstance(failed, Failed)
    assert failed.status == 500
    assert isinstance(delta, Delta)
    assert bench.aborts == [one]


def test_requests_before_and_after_the_engine_get_503() -> None:
    bench = Bench(ready=False)
    bench.service.from_client(PEER, Hello("x"))
    bench.generate()
    assert bench.failure().status == 503
    bench.service.scheduler_ready()
    assert bench.sent[-1] == (PEER, Welcome(MODEL))
    bench.generate(2)
    bench.service.scheduler_lost()
    assert bench.service.live_requests == 0
    last = bench.items()[-1]
    assert isinstance(last, Failed)
    assert (last.request_id, last.status, last.type) == (2, 503, "server_error")
    bench.generate(3)
    last = bench.items()[-1]
    assert isinstance(last, Failed)
    assert last.status == 503
    bench.service.scheduler_ready()
    bench.generate(4)
    assert len(bench.submits) == 2


def test_hello_after_ready_is_answered_at_once() -> None:
    bench = Bench()
    bench.service.from_client(PEER, Hello("x"))
    assert bench.sent == [(PEER, Welcome(MODEL))]


def test_an_unreachable_scheduler_is_a_503() -> None:
    bench = Bench()
    bench.reachable = False
    bench.generate()
    assert bench.failure().status == 503
    assert bench.service.live_requests == 0


def test_drain_finishes_what_runs_and_refuses_the_rest() -> None:
    bench = Bench()
    bench.generate(1)
    bench.service.drain()
    bench.generate(2)
    failed = bench.failure()
    assert (failed.request_id, failed.status) == (2, 503)
    assert bench.idle == 0
    bench.step(row(bench.submits[0].request_id, HELLO, finish="length"))
    assert bench.idle == 1
    assert isinstance(bench.items()[-1], Finished)


CHAT = ChatPrompt((ChatMessage("user", "Hi"),))


def test_an_abort_during_encoding_submits_nothing() -> None:
    async def run() -> None:
        encoder = FakeEncoder()
        bench = Bench(encoder=encoder)
        bench.generate(1, prompt=CHAT)
        await asyncio.sleep(0)
        bench.service.from_client(PEER, Abort(1))
        bench.generate(1, prompt=CHAT)
        encoder.release.set()
        await asyncio.sleep(0.01)
        assert len(bench.submits) == 1
        assert bench.items() == []

    asyncio.run(run())


def test_an_error_during_encoding_fails_the_request_without_its_text(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        encoder = FakeEncoder()
        bench = Bench(encoder=encoder)
        encoder.error = RuntimeError("SECRET PROMPT")
        encoder.release.set()
        bench.generate(1, prompt=CHAT)
        await asyncio.sleep(0.01)
        assert bench.failure().status == 500
        assert "SECRET" not in bench.failure().message
        bench.generate(2)
        assert len(bench.submits) == 1

    asyncio.run(run())
    assert "RuntimeError" in caplog.text
    assert "SECRET" not in caplog.text


def test_prompts_that_wait_for_encoding_are_bounded() -> None:
    async def run() -> None:
        encoder = FakeEncoder()
        bench = Bench(encoder=encoder)
        for request_id in (1, 2, 3):
            bench.generate(request_id, prompt=CHAT)
        failed = bench.failure()
        assert (failed.request_id, failed.status) == (3, 429)
        assert failed.retry_after is not None
        bench.service.from_client(PEER, Abort(1))  # before its task ran at all
        await asyncio.sleep(0.01)
        bench.generate(4, prompt=CHAT)
        encoder.release.set()
        await asyncio.sleep(0.01)
        assert len(bench.submits) == 2

    asyncio.run(run())


@pytest.mark.parametrize(
    ("limits", "n", "refusal"),
    [
        ({"max_queue_requests": 3}, 3, None),
        ({"max_queue_requests": 3}, 4, "n is 4, but at most 3 choices can wait (--max-queue-requests)"),
        ({"max_queue_tokens": 2}, 3, None),
        (
            {"max_queue_tokens": 2},
            4,
            "n is 4: while one choice starts, the others wait with 3 prompt tokens together, but at most 2 can "
            "(--max-queue-tokens)",
        ),
    ],
)
def test_choices_that_can_never_wait_together_are_refused_for_good(
    limits: dict[str, int], n: int, refusal: str | None
) -> None:
    bench = Bench(model=structs.replace(MODEL, **limits))
    bench.generate(n=n)
    if refusal is None:
        assert len(bench.submits) == n
    else:
        assert not bench.submits
        assert (bench.failure().status, bench.failure().param, bench.failure().message) == (400, "n", refusal)


def test_no_chat_template_is_a_400_that_says_so() -> None:
    bench = Bench(model=structs.replace(MODEL, has_chat_template=False))
    bench.generate(prompt=CHAT)
    failed = bench.failure()
    assert (failed.status, failed.param) == (400, "messages")
    assert "no chat template" in failed.message


def test_clients_hear_when_to_wait_and_when_to_come_again() -> None:
    bench = Bench()
    bench.service.from_client(PEER, Hello("test"))
    bench.generate()
    bench.service.scheduler_lost()
    bench.service.scheduler_ready()
    kinds = [type(message) for _, message in bench.sent]
    assert kinds == [Welcome, Paused, Outputs, Welcome]
    bench.sent.clear()
    bench.service.drain()
    bench.service.from_client(b"late", Hello("test"))
    bench.service.from_client(PEER, Hello("test"))
    assert [(peer, type(message)) for peer, message in bench.sent] == [(PEER, Paused)]
