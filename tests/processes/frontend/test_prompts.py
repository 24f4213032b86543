"""What is told of prompts, by a frontend whose engine makes it up: log-probabilities, echo, token ids, /tokenize."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from ipc.messages import ChatPrompt

from ..fake_engine import MODEL, FakeEngine, expected_text
from .process import Frontend

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def client(frontend: Frontend) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{frontend.port}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_echo_with_logprobs(client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {"model": "tiny", "prompt": "abc", "max_tokens": 2, "echo": True, "logprobs": 1}
    choice = client.completions.create(**ask).choices[0]
    assert choice.text == "abc" + expected_text(0, 2)
    found = choice.logprobs
    assert found is not None
    assert found.tokens == ["p0", "p1", "p2", " é0.0", " é0.1"]
    assert found.token_logprobs == [None, -1.0, -2.0, -0.5, -0.5]
    assert found.text_offset == [0, 1, 2, 3, 8]
    assert found.top_logprobs is not None
    assert found.top_logprobs[:2] == [None, {"t0": 0.0, "p1": -1.0}]
    chunks = [chunk.choices[0] for chunk in client.completions.create(**ask, stream=True)]
    assert "".join(chunk.text for chunk in chunks) == choice.text
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        streamed = [value for chunk in chunks if chunk.logprobs for value in getattr(chunk.logprobs, name)]
        assert streamed == getattr(found, name)


@pytest.mark.parametrize("logprobs", [None, 1])
def test_max_tokens_0_scores_alone(client: openai.OpenAI, logprobs: int | None) -> None:
    answer = client.completions.create(model="tiny", prompt=["ab", "cde"], max_tokens=0, echo=True, logprobs=logprobs)
    assert [choice.text for choice in answer.choices] == ["ab", "cde"]
    assert [choice.finish_reason for choice in answer.choices] == ["length", "length"]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 0)
    if logprobs is not None:
        assert answer.choices[1].logprobs is not None
        assert answer.choices[1].logprobs.token_logprobs == [None, -1.0, -2.0]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_prompt_logprobs_in_the_form_of_vllm(frontend: Frontend, path: str, stream: bool) -> None:
    body: dict[str, Any] = {"model": "tiny", "max_tokens": 2, "n": 2, "prompt_logprobs": 1, "return_token_ids": True}
    body |= {"prompt": "abc"} if path == TEXT else {"messages": [{"role": "user", "content": "abc"}]}
    answer = frontend.request("POST", path, {**body, "stream": stream})
    assert answer.status == 200
    listed = [
        None,
        {
            "501": {"logprob": -1.0, "rank": 1, "decoded_token": "p1"},
            "600": {"logprob": 0.0, "rank": 1, "decoded_token": "t0"},
        },
        {
            "502": {"logprob": -2.0, "rank": 2, "decoded_token": "p2"},
            "600": {"logprob": 0.0, "rank": 1, "decoded_token": "t0"},
        },
    ]
    if not stream:
        places = answer.json()["choices"] if path == TEXT else [answer.json()]
    else:
        chunks = [json.loads(event) for event in answer.events() if event != "[DONE]"]
        told = [chunk for chunk in chunks if "prompt_logprobs" in json.dumps(chunk)]
        assert {chunk["choices"][0]["index"] for chunk in told} == {0, 1}
        places = [chunk["choices"][0] for chunk in told] if path == TEXT else told
    for place in places:
        assert place["prompt_logprobs"] == listed
        assert place["prompt_token_ids"] == [500, 501, 502]


BAD = [
    ("prompt_logprobs", -1),
    ("prompt_logprobs", 21),
    ("prompt_logprobs", True),
    ("allowed_token_ids", [MODEL.vocab_size]),
    ("allowed_token_ids", [-1]),
    ("bad_words", [""]),
    ("bad_words", ["  "]),
    ("bad_words", ["x" * 257]),
    ("bad_words", ["x"] * 65),
    ("bad_words", [1]),
    ("stop_token_ids", [999_999_999]),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", [MODEL.vocab_size]),
    ("top_k", -2),
    ("top_k", MODEL.vocab_size + 1),
    ("min_p", 1.5),
    ("max_tokens", 0),
]


@pytest.mark.parametrize(("field", "value"), BAD, ids=str)
def test_b027_values_out_of_range_are_refused_by_name(frontend: Frontend, field: str, value: Any) -> None:
    for path, prompt in ((TEXT, {"prompt": "a"}), (CHAT, {"messages": [{"role": "user", "content": "a"}]})):
        answer = frontend.request("POST", path, {"model": "tiny", **prompt, "min_tokens": 1, field: value})
        assert answer.status == 400
        assert (answer.error()["param"] or "").startswith(field)


@pytest.mark.parametrize("stop", ["", [""], ["a", ""]])
def test_b006_empty_stop_strings_are_refused_by_name(frontend: Frontend, stop: Any) -> None:
    for path, prompt in ((TEXT, {"prompt": "a"}), (CHAT, {"messages": [{"role": "user", "content": "a"}]})):
        answer = frontend.request("POST", path, {"model": "tiny", **prompt, "stop": stop})
        assert (answer.status, answer.error()["param"]) == (400, "stop")


@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p", "presence_penalty", "repetition_penalty"])
@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_b029_numbers_that_are_none_are_refused(frontend: Frontend, field: str, literal: str) -> None:
    answer = frontend.request("POST", TEXT, f'{{"model":"tiny","prompt":"a","{field}":{literal}}}'.encode())
    assert answer.status == 400


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"logprobs": True}, 200),
        ({"logprobs": True, "top_logprobs": 0}, 200),
        ({"logprobs": False, "top_logprobs": 1}, 400),
        ({"top_logprobs": 1}, 400),
    ],
)
def test_b017_top_logprobs_need_logprobs(frontend: Frontend, fields: dict[str, Any], status: int) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "max_tokens": 2, **fields}
    answer = frontend.request("POST", CHAT, body)
    assert answer.status == status
    if status == 200:
        content = answer.json()["choices"][0]["logprobs"]["content"]
        assert [entry["token"] for entry in content] == [" é0.0", " é0.1"]
        assert all(entry["top_logprobs"] == [] for entry in content)
    else:
        assert answer.error()["param"] == "top_logprobs"


def test_tokenize_and_detokenize(frontend: Frontend) -> None:
    def tokens(body: dict[str, Any]) -> Any:
        answer = frontend.request("POST", "/tokenize", body)
        assert answer.status == 200
        return answer.json()

    def codes(text: str) -> list[int]:
        return [ord(character) for character in text]

    assert tokens({"model": "tiny", "prompt": "hé"}) == {
        "tokens": codes("^hé"),
        "count": 3,
        "max_model_len": MODEL.max_model_len,
        "token_strs": None,
    }
    strings = tokens({"prompt": "hé", "add_special_tokens": False, "return_token_strs": True})
    assert (strings["tokens"], strings["token_strs"]) == (codes("hé"), ["h", "é"])
    assert tokens({"prompt": "", "add_special_tokens": False})["count"] == 0
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert tokens({"messages": messages})["tokens"] == codes("user: ab\nassistant:")
    assert tokens({"messages": messages, "add_generation_prompt": False})["tokens"] == codes("user: ab\n")
    assert tokens({"messages": messages, "add_special_tokens": True})["tokens"] == codes("^user: ab\nassistant:")
    answer = frontend.request("POST", "/detokenize", {"tokens": codes("hé!")})
    assert (answer.status, answer.json()) == (200, {"prompt": "hé!"})
    assert frontend.request("POST", "/detokenize", {"tokens": []}).json() == {"prompt": ""}


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, 400, "prompt"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/tokenize", {"prompt": "a", "model": "gpt-9"}, 404, "model"),
        ("/tokenize", {"prompt": 1}, 400, "prompt"),
        ("/tokenize", b'{"prompt":"\\ud83d"}', 400, None),
        (
            "/tokenize",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            400,
            "messages[0].content[0]",
        ),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": [MODEL.vocab_size]}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
        ("/detokenize", {"tokens": [2**31]}, 400, "tokens"),
        ("/detokenize", {"tokens": [1.5]}, 400, "tokens[0]"),
        ("/detokenize", {"tokens": "a"}, 400, "tokens"),
        ("/detokenize", {"tokens": [1] * ((1 << 18) + 1)}, 400, "tokens"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_bad_texts_and_tokens_are_refused(
    frontend: Frontend, path: str, body: Any, status: int, param: str | None
) -> None:
    answer = frontend.request("POST", path, body)
    assert answer.status == status
    named = answer.error()["param"]
    assert named == param or (named or "").startswith(f"{param}[")


def test_a_tokenized_chat_is_the_one_that_would_be_sent(frontend: Frontend, engine: FakeEngine) -> None:
    messages = [{"role": "developer", "content": "x"}, {"role": "user", "content": "hi"}]
    body = {"model": "tiny", "messages": messages, "max_tokens": 1}
    assert frontend.request("POST", CHAT, body, {"x-request-id": "same"}).status == 200
    sent = engine.wait_for_request("same").prompt
    assert isinstance(sent, ChatPrompt)
    tokens = frontend.request("POST", "/tokenize", {"messages": messages}).json()["tokens"]
    rendered = frontend.request("POST", "/detokenize", {"tokens": tokens}).json()["prompt"]
    assert rendered == "".join(f"{message.role}: {message.content}\n" for message in sent.messages) + "assistant:"
