"""Chat answers whose text is told apart into text, reasoning and tool calls."""

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET

from ipc.messages import Delta, Finished

from .generation import Batch
from .pieces import OutputParser, Piece, Reasoning, Text, ToolArguments, ToolCallBegin, is_whole
from .prompt_fields import CompletionLogprobs
from .protocol import AssistantMessage, ChatChoice, ChatLogprobs, FunctionCall, ToolCall
from .requests import Job
from .responses import ChatResponder

_encode = msgspec.json.Encoder().encode


def chat_responder(job: Job, fingerprint: str) -> ChatResponder:
    """The responder for a chat request."""
    return (ChatResponder if job.output_format.plain else ParsedChatResponder)(job, fingerprint)


class ParsedChatResponder(ChatResponder):
    """Feeds each choice through a parser. Log-probabilities and token ids stay those of all tokens, markup included."""

    def __init__(self, job: Job, fingerprint: str) -> None:
        super().__init__(job, fingerprint)
        self._parsers: dict[int, OutputParser] = {}
        self._arguments: dict[int, list[str]] = {}  # of each choice's last call, so far

    def chunks(self, batch: Batch) -> bytes:
        """Server-sent events for what arrived together; empty when nothing is to be said yet."""
        events: list[bytes] = []
        for index, item in batch:
            if index not in self._begun:
                self._begun.add(index)
                events += [self._event(choice, self._head_members(index)) for choice in self._first_choices(index)]
            if isinstance(item, Finished):
                events += [self._piece_event(index, piece) for piece in self._finish(index)]
                events.append(self._last_event(index, item))
            else:
                events += self._delta_events(index, item)
        return b"".join(events)

    def _first_choices(self, index: int) -> list[bytes]:
        # Null, since it is not known whether there will be text at all.
        return [_choice(index, {"role": "assistant", "content": None})]

    def _delta_events(self, index: int, item: Delta) -> list[bytes]:
        pieces = self._push(index, item)
        if not item.logprobs and not self.job.return_token_ids:
            return [self._piece_event(index, piece) for piece in pieces]
        deltas = [_delta(piece) for piece in pieces]
        token_ids = self._token_ids([item])
        # These come with the first piece, or alone while their text is undecided or was markup.
        logprobs = self._logprobs(index, list(item.logprobs)) if item.logprobs else None
        first, *others = deltas or [{}]
        choices = [_choice(index, first, logprobs, token_ids), *(_choice(index, delta) for delta in others)]
        return [self._event(choice) for choice in choices]

    def _piece_event(self, index: int, piece: Piece) -> bytes:
        if isinstance(piece, Text):  # nearly all are
            return self._text_event(index, piece.text)
        return self._event(_choice(index, _delta(piece)))

    def _push(self, index: int, item: Delta) -> Sequence[Piece]:
        parser = self._parser(index)
        if item.in_reasoning:
            parser.begin_in_reasoning()
        return self._noted(index, parser.push(item.text))

    def _finish(self, index: int) -> Sequence[Piece]:
        return self._noted(index, self._parser(index).finish())

    def _noted(self, index: int, pieces: Sequence[Piece]) -> Sequence[Piece]:
        for piece in pieces:
            if isinstance(piece, ToolCallBegin):
                self._arguments[index] = []
            elif isinstance(piece, ToolArguments):
                self._arguments[index].append(piece.text)
        return pieces

    def _parser(self, index: int) -> OutputParser:
        if index not in self._parsers:
            self._parsers[index] = self.job.output_format.parser()
        return self._parsers[index]

    def _reason(self, index: int, end: Finished) -> str:
        called = end.reason == "stop" and is_whole("".join(self._arguments.get(index, ())))
        return "tool_calls" if called else end.reason

    def _whole(self, index: int, items: list[Delta], end: Finished) -> ChatChoice:
        pieces = [piece for item in items for piece in self._push(index, item)]
        pieces += self._finish(index)
        choice = super()._whole(index, items, end)
        assert isinstance(choice, ChatChoice)
        choice.message = _message(pieces)
        return choice

    def _whole_choice(
        self, index: int, text: str, logprobs: ChatLogprobs | CompletionLogprobs | None, reason: str
    ) -> ChatChoice:
        return super()._whole_choice(index, "", logprobs, reason)


def _delta(piece: Piece) -> dict[str, Any]:
    """A piece as OpenAI streams it."""
    match piece:
        case Text(text):
            return {"content": text}
        case Reasoning(text):
            return {"reasoning_content": text, "reasoning": text}
        case ToolCallBegin(call, call_id, name):
            function = FunctionCall(name, "")
            return {"tool_calls": [{"index": call, "id": call_id, "type": "function", "function": function}]}
        case ToolArguments(call, text):
            return {"tool_calls": [{"index": call, "function": {"arguments": text}}]}


def _choice(
    index: int, delta: dict[str, Any], logprobs: ChatLogprobs | None = None, token_ids: Sequence[int] = ()
) -> bytes:
    choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}
    return _encode({**choice, "token_ids": token_ids} if token_ids else choice)


def _message(pieces: Sequence[Piece]) -> AssistantMessage:
    text = "".join(piece.text for piece in pieces if isinstance(piece, Text))
    reasoning = "".join(piece.text for piece in pieces if isinstance(piece, Reasoning))
    calls: dict[int, ToolCall] = {}
    arguments: dict[int, list[str]] = {}
    for piece in pieces:
        if isinstance(piece, ToolCallBegin):
            calls[piece.call] = ToolCall(piece.id, FunctionCall(piece.name, ""))
        elif isinstance(piece, ToolArguments):
            arguments.setdefault(piece.call, []).append(piece.text)
    for call, texts in arguments.items():
        calls[call].function.arguments = "".join(texts)
    return AssistantMessage(
        content=None if calls and not text else text,
        reasoning_content=reasoning or UNSET,
        reasoning=reasoning or UNSET,
        tool_calls=list(calls.values()) or UNSET,
    )
