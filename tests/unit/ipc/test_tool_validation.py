"""Bounds of tools and template variables as SDK clients may send them: bytes that nobody has looked at."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ipc.messages import ChatMessage, ChatPrompt, Grammar, ModelInfo, SamplingParams, Tokenize, ToolCall
from ipc.validation import MAX_TOOLS, InvalidRequest, validate, validate_tokenize

MODEL = ModelInfo(
    names=("m",),
    max_model_len=100,
    vocab_size=50,
    created=0,
    has_chat_template=True,
    template_kwargs=("enable_thinking",),
)
USER = ChatMessage("user", "hi")
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def refused(*messages: ChatMessage, **fields: Any) -> str | None:
    """The parameter that is named; None when the prompt is taken."""
    try:
        validate(ChatPrompt(messages or (USER,), **fields), SamplingParams(), MODEL)
    except InvalidRequest as error:
        return error.param
    return None


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        (json.dumps([TOOL]).encode(), None),
        (b"", None),
        (b"[]", "tools"),
        (b"{}", "tools"),
        (b"[1]", "tools"),
        (b"not json", "tools"),
        (b"\xff", "tools"),
        (b"[" * 5000, "tools"),
        (rb'[{"type": "function", "function": {"name": "f", "description": "\ud83d"}}]', "tools"),
        (b'[{"type": "function"}]', "tools[0].function"),
        (b'[{"type": "function", "function": []}]', "tools[0].function"),
        (b'[{"type": 5, "function": {"name": "f"}}]', "tools[0].type"),
        (b'[{"function": {"name": "f"}}]', "tools[0].type"),
        (b'[{"type": "function", "function": {"name": null}}]', "tools[0].function.name"),
        (b'[{"type": "function", "function": {"name": "f", "parameters": []}}]', "tools[0].function.parameters"),
    ],
)
def test_tools(tools: bytes, param: str | None) -> None:
    assert refused(tools=tools) == param


@pytest.mark.parametrize(
    ("variables", "param"),
    [
        (b'{"enable_thinking": [1]}', None),
        (b"", None),
        (b"[]", "chat_template_kwargs"),
        (b"{", "chat_template_kwargs"),
        (b'{"messages": 1}', "chat_template_kwargs.messages"),
        (json.dumps({"enable_thinking": "x" * 20_000}).encode(), "chat_template_kwargs"),
    ],
)
def test_template_variables(variables: bytes, param: str | None) -> None:
    assert refused(template_kwargs=variables) == param


@pytest.mark.parametrize(
    ("message", "param"),
    [
        (ChatMessage("assistant", "", tool_calls=(ToolCall("1", "f", "anything"),)), None),
        (ChatMessage("tool", "", tool_call_id="1"), None),
        (ChatMessage("user", "", tool_calls=(ToolCall("1", "f", ""),)), "messages[0].tool_calls"),
        (ChatMessage("user", "", tool_call_id="1"), "messages[0].tool_call_id"),
        (ChatMessage("tool", "", tool_call_id="1" * 257), "messages[0].tool_call_id"),
        (ChatMessage("assistant", "", tool_calls=(ToolCall("1", "f", ""),) * 129), "messages[0].tool_calls"),
        (
            ChatMessage("assistant", "", tool_calls=(ToolCall("1", "a b", ""),)),
            "messages[0].tool_calls[0].function.name",
        ),
        (
            ChatMessage("assistant", "", tool_calls=(ToolCall("1", "f", "\ud83d"),)),
            "messages[0].tool_calls[0].function.arguments",
        ),
        (ChatMessage("assistant", "", reasoning="\ud83d"), "messages[0].reasoning"),
    ],
)
def test_b053_calls_in_messages(message: ChatMessage, param: str | None) -> None:
    assert refused(message) == param


@pytest.mark.parametrize("tokens", [("x",) * 17, ("x" * 129,), ("\ud83d",)])
def test_shown_special_tokens(tokens: tuple[str, ...]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        validate(ChatPrompt((USER,)), SamplingParams(shown_special_tokens=tokens), MODEL)
    assert caught.value.param == "shown_special_tokens"


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*TOOL, "name"]), inner, max_size=3),
    max_leaves=6,
)


@given(data=st.binary(max_size=20) | _json.map(lambda value: json.dumps([value]).encode()))
@settings(max_examples=150, deadline=None)
def test_no_bytes_raise_anything_else(data: bytes) -> None:
    for fields in ({"tools": data}, {"template_kwargs": data}):
        param = refused(**fields)
        assert param is None or param.split("[")[0].split(".")[0] in ("tools", "chat_template_kwargs")


def test_a_message_with_calls_cannot_be_continued() -> None:
    called = ChatMessage("assistant", "One moment.", tool_calls=(ToolCall("c", "f", "{}"),))
    fields = {"add_generation_prompt": False, "continue_final_message": True}
    assert refused(USER, called, **fields) == "continue_final_message"
    assert refused(USER, called, USER, ChatMessage("assistant", "It"), **fields) is None
    with pytest.raises(InvalidRequest, match="tool_calls"):
        validate_tokenize(Tokenize(1, ChatPrompt((USER, called), False, True)), MODEL)


@pytest.mark.parametrize(
    ("origins", "param"),
    [
        ({2: "tools[0].function.parameters"}, None),
        (dict.fromkeys(range(MAX_TOOLS), "x"), None),
        (dict.fromkeys(range(MAX_TOOLS + 1), "x"), "grammar"),
        ({1: "x" * 129}, "grammar"),
        ({1: "\ud83d"}, "grammar"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_origins_of_a_grammar(origins: dict[int, str], param: str | None) -> None:
    params = SamplingParams(grammar=Grammar("lark", "start: x", origins))
    if param is None:
        validate(ChatPrompt((USER,)), params, MODEL)
        return
    with pytest.raises(InvalidRequest) as caught:
        validate(ChatPrompt((USER,)), params, MODEL)
    assert caught.value.param == param
