"""Tools, calls and results in chat templates, those that know them and those that do not."""

import json
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import pytest
import uvloop

from ipc.messages import ChatMessage, ChatPrompt, ToolCall
from tests.unit.tokenizer_proc.vocabularies import CHATML
from tokenizer_proc.child_frames import Done
from tokenizer_proc.template_child import Render, Renderer, Setup
from tokenizer_proc.templates import TemplateRenderer, turns_of

T = TypeVar("T")

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": 'Weather of a "city" – any.',
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = ToolCall("call_1", "get_weather", '{"city": "Köln", "days": 2}')
CONVERSATION = (
    ChatMessage("user", "How is it in Köln?"),
    ChatMessage("assistant", "", tool_calls=(CALL,)),
    ChatMessage("tool", "Rain.", tool_call_id="call_1"),
)
# The same as transformers wants it.
TURNS: list[dict[str, Any]] = [
    {"role": "user", "content": "How is it in Köln?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": "call_1",
                "type": "function",
                "function": {"name": "get_weather", "arguments": {"city": "Köln", "days": 2}},
            }
        ],
    },
    {"role": "tool", "content": "Rain.", "name": "get_weather", "tool_call_id": "call_1"},
]
KNOWS_TOOLS = (
    "{% if tools %}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif %}"
    "{% for m in messages %}{{ m.role }}:{% if m.tool_calls %}{% for call in m.tool_calls %}"
    "{{ call.id }} {{ call.function.name }} {{ call.function.arguments | tojson }}{% endfor %}{% endif %}"
    "{{ m.name }} {{ m.tool_call_id }} {{ m.content }}\n{% endfor %}"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
)
NO_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + CHATML


def checked(template: str, work: Callable[[TemplateRenderer], Awaitable[T]]) -> T:
    """Runs after the renderer has found out whether the template shows tools."""

    async def run() -> T:
        renderer = TemplateRenderer(template, {}, 20.0)
        try:
            await renderer.check_tools()
            return await work(renderer)
        finally:
            await renderer.close()

    return uvloop.run(run())


def render(template: str, *messages: ChatMessage, tools: list[Any] | None = None, **options: Any) -> str:
    prompt = ChatPrompt(messages, tools=json.dumps(tools).encode() if tools else b"", **options)
    return checked(template, lambda renderer: renderer.render(prompt))


def test_b059_messages_are_what_transformers_gives_to_templates() -> None:
    assert turns_of(CONVERSATION) == TURNS


def test_tools_render_as_in_transformers() -> None:
    utilities = pytest.importorskip("transformers.utils.chat_template_utils")
    (expected,), _ = utilities.render_jinja_template(
        conversations=[TURNS], chat_template=KNOWS_TOOLS, tools=[TOOL], enable_thinking=False
    )
    child = Renderer()
    assert child.answer(Setup(KNOWS_TOOLS, {}, 10.0)) == Done("")
    request = Render(turns_of(CONVERSATION), False, [TOOL], {"enable_thinking": False})
    assert child.answer(request) == Done(expected)
    assert (
        render(
            KNOWS_TOOLS,
            *CONVERSATION,
            tools=[TOOL],
            template_kwargs=b'{"enable_thinking": false}',
            add_generation_prompt=False,
        )
        == expected
    )


def test_further_names_hide_nothing_that_templates_have() -> None:
    child = Renderer()
    child.answer(Setup("{{ bos_token }}{{ messages | length }}{{ mine }}", {"bos_token": "<s>"}, 10.0))
    hiding = {"bos_token": "x", "messages": [], "mine": 5}
    assert child.answer(Render([{"role": "user"}], False, None, hiding)) == Done("<s>15")


@pytest.mark.parametrize("arguments", ["", "{}", '{"a": 1}', "[1]", "{broken", r'{"a": "\ud83d"}'])
def test_arguments_that_are_no_object_stay_text(arguments: str) -> None:
    (turn,) = turns_of([ChatMessage("assistant", "", tool_calls=(ToolCall("1", "f", arguments),))])
    expected = {"": {}, "{}": {}, '{"a": 1}': {"a": 1}}.get(arguments, arguments)
    assert turn["tool_calls"][0]["function"]["arguments"] == expected


def test_the_check_finds_out_whether_tools_are_shown() -> None:
    async def work(renderer: TemplateRenderer) -> bool:
        return await renderer.check_tools()

    assert checked(KNOWS_TOOLS, work)
    assert not checked(CHATML, work)
    assert not checked(NO_SYSTEM, work)


def test_b059_a_template_without_tools_gets_them_as_text() -> None:
    text = render(CHATML, ChatMessage("system", "Be brief."), *CONVERSATION, tools=[TOOL])
    system, user, assistant, result, prompt = text.split("<|start|>")[1:]
    assert system.startswith("system\nBe brief.\n\n")
    assert json.dumps(TOOL, ensure_ascii=False) in system
    assert user == "user\nHow is it in Köln?<|end|>\n"
    arguments = '{"city": "Köln", "days": 2}'
    call = f'<tool_call>\n{{"name": "get_weather", "arguments": {arguments}}}\n</tool_call>'
    assert assistant == f"assistant\n{call}<|end|>\n"
    assert result == "user\n<tool_response>\nRain.\n</tool_response><|end|>\n"
    assert prompt == "assistant\n"


def test_several_results_are_one_turn() -> None:
    calls = (ToolCall("1", "f", "{}"), ToolCall("2", "g", "{}"))
    results = [ChatMessage("tool", text, tool_call_id=name) for name, text in (("1", "one"), ("2", "two"))]
    text = render(CHATML, ChatMessage("user", "Hi"), ChatMessage("assistant", "Wait.", tool_calls=calls), *results)
    assert text.count("<|start|>user") == 2
    assert "<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response>" in text
    assert "assistant\nWait.\n<tool_call>" in text


def test_without_a_system_role_tools_stand_before_the_first_turn() -> None:
    text = render(NO_SYSTEM, ChatMessage("user", "Hi"), tools=[TOOL])
    assert text.startswith("<|start|>user\n")
    assert text.endswith("</tool_call>\n\nHi<|end|>\n<|start|>assistant\n")


def test_conversations_without_tools_are_untouched() -> None:
    assert render(CHATML, ChatMessage("user", "Hi")) == "<|start|>user\nHi<|end|>\n<|start|>assistant\n"
