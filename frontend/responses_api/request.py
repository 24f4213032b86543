"""What a request for a response means: a chat request, or an `ApiError` in the words of the Responses API."""

from typing import Any

from ipc.messages import ModelInfo

from ..errors import ApiError
from ..protocol import ChatRequest
from ..reasoning import thinking_kwargs
from ..tools import allowed_indices
from ..translation import Names, chat_request
from .items import chat_messages
from .protocol import ResponsesRequest, ResponsesTool, ResponsesToolChoice, TextFormat

_NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "response_format.json_schema": "text.format",
    "tools": "tools",
    "tool_choice": "tool_choice",
}


def translate(body: ResponsesRequest, model: ModelInfo) -> tuple[ChatRequest, Names]:
    """The chat request, and whose names errors about it must be told under."""
    names = Names(_NAMES)
    _refuse_unsupported(body)
    tools, tool_choice = _tools(body, names)
    fields = {
        **body.extra(),
        "model": body.model,
        "messages": chat_messages(body.input, body.instructions, names),
        "max_tokens": body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
        "stop": body.stop,
        "tools": tools,
        "tool_choice": tool_choice,
        "parallel_tool_calls": body.parallel_tool_calls if tools else None,
        "response_format": _response_format(body),
        "stream": body.stream,
        "chat_template_kwargs": {**_thinking(body, model), **(body.chat_template_kwargs or {})} or None,
    }
    return chat_request(fields, names), names


def ignored(body: ResponsesRequest, model: ModelInfo) -> list[str]:
    """Names of the fields that were given and have no effect."""
    found = {
        "store": body.store,
        "truncation": body.truncation == "auto",
        "text.verbosity": body.text is not None and body.text.verbosity,
        "reasoning": body.reasoning is not None and not _thinking(body, model),
        "include": body.include,
    }
    return [name for name, given in found.items() if given]


def _thinking(body: ResponsesRequest, model: ModelInfo) -> dict[str, Any]:
    effort = body.reasoning.effort if body.reasoning is not None else None
    return {} if effort is None else thinking_kwargs(model, effort != "none", effort)


def _refuse_unsupported(body: ResponsesRequest) -> None:
    stored = "responses are not stored here: send the whole conversation as input"
    for name in ("previous_response_id", "conversation"):
        if getattr(body, name) is not None:
            raise ApiError(400, f"{name} is not supported: {stored}", param=name)
    if body.background:
        raise ApiError(400, "background is not supported: a response is not stored, so wait for it", param="background")
    if body.prompt is not None:
        raise ApiError(400, "prompt templates are not stored here: send instructions and input", param="prompt")
    if body.top_logprobs or "message.output_text.logprobs" in (body.include or ()):
        name = "top_logprobs" if body.top_logprobs else "include"
        raise ApiError(400, f"{name}: log-probabilities are told by /v1/chat/completions only", param=name)


def _tools(body: ResponsesRequest, names: Names) -> tuple[list[dict[str, Any]] | None, str | dict[str, Any] | None]:
    """Chat's `tools` and `tool_choice`; `names` learns where in `tools` those are that are left."""
    tools = body.tools or []
    choice = body.tool_choice
    chat_tools = [_tool(index, tool) for index, tool in enumerate(tools)]
    if not isinstance(choice, ResponsesToolChoice):
        # "auto" without tools is what clients send that never look whether they have some.
        return chat_tools or None, choice if chat_tools or choice != "auto" else None
    if choice.type == "function":
        return chat_tools or None, {"type": "function", "function": {"name": choice.name}}
    if choice.type != "allowed_tools":
        problem = f"tool_choice: only functions can be chosen, not {choice.type[:64]!r}"
        raise ApiError(400, problem, param="tool_choice.type")
    allowed = [tool.name for tool in choice.tools or ()]
    offered = allowed_indices(allowed, [tool.name for tool in tools], "tool_choice.tools")
    for at, index in enumerate(offered):
        names.add(f"tools[{at}]", f"tools[{index}]")
    return [chat_tools[index] for index in offered], choice.mode or "auto"


def _tool(index: int, tool: ResponsesTool) -> dict[str, Any]:
    where = f"tools[{index}]"
    if tool.type != "function":
        problem = f"{where}: only tools of type function are supported, not {tool.type[:64]!r}"
        raise ApiError(400, problem, param=f"{where}.type")
    if tool.name is None:
        raise ApiError(400, f"{where}.name is required", param=f"{where}.name")
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
        "strict": tool.strict,
    }
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}


def _response_format(body: ResponsesRequest) -> dict[str, Any] | None:
    form = body.text.format if body.text is not None else None
    if form is None:
        return None
    if form.type != "json_schema":
        return {"type": form.type}
    return {"type": "json_schema", "json_schema": _json_schema(form)}


def _json_schema(form: TextFormat) -> dict[str, Any]:
    for name in ("name", "schema"):
        if getattr(form, name) is None:
            raise ApiError(400, f"text.format.{name} is required", param=f"text.format.{name}")
    fields = {"name": form.name, "schema": form.schema, "strict": form.strict, "description": form.description}
    return {name: value for name, value in fields.items() if value is not None}
