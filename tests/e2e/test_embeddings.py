"""Embeddings of the default model, over HTTP and over ZeroMQ."""

import base64

import numpy as np
import openai
import pytest
from numpy.typing import NDArray

from ipc import BadRequest, Client
from tests.e2e.server import Server

TEXTS = [
    "The cat sat on the mat.",
    "A kitten was sitting on the rug.",
    "Quarterly revenue grew by four percent, said the chief financial officer.",
    "word " * 700,
]


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="unused", max_retries=0)


def vectors(client: openai.OpenAI, texts: list[str]) -> list[NDArray[np.float32]]:
    answer = client.embeddings.create(model="smol", input=texts, encoding_format="base64")
    return [np.frombuffer(base64.b64decode(item.embedding), dtype="<f4") for item in answer.data]


def test_embeddings_have_length_1_and_the_same_bits_in_any_company(client: openai.OpenAI) -> None:
    together = vectors(client, TEXTS)
    for text, vector in zip(TEXTS, together, strict=True):
        assert vector.shape == (576,)
        assert np.linalg.norm(vector.astype(np.float64)) == pytest.approx(1, abs=1e-6)
        (alone,) = vectors(client, [text])
        assert alone.tobytes() == vector.tobytes()
    cat, kitten, revenue, _ = together
    assert cat @ kitten > cat @ revenue


def test_numbers_and_base64_say_the_same(client: openai.OpenAI) -> None:
    answer = client.embeddings.create(model="smol", input=TEXTS[0], encoding_format="float")
    np.testing.assert_array_equal(np.array(answer.data[0].embedding, dtype=np.float32), vectors(client, TEXTS[:1])[0])
    completion = client.completions.create(model="smol", prompt=TEXTS[0], max_tokens=1)
    assert answer.usage.prompt_tokens == completion.usage.prompt_tokens


def test_the_sdk_gives_the_same(client: openai.OpenAI, endpoint: str) -> None:
    with Client(endpoint) as sdk:
        found = sdk.embed(TEXTS[0])
        with pytest.raises(BadRequest) as caught:
            sdk.embed("")
    assert caught.value.param == "prompt"
    np.testing.assert_array_equal(np.array(found.vector, dtype=np.float32), vectors(client, TEXTS[:1])[0])
    assert found.usage.completion_tokens == 0


def test_a_mean_over_all_tokens_and_the_first_of_them_do_not_depend_on_the_cache(endpoint: str) -> None:
    """Long inputs are computed in chunks; what the cache holds of them has keys and values, but no hidden states."""
    with Client(endpoint) as sdk:
        for text in (TEXTS[0], TEXTS[3]):
            before = [sdk.embed(text, pooling) for pooling in ("mean", "cls")]
            assert {found.usage.cached_tokens for found in before} == {0}
            last = sdk.embed(text, "last")
            again = [sdk.embed(text, pooling) for pooling in ("mean", "cls")]
            assert [found.vector for found in again] == [found.vector for found in before]
            assert len({tuple(found.vector) for found in (last, *before)}) == 3
        # The first token attends to itself alone: whatever follows does not change its state.
        heads = [sdk.embed("The " + text, "cls").vector for text in ("cat", "kitten slept well")]
    assert heads[0] == heads[1]
    assert last.usage.cached_tokens > 0


def test_an_input_that_is_too_long_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.embeddings.create(model="smol", input="word " * 9000)
    assert caught.value.param == "input"
    assert caught.value.code == "context_length_exceeded"
