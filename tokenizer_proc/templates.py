"""Chat templates, rendered by a child process that is killed when it takes too long (`killable_child`)."""

import logging
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ipc.messages import ChatMessage, ChatPrompt, ToolCall

from .killable_child import ChildBroken, ChildRefused, KillableChild, TookTooLong
from .template_child import Render, Setup
from .tool_turns import as_plain_turns

log = logging.getLogger(__name__)


class TemplateError(Exception):
    """These messages cannot be rendered; the text is for the client."""


class TemplateRenderer:
    """The parent's side. All methods belong to one event loop."""

    def __init__(self, template: str, special_tokens: Mapping[str, str], timeout: float) -> None:
        """`timeout`: seconds that one rendering may take."""
        self._timeout = timeout
        self.template = template
        setup = Setup(template, dict(special_tokens), timeout)
        self._child = KillableChild("tokenizer_proc.template_child", setup, timeout)
        self._shows_tools = True  # of the template itself; `check_tools` finds out
        self._system_role = True

    @property
    def child_pid(self) -> int | None:
        """Process id of the child, None while there is none."""
        return self._child.pid

    @property
    def waited(self) -> float:
        """Seconds that conversations waited for those before them, since the start."""
        return self._child.waited

    async def start(self) -> None:
        """Start the child and compile the template; TemplateError when it does not compile."""
        try:
            await self._child.start()
        except ChildRefused as error:
            raise TemplateError(str(error)) from None
        except ChildBroken:
            raise TemplateError("the process that renders chat templates does not start") from None

    async def close(self) -> None:
        """End the child, whatever it is doing."""
        await self._child.close()

    async def render(self, prompt: ChatPrompt) -> str:
        """The prompt text of a conversation; TemplateError when the template refuses it or takes too long."""
        messages = turns_of(prompt.messages)
        tools = msgspec.json.decode(prompt.tools) if prompt.tools else None
        variables = msgspec.json.decode(prompt.template_kwargs) if prompt.template_kwargs else {}
        if not self._shows_tools:
            messages, tools = as_plain_turns(messages, tools, system_role=self._system_role), None
        if not prompt.continue_final_message:
            return await self._render(Render(messages, prompt.add_generation_prompt, tools, variables))
        # Where the last message's text ends in the rendered chat is found by a mark that no conversation contains.
        # The space behind it shows whether the template strips its messages.
        mark = f"end-{secrets.token_hex(16)}"
        messages[-1]["content"] += mark + " "
        text = await self._render(Render(messages, False, tools, variables))
        end = text.rfind(mark)
        if end < 0:
            raise TemplateError("the chat template does not show the final message, so it cannot be continued")
        return text[:end] if text.startswith(mark + " ", end) else text[:end].rstrip()

    async def check_generation_prompt(self) -> bool:
        """Whether asking for the generation prompt changes the rendered text; warns when it does not.

        Without it the model would continue the user's turn instead of answering.
        """
        messages = (ChatMessage("user", "Hello there!"),)
        try:
            without = await self.render(ChatPrompt(messages, add_generation_prompt=False))
            adds = without != await self.render(ChatPrompt(messages, add_generation_prompt=True))
        except TemplateError as error:
            log.warning("the chat template does not render a plain user message: %s", error)
            return False
        if not adds:
            log.warning(
                "the chat template ignores add_generation_prompt: the model may continue the user's turn instead of "
                "answering"
            )
        return adds

    async def check_tools(self) -> bool:
        """Whether the template shows a request's tools; if it does not, they are described in the system message."""
        self._shows_tools = self._system_role = True
        user = ChatMessage("user", "Hello there!")
        function = {"name": "get_time", "description": "The time.", "parameters": {"type": "object", "properties": {}}}
        tools = msgspec.json.encode([{"type": "function", "function": function}])
        try:
            without = await self.render(ChatPrompt((user,)))
            shows = without != await self.render(ChatPrompt((user,), tools=tools))
        except TemplateError:
            return True  # what it says of these messages, it says to those who ask
        if not shows:
            try:
                await self.render(ChatPrompt((ChatMessage("system", "Be brief."), user)))
            except TemplateError:
                self._system_role = False
        self._shows_tools = shows
        return shows

    async def _render(self, request: Render) -> str:
        try:
            return await self._child.ask(request)
        except ChildRefused as error:
            raise TemplateError(str(error)) from None
        except TookTooLong:
            raise TemplateError(f"rendering the chat template took longer than {self._timeout:g} s") from None
        except ChildBroken:
            raise TemplateError("the chat template could not be rendered for these messages") from None


def turns_of(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """The conversation as chat templates see it: mappings of the form that transformers gives them.

    Arguments of calls become objects; those that are none stay text. A tool's turn has the name of the function.
    """
    names = {call.id: call.name for message in messages for call in message.tool_calls}
    turns: list[dict[str, Any]] = []
    for message in messages:
        turn: dict[str, Any] = {"role": message.role, "content": message.content}
        name = names.get(message.tool_call_id) if message.name is None and message.tool_call_id else message.name
        if name is not None:
            turn["name"] = name
        if message.tool_call_id is not None:
            turn["tool_call_id"] = message.tool_call_id
        if message.tool_calls:
            turn["tool_calls"] = [_call_of(call) for call in message.tool_calls]
        if message.reasoning:
            turn["reasoning_content"] = message.reasoning
        turns.append(turn)
    return turns


def _call_of(call: ToolCall) -> dict[str, Any]:
    arguments: Any = call.arguments
    try:
        decoded = msgspec.json.decode(call.arguments or "{}")
    except (msgspec.DecodeError, RecursionError):
        decoded = None
    if isinstance(decoded, dict):
        arguments = decoded
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}
