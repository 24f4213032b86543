"""The table of routes: the router and the OpenAPI document are both made from it, so that they cannot differ."""

from . import debug, diagnosis, embeddings, handlers, health, protocol, tokenize
from .messages_api import errors as messages_errors
from .messages_api import handlers as messages
from .messages_api.objects import ErrorEvent, MessageObject, TokenCount
from .messages_api.protocol import CountTokensRequest, MessagesRequest
from .openapi import openapi
from .responses_api.handlers import count_input_tokens, create_response
from .responses_api.objects import InputTokens, Response
from .responses_api.protocol import ResponsesRequest
from .route import Parameter, Route
from .timelines import HEADER
from .timings import RequestList, RequestRecord

TIMINGS = Parameter(
    HEADER,
    "header",
    "1: the answer, or the end of its stream, has a member `timings`",
    {"type": "string", "enum": ["0", "1"], "default": "0"},
)

ROUTES: tuple[Route, ...] = (
    Route(
        method="POST",
        path="/v1/chat/completions",
        handler=handlers.chat_completions,
        summary="Answer a conversation",
        body=protocol.ChatRequest,
        answer=protocol.CompletionResponse[protocol.ChatChoice],
        streams=True,
        parameters=(TIMINGS,),
        example={"messages": [{"role": "user", "content": "Name three rivers."}], "max_tokens": 60},
    ),
    Route(
        method="POST",
        path="/v1/completions",
        handler=handlers.completions,
        summary="Continue a text",
        body=protocol.CompletionRequest,
        answer=protocol.CompletionResponse[protocol.CompletionChoice],
        streams=True,
        parameters=(TIMINGS,),
        example={"prompt": "Once upon a time", "max_tokens": 40},
    ),
    Route(
        method="POST",
        path="/v1/responses",
        handler=create_response,
        summary="Answer an input (OpenAI's Responses API; nothing is stored)",
        body=ResponsesRequest,
        answer=Response,
        streams=True,
        parameters=(TIMINGS,),
        example={"input": "Name three rivers.", "max_output_tokens": 60},
    ),
    Route(
        method="POST",
        path="/v1/responses/input_tokens",
        handler=count_input_tokens,
        summary="How many tokens the input of such a request has",
        body=ResponsesRequest,
        answer=InputTokens,
        example={"input": "Name three rivers."},
    ),
    Route(
        method="POST",
        path="/v1/messages",
        handler=messages.create_message,
        summary="Answer a conversation (Anthropic's Messages API)",
        body=MessagesRequest,
        answer=MessageObject,
        streams=True,
        parameters=(TIMINGS,),
        example={"messages": [{"role": "user", "content": "Name three rivers."}], "max_tokens": 60},
        error=ErrorEvent,
        overloaded=messages_errors.OVERLOADED,
    ),
    Route(
        method="POST",
        path="/v1/messages/count_tokens",
        handler=messages.count_tokens,
        summary="How many input tokens such a request has",
        body=CountTokensRequest,
        answer=TokenCount,
        example={"messages": [{"role": "user", "content": "Name three rivers."}]},
        error=ErrorEvent,
        overloaded=messages_errors.OVERLOADED,
    ),
    Route(
        method="POST",
        path="/v1/embeddings",
        handler=embeddings.embeddings,
        summary="Vectors that stand for texts",
        body=protocol.EmbeddingRequest,
        answer=protocol.EmbeddingResponse,
        example={"input": ["Once upon a time", "In the beginning"]},
    ),
    Route(
        method="POST",
        path="/tokenize",
        handler=tokenize.tokenize,
        summary="The tokens of a prompt",
        body=tokenize.TokenizeRequest,
        answer=tokenize.TokenizeResponse,
        example={"prompt": "Once upon a time"},
    ),
    Route(
        method="POST",
        path="/detokenize",
        handler=tokenize.detokenize,
        summary="The text of tokens",
        body=tokenize.DetokenizeRequest,
        answer=tokenize.DetokenizeResponse,
        example={"tokens": [1, 2, 3]},
    ),
    Route(
        method="GET",
        path="/v1/models",
        handler=handlers.list_models,
        summary="The names that the served model can be asked for by",
        answer=protocol.ModelList,
    ),
    Route(
        method="GET",
        path="/v1/models/{id:.+}",
        handler=handlers.get_model,
        summary="One of these names",
        answer=protocol.Model,
    ),
    Route(
        method="GET",
        path="/health/live",
        handler=health.live,
        summary="This process answers",
        answer=health.HealthState,
        needs_key=False,
    ),
    Route(
        method="GET",
        path="/health/ready",
        handler=health.ready,
        summary="A generation would be accepted, and begin at once",
        answer=health.HealthState,
        needs_key=False,
    ),
    Route(
        method="GET",
        path="/health/progress",
        handler=health.progress,
        summary="What the scheduler does, from its last report",
        answer=health.Progress,
    ),
    Route(
        method="GET",
        path="/metrics",
        handler=health.metrics,
        summary="Counters, gauges and histograms in Prometheus' text format, summed over all frontends",
        answer="text/plain",
    ),
    Route(
        method="GET",
        path="/debug/requests",
        handler=debug.requests,
        summary="The timelines of the last requests that ended, the newest first, of the process that answers",
        answer=RequestList,
        parameters=(
            Parameter(
                "limit",
                "query",
                "at most so many",
                {
                    "type": "integer",
                    "minimum": 1,
                    "maximum": debug.MOST_REQUESTS,
                    "default": debug.REQUESTS,
                },
            ),
        ),
    ),
    Route(
        method="GET",
        path="/debug/requests/{id:.+}",
        handler=debug.request_by_id,
        summary="The timeline of the last request that ended with this x-request-id, if this process answered it",
        answer=RequestRecord,
    ),
    Route(
        method="GET",
        path="/diagnose",
        handler=diagnosis.diagnose,
        summary="What bounds latency, throughput and concurrency at the moment, and which setting to turn",
        answer=diagnosis.DiagnosisObject,
    ),
    Route(
        method="GET",
        path="/debug/trace",
        handler=debug.trace,
        summary="What all processes do in the next seconds, in Chrome's trace event format (for ui.perfetto.dev)",
        answer="application/json",
        parameters=(
            Parameter(
                "seconds",
                "query",
                "how long to watch",
                {
                    "type": "number",
                    "minimum": debug.LEAST_TRACE_SECONDS,
                    "maximum": debug.MOST_TRACE_SECONDS,
                    "default": debug.TRACE_SECONDS,
                },
            ),
        ),
        busy=True,
    ),
    Route(
        method="GET",
        path="/openapi.json",
        handler=openapi,
        summary="This document",
        answer="application/json",
    ),
)
