"""What chat requests say about tools."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frontend.body import decode_body
from frontend.errors import ApiError
from frontend.parsers import OutputFormat
from frontend.protocol import chat_decoder
from frontend.requests import Job, chat_job, ignored
from ipc.messages import ChatMessage, ChatPrompt, ModelInfo, ToolCall
from ipc.validation import MAX_GRAMMAR_BYTES, MAX_TOOL_BYTES, MAX_TOOLS

MODEL = ModelInfo(
    names=("m",),
    max_model_len=100,
    vocab_size=50,
    created=0,
    has_chat_template=True,
    special_tokens={"<tool_call>": 40, "<|end|>": 41, "<think>": 42},
    template_kwargs=("enable_thinking",),
    tool_format="hermes",
    reasoning_format="think",
)
PLAIN = msgspec.structs.replace(MODEL, tool_format="", reasoning_format="")
USER = {"role": "user", "content": "hi"}


def tool(name: str = "f", **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


def chat(model: ModelInfo = MODEL, **fields: Any) -> Job:
    body = {"model": "m", "messages": [USER], **fields}
    return chat_job(decode_body(json.dumps(body).encode(), chat_decoder)[0], model)


def prompt_of(job: Job) -> ChatPrompt:
    (prompt,) = job.prompts
    assert isinstance(prompt, ChatPrompt)
    return prompt


def refused(model: ModelInfo = MODEL, **fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        chat(model, **fields)
    return caught.value


def test_tools_reach_the_template_as_transformers_describes_them() -> None:
    parameters = {"type": "object", "properties": {"b": {"type": "string"}, "a": {}}}
    job = chat(tools=[tool("f", description="F.", parameters=parameters, strict=True), tool("g")])
    assert json.loads(prompt_of(job).tools) == [
        {"type": "function", "function": {"name": "f", "description": "F.", "parameters": parameters}},
        {"type": "function", "function": {"name": "g", "parameters": {"type": "object", "properties": {}}}},
    ]
    assert job.output_format == OutputFormat("hermes", ("f", "g"), "think", enforced="calls")
    job = chat(tools=[tool("f"), tool("g")])
    assert job.output_format == OutputFormat("hermes", ("f", "g"), "think")
    assert job.params.grammar is None


def test_only_the_markup_of_special_tokens_is_shown() -> None:
    assert chat(tools=[tool()]).params.shown_special_tokens == ("<tool_call>", "<think>")
    assert chat().params.shown_special_tokens == ("<think>",)
    assert chat(PLAIN).params.shown_special_tokens == ()


def test_without_tools_or_with_none_there_are_no_calls() -> None:
    for fields in ({}, {"tools": []}, {"tools": None}, {"tools": [tool()], "tool_choice": "none"}):
        job = chat(**fields)
        assert prompt_of(job).tools == b""
        assert job.output_format == OutputFormat(reasoning="think")
    assert chat(PLAIN).output_format.plain


SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}


@pytest.mark.parametrize("fields", [{"response_format": SCHEMA}, {"guided_choice": ["a", "b"]}])
def test_what_a_grammar_makes_is_never_reasoning(fields: dict[str, Any]) -> None:
    """Also where the template has opened a place for it."""
    assert chat().output_format == OutputFormat(reasoning="think")
    assert chat(**fields).output_format.plain


def test_reasoning_effort_is_told_to_templates_that_know_it() -> None:
    for effort, think in (("low", True), ("none", False)):
        assert json.loads(prompt_of(chat(reasoning_effort=effort)).template_kwargs) == {"enable_thinking": think}
    given = chat(reasoning_effort="low", chat_template_kwargs={"enable_thinking": False})
    assert json.loads(prompt_of(given).template_kwargs) == {"enable_thinking": False}
    assert prompt_of(chat(PLAIN, reasoning_effort="low")).template_kwargs == b""


def test_fields_of_chats_without_effect_are_named() -> None:
    def names(model: ModelInfo, **fields: Any) -> list[str]:
        body = {"model": "m", "messages": [USER], **fields}
        return ignored(decode_body(json.dumps(body).encode(), chat_decoder)[0], model)

    assert names(PLAIN, store=False, reasoning_effort=None) == []
    for effort in ("low", "none", "a new word"):
        assert names(PLAIN, store=True, reasoning_effort=effort) == ["store", "reasoning_effort"]
        assert names(MODEL, reasoning_effort=effort) == []


def test_required_and_named_calls_are_enforced() -> None:
    tools = [tool("f"), tool("g")]
    for choice, names in [
        ("required", ["f", "g"]),
        ({"type": "function", "function": {"name": "g"}}, ["g"]),
    ]:
        job = chat(tools=tools, tool_choice=choice)
        grammar = job.params.grammar
        assert grammar is not None
        assert grammar.kind == "lark"
        assert [name for name in ("f", "g") if rf"\"name\": \"{name}\"" in grammar.source] == names
        assert "<[40]>" in grammar.source  # <tool_call> is a special token here
        assert job.output_format.reasoning == ""
    assert "{0,7}" in chat(tools=tools, tool_choice="required").params.grammar.source  # type: ignore[union-attr]
    job = chat(tools=tools, tool_choice="required", parallel_tool_calls=False)
    assert "{0," not in job.params.grammar.source  # type: ignore[union-attr]
    assert job.output_format.most_calls == 1


CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def test_strict_functions_are_enforced_where_the_model_decides() -> None:
    tools = [tool("f", parameters=CITY), tool("g", parameters=CITY, strict=True)]
    for fields in ({}, {"tool_choice": "auto"}, {"parallel_tool_calls": False}):
        job = chat(tools=tools, **fields)
        grammar = job.params.grammar
        assert grammar is not None
        assert list(grammar.origins.values()) == [f"tools[{at}].function.parameters" for at in range(2)]
        lines = grammar.source.split("\n")
        loose, bound = (lines[number - 1] for number in grammar.origins)
        assert '"city"' not in loose
        assert '"city"' in bound
        assert "<[42]>" in grammar.source  # <think> may stand in the text
        assert (job.output_format.reasoning, job.output_format.enforced) == ("think", "calls")


def test_strict_means_nothing_where_nothing_is_called() -> None:
    strict = [tool("g", parameters=CITY, strict=True)]
    assert chat(tools=strict, tool_choice="none").params.grammar is None
    assert chat(tools=[tool("g", parameters=CITY, strict=False)]).params.grammar is None
    # The format is that of all of the output, which then has no calls.
    job = chat(tools=strict, response_format=SCHEMA)
    assert job.params.grammar is not None
    assert job.params.grammar.kind == "json_schema"
    assert (job.output_format.enforced, job.renamed["grammar"]) == ("", "response_format.json_schema.schema")
    # A model that reasons and marks no calls: where its answer begins is not known beforehand.
    llama = msgspec.structs.replace(MODEL, tool_format="llama3_json")
    assert chat(llama, tools=strict).params.grammar is None
    assert chat(msgspec.structs.replace(llama, reasoning_format=""), tools=strict).params.grammar is not None


@pytest.mark.parametrize("fields", [{"tool_choice": "required"}, {}])
def test_parameters_that_are_too_large_to_enforce_are_told(fields: dict[str, Any]) -> None:
    large = {"type": "object", "properties": {"a": {"enum": ["x" * (MAX_TOOL_BYTES - 1000)]}}}
    tools = [tool(f"f{at}", parameters=large, strict=True) for at in range(3)]
    error = refused(tools=tools, **fields)
    assert (error.status, error.body.param) == (400, "tools")
    assert str(MAX_GRAMMAR_BYTES) in error.body.message
    chat(tools=[tool(f"f{at}", parameters=large) for at in range(3)])


def test_a_demanded_call_excludes_another_format() -> None:
    error = refused(tools=[tool()], tool_choice="required", response_format=SCHEMA)
    assert (error.status, error.body.param) == (400, "tool_choice")


def test_the_schema_of_a_named_function_is_told_by_its_index() -> None:
    choice = {"type": "function", "function": {"name": "g"}}
    grammar = chat(tools=[tool("f"), tool("g", parameters=CITY)], tool_choice=choice).params.grammar
    assert grammar is not None
    ((line, name),) = grammar.origins.items()
    assert name == "tools[1].function.parameters"
    assert '"city"' in grammar.source.split("\n")[line - 1]


def allow(*names: str, **fields: Any) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"tools": [tool(name) for name in names], **fields}}


@pytest.mark.parametrize("fields", [{}, {"parallel_tool_calls": False}, {"n": 2}])
def test_allowed_tools_are_as_if_there_were_no_others(fields: dict[str, Any]) -> None:
    """As OpenAI says: `auto` picks from among them, `required` calls one or more of them."""
    tools = [tool("f"), tool("g", parameters=CITY, strict=True), tool("h")]
    for mode in ("auto", "required", None):
        some = chat(tools=tools, tool_choice=allow("h", "g", "h", mode=mode), **fields)
        alone = chat(tools=tools[1:], tool_choice=mode, **fields)
        assert msgspec.structs.replace(some, renamed=alone.renamed) == alone


def test_errors_about_allowed_tools_tell_where_the_request_has_them() -> None:
    tools = [tool("f"), tool("f"), tool("g", parameters={"type": "string"}), tool("h", parameters=CITY)]
    for mode in ("auto", "required"):
        error = refused(tools=tools, tool_choice=allow("g", mode=mode))
        assert (error.status, error.body.param) == (400, "tools[2].function.parameters")
        assert error.body.message.startswith("tools[2].function.parameters must be")
    assert refused(tools=tools, tool_choice=allow("h", "f")).body.param == "tools[1].function.name"
    large = tool("i", description="x" * MAX_TOOL_BYTES)
    assert refused(tools=[*tools, large], tool_choice=allow("h", "i")).body.param == "tools[4]"
    # Of what only the engine finds out, too.
    job = chat(tools=tools, tool_choice=allow("h", mode="required"))
    assert job.params.grammar is not None
    (place,) = job.params.grammar.origins.values()
    error = ApiError(400, f"{place}: no", param=place).renamed(job.renamed)
    assert (error.body.param, error.body.message) == (
        "tools[3].function.parameters",
        "tools[3].function.parameters: no",
    )


@pytest.mark.parametrize(
    ("choice", "param"),
    [
        ({"type": "allowed_tools"}, "tool_choice.allowed_tools"),
        ({"type": "allowed_tools", "allowed_tools": "f"}, "tool_choice.allowed_tools"),
        ({"type": "allowed_tools", "mode": "auto", "tools": [tool()]}, "tool_choice.allowed_tools"),
        (allow(), "tool_choice.allowed_tools.tools"),
        (allow(tools=None), "tool_choice.allowed_tools.tools"),
        (allow("f", "x"), "tool_choice.allowed_tools.tools"),
        (allow(*["f"] * (MAX_TOOLS + 1)), "tool_choice.allowed_tools.tools"),
        (allow("f", mode="none"), "tool_choice.allowed_tools.mode"),
        (allow(tools=["f"]), "tool_choice.allowed_tools.tools[0]"),
        (allow(tools=[tool(), {"type": "mcp", "server_label": "f"}]), "tool_choice.allowed_tools.tools[1].type"),
        (allow(tools=[{"type": "function", "name": "f"}]), "tool_choice.allowed_tools.tools[0].function"),
    ],
    ids=lambda value: str(value)[:80],
)
def test_bad_allowed_tools_are_named(choice: dict[str, Any], param: str) -> None:
    error = refused(tools=[tool()], tool_choice=choice)
    assert (error.status, error.body.param) == (400, param)
    assert param in error.body.message
    assert refused(PLAIN, tools=[tool()], tool_choice=allow("f")).body.param == "tools"
    assert refused(tool_choice=allow("f")).body.param == "tool_choice"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"function_call": "auto"}, "function_call"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"tools": [tool()], "tool_choice": "any"}, "tool_choice"),
        ({"tools": [tool()], "tool_choice": {"type": "custom"}}, "tool_choice"),
        ({"tools": [tool()], "tool_choice": {"type": "function"}}, "tool_choice"),
        (
            {"tools": [tool()], "tool_choice": {"type": "function", "function": {"name": "g"}}},
            "tool_choice.function.name",
        ),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [tool(), {"type": "function", "function": {}}]}, "tools[1].function.name"),
        ({"tools": [tool("")]}, "tools[0].function.name"),
        ({"tools": [tool("a b")]}, "tools[0].function.name"),
        ({"tools": [tool("f" * 65)]}, "tools[0].function.name"),
        ({"tools": [tool(), tool()]}, "tools[1].function.name"),
        ({"tools": [tool(parameters={"type": "string"})]}, "tools[0].function.parameters"),
        ({"tools": [tool(parameters={"enum": ["x" * MAX_TOOL_BYTES]})]}, "tools[0]"),
        ({"tools": [tool(f"f{n}") for n in range(MAX_TOOLS + 1)]}, "tools"),
        ({"tools": [tool(f"f{n}", description="x" * 60_000) for n in range(10)]}, "tools"),
        ({"messages": [{"role": "user", "content": "", "function_call": {"name": "f"}}]}, "messages[0].function_call"),
        ({"chat_template_kwargs": {"thinking": 1}}, "chat_template_kwargs.thinking"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"chat_template_kwargs": {"enable_thinking": "x" * 20_000}}, "chat_template_kwargs"),
        (
            {
                "add_generation_prompt": True,
                "continue_final_message": True,
                "messages": [{**USER, "role": "assistant"}],
            },
            "continue_final_message",
        ),
        (
            {"messages": [{"role": "user", "content": "", "tool_calls": [{"id": "1", "function": {}}]}]},
            "messages[0].tool_calls[0].function.name",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_cannot_be_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    error = refused(**fields)
    assert (error.status, error.body.param) == (400, param)
    assert param in error.body.message or param.split(".")[0] in error.body.message


def test_deprecated_fields_say_what_to_use() -> None:
    assert "use tools" in refused(functions=[{"name": "f"}]).body.message
    assert "use tool_choice" in refused(function_call={"name": "f"}).body.message
    old = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}}
    assert "use tool_calls" in refused(messages=[USER, old]).body.message


def test_a_model_whose_calls_are_not_known_takes_no_tools() -> None:
    error = refused(PLAIN, tools=[tool()])
    assert error.body.param == "tools"
    assert "--tool-parser" in error.body.message


def test_bounds_can_be_reached() -> None:
    chat(tools=[tool(f"f{n}") for n in range(MAX_TOOLS)])
    chat(tools=[tool("aZ_-" * 16, parameters={"$ref": "#/$defs/P", "$defs": {"P": {}}})])
    job = chat(chat_template_kwargs={"enable_thinking": False})
    assert prompt_of(job).template_kwargs == b'{"enable_thinking":false}'


@pytest.mark.parametrize(
    "assistant", [{"content": None}, {}, {"content": []}, {"content": ""}, {"content": [{"type": "text", "text": ""}]}]
)
def test_b059_a_turn_of_calls_has_no_content(assistant: dict[str, Any]) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "get_secret_number", "arguments": "{}"}}
    messages = [
        {"role": "system", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        USER,
        {"role": "assistant", **assistant, "tool_calls": [call]},
        {
            "role": "tool",
            "tool_call_id": "call_1",
            "content": [{"type": "text", "text": "42"}, {"type": "text", "text": ".69"}],
        },
    ]
    assert prompt_of(chat(messages=messages)).messages == (
        ChatMessage("system", "ab"),
        ChatMessage("user", "hi"),
        ChatMessage("assistant", "", tool_calls=(ToolCall("call_1", "get_secret_number", "{}"),)),
        ChatMessage("tool", "42.69", tool_call_id="call_1"),
    )


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
def test_reasoning_of_earlier_turns_reaches_the_template(field: str) -> None:
    messages = [USER, {"role": "assistant", "content": "Four.", field: "Two and two."}, USER]
    assert prompt_of(chat(messages=messages)).messages[1].reasoning == "Two and two."


@pytest.mark.parametrize(
    "body",
    [
        rb'"messages": [{"role": "user", "content": "\ud83d"}]',
        rb'"messages": [{"role": "user", "content": "", "name": "\ud83d"}]',
        rb'"messages": [{"role": "assistant", "tool_calls": [%b]}]'
        % rb'{"id": "1", "function": {"name": "f", "arguments": "\ud83d"}}',
        rb'"messages": [{"role": "assistant", "tool_calls": [%b]}]'
        % rb'{"id": "\ud83d", "function": {"name": "f", "arguments": ""}}',
        rb'"messages": [{"role": "tool", "content": "", "tool_call_id": "\ud83d"}]',
        rb'"messages": [], "tools": [{"type": "function", "function": {"name": "f", "description": "\ud83d"}}]',
        rb'"messages": [], "tools": [{"type": "function", "function": {"name": "f", "parameters": {"\ud83d": 1}}}]',
        rb'"messages": [], "chat_template_kwargs": {"enable_thinking": "\ud83d"}',
    ],
)
def test_b053_unpaired_surrogates_are_refused(body: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        decode_body(b'{"model": "m", ' + body + b"}", chat_decoder)
    assert caught.value.status == 400
    assert "surrogate" in caught.value.body.message


_names = st.sampled_from(["f", "g", "", "a b", "f" * 65])
_values = st.none() | st.booleans() | st.integers() | st.text(max_size=3) | st.just({}) | st.just([]) | _names
_parameters = st.dictionaries(st.sampled_from(["type", "properties", "anyOf", "$ref"]), _values, max_size=3)
_functions = st.fixed_dictionaries(
    {}, optional={"name": _names | _values, "parameters": _parameters | _values, "strict": _values}
)
_tools = st.fixed_dictionaries({}, optional={"type": st.just("function") | _values, "function": _functions | _values})
_allowed = st.fixed_dictionaries(
    {"type": st.just("allowed_tools")},
    optional={
        "allowed_tools": st.fixed_dictionaries(
            {}, optional={"mode": st.just("required") | _values, "tools": st.lists(_tools, max_size=3) | _values}
        )
        | _values
    },
)


@given(
    tools=st.lists(_tools | _values, max_size=3) | _values,
    choice=st.sampled_from(["auto", "none", "required"]) | _tools | _allowed | _values,
    parallel=_values,
)
@settings(max_examples=200, deadline=None)
def test_no_tools_raise_anything_but_400(tools: Any, choice: Any, parallel: Any) -> None:
    try:
        answer: Job | ApiError = chat(tools=tools, tool_choice=choice, parallel_tool_calls=parallel)
    except ApiError as error:
        answer = error
    assert answer.prompts if isinstance(answer, Job) else answer.status == 400
