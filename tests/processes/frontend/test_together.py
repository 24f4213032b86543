"""Several prompts in one body that an idle engine could never queue: a 400 at once, and none of them is sent."""

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from ..fake_engine import MODEL, FakeEngine
from .process import Frontend

REQUESTS, TOKENS = 6, 30


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeEngine]:
    model = msgspec.structs.replace(MODEL, max_queue_requests=REQUESTS, max_queue_tokens=TOKENS)
    engine = FakeEngine(tmp_path_factory.mktemp("engine"), model=model)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def server(small: FakeEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Frontend]:
    frontend = Frontend(tmp_path_factory.mktemp("run"), small).wait_until_ready()
    yield frontend
    frontend.close()


# Texts have a token for each character, and one in front.
TOO_MANY = (
    ({"prompt": ["a"] * 7}, "--max-queue-requests"),
    ({"prompt": [[1]] * 7}, "--max-queue-requests"),
    ({"prompt": ["a", "b"], "n": 4}, "--max-queue-requests"),
    ({"prompt": [[1] * 16] * 3}, "--max-queue-tokens"),
    ({"prompt": ["a" * 15] * 3}, "--max-queue-tokens"),
    ({"prompt": ["a" * 9, [2] * 4][:1] * 2, "n": 3}, "--max-queue-tokens"),
)
ENOUGH_ROOM = (
    {"prompt": ["a"] * 6},
    {"prompt": ["a", "b"], "n": 3},
    {"prompt": [[1] * 15] * 3},
    {"prompt": ["a" * 14] * 3},
    {"prompt": ["a" * 200]},  # one alone waits for nobody
)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("fields", "limit"), TOO_MANY)
def test_more_than_can_ever_wait(
    server: Frontend, small: FakeEngine, fields: dict[str, Any], limit: str, stream: bool
) -> None:
    sent = len(small.requests)
    answer = server.request("POST", "/v1/completions", {"model": "tiny", "max_tokens": 1, "stream": stream, **fields})
    error = answer.error()
    assert (answer.status, error["type"], error["param"]) == (400, "invalid_request_error", "prompt")
    assert limit in error["message"]
    assert "retry-after" not in {name.lower() for name in answer.headers}
    assert len(small.requests) == sent


@pytest.mark.parametrize("fields", ENOUGH_ROOM)
def test_as_many_as_can_wait(server: Frontend, fields: dict[str, Any]) -> None:
    answer = server.request("POST", "/v1/completions", {"model": "tiny", "max_tokens": 1, **fields})
    assert answer.status == 200, answer.body
    assert len(answer.json()["choices"]) == len(fields["prompt"]) * fields.get("n", 1)


@pytest.mark.parametrize(
    ("inputs", "limit"),
    [
        (["a"] * 7, "--max-queue-requests"),
        (["a" * 15] * 3, "--max-queue-tokens"),
        ([[1] * 16] * 3, "--max-queue-tokens"),
    ],
)
def test_inputs_of_embeddings(server: Frontend, small: FakeEngine, inputs: list[Any], limit: str) -> None:
    sent = len(small.requests)
    answer = server.request("POST", "/v1/embeddings", {"model": "tiny", "input": inputs})
    assert (answer.status, answer.error()["param"]) == (400, "input")
    assert limit in answer.error()["message"]
    assert len(small.requests) == sent
    assert server.request("POST", "/v1/embeddings", {"model": "tiny", "input": inputs[:2]}).status == 200


def test_listed_values_are_counted_over_all_prompts_and_choices(server: Frontend, small: FakeEngine) -> None:
    """Of one prompt, the tokenizer process counts: tests/unit/tokenizer_proc/test_prompt_report.py."""
    sent = len(small.requests)
    fields = {"model": "tiny", "prompt": [[1] * 150] * 4, "max_tokens": 1, "n": 16, "prompt_logprobs": 20}
    answer = server.request("POST", "/v1/completions", fields)
    assert (answer.status, answer.error()["param"]) == (400, "prompt_logprobs")
    assert f"{600 * 16 * 21} values, but at most 200000" in answer.error()["message"]
    assert len(small.requests) == sent
