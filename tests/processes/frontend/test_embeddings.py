"""Embeddings under the official openai client, with an engine that answers every prompt alike."""

import base64
from collections.abc import Iterator

import numpy as np
import openai
import pytest

from ..fake_engine import EMBEDDING, MODEL, FakeEngine, prompt_length
from .process import Frontend


@pytest.fixture(scope="module")
def client(frontend: Frontend) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{frontend.port}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.mark.parametrize("encoding", ["float", "base64", None])
def test_one_embedding(client: openai.OpenAI, encoding: str | None) -> None:
    wanted = {} if encoding is None else {"encoding_format": encoding}
    answer = client.embeddings.create(model="tiny", input="hello", **wanted)
    assert answer.object == "list"
    assert answer.model == "tiny"
    (item,) = answer.data
    assert (item.object, item.index) == ("embedding", 0)
    values = item.embedding
    if encoding == "base64":  # asked for by name, the client leaves it as it is
        values = np.frombuffer(base64.b64decode(values), dtype="<f4")
    np.testing.assert_array_equal(np.array(values, dtype=np.float32), np.array(EMBEDDING, dtype=np.float32))
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == 5


@pytest.mark.parametrize("inputs", [["one", "three", "x"], [[1, 2], [3], [4, 5, 6]], [7, 8, 9]])
def test_several_inputs(client: openai.OpenAI, engine: FakeEngine, inputs: list[object]) -> None:
    seen = len(engine.requests)
    answer = client.embeddings.create(model="tiny", input=inputs)
    expected = 1 if isinstance(inputs[0], int) else len(inputs)
    assert [item.index for item in answer.data] == list(range(expected))
    asked = engine.requests[seen:]
    assert len(asked) == expected
    assert all(request.pooling == MODEL.pooling == "mean" for request in asked)
    assert answer.usage.prompt_tokens == sum(map(prompt_length, asked))


def test_the_models_list_says_how_embeddings_are_made(client: openai.OpenAI) -> None:
    (entry, _) = client.models.list().data
    assert entry.model_dump()["pooling"] == "mean"


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input[1]"),
        ({"input": ["a", 1]}, "input"),
        ({"input": [[1], []]}, "input[1]"),
        ({"input": [[1], [2, 5000]]}, "input[1]"),
        ({"input": [1] * 256}, "input"),
        ({"input": [-1]}, "input"),
        ({"input": ["x"] * 129}, "input"),
        ({"input": 5}, "input"),
        ({"dimensions": 2}, "dimensions"),
        ({"encoding_format": "int8"}, "encoding_format"),
        ({"model": 3}, "model"),
    ],
)
def test_bad_parameters_are_named(client: openai.OpenAI, change: dict[str, object], param: str) -> None:
    body = {"model": "tiny", "input": "hello", "encoding_format": "float"} | change
    with pytest.raises(openai.BadRequestError) as caught:
        client.post("/embeddings", body=body, cast_to=object)
    assert caught.value.param == param
    message = str(caught.value.message)
    assert param in message
    assert "prompt" not in message


def test_errors_of_the_engine_keep_their_status(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="other", input="hello")
