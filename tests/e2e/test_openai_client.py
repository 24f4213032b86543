"""The official `openai` client against the real server."""

import openai
import pytest

from tests.e2e.server import Server

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="unused", max_retries=0)


def test_models_are_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["smol"]
    assert client.models.retrieve("smol").id == "smol"


def test_chat_streamed_and_not_are_the_same(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="smol", messages=QUESTION, temperature=0, max_tokens=40)
    chunks = list(
        client.chat.completions.create(
            model="smol",
            messages=QUESTION,
            temperature=0,
            max_tokens=40,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert "Paris" in text
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == whole.choices[0].finish_reason
    assert sum(bool(chunk.choices and chunk.choices[0].finish_reason) for chunk in chunks) == 1
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens


def test_completions_streamed_and_not_are_the_same(client: openai.OpenAI) -> None:
    whole = client.completions.create(model="smol", prompt="1, 2, 3,", temperature=0, max_tokens=12)
    chunks = list(client.completions.create(model="smol", prompt="1, 2, 3,", temperature=0, max_tokens=12, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage.completion_tokens == 12
    assert all(chunk.usage is None for chunk in chunks)


def test_stop_strings_end_the_text_before_them(client: openai.OpenAI) -> None:
    free = client.completions.create(model="smol", prompt="1, 2, 3,", temperature=0, max_tokens=20).choices[0].text
    assert " 6" in free
    for stream in (False, True):
        answer = client.completions.create(
            model="smol", prompt="1, 2, 3,", temperature=0, max_tokens=20, stop=[" 6"], stream=stream
        )
        choices = [chunk.choices[0] for chunk in answer] if stream else [answer.choices[0]]
        assert "".join(choice.text for choice in choices) == free.split(" 6")[0]
        assert choices[-1].finish_reason == "stop"


def test_several_choices(client: openai.OpenAI) -> None:
    """B036."""
    answer = client.chat.completions.create(model="smol", messages=QUESTION, n=4, temperature=1, seed=3, max_tokens=12)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert len({choice.message.content for choice in answer.choices}) > 1
    assert answer.usage.completion_tokens <= 48


def test_logprobs_streamed_and_not_are_the_same(client: openai.OpenAI) -> None:
    """B017, B018."""
    ask = {
        "model": "smol",
        "messages": QUESTION,
        "temperature": 0,
        "max_tokens": 8,
        "logprobs": True,
        "top_logprobs": 3,
    }
    whole = client.chat.completions.create(**ask).choices[0].logprobs.content
    streamed = [
        position
        for chunk in client.chat.completions.create(**ask, stream=True)
        if chunk.choices and chunk.choices[0].logprobs
        for position in chunk.choices[0].logprobs.content
    ]
    assert streamed == whole
    assert all(len(position.top_logprobs) == 3 for position in whole)
    assert all(position.logprob == max(top.logprob for top in position.top_logprobs) for position in whole)


@pytest.mark.parametrize(
    ("bad", "param"),
    [
        ({"temperature": 3}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 100_000}, "max_tokens"),
        ({"top_p": 0}, "top_p"),
        ({"n": 17}, "n"),
        ({"stop": [""]}, "stop"),
        ({"extra_body": {"stop_token_ids": [49152]}}, "stop_token_ids"),
        ({"extra_body": {"best_of": 2}}, "best_of"),
    ],
)
def test_a_bad_parameter_is_named(client: openai.OpenAI, bad: dict, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="smol", messages=QUESTION, **bad)
    assert caught.value.param == param
    assert param in caught.value.message


def test_an_unknown_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="smol"):
        client.chat.completions.create(model="gpt-nothing", messages=QUESTION)


def test_a_prompt_as_long_as_the_context_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="smol", prompt=[5] * 8192, max_tokens=1)
    assert "8192" in caught.value.message
