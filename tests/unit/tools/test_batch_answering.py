"""Which answers of the engine a batch takes for the answer, and which it asks for again."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from msgspec import Raw

from ipc.engine_client import EngineClient, Stream
from ipc.messages import Delta, Failed, Finished, ModelInfo, PromptInfo
from tools.batch import answering
from tools.batch.answering import Answerer
from tools.batch.errors import BatchError
from tools.batch.requests_file import BatchLine

MODEL = ModelInfo(names=("tiny",), max_model_len=256, vocab_size=1000, created=0, has_chat_template=False)
LINE = BatchLine("a", "/v1/completions", Raw(b'{"model": "tiny", "prompt": "x"}'))
WRONG = BatchLine("b", "/v1/completions", Raw(b'{"model": "tiny", "prompt": "x", "temperature": 9}'))


class ScriptedClient(EngineClient):
    """Answers the requests by these statuses in turn (the last one stays); others run while `busy` is positive."""

    def __init__(self, *statuses: int, busy: int = 0, back: Callable[[], None] = lambda: None) -> None:
        super().__init__(["ipc:///nowhere"])
        self._statuses = list(statuses)
        self._back = back
        self.busy = busy
        self.sent = 0

    async def connect(self, timeout: float | None = None) -> ModelInfo:
        self._back()
        return MODEL

    @property
    def live_requests(self) -> int:
        self.busy -= 1
        return max(0, self.busy)

    def generate(self, *arguments: Any, **named: Any) -> Stream:
        self.sent += 1
        status = self._statuses.pop(0) if len(self._statuses) > 1 else self._statuses[0]
        stream = Stream(self.sent, 1, lambda stream: None)
        if status != 200:
            stream._put(Failed(self.sent, status, "no", "server_error", retry_after=1.0))
            return stream
        if named.get("return_prompt"):
            stream._put(PromptInfo(self.sent, b"\5\0\0\0", "x", b"", "x"))
        stream._put(Delta(self.sent, 0, "text", b"\1\0\0\0"))
        stream._put(Finished(self.sent, 0, "stop", None, 1, 1, 0))
        return stream


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds slept between tries, which pass at once."""
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(answering.asyncio, "sleep", sleep)
    return slept


def status_of(client: EngineClient, line: BatchLine = LINE) -> int:
    return asyncio.run(Answerer(client, MODEL).answer(line)).status


@pytest.mark.parametrize("failures", [(503,), (429,), (503, 429, 503)])
def test_a_passing_failure_is_no_answer(failures: tuple[int, ...], pauses: list[float]) -> None:
    client = ScriptedClient(*failures, 200)
    assert status_of(client) == 200
    assert client.sent == len(failures) + 1
    assert len(pauses) == len(failures)
    assert min(pauses) >= 1.0, "Retry-After is kept"


@pytest.mark.parametrize("status", [429, 503])
def test_a_lasting_failure_is_the_answer_after_five_tries(status: int, pauses: list[float]) -> None:
    client = ScriptedClient(status)
    assert status_of(client) == status
    assert client.sent == 5
    assert pauses == sorted(pauses), "each pause is at least as long as the one before"


def test_a_queue_full_of_other_requests_of_the_batch_is_waited_for() -> None:
    client = ScriptedClient(429, busy=50)
    assert status_of(client) == 429
    assert client.sent > 50


@pytest.mark.parametrize("status", [400, 404, 500])
def test_other_errors_are_answers(status: int) -> None:
    client = ScriptedClient(status)
    assert status_of(client) == status
    assert client.sent == 1


def test_a_line_may_ask_for_its_prompt() -> None:
    line = BatchLine(
        "c", "/v1/completions", Raw(b'{"model": "tiny", "prompt": "x", "echo": true, "return_token_ids": true}')
    )
    answer = asyncio.run(Answerer(ScriptedClient(200), MODEL).answer(line))
    (choice,) = json.loads(answer.body)["choices"]
    assert (choice["text"], choice["prompt_token_ids"], choice["token_ids"]) == ("xtext", [5], [1])


def test_a_wrong_request_is_not_sent() -> None:
    client = ScriptedClient(200)
    assert status_of(client, WRONG) == 400
    assert client.sent == 0


def test_an_engine_that_stays_away_ends_the_batch() -> None:
    def stays_away() -> None:
        raise TimeoutError

    with pytest.raises(BatchError, match="did not come back"):
        status_of(ScriptedClient(503, back=stays_away))
