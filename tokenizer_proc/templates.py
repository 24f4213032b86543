"""Chat templates, rendered by a child process that is killed when it takes too long.

The child renders one conversation at a time, in order. It is started again after a kill, and once per request after any
other death.
"""

import asyncio
import contextlib
import logging
import secrets
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ipc.messages import ChatMessage, ChatPrompt, ToolCall

from .template_child import LENGTH, MAX_FRAME_BYTES, Answer, Refused, Render, Request, Setup
from .tool_turns import as_plain_turns

log = logging.getLogger(__name__)

_START_SECONDS = 30.0  # importing Jinja on a busy machine; not the template's fault
_ROOT = Path(__file__).resolve().parent.parent


class TemplateError(Exception):
    """These messages cannot be rendered; the text is for the client."""


class _ChildGone(Exception):
    """The child ended by itself, or was killed by somebody else."""


class TemplateRenderer:
    """The parent's side. All methods belong to one event loop."""

    def __init__(self, template: str, special_tokens: Mapping[str, str], timeout: float) -> None:
        """`timeout`: seconds that one rendering may take."""
        self._setup = Setup(template, dict(special_tokens), timeout)
        self._timeout = timeout
        self._lock = asyncio.Lock()
        self._exchange: asyncio.Task[str] | None = None  # with the child; holds the lock
        self._child: asyncio.subprocess.Process | None = None
        self._decoder: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)
        self._shows_tools = True  # of the template itself; `check_tools` finds out
        self._system_role = True

    @property
    def template(self) -> str:
        """The template's source."""
        return self._setup.template

    @property
    def child_pid(self) -> int | None:
        """Process id of the child, None while there is none."""
        return None if self._child is None else self._child.pid

    async def start(self) -> None:
        """Start the child and compile the template; TemplateError when it does not compile."""
        async with self._lock:
            try:
                await self._ensure_child()
            except _ChildGone:
                raise TemplateError("the process that renders chat templates does not start") from None

    async def close(self) -> None:
        """End the child, whatever it is doing."""
        if self._exchange is not None:
            self._exchange.cancel()
        async with self._lock:
            await self._kill()

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
        await self._lock.acquire()
        # A task of its own, which a caller that gives up does not cancel: the child would have to be killed, and
        # everybody else would wait for a new one.
        exchange = self._exchange = asyncio.create_task(self._ask_twice(request))
        exchange.add_done_callback(self._exchanged)
        await asyncio.wait({exchange})
        return exchange.result()

    def _exchanged(self, exchange: asyncio.Task[str]) -> None:
        self._exchange = None
        self._lock.release()
        if not exchange.cancelled():
            exchange.exception()  # marks it as seen, when the caller has gone

    async def _ask_twice(self, request: Render) -> str:
        for attempt in (1, 2):
            try:
                await self._ensure_child()
                return await self._ask(request, self._timeout)
            except _ChildGone:
                # Not the template's time limit; so worth one more try, unless this request is what ends it.
                log.warning("the template process ended unexpectedly (attempt %d of 2)", attempt)
                await self._kill()
            except TimeoutError:
                await self._kill()
                raise TemplateError(f"rendering the chat template took longer than {self._timeout:g} s") from None
        raise TemplateError("the chat template could not be rendered for these messages")

    async def _ensure_child(self) -> None:
        if self._child is not None and self._child.returncode is None:
            return
        await self._kill()
        self._child = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tokenizer_proc.template_child",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            cwd=_ROOT,
        )
        try:
            await self._ask(self._setup, _START_SECONDS)
        except TimeoutError:
            await self._kill()
            raise _ChildGone from None

    async def _ask(self, request: Request, seconds: float) -> str:
        child = self._child
        assert child is not None
        assert child.stdin is not None
        assert child.stdout is not None
        body = msgspec.msgpack.encode(request)
        if len(body) > MAX_FRAME_BYTES:
            raise TemplateError("the messages are too long")
        try:
            async with asyncio.timeout(seconds):
                child.stdin.write(LENGTH.pack(len(body)) + body)
                await child.stdin.drain()
                (size,) = LENGTH.unpack(await child.stdout.readexactly(LENGTH.size))
                if size > MAX_FRAME_BYTES:
                    raise _ChildGone
                answer = self._decoder.decode(await child.stdout.readexactly(size))
        except (asyncio.IncompleteReadError, OSError, msgspec.DecodeError) as error:
            if isinstance(error, TimeoutError):  # in Python 3.11 it is an OSError
                raise
            raise _ChildGone from None
        except asyncio.CancelledError:
            # Only when this process ends. An answer that nobody reads would be taken for the next one's.
            await self._kill()
            raise
        if isinstance(answer, Refused):
            raise TemplateError(answer.message)
        return answer.text

    async def _kill(self) -> None:
        child, self._child = self._child, None
        if child is None:
            return
        if child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
        await child.wait()


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
