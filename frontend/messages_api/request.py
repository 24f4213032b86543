"""What a messages request means: a chat request, or an `ApiError` in the words of the Messages API."""

from typing import Any

from ipc.messages import ModelInfo

from ..errors import ApiError
from ..protocol import ChatRequest
from ..reasoning import thinking_kwargs
from ..translation import Names, chat_request
from .blocks import chat_messages
from .protocol import CountTokensRequest, MessagesRequest, MessagesTool

MAX_TEMPERATURE = 1.0  # Anthropic's; a chat request may go to 2
_NAMES = {
    "stop": "stop_sequences",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    ".parameters": ".input_schema",
    "response_format": "output_config.format",
    "response_format.json_schema": "output_config.format",
    "tools": "tools",
    "tool_choice": "tool_choice",
}
_TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def translate(body: MessagesRequest, model: ModelInfo) -> tuple[ChatRequest, Names]:
    """The chat request, and whose names errors about it must be told under."""
    if body.temperature is not None and not 0 <= body.temperature <= MAX_TEMPERATURE:
        raise ApiError(400, f"temperature must be between 0 and {MAX_TEMPERATURE:g}", param="temperature")
    names = Names(_NAMES)
    fields = {
        **_prompt_fields(body, names, model),
        "max_tokens": body.max_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
        "stop": body.stop_sequences,
        "stream": body.stream,
    }
    return chat_request(fields, names), names


def translate_prompt(body: CountTokensRequest, model: ModelInfo) -> tuple[ChatRequest, Names]:
    """Likewise for a request of which only the prompt is to be counted."""
    names = Names(_NAMES)
    return chat_request(_prompt_fields(body, names, model), names), names


def ignored(body: CountTokensRequest, model: ModelInfo) -> list[str]:
    """Names of the fields that were given and have no effect."""
    found = {
        "thinking": body.thinking is not None and body.thinking.type != "disabled" and not _thinking(body, model),
        "thinking.budget_tokens": _thinking(body, model) and body.thinking and body.thinking.budget_tokens,
        "output_config.effort": body.output_config is not None and body.output_config.effort,
    }
    return [name for name, given in found.items() if given]


def _thinking(body: CountTokensRequest, model: ModelInfo) -> dict[str, Any]:
    return {} if body.thinking is None else thinking_kwargs(model, body.thinking.type != "disabled")


def _prompt_fields(body: CountTokensRequest, names: Names, model: ModelInfo) -> dict[str, Any]:
    """What decides the prompt, and everything else that both kinds of request have."""
    messages = chat_messages(body.messages, body.system, names)
    # As Anthropic does: a last turn of the assistant is the beginning of the answer.
    prefilled = bool(messages) and messages[-1]["role"] == "assistant"
    if prefilled and "tool_calls" in messages[-1]:
        where = f"messages[{len(body.messages) - 1}]"
        raise ApiError(400, f"{where}: each tool_use needs its tool_result in the next message", param=where)
    tools = [_tool(index, tool) for index, tool in enumerate(body.tools or ())]
    choice = body.tool_choice
    tool_choice: str | dict[str, Any] | None = None
    if choice is not None and choice.type == "tool":
        if choice.name is None:
            raise ApiError(400, "tool_choice.name is required", param="tool_choice.name")
        tool_choice = {"type": "function", "function": {"name": choice.name}}
    elif choice is not None:
        # "auto" without tools is what clients send that never look whether they have some.
        tool_choice = _TOOL_CHOICES[choice.type] if tools or choice.type != "auto" else None
    one_call = choice is not None and bool(tools) and choice.disable_parallel_tool_use
    return {
        **body.extra(),
        "model": body.model,
        "messages": messages,
        "continue_final_message": True if prefilled else None,
        "tools": tools or None,
        "tool_choice": tool_choice,
        "parallel_tool_calls": False if one_call else None,
        "response_format": _response_format(body),
        "chat_template_kwargs": {**_thinking(body, model), **(body.chat_template_kwargs or {})} or None,
    }


def _tool(index: int, tool: MessagesTool) -> dict[str, Any]:
    where = f"tools[{index}]"
    if tool.type not in (None, "custom"):
        problem = f"{where}: only tools with a name and an input_schema are supported, not {tool.type[:64]!r}"
        raise ApiError(400, problem, param=f"{where}.type")
    if tool.input_schema is None:
        raise ApiError(400, f"{where}.input_schema is required", param=f"{where}.input_schema")
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _response_format(body: CountTokensRequest) -> dict[str, Any] | None:
    form = body.output_config.format if body.output_config is not None else None
    if form is None:
        return None
    where = "output_config.format"
    if form.type != "json_schema":
        raise ApiError(400, f"{where}.type must be json_schema, not {form.type[:64]!r}", param=f"{where}.type")
    if form.schema is None:
        raise ApiError(400, f"{where}.schema is required", param=f"{where}.schema")
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": form.schema, "strict": True}}
