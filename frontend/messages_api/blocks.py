"""Messages of content blocks as chat messages.

A user's turn may hold results of tools, each of which is a chat message of its own.
"""

import json
from typing import Any

from ..errors import ApiError
from ..translation import Names, required
from .protocol import MessageBlock, MessageTurn, ToolResultBlock


def chat_messages(
    messages: list[MessageTurn], system: str | list[MessageBlock] | None, names: Names
) -> list[dict[str, Any]]:
    """Chat messages of a conversation; `names` learns where each came from."""
    found: list[dict[str, Any]] = []

    def add(message: dict[str, Any], where: str) -> None:
        names.add(f"messages[{len(found)}]", where)
        found.append(message)

    if system:
        text = system if isinstance(system, str) else _joined(system, "system")
        add({"role": "system", "content": text}, "system")
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if isinstance(message.content, str):
            add({"role": message.role, "content": message.content}, where)
        elif message.role == "assistant":
            add(_assistant(message.content, where, f"messages[{len(found)}]", names), where)
        elif message.role == "system":
            add({"role": "system", "content": _joined(message.content, f"{where}.content")}, where)
        else:
            for part, place in _user(message.content, where):
                add(part, place)
    return found


def _joined(blocks: list[MessageBlock], where: str) -> str:
    return "".join(_text(block, f"{where}[{index}]", "text") for index, block in enumerate(blocks))


def _text(block: MessageBlock | ToolResultBlock, where: str, supported: str) -> str:
    if block.type != "text":
        problem = f"{where}: only blocks of type {supported} are supported here, not {block.type[:64]!r}"
        raise ApiError(400, problem, param=where)
    return required(block.text, f"{where}.text")


def _user(blocks: list[MessageBlock], where: str) -> list[tuple[dict[str, Any], str]]:
    """A user's turn: messages of the tools whose results it holds, and of the user, in the order of the blocks."""
    found: list[tuple[dict[str, Any], str]] = []
    for index, block in enumerate(blocks):
        place = f"{where}.content[{index}]"
        if block.type == "tool_result":
            tool_use_id = required(block.tool_use_id, f"{place}.tool_use_id")
            found.append(({"role": "tool", "content": _result(block, place), "tool_call_id": tool_use_id}, place))
            continue
        text = _text(block, place, "text and tool_result")
        if found and found[-1][0]["role"] == "user":
            found[-1][0]["content"] += text
        else:
            found.append(({"role": "user", "content": text}, place))
    return found or [({"role": "user", "content": ""}, where)]


def _result(block: MessageBlock, where: str) -> str:
    if not isinstance(block.content, list):
        return block.content or ""
    return "".join(_text(part, f"{where}.content[{at}]", "text") for at, part in enumerate(block.content))


def _assistant(blocks: list[MessageBlock], where: str, chat: str, names: Names) -> dict[str, Any]:
    """The assistant's turn `where`, which is `chat` among the chat messages."""
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for index, block in enumerate(blocks):
        place = f"{where}.content[{index}]"
        match block.type:
            case "thinking":
                thoughts.append(required(block.thinking, f"{place}.thinking"))
            case "redacted_thinking":
                pass  # only Anthropic can read it
            case "tool_use":
                call = f"{chat}.tool_calls[{len(calls)}]"
                names.add(call, place)
                names.add(f"{call}.function", place)
                names.add(f"{call}.function.arguments", f"{place}.input")
                arguments = json.dumps(required(block.input, f"{place}.input"), ensure_ascii=False)
                function = {"name": required(block.name, f"{place}.name"), "arguments": arguments}
                calls.append({"id": required(block.id, f"{place}.id"), "type": "function", "function": function})
            case _:
                texts.append(_text(block, place, "text, thinking and tool_use"))
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message
