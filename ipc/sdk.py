"""What a service needs of the client SDK, in one place; the package itself hands out the same names."""

from .blocking import BlockingStream, Client
from .client import AsyncClient, CompletionStream
from .errors import (
    AuthenticationFailed,
    BadRequest,
    Cancelled,
    Conflict,
    ConnectionLost,
    DeadlineExceeded,
    Overloaded,
    RequestFailed,
    ServerError,
    Unavailable,
)
from .messages import ChatMessage, ChatPrompt, Grammar, ModelInfo, SamplingParams
from .results import Choice, Chunk, Completion, Embedding, Score, Tokens, Usage

__all__ = [
    "AsyncClient",
    "AuthenticationFailed",
    "BadRequest",
    "BlockingStream",
    "Cancelled",
    "ChatMessage",
    "ChatPrompt",
    "Choice",
    "Chunk",
    "Client",
    "Completion",
    "CompletionStream",
    "Conflict",
    "ConnectionLost",
    "DeadlineExceeded",
    "Embedding",
    "Grammar",
    "ModelInfo",
    "Overloaded",
    "RequestFailed",
    "SamplingParams",
    "Score",
    "ServerError",
    "Tokens",
    "Unavailable",
    "Usage",
]
