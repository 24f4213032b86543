"""Idempotency keys: the table against a model of it, and the rule as clients see it."""

import asyncio
from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ipc.codec import encode
from ipc.engine_messages import AbortRequests
from ipc.messages import Abort, Delta, Failed, Finished, Generate, Outputs, PromptInfo, SamplingParams, TextPrompt
from ipc.validation import InvalidRequest
from tests.unit.tokenizer_proc.test_service import EOS, PEER, Bench, row
from tokenizer_proc.idempotency import MAX_ANSWER_BYTES, IdempotencyKeys, KeyConflict, Record, fingerprint_of

SECONDS = 10.0
KEYS = ("a", "b", "c", "d")
MAX_KEYS = 3
MAX_BYTES = 150


def request(key: str, body: str = "x", tenant: str = "", request_id: int = 1) -> Generate:
    return Generate(request_id, TextPrompt(body), SamplingParams(), tenant=tenant, idempotency_key=key)


class Table(RuleBasedStateMachine):
    """`running` and `ended` are what the table must know, told only by what was done to it."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.table = IdempotencyKeys(SECONDS, max_keys=MAX_KEYS, max_bytes=MAX_BYTES, clock=lambda: self.now)
        self.running: dict[tuple[str, str], tuple[Record, str]] = {}
        self.ended: dict[tuple[str, str], tuple[str, float, str]] = {}  # body, time, text; oldest first

    def forget(self) -> None:
        self.ended = {key: end for key, end in self.ended.items() if end[1] > self.now - SECONDS}
        while len(self.ended) > MAX_KEYS:
            del self.ended[next(iter(self.ended))]

    def kept(self) -> set[tuple[str, str]]:
        """Keys of the newest answers that fit, none of which is too large by itself."""
        kept: set[tuple[str, str]] = set()
        total = 0
        for key, (_, _, text) in reversed(self.ended.items()):
            total += len(encode(Outputs((Delta(1, 0, text, b""),))))
            if total > MAX_BYTES:
                break
            kept.add(key)
        return kept

    @rule(tenant=st.sampled_from(("", "t")), key=st.sampled_from(KEYS), body=st.sampled_from(("x", "y")))
    def begin(self, tenant: str, key: str, body: str) -> None:
        self.forget()
        place = (tenant, key)
        asked = request(key, body, tenant, request_id=77)
        if place in self.running:
            if self.running[place][1] == body:
                with pytest.raises(KeyConflict) as caught:
                    self.table.begin(asked)
                assert caught.value.retry_after is not None
            else:
                with pytest.raises(InvalidRequest):
                    self.table.begin(asked)
        elif place in self.ended and self.ended[place][0] != body:
            with pytest.raises(InvalidRequest) as refused:
                self.table.begin(asked)
            assert refused.value.param == "idempotency_key"
        elif place in self.ended and place in self.kept():
            assert self.table.begin(asked) == (Delta(77, 0, self.ended[place][2], b""),)
        elif place in self.ended:
            with pytest.raises(KeyConflict) as caught:
                self.table.begin(asked)
            assert caught.value.retry_after is None
        else:
            record = self.table.begin(asked)
            assert isinstance(record, Record)
            self.running[place] = record, body

    @precondition(lambda self: self.running)
    @rule(data=st.data(), text=st.text(max_size=40), whole=st.booleans())
    def end(self, data: st.DataObject, text: str, whole: bool) -> None:
        place = data.draw(st.sampled_from(sorted(self.running)))
        record, body = self.running.pop(place)
        record.items.append(Delta(1, 0, text, b""))
        if whole:
            record.keep()
            self.ended[place] = body, self.now, text
            self.forget()
        record.release()

    @rule(seconds=st.floats(0.0, SECONDS))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def nothing_is_kept_without_bound(self) -> None:
        assert len(self.table._ended) <= MAX_KEYS
        assert self.table._bytes == sum(map(len, self.table._answers.values())) <= MAX_BYTES
        assert self.table._answers.keys() <= self.table._ended.keys()


TestTable = Table.TestCase
TestTable.settings = settings(max_examples=60, stateful_step_count=40)


def test_an_answer_that_is_too_large_is_not_kept_but_its_key_is() -> None:
    table = IdempotencyKeys(SECONDS)
    record = table.begin(request("k"))
    assert isinstance(record, Record)
    record.items.append(Delta(1, 0, "x" * MAX_ANSWER_BYTES, b""))
    record.keep()
    with pytest.raises(KeyConflict, match="not kept any more"):
        table.begin(request("k"))


CHANGES: list[dict[str, Any]] = [
    {"prompt": TextPrompt("other")},
    {"params": SamplingParams(seed=1)},
    {"params": SamplingParams(logit_bias={2: 1.0})},
    {"namespace": "n"},
    {"pooling": "last"},
    {"return_prompt": True},
]


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_what_makes_another_request(change: dict[str, Any]) -> None:
    assert fingerprint_of(msgspec.structs.replace(request("k"), **change)) != fingerprint_of(request("k"))


def test_what_makes_the_same_request() -> None:
    biased = [
        msgspec.structs.replace(request("k"), params=SamplingParams(logit_bias=bias))
        for bias in ({1: 1.0, 2: 2.0}, {2: 2.0, 1: 1.0})
    ]
    assert fingerprint_of(biased[0]) == fingerprint_of(biased[1])
    same = msgspec.structs.replace(request("k"), request_id=9, external_id="x", priority=5, deadline=3.0)
    assert fingerprint_of(same) == fingerprint_of(request("k"))


# --- the rule, through the service ---


class Keyed(Bench):
    def ask(self, request_id: int, peer: bytes = PEER, text: str = "hello", key: str = "k", **fields: Any) -> None:
        params = SamplingParams(**fields.pop("params", {}))
        asked = Generate(request_id, TextPrompt(text), params, idempotency_key=key, **fields)
        self.service.from_client(peer, asked)

    def finish(self, at: int = -1) -> None:
        self.step(plain=[(self.submits[at].request_id, self.submits[at].token_ids[0])])
        self.step(row(self.submits[at].request_id, EOS, finish="stop", stop_token=EOS))


def test_a_repetition_gets_the_very_answer_without_running_again() -> None:
    bench = Keyed()
    bench.ask(1)
    bench.finish()
    bench.ask(5, peer=b"again")
    first = bench.items()
    assert any(isinstance(item, Finished) for item in first)
    assert bench.items(b"again") == [msgspec.structs.replace(item, request_id=5) for item in first]
    assert len(bench.submits) == 1
    assert bench.service.live_requests == 0


def test_a_prompts_report_is_a_part_of_the_answer() -> None:
    bench = Keyed()
    bench.ask(1, return_prompt=True)
    bench.finish()
    bench.ask(2, return_prompt=True)
    kinds = [type(item) for item in bench.items()]
    assert kinds[: len(kinds) // 2] == kinds[len(kinds) // 2 :]
    assert kinds[0] is PromptInfo


def test_while_the_first_runs_the_same_is_refused_and_harms_it_not() -> None:
    bench = Keyed()
    bench.ask(1)
    bench.ask(2, peer=b"again")
    (failed,) = bench.items(b"again")
    assert isinstance(failed, Failed)
    assert (failed.status, failed.param, failed.code) == (409, "idempotency_key", "idempotency_key_in_use")
    assert failed.retry_after is not None
    bench.finish()
    assert isinstance(bench.items()[-1], Finished)


@pytest.mark.parametrize("ended", [True, False])
def test_another_request_with_the_key_is_refused(ended: bool) -> None:
    bench = Keyed()
    bench.ask(1)
    if ended:
        bench.finish()
    bench.ask(2, peer=b"other", text="hello hello")
    (failed,) = bench.items(b"other")
    assert isinstance(failed, Failed)
    assert (failed.status, failed.param, failed.code) == (400, "idempotency_key", "idempotency_key_reused")
    assert len(bench.submits) == 1


def test_a_key_is_its_tenants_own() -> None:
    bench = Keyed()
    for number, tenant in enumerate(("a", "b", "")):
        bench.ask(number, tenant=tenant)
    assert len(bench.submits) == 3


@pytest.mark.parametrize("end", ["abort", "client lost", "failed", "scheduler lost", "deadline"])
def test_a_request_without_an_answer_leaves_its_key_free(end: str) -> None:
    async def main() -> None:
        bench = Keyed()
        bench.ask(1, deadline=0.01 if end == "deadline" else None)
        (first,) = bench.submits
        match end:
            case "abort":
                bench.service.from_client(PEER, Abort(1))
            case "client lost":
                bench.service.client_lost(PEER)
            case "failed":
                bench.step(Failed(first.request_id, 500, "no", "server_error"))
            case "scheduler lost":
                bench.service.scheduler_lost()
                bench.service.scheduler_ready()
            case "deadline":
                await asyncio.sleep(0.05)
        bench.ask(2, peer=b"again")
        assert len(bench.submits) == 2
        bench.finish()
        assert isinstance(bench.items(b"again")[-1], Finished)

    asyncio.run(main())


def test_one_choice_of_two_is_no_answer() -> None:
    bench = Keyed()
    bench.ask(1, params={"n": 2})
    bench.step(row(bench.submits[0].request_id, EOS, finish="stop", stop_token=EOS))
    bench.service.client_lost(PEER)
    bench.ask(2, peer=b"again", params={"n": 2})
    assert len(bench.submits) == 4


def test_an_invalid_request_takes_no_key() -> None:
    bench = Keyed()
    bench.ask(1, text="")
    bench.ask(2)
    assert len(bench.submits) == 1


# --- deadlines ---


def test_a_request_whose_deadline_comes_is_aborted_wherever_it_is() -> None:
    async def main() -> None:
        bench = Bench()
        request = Generate(3, TextPrompt("hello"), SamplingParams(n=2), deadline=0.02)
        bench.service.from_client(PEER, request)
        bench.service.from_client(PEER, Generate(4, TextPrompt("hello"), SamplingParams(), deadline=60.0))
        await asyncio.sleep(0.1)
        (failed,) = bench.items()
        assert isinstance(failed, Failed)
        assert (failed.request_id, failed.status, failed.param, failed.code) == (
            3,
            408,
            "deadline",
            "deadline_exceeded",
        )
        assert AbortRequests(tuple(submit.request_id for submit in bench.submits[:2])) in bench.asked
        assert bench.service.live_requests == 1

    asyncio.run(main())


def test_a_finished_request_has_no_deadline_any_more() -> None:
    async def main() -> None:
        bench = Bench()
        bench.service.from_client(PEER, Generate(3, TextPrompt("hello"), SamplingParams(), deadline=0.05))
        bench.step(row(bench.submits[0].request_id, EOS, finish="stop", stop_token=EOS))
        await asyncio.sleep(0.1)
        assert [type(item) for item in bench.items()].count(Failed) == 0
        assert bench.aborts == []

    asyncio.run(main())


@pytest.mark.parametrize("deadline", [0.0, -1.0, float("nan"), float("inf"), 86401.0])
def test_a_deadline_out_of_bounds_is_refused_by_name(deadline: float) -> None:
    bench = Bench()
    bench.service.from_client(PEER, Generate(1, TextPrompt("hello"), SamplingParams(), deadline=deadline))
    failed = bench.failure()
    assert (failed.status, failed.param) == (400, "deadline")
    assert "between 0.001 and 86400" in failed.message
