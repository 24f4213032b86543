"""Chat answers with reasoning and tool calls: streamed and whole are the same."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frontend.generation import Batch
from frontend.parsed_responses import ParsedChatResponder, chat_responder
from frontend.parsers import OutputFormat
from frontend.protocol import PromptTokensDetails, Usage
from frontend.requests import Job
from frontend.responses import ChatResponder
from ipc.codec import pack_ints
from ipc.messages import (
    Delta,
    Finished,
    FinishReason,
    PositionLogprobs,
    PromptInfo,
    SamplingParams,
    TextPrompt,
    TokenLogprob,
)

USAGE = Usage(1, 2, 3, PromptTokensDetails(0))
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "é"}}\n</tool_call>'
TIME = '<tool_call>{"name": "get_time"}</tool_call>'
OUTPUTS = [
    "Hello.",
    "",
    " \n",
    CALL,
    f"Sure.\n{CALL}\n{TIME}",
    f"<think>\nHm.\n</think>\n\n{CALL}",
    "<think>Hm.</think>Hello.",
    "<tool_call>broken",
    '<tool_call>{"name": "f", "arguments": {"a": 1',
]


def make(n: int = 1, *, logprobs: bool = False, token_ids: bool = False) -> ParsedChatResponder:
    params = SamplingParams(n=n, logprobs=0 if logprobs else None)
    job = Job(
        (TextPrompt("p"),),
        params,
        "m",
        True,
        False,
        return_token_ids=token_ids,
        output_format=OutputFormat("hermes", ("f", "get_time"), "think"),
    )
    responder = chat_responder(job, "fp")
    assert isinstance(responder, ParsedChatResponder)
    responder.prompt_of = lambda index: PromptInfo(1, pack_ints([1]), "p", pack_ints([0]), "p")
    return responder


def deltas(index: int, parts: list[str], reason: FinishReason = "stop") -> list[tuple[int, Delta | Finished]]:
    """Each part as a token of its own."""
    found: list[tuple[int, Delta | Finished]] = []
    for at, part in enumerate(parts):
        token = TokenLogprob(at, part, part.encode(), -0.5)
        found.append((index, Delta(1, index, part, pack_ints([at]), (PositionLogprobs(token, ()),))))
    return [*found, (index, Finished(1, index, reason, None, 1, len(parts), 0))]


def events(data: bytes) -> list[dict[str, Any]]:
    return [json.loads(part.removeprefix("data: ")) for part in data.decode().split("\n\n") if part]


def put_together(choices: list[dict[str, Any]]) -> dict[str, Any]:
    """As clients do it: text is appended, calls are found by their index."""
    message: dict[str, Any] = {"content": None}
    for choice in choices:
        delta = dict(choice["delta"])
        for call in delta.pop("tool_calls", ()):
            calls = message.setdefault("tool_calls", [])
            function = call["function"]
            if call["index"] == len(calls):
                assert function["arguments"] == ""
                calls.append({"id": call["id"], "type": call["type"], "function": dict(function)})
            else:
                assert set(call) == {"index", "function"}
                calls[call["index"]]["function"]["arguments"] += function["arguments"]
        for name, value in delta.items():
            message[name] = (message.get(name) or "") + value if value is not None else message.get(name)
    return message


def same(streamed: dict[str, Any], whole: dict[str, Any]) -> bool:
    """But for ids, which are random, and for null where a stream cannot know that there would be no text."""

    def comparable(message: dict[str, Any]) -> dict[str, Any]:
        calls = [{**call, "id": "x"} for call in message.get("tool_calls", ())]
        named = {name: message.get(name) or "" for name in ("role", "content", "reasoning", "reasoning_content")}
        return {**named, "calls": calls}

    return comparable(streamed) == comparable(whole)


@given(data=st.data(), logprobs=st.booleans(), token_ids=st.booleans())
@settings(max_examples=120, deadline=None)
def test_streamed_equals_whole(data: st.DataObject, logprobs: bool, token_ids: bool) -> None:
    n = data.draw(st.integers(1, 3))
    queues = []
    for index in range(n):
        output = data.draw(st.sampled_from(OUTPUTS))
        size = data.draw(st.integers(1, 9))
        parts = [output[at : at + size] for at in range(0, len(output), size)]
        queues.append(deltas(index, parts, data.draw(st.sampled_from(["stop", "length"]))))
    if not logprobs:
        queues = [[(index, _without(item)) for index, item in queue] for queue in queues]
    batches: list[Batch] = [[]]
    while any(queues):
        batches[-1].append(data.draw(st.sampled_from([queue for queue in queues if queue])).pop(0))
        if data.draw(st.booleans()):
            batches.append([])
    options: dict[str, Any] = {"logprobs": logprobs, "token_ids": token_ids}
    whole = json.loads(make(n, **options).whole(batches, USAGE))["choices"]
    responder = make(n, **options)
    streamed = [chunk["choices"][0] for batch in batches for chunk in events(responder.chunks(batch))]
    for index, choice in enumerate(whole):
        mine = [part for part in streamed if part["index"] == index]
        assert same(put_together(mine), choice["message"])
        assert [part["finish_reason"] for part in mine] == [None] * (len(mine) - 1) + [choice["finish_reason"]]
        assert mine[0]["delta"]["role"] == "assistant"
        if logprobs:
            positions = [position for part in mine if part["logprobs"] for position in part["logprobs"]["content"]]
            assert positions == choice["logprobs"]["content"]
        if token_ids:
            assert [token for part in mine for token in part.get("token_ids", ())] == choice["token_ids"]


def _without(item: Delta | Finished) -> Delta | Finished:
    return item if isinstance(item, Finished) else Delta(1, item.index, item.text, item.token_ids)


def message_of(output: str, reason: FinishReason = "stop") -> tuple[dict[str, Any], str]:
    choice = json.loads(make().whole([deltas(0, [output], reason)], USAGE))["choices"][0]
    return choice["message"], choice["finish_reason"]


def test_content_is_null_only_beside_calls() -> None:
    message, reason = message_of(CALL)
    assert message["content"] is None
    assert reason == "tool_calls"
    (call,) = message["tool_calls"]
    assert call["id"].startswith("call_")
    assert (call["type"], call["function"]) == ("function", {"name": "f", "arguments": '{"a": "é"}'})
    message, reason = message_of(f"Sure.\n{CALL}")
    assert (message["content"], reason) == ("Sure.", "tool_calls")
    message, reason = message_of("")
    assert (message["content"], reason, "tool_calls" in message) == ("", "stop", False)


def test_reasoning_has_both_names() -> None:
    message, _ = message_of("<think>Hm.</think>Hello.")
    assert message["reasoning"] == message["reasoning_content"] == "Hm."
    assert message["content"] == "Hello."
    message, _ = message_of("Hello.")
    assert "reasoning" not in message


def test_a_cut_call_ends_by_length() -> None:
    message, reason = message_of('<tool_call>{"name": "f", "arguments": {"a": 1', "length")
    assert reason == "length"
    assert message["tool_calls"][0]["function"]["arguments"] == '{"a": 1'


def test_b063_the_first_delta_of_a_call_has_id_type_and_name() -> None:
    batch = deltas(0, list(TIME))
    chunks = [chunk["choices"][0] for chunk in events(make().chunks(batch))]
    calls = [call for chunk in chunks for call in chunk["delta"].get("tool_calls", ())]
    first, second = calls
    assert set(first) == {"index", "id", "type", "function"}
    assert first["function"] == {"name": "get_time", "arguments": ""}
    assert second == {"index": 0, "function": {"arguments": "{}"}}
    assert chunks[-1]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("opened", [False, True])
def test_reasoning_that_the_prompt_has_opened(opened: bool) -> None:
    batch: Batch = [
        (0, Delta(1, 0, "Hm.</think>", b"", (), opened)),
        (0, Delta(1, 0, "Hello.", b"", (), opened)),
        (0, Finished(1, 0, "stop", None, 1, 2, 0)),
    ]
    message = json.loads(make().whole([batch], USAGE))["choices"][0]["message"]
    assert message.get("reasoning") == ("Hm." if opened else None)
    assert message["content"] == ("Hello." if opened else "Hm.</think>Hello.")


def test_requests_without_markup_keep_the_plain_responder() -> None:
    assert type(chat_responder(Job((TextPrompt("p"),), SamplingParams(), "m", False, False), "fp")) is ChatResponder
