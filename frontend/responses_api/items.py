"""The input of a response as chat messages.

A turn of the assistant comes back as several items (reasoning, a message, function calls), which are one chat message.
"""

from typing import Any

from ..errors import ApiError
from ..translation import Names, required
from .protocol import InputItem, InputPart

_TEXT_PARTS = ("input_text", "output_text", "text")


def chat_messages(items: str | list[InputItem], instructions: str | None, names: Names) -> list[dict[str, Any]]:
    """Chat messages of an input; `names` learns which item each came from."""
    conversation = _Conversation(names)
    if instructions is not None:
        conversation.add({"role": "system", "content": instructions}, "instructions")
    if isinstance(items, str):
        conversation.add({"role": "user", "content": items}, "input")
        return conversation.messages
    for index, item in enumerate(items):
        conversation.take(item, f"input[{index}]")
    return conversation.messages


class _Conversation:
    def __init__(self, names: Names) -> None:
        self.messages: list[dict[str, Any]] = []
        self._names = names
        self._turn: dict[str, Any] | None = None  # the assistant's, while more of it may come

    def add(self, message: dict[str, Any], where: str) -> None:
        self._names.add(f"messages[{len(self.messages)}]", where)
        self.messages.append(message)
        self._turn = message if message["role"] == "assistant" else None

    def take(self, item: InputItem, where: str) -> None:
        match item.type:
            case None | "message":
                self._message(item, where)
            case "function_call":
                self._function_call(item, where)
            case "function_call_output":
                call_id = required(item.call_id, f"{where}.call_id")
                text = _text(item.output, f"{where}.output")
                self.add({"role": "tool", "content": text, "tool_call_id": call_id}, where)
            case "reasoning":
                self._reasoning(item, where)
            case "item_reference":
                raise ApiError(400, f"{where}: nothing is stored here: send the item itself", param=where)
            case other:
                raise ApiError(400, f"{where}: items of type {other[:64]!r} are not supported", param=f"{where}.type")

    def _message(self, item: InputItem, where: str) -> None:
        role = required(item.role, f"{where}.role")
        text = _text(item.content, f"{where}.content")
        turn = self._turn
        if role == "assistant" and turn is not None and turn["content"] is None and "tool_calls" not in turn:
            turn["content"] = text
        else:
            self.add({"role": role, "content": text}, where)

    def _reasoning(self, item: InputItem, where: str) -> None:
        """OpenAI's own reasoning comes as a summary and bytes that only OpenAI can read; ours comes as content."""
        if isinstance(item.content, str):
            raise ApiError(400, f"{where}.content must be a list of parts", param=f"{where}.content")
        text = "".join(part.text or "" for part in item.content or item.summary or ())
        self.add({"role": "assistant", "content": None, "reasoning_content": text}, where)

    def _function_call(self, item: InputItem, where: str) -> None:
        if self._turn is None:
            self.add({"role": "assistant", "content": None}, where)
        assert self._turn is not None
        calls = self._turn.setdefault("tool_calls", [])
        chat = f"messages[{len(self.messages) - 1}].tool_calls[{len(calls)}]"
        self._names.add(chat, where)
        self._names.add(f"{chat}.id", f"{where}.call_id")
        self._names.add(f"{chat}.function", where)
        function = {
            "name": required(item.name, f"{where}.name"),
            "arguments": required(item.arguments, f"{where}.arguments"),
        }
        call_id = required(item.call_id, f"{where}.call_id")
        calls.append({"id": call_id, "type": "function", "function": function})


def _text(content: str | list[InputPart] | None, where: str) -> str:
    if content is None or isinstance(content, str):
        return required(content, where)
    return "".join(_part_text(part, f"{where}[{index}]") for index, part in enumerate(content))


def _part_text(part: InputPart, where: str) -> str:
    if part.type == "refusal":
        return required(part.refusal, f"{where}.refusal")
    if part.type not in _TEXT_PARTS:
        problem = f"{where}: only parts of type input_text and output_text are supported, not {part.type[:64]!r}"
        raise ApiError(400, problem, param=where)
    return required(part.text, f"{where}.text")
