"""Chat templates, rendered by a child process that is killed when it takes too long (`killable_child`)."""

import logging
import secrets
from collections.abc import Mapping
from typing import Any

from ipc.messages import ChatMessage, ChatPrompt

from .killable_child import ChildBroken, ChildRefused, KillableChild, TookTooLong
from .template_child import Render, Setup

log = logging.getLogger(__name__)


class TemplateError(Exception):
    """These messages cannot be rendered; the text is for the client."""


class TemplateRenderer:
    """The parent's side. All methods belong to one event loop."""

    def __init__(self, template: str, special_tokens: Mapping[str, str], timeout: float) -> None:
        """`timeout`: seconds that one rendering may take."""
        self._timeout = timeout
        setup = Setup(template, dict(special_tokens), timeout)
        self._child = KillableChild("tokenizer_proc.template_child", setup, timeout)

    @property
    def child_pid(self) -> int | None:
        """Process id of the child, None while there is none."""
        return self._child.pid

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
        messages = [_as_mapping(message) for message in prompt.messages]
        if not prompt.continue_final_message:
            return await self._render(Render(messages, prompt.add_generation_prompt))
        # Where the last message's text ends in the rendered chat is found by a mark that no conversation contains.
        # The space behind it shows whether the template strips its messages.
        mark = f"end-{secrets.token_hex(16)}"
        messages[-1]["content"] += mark + " "
        text = await self._render(Render(messages, False))
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

    async def _render(self, request: Render) -> str:
        try:
            return await self._child.ask(request)
        except ChildRefused as error:
            raise TemplateError(str(error)) from None
        except TookTooLong:
            raise TemplateError(f"rendering the chat template took longer than {self._timeout:g} s") from None
        except ChildBroken:
            raise TemplateError("the chat template could not be rendered for these messages") from None


def _as_mapping(message: ChatMessage) -> dict[str, Any]:
    mapping = {"role": message.role, "content": message.content}
    if message.name is not None:
        mapping["name"] = message.name
    return mapping
