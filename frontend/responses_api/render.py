"""Outputs in the form of the Responses API."""

import itertools
import time
import uuid

import msgspec

from ..errors import ApiError
from ..piece_renderer import Event, PieceRenderer, encode_events
from ..pieces import OutputParser, Piece
from ..protocol import Usage
from ..requests import Job
from ..translation import Names
from .objects import (
    Completed,
    Created,
    ErrorEvent,
    Failed,
    FunctionTool,
    Incomplete,
    IncompleteDetails,
    InProgress,
    InputTokensDetails,
    OutputTokensDetails,
    Response,
    ResponseError,
    ResponseUsage,
)
from .output import Output
from .protocol import ReasoningConfig, ResponsesRequest, ResponsesTool, TextConfig, TextFormat

_ERROR_CODES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}  # of the codes that OpenAI's client knows


class ResponsesRenderer(PieceRenderer):
    """The answer to one request: a `response` object, or the events in which it comes about."""

    def __init__(self, job: Job, body: ResponsesRequest, names: Names, parser: OutputParser) -> None:
        super().__init__(parser)
        self._names = names
        self._count = itertools.count()
        self._output = Output(self._number)
        self._response = Response(
            id="resp_" + uuid.uuid4().hex,
            created_at=int(time.time()),
            status="in_progress",
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            model=job.model,
            parallel_tool_calls=body.parallel_tool_calls is not False,
            reasoning=ReasoningConfig(),
            temperature=job.params.temperature,
            text=TextConfig((body.text and body.text.format) or TextFormat("text")),
            tool_choice=body.tool_choice or "auto",
            tools=[_function_tool(tool) for tool in body.tools or ()],
            top_p=job.params.top_p,
            user=body.user,
            metadata=body.metadata or {},
        )

    def _number(self) -> int:
        return next(self._count)

    def _start(self, prompt_tokens: int) -> list[Event]:
        return [Created(self._number(), self._response), InProgress(self._number(), self._response)]

    def _add(self, piece: Piece) -> list[Event]:
        return self._output.add(piece)

    def _end(self, usage: Usage) -> list[Event]:
        assert self._finished is not None
        cut = self._finished.reason == "length"
        events = self._output.close("incomplete" if cut else "completed")
        response = msgspec.structs.replace(
            self._response,
            status="incomplete" if cut else "completed",
            completed_at=None if cut else int(time.time()),
            incomplete_details=IncompleteDetails("max_output_tokens") if cut else None,
            output=list(self._output.items),
            usage=ResponseUsage(
                usage.prompt_tokens,
                InputTokensDetails(usage.prompt_tokens_details.cached_tokens),
                usage.completion_tokens,
                OutputTokensDetails(self._reasoning_tokens),
                usage.total_tokens,
            ),
            timings=self.timings,
        )
        self._response = response
        return [*events, Incomplete(self._number(), response) if cut else Completed(self._number(), response)]

    def _answer(self, usage: Usage) -> Response:
        return self._response

    def error(self, error: ApiError) -> bytes:
        """`response.failed`, or an error event where no response has begun (only comments have been sent)."""
        error = self._names.translate(error)
        body = error.body
        if not self._begun:
            return encode_events([ErrorEvent(self._number(), body.code, body.message, body.param)])
        events = self._output.close("incomplete")
        failed = msgspec.structs.replace(
            self._response,
            status="failed",
            error=ResponseError(_ERROR_CODES.get(error.status, "server_error"), body.message),
            output=list(self._output.items),
        )
        return encode_events([*events, Failed(self._number(), failed)])


def _function_tool(tool: ResponsesTool) -> FunctionTool:
    assert tool.name is not None  # checked by the translation
    return FunctionTool(tool.name, tool.description, tool.parameters, tool.strict)
